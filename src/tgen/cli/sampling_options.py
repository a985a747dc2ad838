"""The options that steer what is drawn, and what they make of their values."""

import os
from typing import Annotated, Any

import typer

from tgen.config import SAMPLERS, SamplingConfig, StringConfig
from tgen.errors import UsageError

DEFAULT = SamplingConfig()
_DRAWING, _PENALTIES, _STRINGS = "Drawing a token", "Penalties", "Strings"


def _option(name: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, **more)


Temperature = Annotated[float, _option("--temperature", "0: always the likeliest token.", _DRAWING)]
TopK = Annotated[int, _option("--top-k", "Draw from the k likeliest tokens; 0: all.", _DRAWING)]
TopP = Annotated[
    float, _option("--top-p", "Draw from the likeliest that hold this much; 1: all.", _DRAWING)
]
MinP = Annotated[
    float, _option("--min-p", "Draw from those this share as likely as the likeliest.", _DRAWING)
]
TypicalP = Annotated[
    float, _option("--typical-p", "Draw from the least surprising that hold this much.", _DRAWING)
]
TopNSigma = Annotated[
    float, _option("--top-n-sigma", "Draw from logits within n deviations of the best.", _DRAWING)
]
XtcProbability = Annotated[
    float, _option("--xtc-probability", "How often the likeliest are left out.", _DRAWING)
]
XtcThreshold = Annotated[
    float, _option("--xtc-threshold", "From which probability on; the last stays.", _DRAWING)
]
Samplers = Annotated[
    str, _option("--samplers", "The order in which these apply, and which at all.", _DRAWING)
]
RepetitionPenalty = Annotated[
    float, _option("--repetition-penalty", "Divides the logits of tokens seen; 1: off.", _PENALTIES)
]
PresencePenalty = Annotated[
    float, _option("--presence-penalty", "Taken from the logits of tokens seen.", _PENALTIES)
]
FrequencyPenalty = Annotated[
    float, _option("--frequency-penalty", "Taken once for each time that it was seen.", _PENALTIES)
]
PenaltyWindow = Annotated[
    int, _option("--penalty-window", "Only the last n tokens count; 0: all.", _PENALTIES)
]
PenalizePrompt = Annotated[
    bool, _option("--penalize-prompt/--no-penalize-prompt", "The prompt's count too.", _PENALTIES)
]
NoRepeatNgram = Annotated[
    int, _option("--no-repeat-ngram", "No n tokens come a second time; 0: off.", _PENALTIES)
]
DryMultiplier = Annotated[
    float, _option("--dry-multiplier", "Makes long repeats ever less likely; 0: off.", _PENALTIES)
]
DryBase = Annotated[float, _option("--dry-base", "By how much more with each token.", _PENALTIES)]
DryAllowedLength = Annotated[
    int, _option("--dry-allowed-length", "Repeats up to this length are free.", _PENALTIES)
]
Stop = Annotated[
    list[str] | None,
    _option("--stop", "End before this text; repeatable.", _STRINGS, metavar="TEXT"),
]
UntilNewline = Annotated[bool, _option("--until-newline", "End before a new line.", _STRINGS)]
Ban = Annotated[
    list[str] | None,
    _option("--ban", "Never write this text; repeatable.", _STRINGS, metavar="TEXT"),
]
Bias = Annotated[
    list[str] | None,
    _option(
        "--bias", "Added to tokens that complete a text; repeatable.", _STRINGS, metavar="TEXT=N"
    ),
]
Require = Annotated[
    list[str] | None,
    _option("--require", "Do not end before this was written.", _STRINGS, metavar="TEXT"),
]


def samplers(names: str) -> tuple[str, ...]:
    """`top_k,temperature` or `top-k,temperature` -> names in order."""
    return tuple(name.strip().replace("-", "_") for name in names.split(",") if name.strip())


def strings(
    stop: list[str] | None,
    ban: list[str] | None,
    bias: list[str] | None,
    require: list[str] | None,
    *,
    until_newline: bool,
) -> StringConfig:
    """The bytes of what was typed, whatever their encoding."""
    biases = dict.fromkeys(_bytes("--ban", ban), -float("inf"))
    for item in bias or []:
        text, sign, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not sign or not abs(value) < float("inf"):
            raise UsageError(f"--bias {item!r} is not TEXT=NUMBER", "for example --bias ' king=2'")
        biases[_bytes("--bias", [text])[0]] = value
    stops = _bytes("--stop", stop) + ([b"\n"] if until_newline else [])
    return StringConfig(
        stop=tuple(stops), biases=biases, required=tuple(_bytes("--require", require))
    )


def _bytes(option: str, texts: list[str] | None) -> list[bytes]:
    if "" in (texts or []):
        raise UsageError(f"{option} is empty", "give some text")
    return [os.fsencode(text) for text in texts or []]


SAMPLERS_TEXT = ",".join(SAMPLERS)
