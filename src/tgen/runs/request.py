"""Requests to start or resume a run.

Does not import torch: it is imported once the run is locked.
"""

from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tgen.config import DEFAULT_FAMILY, SIZES, Family, Size
from tgen.config.engine import Device, device_option, threads_option
from tgen.config.input_files import Reading
from tgen.config.option import check_ranges, option
from tgen.config.training import Parallel, TrainConfig
from tgen.errors import UsageError

_data = partial(option, panel="Data and tokenizer")
_output = partial(option, panel="Output")
_hardware = partial(option, panel="Hardware")
_MANY_RANKS = "start many ranks with torchrun, or add --dry-run"
_SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
_OF_BASE = "size parameters family tokenizer vocab_size unk"  # fixed by the model to fine-tune
_OF_RUN = " ".join(  # settings of the run to repeat
    [
        f"{_OF_BASE} start_from adapter general overrides chat template ngrams compile",
        "n_ranks device_memory",
        *(one.name for one in (*fields(TrainConfig), *fields(Reading))),
    ]
)
Log = Literal["trackio", "wandb", "wandb:online"]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Request to start a run; the options of `tgen train` and `tgen.train` are its fields."""

    corpus: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin: texts, documents or rows "
        "(text, prompt and completion, or messages), also compressed.",
        argument=True,
        metavar="CORPUS",
    )
    out: Path = option(
        help_text="Model directory to write.",
        flags="--out -o",
        metavar="DIR",
        shown_default="models/<name of the corpus>; with --from-run, "
        "models/<name of the run>-repeated",
    )
    size: Size | None = option(
        None,
        f"Model size: {', '.join(SIZES)}.",
        "--size",
        metavar="SIZE",
        shown_default="chosen by the plan",
    )
    parameters: int | None = option(
        None,
        "Number of parameters, for example 250k or 1.5M; the plan chooses a shape within 2%.",
        "--parameters",
        metavar="N",
        excludes="size",
        shown_default="those of --size",
        low=1,
        high=10**12,
    )
    # Families that the command line does not offer can be trained from Python.
    family: Family = option(DEFAULT_FAMILY, "Model architecture.", "--family", check_choices=False)
    start_from: Path | None = option(
        None,
        "Model to fine-tune (path or name), with its tokenizer and shape.",
        "--from",
        metavar="NAME",
        excludes=_OF_BASE,
        hint="remove one of them: the model has its own",
    )
    adapter: Path | None = option(
        None,
        "LoRA adapter to continue training (path or name), on --from or its own base model.",
        "--adapter",
        metavar="DIR",
        excludes=_OF_BASE,
        hint="remove one of them: the adapter has its own",
    )
    general: Path | None = option(
        None,
        "Text whose loss is reported before and after fine-tuning, to show what was forgotten.",
        "--general",
        metavar="FILE",
        shown_default="short texts that the base model writes",
        needs="start_from adapter",
    )
    from_run: Path | None = option(
        None,
        "Run to repeat (model directory): the same corpus, settings and number of steps; on the "
        "same machine, the same weights.",
        "--from-run",
        metavar="DIR",
        excludes=_OF_RUN,
        hint="remove one of them: the run has its own settings",
    )
    overrides: dict[str, str] = option(
        default_factory=dict,
        help_text="Other setting of the model or the run, for example n_layers=8; repeatable.",
        flags="--set",
        metavar="FIELD=VALUE",
    )
    overwrite: bool = option(False, "Replace the model in --out.", "--overwrite")
    tokenizer: str = _data(
        "auto",
        "Tokenizer to train (char, bpe, or word: words and punctuation), or a tokenizer.json file.",
        "--tokenizer",
        metavar="char|bpe|word|PATH",
        shown_default="bpe; char below 10 KB of text",
    )
    vocab_size: int | None = _data(
        None,
        "Maximum vocabulary size, in tokens.",
        "--vocab-size",
        shown_default="char: all characters; bpe: chosen by the plan; word: all words",
        low=1,
        high=1_000_000,  # the tokenizers library allocates a table of this size
    )
    unk: bool = _data(
        False,
        "Encode unknown words as <unk>; requires --tokenizer word.",
        "--unk",
        needs="tokenizer=word",
    )
    chat: bool = _data(
        False, "Train on prompt/completion rows as chats, through the chat template.", "--chat"
    )
    template: str | None = _data(
        None,
        "Chat template: a Jinja file, or plain for lines of questions (Q:) and answers (A:).",
        "--template",
        metavar="FILE|plain",
        shown_default="that of the model; plain for a new one",
    )
    reading: Reading = field(default_factory=Reading)
    train: TrainConfig = field(default_factory=TrainConfig)
    tensorboard: bool = _output(
        False, "Write TensorBoard events to training/tensorboard.", "--tensorboard"
    )
    log: Log | None = _output(
        None,
        "Log metrics with the library wandb or trackio; only wandb:online uses the network.",
        "--log",
        metavar="trackio|wandb|wandb:online",
        shown_default="",
    )
    ngrams: bool = _output(
        False, "Store n-grams of the corpus with the model, for speculative decoding.", "--ngrams"
    )
    index: bool = _output(
        False,
        "Store the training text with an index for `tgen inspect --view sources`, in the training "
        "directory, readable only by you.",
        "--index",
    )
    device: Device = device_option("Hardware")
    threads: int | None = threads_option("Hardware")
    compile: bool | None = _hardware(
        None,
        "Compile the training step: slower start, faster steps.",
        "--compile/--no-compile",
        metavar="",
        shown_default="on a GPU with Triton, except in short runs and with --steps",
    )
    parallel: Parallel | None = _hardware(
        None,
        "Storage per torchrun process: the whole model (ddp), a shard of it (fsdp), or a shard "
        "within the machine (hsdp).",
        "--parallel",
        shown_default="ddp if each process has enough memory",
    )
    n_ranks: int | None = _hardware(
        None,
        "Number of processes (with --device-memory: GPUs) that --dry-run plans for.",
        "--ranks",
        low=1,
        high=1 << 20,
        needs="dry_run",
        needs_hint=_MANY_RANKS,
    )
    device_memory: int | None = _hardware(  # bytes
        None,
        "Memory of each GPU that --dry-run plans for, for example 80GB.",
        "--device-memory",
        metavar="SIZE",
        needs="dry_run",
        needs_hint=_MANY_RANKS,
    )
    command: list[str] = field(default_factory=list)  # words after `tgen`, for the model card
    began: float | None = None  # start of the time budget by time.monotonic; None: now

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.parameters is not None and (given := self.overrides.keys() & {*_SHAPE}):
            raise UsageError(
                f"--set {min(given)} cannot be combined with --parameters",
                "remove one of them: --parameters chooses the shape",
            )

    @property
    def is_estimate(self) -> bool:
        """Whether the plan is for other machines."""
        return self.n_ranks is not None or self.device_memory is not None


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """Request to resume a run; settings and corpus are checked against the run's own."""

    out: Path
    corpus: list[str] = field(default_factory=list)  # empty: use the tokens of the run
    settings: dict[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    reading: dict[str, Any] = field(default_factory=dict)  # fields of Reading
    overrides: dict[str, str] = field(default_factory=dict)  # from --set: field -> value
    override: bool = False  # allow settings and corpus to differ
    start_from: Path | None = None  # where the base model of a LoRA run is now
    parallel: Parallel | None = None
    device: Device = device_option("Hardware")
    threads: int | None = threads_option("Hardware")

    def __post_init__(self) -> None:
        check_ranges(self)
        TrainConfig(**self.settings)
        Reading(**self.reading)
        if self.reading and not self.corpus:
            name = next(iter(self.reading))
            raise UsageError(
                f"{name}: has no effect, because the run has its tokens",
                f"remove {name}, or name the corpus",
                field=name,
            )
