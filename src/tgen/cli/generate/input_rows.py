"""A row of `tgen generate --input`: what it asks for, and what has come of it."""

import base64
import difflib
import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tgen.config import TEXTS, SamplingConfig
from tgen.errors import UsageError
from tgen.reports import Token

_DEFAULT = SamplingConfig()
_WANTED = 'give {"prompt": "..."} on a line'
_SHORT = {"n": "max_new_tokens", "t": "temperature"}
_GLOBAL_ONLY = (
    *("input", "model", "device", "threads", "weights", "draft", "no_kv_cache", "batch_size"),
    *("chat", "system"),
    *("json", "jsonl", "save_cache", "load_cache", "quiet", "interactive", "stats"),
)


@dataclass(kw_only=True)
class Generation:
    """One text of the output: asked for, on its way, or wrong."""

    row: int
    sample: int = 0
    line: int | None = None  # of the input, from 1
    id: Any = None  # whatever the row gave
    prompt: bytes = b""
    n_prompt: int = 0  # tokens
    echo: bool = False
    sampling: SamplingConfig = _DEFAULT
    error: UsageError | None = None
    text: bytearray = field(default_factory=bytearray)
    tokens: list[Token] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # when it began, its first and last token

    @property
    def done(self) -> bool:
        """Whether nothing more will come of it."""
        ended = bool(self.tokens) and self.tokens[-1].last
        return ended or self.error is not None or self.sampling.max_new_tokens == 0

    @property
    def finish(self) -> str:
        """Why it ended."""
        return (self.tokens[-1].finish or "length") if self.tokens else "length"

    @property
    def complete(self) -> bool:
        """Whether it is of the form that it was to be of."""
        return self.tokens[-1].complete if self.tokens else not self.sampling.constrained


def row_fields(line: bytes) -> dict[str, Any]:
    """A line of JSONL. Raises UsageError if it is not an object with a prompt."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not JSON: {error}", _WANTED) from None
    except (ValueError, RecursionError):
        raise UsageError("a number is too long, or the nesting too deep", _WANTED) from None
    if not isinstance(found, dict):
        raise UsageError("not a JSON object", _WANTED)
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = _SHORT.get(key, key.replace("-", "_"))
        if name in given:
            raise UsageError(f"{name} is given twice", "leave one of them away")
        given[name] = value
    return given


def row_prompt(given: dict[str, Any]) -> bytes:
    """A row's prompt as bytes; `prompt_bytes` is base64, for what is no UTF-8."""
    coded, prompt = given.pop("prompt_bytes", None), given.pop("prompt", None)
    if coded is not None and prompt is not None:
        raise UsageError("prompt and prompt_bytes are both given", "leave one of them away")
    if coded is not None:
        try:
            return base64.b64decode(coded, validate=True)
        except (TypeError, ValueError):
            raise UsageError("prompt_bytes is not base64", "encode the prompt's bytes") from None
    if prompt is None:
        raise UsageError("there is no prompt", _WANTED)
    text: str = _checked("prompt", prompt, isinstance(prompt, str), "a text")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError("prompt has half of a surrogate pair", "give prompt_bytes") from None


def row_sampling(base: SamplingConfig, given: dict[str, Any]) -> SamplingConfig:
    """`base` with a row's own fields. Raises UsageError for what it does not have."""
    known = {field.name for field in fields(SamplingConfig)}
    values = {}
    for name, value in given.items():
        if name in _GLOBAL_ONLY:
            raise UsageError(f"{name} holds for all rows", "give it on the command line")
        if name not in known:
            close = difflib.get_close_matches(name, [*known, "prompt", "samples", "echo", "id"], 1)
            hint = f"did you mean {close[0]}?" if close else "`tgen generate --help` lists them"
            raise UsageError(f"unknown field {name[:60]!r}", hint)
        values[name] = _value(name, value)
    return replace(base, **values)


def _value(name: str, value: Any) -> Any:
    """A field's value from JSON. Raises UsageError if it is of another type."""
    if name == "bias":
        number = isinstance(value, dict) and all(map(_is_number, value.values()))
        return _checked(name, value, number, 'an object such as {" king": 2}')
    if name in (*TEXTS, "samplers"):
        items = value if isinstance(value, list) else [value]
        texts = all(isinstance(item, str) for item in items)
        return _checked(name, value, texts, "a text, or a list of texts")
    if name == "json_schema":
        return _checked(name, value, isinstance(value, (str, dict)), "a schema, or its text")
    return _like(name, value, getattr(_DEFAULT, name))


def pop_row_option(given: dict[str, Any], name: str, default: Any) -> Any:
    """Takes a field that is none of SamplingConfig. Raises UsageError if it is of another type."""
    return _like(name, given.pop(name, default), default)


def _like(name: str, value: Any, default: Any) -> Any:
    """A value of the type of its default; None stands for a text."""
    if isinstance(default, bool):
        return _checked(name, value, isinstance(value, bool), "true or false")
    if isinstance(default, int):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return _checked(name, value, whole, "a whole number")
    if isinstance(default, float):
        return _checked(name, value, _is_number(value), "a number")
    return _checked(name, value, isinstance(value, str), "a text")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checked(name: str, value: Any, sound: bool, wanted: str) -> Any:
    if not sound:
        raise UsageError(f"{name} is {json.dumps(value)[:60]}", f"{name} must be {wanted}")
    return value
