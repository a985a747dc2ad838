"""Keywords of JSON Schema: their values are checked, and those that llguidance lacks are written by
means of those that it has."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Resolver = Callable[[dict[str, Any], str], Any]

FORMATS = frozenset(  # that llguidance checks
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
TYPES = ("null", "boolean", "number", "string", "array", "object")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_LISTS = frozenset(("required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"))
OBJECTS = frozenset(
    (
        *("properties", "patternProperties", "dependencies"),
        *("dependentRequired", "dependentSchemas"),
    )
)
_NUMBERS = frozenset((*LIMITS, "multipleOf"))
PLAIN = frozenset(  # that llguidance has
    (
        *("type", "const", "format", "pattern", "items", "additionalProperties"),
        *("properties", "patternProperties", *COUNTS, *_LISTS, *_NUMBERS, "$ref"),
    )
)
_UNCHECKED = ("contentEncoding", "contentMediaType", "contentSchema")
_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "$dynamicRef", "$recursiveRef", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems", *_UNCHECKED),
    )
)
LIST_VALUES = "list the allowed values instead, for example in an enum"
_WITHOUT = {  # keyword -> what can be done without it
    "uniqueItems": "remove it and check the items afterwards",
    "maxContains": "remove it and check the items afterwards",
    "propertyNames": "use a pattern or an enum in it, or patternProperties",
    "not": LIST_VALUES,
}
_MAX_PREFIX = 81  # of strings in `not`; llguidance's regular expressions nest up to 250 deep
_MAX_DEPTH = 3  # of schemas in a schema whose negation is formed
LOWEST = -9e18
FAR = 9e18  # llguidance overflows near 2^63
_NEGATIONS = {  # keyword -> type, keyword and difference of its negation
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


CUT_OFF = "incomplete escape sequence at the end"


class SchemaError(ValueError):
    """A schema that cannot be used; `hint` says what to do."""

    def __init__(self, path: str, message: str, hint: str = "use a valid JSON schema") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.hint = hint


def is_cut_off(regex: str) -> bool:
    """Whether a regular expression ends in an unescaped backslash, which llguidance ignores."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def join(path: str, key: str) -> str:
    """Return the path of a keyword or a property, for messages."""
    return f"{path}.{key}" if path else key


def is_known(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has any keyword of JSON Schema."""
    rewritten = {"not", "if", "contains", *_WITHOUT, *OBJECTS}
    return any(key in PLAIN or key in rewritten or key in _ANNOTATIONS for key in schema)


def simplify(schema: Any, path: str, resolve: Resolver) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of a schema that constrain values, as llguidance has them, and notes.

    The result may allow less than the schema. Raises SchemaError for what is not supported.
    """
    if not isinstance(schema, dict):
        raise SchemaError(path, "not an object, true or false")
    result: dict[str, Any] = {}
    more: list[Any] = []
    notes = []
    for key, given in schema.items():
        value = _check(key, given, path)
        if key in _UNCHECKED or (key == "format" and value not in FORMATS):
            notes.append(f"{join(path, key)}: {json.dumps(value)[:40]} is not checked")
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):  # draft 4
            other = "minimum" if key == "exclusiveMinimum" else "maximum"
            if value and other in schema:
                result[key] = _inward(key, _check(other, schema[other], path), path)
        elif key in ("items", "additionalItems"):
            listed = isinstance(schema.get("items"), list)  # before draft 2020-12
            if key == "items" or listed:
                result["prefixItems" if key == "items" and listed else "items"] = value
        elif key in PLAIN:
            result[key] = _inward(key, value, path) if key in LIMITS else value
        else:
            more += _rewrite(key, value, schema, path, resolve)
    if more:
        result["allOf"] = [*result.get("allOf", ()), *more]
    return result, notes


