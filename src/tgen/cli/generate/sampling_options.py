"""The options that steer how a text goes on: each is a field of SamplingConfig."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tgen.checkpoint.hf.generation_config import FILE as CONFIG_FILE
from tgen.checkpoint.hf.generation_config import GenerationDefaults
from tgen.cli.options import was_given
from tgen.config import Overflow, SamplingConfig
from tgen.errors import TgenError, UsageError
from tgen.storage import files

DEFAULT = SamplingConfig()
_DRAWING, _PENALTIES, _TEXTS, _FORM = "Drawing a token", "Penalties", "Texts", "A given form"
_SCHEMA_BYTES = 1 << 20


def _option(names: str, help_text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names.split(), help=help_text, rich_help_panel=panel, **more)


def _texts(name: str, help_text: str) -> Any:
    return _option(name, help_text, _TEXTS, metavar="TEXT", show_default=False)


MaxNewTokens = Annotated[int, _option("--max-new-tokens -n", "Stop after this many tokens.")]
OverflowOption = Annotated[
    Overflow,
    _option(
        "--overflow",
        "Where the context is full: keep its last half and go on, stop there, or refuse a text "
        "that may come to it.",
    ),
]
Seed = Annotated[
    int | None, _option("--seed", "Repeats a text.", show_default="a new one, printed")
]
Temperature = Annotated[
    float, _option("--temperature -t", "Below 1 likelier, above 1 wilder; 0: no chance.", _DRAWING)
]
TopK = Annotated[int, _option("--top-k", "Keep the k likeliest tokens; 0: all.", _DRAWING)]
TopP = Annotated[
    float, _option("--top-p", "Keep the likeliest that together have this much; 1: all.", _DRAWING)
]
MinP = Annotated[
    float,
    _option("--min-p", "Keep those at least this times as likely as the likeliest.", _DRAWING),
]
TypicalP = Annotated[
    float,
    _option("--typical-p", "Keep the least surprising or dull that have this much.", _DRAWING),
]
TopNSigma = Annotated[
    float,
    _option("--top-n-sigma", "Keep logits within n deviations of the highest; 0: all.", _DRAWING),
]
XtcProbability = Annotated[
    float,
    _option("--xtc-probability", "How often the likeliest are left out, all but one.", _DRAWING),
]
XtcThreshold = Annotated[
    float, _option("--xtc-threshold", "How likely those are, at least.", _DRAWING)
]
Samplers = Annotated[
    str, _option("--samplers", "In which order these apply, and which at all.", _DRAWING)
]
RepetitionPenalty = Annotated[
    float,
    _option("--repetition-penalty", "Divides logits above 0 of tokens that came.", _PENALTIES),
]
PresencePenalty = Annotated[
    float, _option("--presence-penalty", "Taken from the logits of tokens that came.", _PENALTIES)
]
FrequencyPenalty = Annotated[
    float, _option("--frequency-penalty", "Taken for each time that a token came.", _PENALTIES)
]
PenaltyWindow = Annotated[
    int, _option("--penalty-window", "Only the last n tokens count; 0: all.", _PENALTIES)
]
PenalizePrompt = Annotated[
    bool,
    _option("--penalize-prompt/--no-penalize-prompt", "Whether the prompt counts.", _PENALTIES),
]
NoRepeatNgram = Annotated[
    int, _option("--no-repeat-ngram", "No n tokens come a second time; 0: off.", _PENALTIES)
]
DryMultiplier = Annotated[
    float, _option("--dry-multiplier", "DRY: long repeats become unlikely; 0: off.", _PENALTIES)
]
DryBase = Annotated[
    float, _option("--dry-base", "How many times more with each token.", _PENALTIES)
]
DryAllowedLength = Annotated[
    int, _option("--dry-allowed-length", "Repeats up to this length are free.", _PENALTIES)
]
DryBreakers = Annotated[
    list[str] | None,
    _option(
        "--dry-breakers",
        "Repeats do not reach across these; repeatable.",
        _PENALTIES,
        metavar="TEXT",
        show_default='a new line, : " and *',
    ),
]
Stop = Annotated[list[str] | None, _texts("--stop", "End before this; repeatable.")]
UntilNewline = Annotated[bool, _option("--until-newline", "End before a new line.", _TEXTS)]
Ban = Annotated[list[str] | None, _texts("--ban", "Never write this; repeatable.")]
Require = Annotated[list[str] | None, _texts("--require", "Write this somewhere; repeatable.")]
Bias = Annotated[
    list[str] | None,
    _option(
        "--bias",
        "Add N to the logits of tokens that complete this; repeatable.",
        _TEXTS,
        metavar="TEXT=N",
        show_default=False,
    ),
]
Choices = Annotated[
    str | None,
    _option("--choices", "Write one of these.", _FORM, metavar="A,B,...", show_default=False),
]
RegexOption = Annotated[
    str | None,
    _option("--regex", "Write what this matches.", _FORM, show_default=False),
]
JsonSchema = Annotated[
    Path | None,
    _option(
        "--json-schema",
        "Write a JSON document of the schema in this file.",
        _FORM,
        metavar="FILE",
        show_default=False,
    ),
]
Logprobs = Annotated[
    int, _option("--logprobs", "To JSON: the k likeliest tokens at every place.", metavar="K")
]
Explain = Annotated[
    bool, _option("--explain", "To JSON: probability, rank, entropy, what each sampler removed.")
]


def sampling_config(given: Mapping[str, Any], *, seed: int) -> SamplingConfig:
    """The configuration that the options, by their parameters' names, amount to."""
    values: dict[str, Any] = {}
    for field in fields(SamplingConfig):
        value = given[field.name]
        if field.name == "seed":
            values[field.name] = seed
        elif field.name == "bias":
            values[field.name] = [_bias(item) for item in value or []]
        elif field.name == "json_schema":
            values[field.name] = _schema(value)
        elif field.name == "choices":
            values[field.name] = [] if value is None else _raw(value.split(","))
        elif field.name in ("stop", "ban", "require"):
            values[field.name] = _raw(value or [])
        elif field.name == "dry_breakers":
            values[field.name] = DEFAULT.dry_breakers if value is None else _raw(value)
        else:
            values[field.name] = value
    with by_option():
        return SamplingConfig(**values)


