"""What never changes in a run: kept as `training/run.json`, so that it can go on anywhere."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from tgen.config import ModelConfig, TrainConfig
from tgen.errors import TrainingError
from tgen.reports import Choice
from tgen.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run's text, plan and machine, as they were when it began."""

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
    prompt: str  # of the samples; bytes that are no text as surrogates

    @property
    def sample_prompt(self) -> bytes:
        """The prompt's bytes."""
        return self.prompt.encode("utf-8", "surrogateescape")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; raises TrainingError for anything else."""
        try:
            plan = values["plan"]
            parts = {
                "tokenizer": Choice(**values["tokenizer"]),
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
        except (KeyError, TypeError):
            raise TrainingError(
                "training/run.json is of another version or damaged", "start with --overwrite"
            ) from None