def _check(key: str, value: Any, path: str) -> Any:
    """Return a keyword's value, whole numbers as int; raise SchemaError for one of a wrong type."""
    counts = (*COUNTS, "minContains", "maxContains")
    if key in counts and isinstance(value, float) and value.is_integer():
        value = int(value)
    listed = isinstance(value, list)
    elements = value if listed else [value]
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool):  # draft 4
        number = key in ("exclusiveMinimum", "exclusiveMaximum")
    for keys, is_valid, expected in (
        (counts, type(value) is int and 0 <= value < 2**53, "a whole number from 0 to 2^53 - 1"),
        (_LISTS, listed, "a list"),
        (("required",), all(isinstance(one, str) for one in elements), "a list of names"),
        (OBJECTS, isinstance(value, dict), "an object"),
        (_NUMBERS, number, "a number"),
        (("pattern", "format"), isinstance(value, str), "a string"),
        (("type",), all(one in (*TYPES, "integer") for one in elements), "names of types"),
    ):
        if key in keys and not is_valid:
            message = f"invalid value {json.dumps(value)[:60]}, expected {expected}"
            raise SchemaError(join(path, key), message)
    numbers = [*_numbers(value)] if key in ("const", "enum") else []
    if not all(map(math.isfinite, (one for one in numbers if isinstance(one, float)))):
        raise SchemaError(join(path, key), "a number is not finite", "use numbers below 1.8e308")
    if any(not LOWEST <= one <= FAR for one in numbers):  # llguidance overflows
        raise SchemaError(join(path, key), f"a number is beyond {FAR:.0e}", "use a smaller one")
    if rounded := next((one for one in numbers if float(one) != one), None):
        message = f"{rounded} cannot be generated exactly, as it is beyond 2^53"
        raise SchemaError(join(path, key), message, "use a string")
    return value


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a value."""
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)):
        yield value


def _inward(key: str, value: float, path: str) -> float:
    """Return a limit that a float64 represents, and llguidance too; never one that allows more."""
    if isinstance(value, bool):
        return value
    is_low = key.endswith("inimum")
    if value < LOWEST and not is_low:
        raise SchemaError(join(path, key), f"a number is below {LOWEST:.0e}")
    if value > FAR and is_low:
        raise SchemaError(join(path, key), f"a number is above {FAR:.0e}")
    if abs(value) > FAR and is_low == (value < 0):
        return -FAR if is_low else FAR
    near = int(float(value)) if isinstance(value, int) else value
    step = 2048 if is_low else -2048  # more than the spacing of float64 below 9e18
    return near if near == value or (near > value) == is_low else int(float(near + step))


def _rewrite(
    key: str, value: Any, schema: dict[str, Any], path: str, resolve: Resolver
) -> Iterator[Any]:
    """Yield schemas that together say what a keyword says that llguidance does not have."""
    where = join(path, key)
    if key == "not":
        yield negate(value, where, resolve)
    elif key == "if" and ("then" in schema or "else" in schema):
        otherwise = negate(value, where, resolve) if schema.get("else") is not False else True
        yield {
            "anyOf": [
                {"allOf": [value, schema.get("then", True)]},
                {"allOf": [otherwise, schema.get("else", True)]},
            ]
        }
    elif key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in value.items():
            then = {"required": needed} if isinstance(needed, list) else needed
            if needed not in ([], True):
                absent = {"properties": {name: False}}
                yield {"anyOf": [absent, {"required": [name], "allOf": [then]}]}
    elif key == "contains":
        n = _check("minContains", schema.get("minContains", 1), path)
        if "maxContains" in schema:
            raise SchemaError(path, "maxContains is not supported", _WITHOUT["maxContains"])
        if n > 100:
            raise SchemaError(path, "minContains is above 100", "use a smaller one")
        if n:  # the items that it needs come first
            yield {"prefixItems": [value] * n, "minItems": n}
    elif key == "uniqueItems" and value is True:
        if schema.get("maxItems") not in (0, 1):
            raise SchemaError(path, "uniqueItems is not supported", _WITHOUT[key])
    elif key == "propertyNames" and value is not True:
        yield _property_names(value, where, resolve)
    elif key in ("unevaluatedProperties", "unevaluatedItems"):
        other = "additionalProperties" if key == "unevaluatedProperties" else "items"
        if value is not True and not isinstance(schema.get(other), (dict, bool)):
            raise SchemaError(path, f"{key} is not supported", f"use {other}")
    elif key in ("$dynamicRef", "$recursiveRef"):
        raise SchemaError(path, f"{key} is not supported", "use $ref")


def _property_names(schema: Any, path: str, resolve: Resolver) -> Any:
    """Return a schema of objects whose names satisfy `schema`."""
    for _ in range(_MAX_DEPTH):
        if isinstance(schema, dict) and "$ref" in schema:
            schema = resolve(schema, path)
    core = simplify(schema, path, resolve)[0] if schema is not False else {"enum": []}
    if core.get("type", "string") != "string":
        core = {"enum": []}
    names = core.pop("enum", None)
    if "const" in core:
        only = core.pop("const")
        names = [only] if names is None or only in names else []
    core.pop("type", None)
    if names is not None and not core:
        allowed = {name: True for name in names if isinstance(name, str)}
        return {"properties": allowed, "additionalProperties": False}
    low, high = core.pop("minLength", None), core.pop("maxLength", None)
    pattern = core.pop("pattern", None)
    if core or names is not None or (pattern is not None and (low, high) != (None, None)):
        raise SchemaError(path, "is not supported", _WITHOUT["propertyNames"])
    if pattern is None and (low, high) == (None, None):
        return True
    length = f"^(?s:.{{{low or 0},{'' if high is None else high}}})$"
    return {"patternProperties": {pattern or length: True}, "additionalProperties": False}


def negate(schema: Any, path: str, resolve: Resolver, depth: int = 0) -> Any:
    """Return a schema of values that `schema` does not allow; some of them may be missing.

    Raises SchemaError if llguidance can express none of them.
    """
    if isinstance(schema, bool):
        return not schema
    if depth > _MAX_DEPTH:
        raise SchemaError(path, "the negation is too complex", _WITHOUT["not"])
    options: list[Any] = []
    refused = None
    for key, given in schema.items() if isinstance(schema, dict) else ():
        value = _check(key, given, path)
        try:
            options.extend(_negations(key, value, schema, path, resolve, depth))
        except SchemaError as error:
            refused = error
    if refused and not options:
        raise refused
    return {"anyOf": options}


def _negations(
    key: str, value: Any, schema: dict[str, Any], path: str, resolve: Resolver, depth: int
) -> Iterator[Any]:
    """Yield schemas of values that a keyword does not allow."""
    where = join(path, key)
    if key == "type":
        types = {value} if isinstance(value, str) else set(value)
        types |= {"number"} if "integer" in types else set()
        yield {"type": [one for one in TYPES if one not in types]}
    elif key in ("const", "enum"):
        yield from _other_values([value] if key == "const" else value)
    elif key == "required":
        yield from ({"type": "object", "properties": {name: False}} for name in value)
    elif key == "properties":
        for name, one in value.items():
            if one not in (True, {}):
                other = negate(one, f"{where}.{name}", resolve, depth + 1)
                yield {"type": "object", "required": [name], "properties": {name: other}}
    elif key in _NEGATIONS and not isinstance(value, bool):
        kind, negation, difference = _NEGATIONS[key]
        if value + difference >= 0 or kind == "number":
            yield {"type": kind, negation: value + difference}
    elif key == "not":
        yield value
    elif key in ("anyOf", "oneOf"):
        yield {"allOf": [negate(one, where, resolve, depth + 1) for one in value]}
    elif key == "allOf":
        yield from (negate(one, where, resolve, depth + 1) for one in value)
    elif key == "$ref":
        yield negate(resolve(schema, path), path, resolve, depth + 1)
    elif key in PLAIN or key in OBJECTS or key in ("if", "contains", *_WITHOUT):
        raise SchemaError(path, f"the negation of {key} is not supported", _WITHOUT["not"])


def _other_values(values: list[Any]) -> Iterator[Any]:
    """Yield schemas of values other than these; no arrays or objects if some of these are."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({v for v in values if isinstance(v, (int, float)) and type(v) is not bool})
    kinds = {"null": type(None), "array": list, "object": dict}
    yield {"type": [t for t, kind in kinds.items() if not any(type(v) is kind for v in values)]}
    yield from ({"const": one} for one in (True, False) if not any(v is one for v in values))
    yield {"type": "string"} | ({"pattern": f"^{_other_strings(strings)}$"} if strings else {})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        yield {"type": "number"} | {k: v for k, v in limits.items() if v is not None}


def _other_strings(strings: list[str], limit: int = _MAX_PREFIX) -> str:
    """Return a regular expression of all strings but these, and but those that start like one of
    these for `limit` characters and one more."""
    rest: dict[str, list[str]] = {}
    for text in strings:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    codes = {first: rf"\x{{{ord(first):x}}}" for first in rest}
    options = [] if "" in strings else [""]
    options.append(f"[^{''.join(codes.values())}](?s:.*)" if rest else "(?s:.+)")
    if limit:
        options += [codes[c] + _other_strings(others, limit - 1) for c, others in rest.items()]
    return f"(?:{'|'.join(options)})"
