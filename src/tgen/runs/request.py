"""What the user asked for, without torch: a run that another process owns is refused before it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgen.config import DEFAULT_FAMILY, Family, Parallel, Size, TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user asked for."""

    corpus: list[str] = field(default_factory=list)
    out: Path
    start_from: Path | None = None  # a model to fine-tune, by path or name
    family: Family = DEFAULT_FAMILY
    size: Size | None = None  # None: the plan chooses
    tokenizer: str = "auto"  # char, bpe, or the path of a tokenizer.json
    vocab_size: int | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    overrides: dict[str, str] = field(default_factory=dict)
    compile: bool | None = None  # None: where it is known to pay
    parallel: Parallel | None = None  # how ranks share the model; None: as it fits them
    overwrite: bool = False
    device: str = "auto"
    threads: int | None = None
    tensorboard: bool = False
    ngrams: bool = False  # whether the model comes with tables of them
    n_ranks: int | None = None  # for a dry run: the same on so many ranks
    device_memory: int | None = None  # and with so many bytes each
    began: float | None = None  # by time.monotonic: from when the minutes count; None: from now


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """What the user asked for, of a run that is there."""

    out: Path
    corpus: list[str] = field(default_factory=list)  # empty: what was read when it began
    settings: dict[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    overrides: dict[str, str] = field(default_factory=dict)  # field=value, as for a new run
    override: bool = False  # whether they may differ from what it began with
    parallel: Parallel | None = None
    device: str = "auto"
    threads: int | None = None