def advised(
    context: typer.Context, defaults: GenerationDefaults
) -> tuple[dict[str, Any], list[str]]:
    """What the options that were not given are by generation_config.json; what to say of it."""
    values = {
        name: value for name, value in defaults.sampling.items() if not was_given(context, name)
    }
    said = [
        "greedy" if (name, value) == ("temperature", 0) else f"{name.replace('_', '-')} {value}"
        for name, value in values.items()
    ]
    lines = [f"{CONFIG_FILE}: {', '.join(said)} (flags override)"] if said else []
    return values, lines + defaults.notes


@contextmanager
def by_option() -> Iterator[None]:
    """Lets errors name the option where they name the field."""
    try:
        yield
    except UsageError as error:
        option = "--" + error.field.replace("_", "-")
        texts = (text.replace(error.field, option, 1) for text in (error.message, error.hint))
        raise (UsageError(*texts) if error.field else error) from None


def _raw(texts: Sequence[str]) -> list[bytes]:
    """The bytes that were typed, whatever their encoding."""
    return [os.fsencode(text) for text in texts]


def _bias(item: str) -> tuple[bytes, float]:
    text, sign, number = item.rpartition("=")
    try:
        return os.fsencode(text), float(number if sign else "")
    except ValueError:
        raise UsageError(
            f"--bias {item!r} is not TEXT=NUMBER", "for example --bias ' king=2'"
        ) from None


def _schema(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with files.open_stream(path) as file:
            return file.read(_SCHEMA_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--json-schema {path}: {error}", "give a JSON schema") from None
    except TgenError as error:
        raise UsageError(f"--json-schema: {error.message}", error.hint) from None


SAMPLERS_TEXT = ",".join(DEFAULT.samplers)
