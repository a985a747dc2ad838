"""What a run began with, and what was overridden since: `training/run.json`, so that it can go on
anywhere."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tgen.config import ModelConfig, TrainConfig
from tgen.errors import TrainingError, UsageError
from tgen.reports import Choice
from tgen.training.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run's text, plan and machine, as they were when it began but for what was overridden."""

    run_id: str  # drawn when it began: its states bear it
    corpus: list[str]
    corpus_sha256: str
    corpus_bytes: int
    train_bytes: int  # that are scored
    held_out_bytes: int
    tokenizer: Choice
    end_of_text: int | None  # the token; a tokenizer from elsewhere does not tell it
    start_from: str | None
    plan: Plan
    baselines: dict[str, float]  # bits per byte of the held-out text
    device: str
    threads: int
    tensorboard: bool
    sample_prompt: bytes
    tokenizer_sha256: str = ""
    read_bytes: int = 0  # of the text to train on, at most: what the time allowed
    ngrams: bool = False  # whether the model comes with tables of them
    corpus_changes: int = 0  # how often it became another on the way
    end_changes: int = 0  # how often another end was asked for: states tell which one they know
    overridden: list[str] = field(default_factory=list)  # what was changed on the way, in words

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        text = self.sample_prompt.decode("utf-8", "surrogateescape")
        return asdict(self) | {"sample_prompt": text}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; raises TrainingError where fields are missing, unknown or absurd."""
        try:
            plan = values["plan"]
            parts = {
                "tokenizer": Choice(**values["tokenizer"]),
                "sample_prompt": values["sample_prompt"].encode("utf-8", "surrogateescape"),
                "plan": Plan(
                    **plan
                    | {
                        "model": ModelConfig.from_dict(plan["model"]),
                        "train": TrainConfig(**plan["train"]),
                        "choices": [Choice(**choice) for choice in plan["choices"]],
                    }
                ),
            }
            return cls(**{**values, **parts})
        except (KeyError, TypeError, AttributeError, UsageError):
            raise TrainingError(
                "training/run.json is of another version or damaged",
                "put a copy back, or go on from its weights: --from this --out, with another",
            ) from None
