"""JSON objects from outside, as pydantic models: a field is one line.

Types are strict: strings and booleans are not accepted as numbers.
"""

import json

from pydantic import BaseModel, ConfigDict, ValidationError

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
    "literal_error": "{expected}",
    "value_error": "{error}",  # of a field's own validator
}


class JsonObject(BaseModel):
    """An object with the declared fields; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


def explain(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first invalid field, and its value and what is expected there."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in first["loc"])
    path = "".join(steps).removeprefix(".")
    if kind in ("missing", "extra_forbidden"):
        return path, f"{path} is {'missing' if kind == 'missing' else 'not supported'}"
    expected = _EXPECTED.get(kind, first["msg"]).format(**first.get("ctx", {}))
    expected = expected.removesuffix(".0")  # limits of floats
    return path, f"{path}: invalid value {json.dumps(first['input'])[:60]}, expected {expected}"
