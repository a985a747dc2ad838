"""How a text is generated."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, TypedDict

from tgen.config.check import require

Draft = Literal["auto", "off"]
StoredAs = Literal["float32", "bfloat16", "int8"]  # weights in memory
STORED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 34 / 32}  # a weight; int8's with its scale
Overflow = Literal["slide", "stop", "error"]
Text = str | bytes

SAMPLERS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
_SHARE, _NOT_NEGATIVE = "a number from 0 to 1", "0 (off) or a positive number"
_PART = "a number above 0, up to 1 (off)"
_LEAST = 5e-324  # above 0
_RANGES: dict[str, tuple[float, float, str]] = {
    "max_new_tokens": (0, math.inf, "a number of at least 0"),
    "temperature": (0, math.inf, "0 (greedy) or a positive number"),
    "top_k": (0, math.inf, _NOT_NEGATIVE),
    "top_p": (_LEAST, 1, _PART),
    "min_p": (0, 1, _SHARE),
    "typical_p": (_LEAST, 1, _PART),
    "top_n_sigma": (0, math.inf, _NOT_NEGATIVE),
    "xtc_probability": (0, 1, _SHARE),
    "xtc_threshold": (0, 1, _SHARE),
    "repetition_penalty": (1e-3, 1e3, "a number from 0.001 to 1000, 1 being off"),
    "presence_penalty": (-1e6, 1e6, "a number from -1e6 to 1e6"),
    "frequency_penalty": (-1e6, 1e6, "a number from -1e6 to 1e6"),
    "penalty_window": (0, math.inf, "0 (the whole text) or a positive number"),
    "no_repeat_ngram": (0, math.inf, _NOT_NEGATIVE),
    "dry_multiplier": (0, 1e6, "0 (off) or a number up to 1e6"),
    "dry_base": (1, 1e6, "a number from 1 to 1e6"),
    "dry_allowed_length": (1, math.inf, "a positive number"),
    "logprobs": (0, math.inf, "a number of at least 0"),
    "seed": (0, 2**63 - 1, "a number from 0 to 2^63 - 1"),
}
DEFAULT_BATCH_SIZE = 64  # texts that are computed together
TEXTS = ("stop", "ban", "require", "choices", "dry_breakers")
CONSTRAINTS = ("choices", "regex", "json_schema")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a text goes on: rules and penalties change the logits, `samplers` follow in their order.

    `docs/cli.md` says what each does. Texts may be str or bytes. Raises UsageError for values that
    cannot be used.
    """

    max_new_tokens: int = 256
    overflow: Overflow = "slide"  # where the context is full
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 40  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    top_n_sigma: float = 0.0  # 0: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    samplers: Sequence[str] = SAMPLERS  # or their names with commas between
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0  # the last tokens that count; 0: all
    penalize_prompt: bool = True
    no_repeat_ngram: int = 0  # 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: Sequence[Text] = ("\n", ":", '"', "*")  # no repeat reaches across them
    bias: Mapping[Text, float] | Sequence[tuple[Text, float]] = ()  # for tokens that complete one
    ban: Sequence[Text] = ()  # never written
    require: Sequence[Text] = ()  # the text has them
    stop: Sequence[Text] = ()  # the text ends before the first of these
    until_newline: bool = False
    choices: Sequence[Text] = ()  # the text is one of these
    regex: str | None = None  # the text matches it
    json_schema: str | Mapping[str, Any] | None = None  # the text is a document of it
    logprobs: int = 0  # of how many tokens, the likeliest, at every place
    explain: bool = False  # say what each sampler removed
    # Rows that differ in it alone are drawn together.
    seed: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name, (least, most, wanted) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(getattr(type(self), name), int):  # the default
                require(isinstance(value, Integral), name, value, "a whole number")
            require(least <= value <= most and value < math.inf, name, value, wanted)
        known = self.overflow in ("slide", "stop", "error")
        require(known, "overflow", self.overflow, "slide, stop or error")
        for name in TEXTS:
            given = getattr(self, name)
            texts = (given,) if isinstance(given, (str, bytes)) else given
            self._set(name, tuple(_checked(name, text) for text in texts))
        pairs = self.bias.items() if isinstance(self.bias, Mapping) else self.bias
        self._set("bias", tuple((_checked("bias", text), value) for text, value in pairs))
        for value in self.biases.values():
            require(abs(value) <= 1e6, "bias", value, "a number from -1e6 to 1e6")
        given = self.samplers.split(",") if isinstance(self.samplers, str) else self.samplers
        names = (name.strip().replace("-", "_") for name in given)
        self._set("samplers", tuple(name for name in names if name))
        named = set(self.samplers)
        sound = len(named) == len(self.samplers) and named <= set(SAMPLERS)
        wanted = f"some of {', '.join(SAMPLERS)}, each once"
        require(sound, "samplers", ",".join(self.samplers) or "empty", wanted)
        if isinstance(self.json_schema, Mapping):
            self._set("json_schema", json.dumps(self.json_schema))
        for name in ("regex", "json_schema"):
            if getattr(self, name) is not None:
                _checked(name, getattr(self, name))
        for text in map(raw, self.require):
            ends = [*self.stops, *map(raw, self.ban)]
            clash = any(other in text for other in ends)
            shown = repr(text.decode(errors="replace"))
            require(not clash, "require", shown, "free of what is banned or ends the text")
        asked = [name for name in CONSTRAINTS if getattr(self, name)]
        require(len(asked) <= 1, asked[0] if asked else "", "given", "alone: one says what fits")
        for name in ("stop", "until_newline", "require"):
            clash = bool(asked) and bool(getattr(self, name))
            require(not clash, name, "given", f"left away: {' '.join(asked)} says where it ends")

    @property
    def biases(self) -> dict[bytes, float]:
        """What is added to tokens that complete a text."""
        return {raw(text): value for text, value in dict(self.bias).items()}

    @property
    def stops(self) -> list[bytes]:
        """The texts that end it."""
        return [*map(raw, self.stop), *([b"\n"] if self.until_newline else [])]

    @property
    def constrained(self) -> bool:
        """Whether the text must be of a given form."""
        return any(getattr(self, name) for name in CONSTRAINTS)

    @property
    def penalises(self) -> bool:
        """Whether tokens of the text so far become less likely."""
        weights = (self.presence_penalty, self.frequency_penalty, self.dry_multiplier)
        return any(weights) or self.repetition_penalty != 1 or self.no_repeat_ngram > 0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingConfig as keyword arguments."""

    max_new_tokens: int
    overflow: Overflow
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    samplers: Sequence[str]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    penalize_prompt: bool
    no_repeat_ngram: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_breakers: Sequence[Text]
    bias: Mapping[Text, float] | Sequence[tuple[Text, float]]
    ban: Sequence[Text]
    require: Sequence[Text]
    stop: Sequence[Text]
    until_newline: bool
    choices: Sequence[Text]
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    logprobs: int
    explain: bool
    seed: int


def raw(text: Text) -> bytes:
    """The bytes of a text."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _checked(name: str, text: Any) -> Text:
    require(isinstance(text, (str, bytes)), name, repr(text), "text")
    require(len(text) > 0, name, "empty", "some text")
    try:
        raw(text)
    except UnicodeEncodeError:
        require(False, name, repr(text), "text: half of a surrogate pair is none")
    return text  # type: ignore[no-any-return]
