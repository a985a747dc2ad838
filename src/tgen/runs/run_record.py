"""The record of a run, `training/run.json`, from which any machine can resume it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.errors import TrainingError, UsageError
from tgen.reports.training import Choice
from tgen.runs.adapter_record import AdapterRecord
from tgen.runs.field_types import check_field_types
from tgen.training.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ChatRecord:
    """How the conversations of a run became tokens, so that resuming gives the same ones."""

    template: str  # Jinja source
    variables: dict[str, str]  # `bos_token` and so on
    date: str  # ISO time that the template sees as the current one
    end_ids: list[int]  # of the source model
    end_id: int = -1  # the token that ends an answer; -1: not known yet, as the values below
    n_rows: int = 0  # to train on
    n_held_out_rows: int = 0
    sample_ids: list[int] = field(default_factory=list)  # of the question that samples answer


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Corpus, plan and settings of a run, updated by every --override."""

    run_id: str  # random; stored in every training state of the run
    corpus: list[str]
    corpus_sha256: str
    corpus_bytes: int
    train_bytes: int  # bytes of target tokens
    held_out_bytes: int  # bytes of target tokens
    tokenizer: Choice
    end_of_text: int | None  # token id; a third-party tokenizer.json does not name it
    start_from: str | None
    plan: Plan
    baselines: dict[str, float]  # bits per byte on the validation split, by name
    device: str
    threads: int
    tensorboard: bool
    sample_prompt: bytes
    tokenizer_sha256: str = ""
    read_bytes: int = 0  # limit of the training split, from the time budget
    ngrams: bool = False  # store n-gram tables with the model
    inherited: InheritedSettings | None = None  # from the model that it was fine-tuned from
    chat: ChatRecord | None = None  # the corpus has conversations
    begin_of_text: int | None = None  # token id; None: documents have none at their start
    corpus_changes: int = 0  # corpus replacements by --override
    end_changes: int = 0  # changes of the end by --override; states store the count too
    exact_epochs: bool = False  # see `TokenDataset`; runs of tgen 0.1 have other windows
    adapter: AdapterRecord | None = None  # of a LoRA run
    general_bits_per_byte: float | None = None  # of the general text, before fine-tuning
    overridden: list[str] = field(default_factory=list)  # every change, as a note for the user

    @property
    def end_ids(self) -> list[int]:
        """End-of-text token ids for `Tokenizer`: one or none."""
        return [] if self.end_of_text is None else [self.end_of_text]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        text = self.sample_prompt.decode("utf-8", "surrogateescape")
        return asdict(self) | {"sample_prompt": text}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert `to_dict`; raise TrainingError for missing, unknown or invalid values."""
        try:
            plan = values["plan"]
            parts: dict[str, Any] = {
                "tokenizer": Choice(**values["tokenizer"]),
                "sample_prompt": values["sample_prompt"].encode("utf-8", "surrogateescape"),
                "plan": Plan(
                    **plan
                    | {
                        "model": ModelConfig.from_dict(plan["model"]),
                        "train": ResolvedTrainConfig.from_dict(plan["train"]),
                        "choices": [Choice(**choice) for choice in plan["choices"]],
                    }
                ),
            }
            if (inherited := values.get("inherited")) is not None:
                parts["inherited"] = InheritedSettings.from_dict(inherited)
            if (chat := values.get("chat")) is not None:
                parts["chat"] = ChatRecord(**chat)
            if (adapter := values.get("adapter")) is not None:
                parts["adapter"] = AdapterRecord(**adapter)
            record = cls(**{**values, **parts})
            check_field_types(record)
            if not 1 <= record.plan.context_length <= record.plan.model.context_length:
                raise TypeError("context_length is out of range")
            return record
        except (KeyError, TypeError, ValueError, AttributeError, UsageError):
            raise TrainingError(
                "training/run.json is damaged or was written by another version of tgen",
                "restore a backup, or fine-tune the weights: --from this directory, another --out",
            ) from None
