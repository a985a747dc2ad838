"""How a text is generated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tgen.config.check import require

Draft = Literal["auto", "off"]
StoredAs = Literal["float32", "bfloat16", "int8"]  # weights in memory
DEFAULT_MAX_NEW_TOKENS = 256


SAMPLERS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
_SHARE, _NOT_NEGATIVE = "a number from 0 to 1", "0 (off) or a positive number"
_SAMPLING_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "0 (greedy) or a positive number"),
    "top_k": (0, math.inf, _NOT_NEGATIVE),
    "top_p": (5e-324, 1, "a number above 0, up to 1 (off)"),
    "min_p": (0, 1, _SHARE),
    "typical_p": (5e-324, 1, "a number above 0, up to 1 (off)"),
    "top_n_sigma": (0, math.inf, _NOT_NEGATIVE),
    "xtc_probability": (0, 1, _SHARE),
    "xtc_threshold": (0, 1, _SHARE),
    "repetition_penalty": (5e-324, math.inf, "a positive number, 1 being off"),
    "presence_penalty": (-1e30, 1e30, "a number"),
    "frequency_penalty": (-1e30, 1e30, "a number"),
    "penalty_window": (0, math.inf, "0 (the whole text) or a positive number"),
    "no_repeat_ngram": (0, math.inf, _NOT_NEGATIVE),
    "dry_multiplier": (0, math.inf, _NOT_NEGATIVE),
    "dry_base": (1, math.inf, "a number from 1"),
    "dry_allowed_length": (1, math.inf, "a positive number"),
    "seed": (0, 2**63 - 1, "a number from 0 to 2^63 - 1"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn from the logits: penalties by the text so far, then `samplers` in order.

    `docs/cli.md` says what each does.
    """

    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 40  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    top_n_sigma: float = 0.0  # 0: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0  # the last tokens that count; 0: all
    penalize_prompt: bool = True
    no_repeat_ngram: int = 0  # 0: off
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    samplers: tuple[str, ...] = SAMPLERS
    seed: int = 0

    @property
    def penalises(self) -> bool:
        """Whether the text so far changes the logits."""
        weights = (self.presence_penalty, self.frequency_penalty, self.dry_multiplier)
        return any(weights) or self.repetition_penalty != 1 or self.no_repeat_ngram > 0

    def __post_init__(self) -> None:
        for name, (least, most, wanted) in _SAMPLING_RANGES.items():
            value = getattr(self, name)
            require(least <= value <= most and value < math.inf, name, value, wanted)
        named = set(self.samplers)
        sound = len(named) == len(self.samplers) and named <= set(SAMPLERS)
        require(sound, "samplers", ",".join(self.samplers), f"some of {', '.join(SAMPLERS)}, once")


@dataclass(frozen=True)
class StringConfig:
    """What strings, as bytes, do to a text."""

    stop: tuple[bytes, ...] = ()  # the text ends before the first of these
    biases: Mapping[bytes, float] = field(default_factory=dict)  # added to tokens that complete one
    required: tuple[bytes, ...] = ()  # the text does not end before it has them
    breakers: tuple[bytes, ...] = (b"\n", b":", b'"', b"*")  # no DRY repeat reaches across them
