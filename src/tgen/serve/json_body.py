"""Bodies of requests: JSON objects with strict types, and errors that name the field."""

import json
from typing import Annotated, Any, NoReturn, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from tgen.serve.http_error import HttpError, bad_request

_MAX_SCHEMA_BYTES = 1 << 16  # compiled grammars and their schemas are cached
# Type of an error -> what is expected.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_unicode": "text without unpaired surrogates",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "at least {ge:,}",
    "less_than_equal": "at most {le:,}",
    "too_short": "a value that is not empty",
    "too_long": "at most {max_length:,} items",
    "literal_error": "{expected}",
    "value_error": "{error}",  # of a field's own validator
}


class JsonObject(BaseModel):
    """A JSON object with the declared fields; others are ignored.

    Types are strict: strings and booleans are not accepted as numbers. `Whole` accepts 3.0, too.
    """

    model_config = ConfigDict(strict=True, frozen=True)


def check_unicode(text: str) -> str:
    """Return the text; raises ValueError for one with unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text without unpaired surrogates") from None
    return text


def check_size(value: Any) -> Any:
    """Return a schema, grammar or list that is small enough and without unpaired surrogates; raises
    ValueError."""
    if len(check_unicode(json.dumps(value, ensure_ascii=False)).encode()) > _MAX_SCHEMA_BYTES:
        kind = "schema" if isinstance(value, dict) else "value"
        raise ValueError(f"a {kind} of up to {_MAX_SCHEMA_BYTES:,} bytes")
    return value


def to_whole(value: Any) -> Any:
    """Return a number such as 3.0, which some languages write for 3, as a whole number; any other
    value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_ids(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of whole numbers, as token ids are."""
    return isinstance(value, list) and all(type(i) is int for i in value)


def list_parts(content: Any, kind: str) -> Any:
    """Return the parts of a message's content, which may be a text: then one of this type. What an
    assistant refused with is text, too."""
    if not isinstance(content, (str, list)):
        raise ValueError("a string or a list of text parts")
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return [
        {"type": kind, "text": part["refusal"]} if _is_refusal(part) else part for part in content
    ]


def _is_refusal(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part


Whole = Annotated[int, BeforeValidator(to_whole)]
Unicode = Annotated[str, AfterValidator(check_unicode)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(check_size)]
# Only the first of many wrong values in a list is an error: all would take seconds.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Object = TypeVar("_Object", bound=JsonObject)


def load_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that are not null.

    Raises HttpError, and RecursionError for a body that is nested too deeply.
    """
    try:
        text = body.decode("utf-8-sig")  # Windows' programs write a byte order mark
        values = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        reason = str(error).partition(";")[0]  # without how to configure Python
        raise bad_request(f"the body is not valid JSON: {reason}") from None
    if not isinstance(values, dict):
        raise bad_request('the body is not a JSON object such as {"prompt": "What is"}')
    return {name: value for name, value in values.items() if value is not None}


def validate(kind: type[_Object], values: object, at: str = "") -> _Object:
    """Return an object of the fields; `at` is its place in the body. Raises HttpError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise describe_error(error, at) from None


def describe_error(error: ValidationError, at: str = "") -> HttpError:
    """Return the error that names the first invalid field, its value and what is expected."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in first["loc"])
    path = (at + "".join(steps)).removeprefix(".")
    if kind in ("missing", "extra_forbidden"):
        state = "missing" if kind == "missing" else "not supported"
        return bad_request(f"{path} is {state}", path)
    expected = _EXPECTED.get(kind, first["msg"]).format(**first.get("ctx", {}))
    expected = {"False": "false"}.get(expected, expected).removesuffix(".0")  # limits of floats
    value = json.dumps(first["input"])[:60]
    return bad_request(f"{path}: invalid value {value}, expected {expected}", path)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
