"""Sizes of the shortest texts of a translated JSON schema, and its parts without any text."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, if it does."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def without(schema: Any, dead: set[str]) -> Any:
    """Return a schema with false in place of references of which no text can exist."""
    if not dead or not isinstance(schema, dict):
        return schema
    if schema.get("$ref") in dead:
        return False
    result = {}
    for key, value in schema.items():  # values of const and enum are no schemas
        if key in ("properties", "patternProperties"):
            value = {name: without(one, dead) for name, one in value.items()}
        elif key in ("allOf", "anyOf", "prefixItems"):
            value = [without(one, dead) for one in value]
        elif key in ("items", "additionalProperties"):
            value = without(value, dead)
        result[key] = value
    return result


def shortest(root: Any, definitions: dict[str, Any]) -> tuple[dict[str, float], float, int]:
    """Return estimates of the shortest texts of the definitions and of the root, in characters,
    infinite without a text; and the largest of any part that has one."""
    sizes = dict.fromkeys(definitions, math.inf)
    longest = 0.0

    def size(schema: Any) -> float:
        nonlocal longest
        result = _size(schema, size, sizes) if isinstance(schema, dict) else 1.0
        result = math.inf if schema is False else result
        longest = longest if result == math.inf else max(longest, result)
        return result

    changed = True
    while changed:  # few passes: most references lead to later definitions
        before = sum(one == math.inf for one in sizes.values())
        for name in reversed(definitions):
            sizes[name] = min(sizes[name], size(definitions[name]))
        changed = sum(one == math.inf for one in sizes.values()) < before
    return sizes, size(root), int(longest)


def _size(schema: dict[str, Any], size: Callable[[Any], float], sizes: dict[str, float]) -> float:
    """Return an estimate of the shortest text of a schema for llguidance."""
    if "$ref" in schema:
        name: str = schema["$ref"]
        return sizes[name.removeprefix("#/$defs/")]
    if "anyOf" in schema:
        return min(map(size, schema["anyOf"]), default=math.inf)
    if "allOf" in schema:
        return sum(map(size, schema["allOf"]))
    if (values := values_of(schema)) is not None:
        return min((len(json.dumps(value)) for value in values), default=math.inf)
    properties, given = schema.get("properties", {}), schema.get("type", "null")
    fields = {name: len(name) + 6 + size(value) for name, value in properties.items()}
    first = [size(one) + 2 for one in schema.get("prefixItems", ())]
    n, rest = schema.get("minItems", 0), size(schema.get("items", True)) + 2
    free = [schema.get("additionalProperties", True), *schema.get("patternProperties", {}).values()]
    others = min(map(size, free)) + 20
    required = schema.get("required", ())
    missing = max(0, schema.get("minProperties", 0) - len(required))
    possible = (one for name, one in fields.items() if name not in required and one < math.inf)
    optional = sorted(possible)[:missing]
    missing -= len(optional)
    matched = 30 if "pattern" in schema or "format" in schema else 0
    digits = len(str(schema.get("minimum", 0))) + len(str(schema.get("maximum", "")))
    lengths = {
        "string": 2 + schema.get("minLength", 0) + matched,
        "array": 2 + sum(first[:n]) + (rest * (n - len(first)) if n > len(first) else 0),
        "object": 2
        + sum(fields.get(name, others) for name in required)
        + sum(optional)
        + (others * missing if missing else 0),
        "number": digits,
        "integer": digits,
    }
    types = [given] if isinstance(given, str) else given
    return min((float(lengths.get(one, 4)) for one in types), default=math.inf)
