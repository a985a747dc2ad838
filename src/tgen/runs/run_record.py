"""The record of a run, `training/run.json`, from which any machine can resume it.

It also describes the run's LoRA adapter. The types of all values read from the file are checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from numpy.typing import NDArray

from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.config import ModelConfig
from tgen.config.input_files import Reading
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import MAX_VAL_BYTES
from tgen.errors import TrainingError, UsageError
from tgen.lora.matrices import NewAdapter, Pair, Shape, adapter_layout, parameter_shapes
from tgen.planning.costs import FrozenModel
from tgen.planning.plan import Plan
from tgen.reports.training import Choice
from tgen.runs.request import Log
from tgen.storage import files


def check_field_types(instance: Any) -> None:
    """Raise TypeError if a field of a dataclass, or of one inside it, has the wrong type."""
    hints = get_type_hints(type(instance))
    for one in fields(instance):
        value = getattr(instance, one.name)
        if not _has_type(value, hints[one.name]):
            raise TypeError(f"{one.name} has the type {type(value).__name__}")


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin in (list, tuple):  # of any length
        return type(value) is origin and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(_has_type(v, arguments[1]) for v in value.values())
    if hint is int:
        return type(value) is int and abs(value) < 1 << 63
    if hint is float:  # JSON from other programs may have 1 for 1.0
        return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)
    if is_dataclass(hint):
        if type(value) is hint:
            check_field_types(value)
        return type(value) is hint
    return type(value) is (NoneType if hint is None else hint)


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """The base model of a LoRA run, and the shapes of its adapter."""

    base: str  # name or path, as adapter_config.json has it
    base_path: str
    base_digest: str  # see `adapter_base.base_digest`
    alpha: float
    ranks: dict[str, int]  # by transformers' name of the matrix
    scales: dict[str, float]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The rank and scale of each pair."""
        return {name: Shape(rank, self.scales[name]) for name, rank in self.ranks.items()}

    def new_adapter(
        self, config: ModelConfig, pairs: Mapping[str, Pair] | None = None
    ) -> NewAdapter:
        """Return the adapter before the first step, with `pairs` or new ones."""
        return NewAdapter(adapter_layout(config), self.shapes, pairs)

    def frozen_model(self, config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> FrozenModel:
        """Return the sizes that the plan needs."""
        layout = adapter_layout(config)
        narrow = [a.size for a in arrays.values() if len(a.shape) == 2 and a.dtype.itemsize < 4]
        return FrozenModel(
            sum(array.size * array.dtype.itemsize for array in arrays.values()),
            4 * max(narrow, default=0),
            tuple(parameter_shapes(layout, self.shapes).values()),
        )


@dataclass(frozen=True, kw_only=True)
class ChatRecord:
    """A record of how a run turned its conversations into tokens, so that resuming repeats it."""

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
    baselines: dict[str, float]  # bits per byte on the validation set, by name
    device: str
    threads: int
    tensorboard: bool
    sample_prompt: bytes
    tokenizer_sha256: str
    read_bytes: int  # limit of the training set, from the time budget
    max_val_bytes: int = MAX_VAL_BYTES  # limit of the held-out split
    sample_pieces: int = 1  # of a training set that is longer, at least; 1 before it was recorded
    ngrams: bool = False  # store n-gram tables with the model
    index: bool = False  # store an index of the training text
    inherited: InheritedSettings | None = None  # from the model that it was fine-tuned from
    chat: ChatRecord | None = None  # the corpus has conversations
    begin_of_text: int | None = None  # token id; None: documents have none at their start
    corpus_changes: int = 0  # corpus replacements by --override
    end_changes: int = 0  # changes of the end by --override; states store the count too
    exact_epochs: Literal[True]  # each token is a target once per epoch
    adapter: AdapterRecord | None = None  # of a LoRA run
    general_bits_per_byte: float | None = None  # of the general text, before fine-tuning
    command: list[str] = field(default_factory=list)  # words after `tgen`; none from Python
    overridden: list[str] = field(default_factory=list)  # every change, as a note for the user
    reading: Reading | None = None  # how files are read; None: as before it was recorded
    detected_encodings: dict[str, str] = field(default_factory=dict)  # by file
    log: Log | None = None  # other programs' log of metrics
    adapter_from: str | None = None  # path or name of the adapter that the run continues
    start_sha256: str = ""  # of the weights before the first step, in fine-tuning
    environment: dict[str, Any] = field(default_factory=dict)  # versions, CPU and its flags

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
                        "train": ResolvedTrainConfig(**plan["train"]),
                        "choices": [Choice(**choice) for choice in plan["choices"]],
                    }
                ),
            }
            if (inherited := values.get("inherited")) is not None:
                parts["inherited"] = InheritedSettings.from_dict(inherited)
            if (reading := values.get("reading")) is not None:
                parts["reading"] = Reading(**reading)
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


def recorded_corpus(paths: Sequence[str]) -> list[str]:
    """Return paths as a run records them: a pipe as stdin, since neither can be read again."""
    return ["-" if files.is_pipe(path) else path for path in paths]
