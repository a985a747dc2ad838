"""A user's JSON schema as the schema that llguidance compiles: its texts are valid under the
user's, and they end.

Objects with `properties` are closed unless `additionalProperties` says otherwise; numbers, strings
and arrays without limits get them. The result may allow less than the user's schema, never more.

A schema becomes a union of conjunctions of simple schemas: `anyOf` and `oneOf` are distributed over
`allOf` and `$ref`, so that a merged object is closed as a whole.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, NamedTuple

from tgen.generation.schema_keywords import (
    COMBINED,
    CUT_OFF,
    FAR,
    LIST_VALUES,
    TYPES,
    SchemaError,
    is_cut_off,
    is_known,
    join,
    negate,
    simplify,
)
from tgen.generation.schema_references import References
from tgen.generation.schema_sizes import shortest, values_of, without

MAX_INTEGER = 2**53 - 1  # the largest that every JSON reader represents exactly
MAX_LENGTH = 16_384  # characters of a string without maxLength, pattern and format
MAX_ITEMS = 1_000  # of an array without maxItems
# Options of llguidance: one space after colons and commas, as white space could repeat endlessly.
ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DECIMALS = 9  # of a number; llguidance's multipleOf has no more
_MAX_ALTERNATIVES = 1_000  # conjunctions of a schema
_ALL = "*"  # all items of an array
_MAX_STEPS = 100_000  # of distribution
_MAX_DEPTH = 3


@dataclass
class Translation:
    """A schema for llguidance, and what else is known about it."""

    schema: Any = True
    notes: list[str] = field(default_factory=list)
    patterns: dict[str, str] = field(default_factory=dict)  # regular expression -> its path
    longest: int = 0  # of the shortest texts of its parts, in characters, estimated


class _Part(NamedTuple):
    """The keywords of a schema without `COMBINED`, or a reference."""

    keywords: dict[str, Any]
    path: str
    target: Any = None  # of the reference


_Conjunction = list[_Part]
# A keyword, and the place in the value: schemas for it are united; llguidance merges the others.
_Position = tuple[str, str] | tuple[str]


def translate(schema: Any, *, closed: bool = True) -> Translation:
    """Translate a schema; not `closed`: objects stay open.

    Raises SchemaError, and RecursionError if the nesting is too deep.
    """
    translator = _Translator(unwrap(schema), closed=closed)
    if isinstance(translator.root, dict) and translator.root and not is_known(translator.root):
        names = ", ".join(translator.root)[:60]
        translator.result.notes.append(f"no keyword of JSON Schema: {names}; all JSON is allowed")
    root = translator.schema(translator.root, "")
    while translator.waiting:  # in a loop: a chain of references may be long
        name, target, path, closed = translator.waiting.pop()
        translator.definitions[name] = translator.definition(target, path, closed=closed)
    result, definitions = translator.result, translator.definitions
    for pattern, path in result.patterns.items():
        if is_cut_off(pattern):
            raise SchemaError(path, CUT_OFF)
    sizes, size, result.longest = shortest(root, definitions)
    if size == math.inf:
        for name, (path, ref) in translator.references.items():
            if sizes[name] == math.inf and definitions[name] is not False:
                reason = "refers only to itself, or needs itself without end"
                hint = "let one of its properties be absent or null"
                raise SchemaError(path, f"no text matches: {ref} {reason}", hint)
        if translator.lacks_texts:
            raise SchemaError("", "tgen cannot generate any text of the schema", LIST_VALUES)
        raise SchemaError("", "no text matches the schema", "use one that some text matches")
    dead = {f"#/$defs/{name}" for name, one in sizes.items() if one == math.inf}
    living = {
        name: without(one, dead) for name, one in definitions.items() if sizes[name] != math.inf
    }
    root = without(root, dead)
    result.schema = {"allOf": [root], "$defs": living} if living else root
    return result


def unwrap(schema: Any) -> Any:
    """Return the schema in OpenAI's `response_format`, its `json_schema`, or `text.format`."""
    typed = isinstance(schema, dict) and schema.get("type") == "json_schema"
    inner = schema.get("json_schema", schema) if typed else schema
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        return schema
    named = {"name"} <= inner.keys() <= {"name", "schema", "strict", "description"}
    return inner["schema"] if typed or named else schema


class _Translator:
    def __init__(self, root: Any, *, closed: bool) -> None:
        self.root, self.result, self._closed = root, Translation(), closed
        self.lacks_texts = False  # whether the result may allow less, besides its limits
        self.definitions: dict[str, Any] = {}
        self.waiting: list[tuple[str, Any, str, bool]] = []  # definitions to come
        self.references: dict[
            str, tuple[str, str]
        ] = {}  # by definition: path and text of the first
        self._names: dict[tuple[int, bool], str] = {}
        # Schemas, whose ids must not be used again, and their translations.
        self._seen: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._merged: dict[tuple[int, ...], Any] = {}  # by the ids of their parts
        self._resolve, self._steps = References(root).resolve, 0
        self._depth = 0  # of properties by which alternatives are told apart

    def schema(self, schema: Any, path: str, *, closed: bool = True) -> Any:
        """Return a schema for llguidance; not `closed`: for a part of a merged value, which gets
        its limits elsewhere."""
        key = id(schema), closed
        if key in self._seen:
            known = self._seen[key][1]
            if isinstance(known, dict) and any(isinstance(v, (dict, list)) for v in known.values()):
                return self._define(_Part({"$ref": path}, path, schema), closed=closed)
            return known
        self._seen[key] = schema, {"": []}  # so that a schema within itself becomes a reference
        result = self.definition(schema, path, closed=closed)
        self._seen[key] = schema, result
        return result

    def definition(self, schema: Any, path: str, *, closed: bool) -> Any:
        merged = [self._merge(one, closed=closed) for one in self._alternatives(schema, path)]
        options = [option for option in merged if option is not False]
        if len(options) < 2:
            return options[0] if options else False
        return {"anyOf": options}

    def _alternatives(
        self, schema: Any, path: str, chain: Sequence[int] = ()
    ) -> list[_Conjunction]:
        """Return conjunctions, of which a value must satisfy one. A reference alone stays one.

        `chain` has the targets of the references that are being replaced.
        """
        if isinstance(schema, bool):
            return [[]] if schema else []
        self._count(1, path)
        core, notes = simplify(schema, path, self._resolve)
        self.lacks_texts |= any(key in schema for key in ("not", "if", "contains"))
        self.result.notes += [note for note in notes if note not in self.result.notes]
        own = {key: value for key, value in core.items() if key not in COMBINED}
        factors: list[list[_Conjunction]] = [[[_Part(own, path)]]] if own else []
        for key, value in core.items():
            where = join(path, key)
            if key == "$ref":
                factors.append([[_Part({"$ref": value}, path, self._resolve(schema, path))]])
            elif key in COMBINED:
                options = [
                    self._alternatives(one, f"{where}[{i}]", chain) for i, one in enumerate(value)
                ]
                if key == "oneOf":
                    options = self._separate(value, options, where)
                factors += options if key == "allOf" else [[*itertools.chain(*options)]]
        result = self._product(factors, path)
        if len(result) == 1 and len(result[0]) == 1:
            return result
        return [whole for one in result for whole in self._replace(one, path, chain)]

    def _product(self, factors: Sequence[list[_Conjunction]], path: str) -> list[_Conjunction]:
        result: list[_Conjunction] = [[]]
        for factor in factors:
            n = len(result) * len(factor)
            self._count(n if n <= _MAX_ALTERNATIVES else _MAX_STEPS, path)
            result = [one + two for one, two in product(result, factor)]
        return result

    def _count(self, steps: int, path: str) -> None:
        self._steps += steps
        if self._steps >= _MAX_STEPS:
            message = "too many combinations of alternatives"
            raise SchemaError(path, message, "use fewer anyOf, oneOf, not, if and dependencies")

    def _replace(
        self, conjunction: _Conjunction, path: str, chain: Sequence[int], *, alone: bool = False
    ) -> list[_Conjunction]:
        """Replace references by what they refer to, but one that is `alone` only if asked."""
        if len(conjunction) == 1 and not alone:
            return [conjunction] if _types(conjunction) else []
        factors = [
            [[part]] if part.target is None else self._expand(part.target, _place(part), chain)
            for part in conjunction
        ]
        return [whole for whole in self._product(factors, path) if _types(whole)]

    def _expand(self, schema: Any, path: str, chain: Sequence[int] = ()) -> list[_Conjunction]:
        """Return the alternatives of a schema without references."""
        if id(schema) in chain:  # a value that must satisfy itself: nothing more
            return [[]]
        chain = (*chain, id(schema))
        found = self._alternatives(schema, path, chain)
        return [whole for one in found for whole in self._replace(one, path, chain, alone=True)]

    def _separate(
        self, schemas: Sequence[Any], options: list[list[_Conjunction]], path: str
    ) -> list[list[_Conjunction]]:
        """Return the alternatives of `oneOf`, each without the values of others."""
        expanded = [self._expand(one, path) for one in schemas]
        listed = [_listed(one) for one in expanded]
        sets = [values for values in listed if values is not None]
        if len(sets) == len(listed) and len(set().union(*sets)) == sum(map(len, sets)):
            return options  # as below, without a step for each pair
        for (i, a), (j, b) in combinations(enumerate(expanded), 2):
            self._count(len(a) * len(b), path)
            if all(self._disjoint(one, two) for one, two in product(a, b)):
                continue
            for mine, other in ((i, j), (j, i)):
                try:
                    negation = negate(schemas[other], f"{path}[{other}]", self._resolve)
                    self.lacks_texts = True
                except SchemaError:
                    message = f"alternatives {i} and {j} may match the same value"
                    hint = "use anyOf, or require a property with another const in each"
                    raise SchemaError(path, message, hint) from None
                without = self._alternatives(negation, path)
                whole = self._product([options[mine], without], path)
                options[mine] = [c for one in whole for c in self._replace(one, path, ())]
        return options

    def _disjoint(self, one: _Conjunction, two: _Conjunction) -> bool:
        """Return whether surely no value satisfies both."""
        both = [*one, *two]
        types = _types(both)
        if not types:
            return True
        lists = [map(_canonical, v) for part in both if (v := values_of(part.keywords)) is not None]
        if lists and not set.intersection(*map(set, lists)):
            return True
        if types <= {"number", "integer"}:
            low, high = _range(part.keywords for part in both)
            return low > high
        if types != {"object"}:
            return False
        for name in {name for part in both for name in part.keywords.get("required", ())}:
            found = [_property(part.keywords, name) for part in both]
            if False in found:
                return True
            schemas = [one for one in found if one is not True]
            if len(schemas) > 1 and self._depth < _MAX_DEPTH:
                self._depth += 1
                options = [self._expand(one, "") for one in schemas]
                apart = any(
                    all(self._disjoint(a, b) for a, b in product(*pair))
                    for pair in combinations(options, 2)
                )
                self._depth -= 1
                if apart:
                    return True
        return False

    def _merge(self, conjunction: _Conjunction, *, closed: bool) -> Any:
        """Return the schema of a conjunction."""
        if not conjunction:
            return self._any() if closed else True
        if conjunction[0].target is not None:
            return self._define(conjunction[0], closed=closed)
        prefixed = any("prefixItems" in part.keywords for part in conjunction)
        positions = [_positions(part.keywords, prefixed=prefixed) for part in conjunction]
        counts = Counter(itertools.chain(*positions))
        shared = {position for position, n in counts.items() if n > 1}
        if any({"properties", "patternProperties"} <= part.keywords.keys() for part in conjunction):
            shared.add(("patternProperties",))  # llguidance merges what matches both
        parts = [self._emit(part, shared, closed=closed) for part in conjunction]
        limits = self._unite(conjunction, shared, closed=closed)
        _check_names(conjunction)
        if closed:
            limits = self._limits(conjunction, limits)
        if len(parts) > 1:
            return {"allOf": [*parts, *([limits] if limits else [])]}
        properties = parts[0].get("properties", {}) | limits.pop("properties", {})
        return parts[0] | limits | ({"properties": properties} if properties else {})

    def _emit(self, part: _Part, shared: set[_Position], *, closed: bool) -> dict[str, Any]:
        """Return the keywords of a part, without the schemas that `_unite` returns."""
        result: dict[str, Any] = {}
        for key, value in part.keywords.items():
            path, whole = join(part.path, key), closed and (key,) not in shared
            if key in ("properties", "patternProperties"):
                result[key] = {
                    name: (key, name) in shared or self.schema(one, f"{path}.{name}", closed=whole)
                    for name, one in value.items()
                }
            elif key == "prefixItems":
                result[key] = [
                    self.schema(one, f"{path}[{i}]", closed=whole) for i, one in enumerate(value)
                ]
            elif key in ("items", "additionalProperties"):
                result[key] = (key, _ALL) in shared or self.schema(value, path, closed=whole)
            else:
                result[key] = value
            if key == "patternProperties":
                self.result.patterns |= {pattern: f"{path}.{pattern}" for pattern in value}
            if key == "pattern":
                self.result.patterns[value] = path
        return result

    def _unite(
        self, conjunction: _Conjunction, shared: set[_Position], *, closed: bool
    ) -> dict[str, Any]:
        """Return the schemas of places for which several parts have some."""
        result: dict[str, Any] = {}
        for key, name in sorted(one for one in shared if len(one) == 2):
            found = [
                (join(part.path, key), part.keywords[key])
                for part in conjunction
                if key in part.keywords
            ]
            if key == "properties":
                found = [(f"{path}.{name}", one[name]) for path, one in found if name in one]
            schemas = [one for _, one in found]
            whole = self._merged.setdefault(tuple(map(id, schemas)), {"allOf": schemas})
            merged = self.schema(whole, found[0][0], closed=closed)
            if key == "properties":
                result.setdefault(key, {})[name] = merged
            else:
                result[key] = merged
        return result

    def _limits(self, conjunction: _Conjunction, limits: dict[str, Any]) -> dict[str, Any]:
        """Return keywords with those that bound and close a value without limits of its own."""
        types, keywords = _types(conjunction), [part.keywords for part in conjunction]
        given, single = {key for one in keywords for key in one}, len(conjunction) == 1
        if given & {"const", "enum"}:
            return limits
        limits |= _number_limits(keywords, types)
        if "string" in types and not given & {"maxLength", "pattern", "format"}:
            limits["maxLength"] = max(MAX_LENGTH, *(k.get("minLength", 0) for k in keywords), 0)
        if "array" in types and "maxItems" not in given:
            limits["maxItems"] = max(MAX_ITEMS, *(k.get("minItems", 0) for k in keywords), 0)
        if "array" in types and single and "items" not in given:
            limits["items"] = self._any()
        names = _closed_names(keywords) if self._closed else None
        if "object" in types and names is not None:
            declared = {name for one in keywords for name in one.get("properties", ())}
            more: dict[str, Any] = {
                name: True if name in declared else self._any()
                for name in names
                if not single or name not in declared
            }
            limits["properties"] = more | limits.get("properties", {})
            patterns = [name for one in keywords for name in one.get("patternProperties", ())]
            if not single and patterns:
                limits["patternProperties"] = dict.fromkeys(patterns, True)
            limits["additionalProperties"] = False
        elif "object" in types and single and "additionalProperties" not in given:
            limits["additionalProperties"] = self._any()
        return limits

    def _define(self, part: _Part, *, closed: bool) -> dict[str, str]:
        key = id(part.target), closed
        name = self._names.setdefault(key, str(len(self._names)))
        if name not in self.references:
            self.references[name] = part.path, str(part.keywords["$ref"])
            self.waiting.append((name, part.target, _place(part), closed))
            self.definitions[name] = True  # in this order; see `shortest`
        return {"$ref": f"#/$defs/{name}"}

    def _any(self) -> dict[str, str]:
        """Return a reference to any JSON value within the limits."""
        ref = {"$ref": "#/$defs/any"}
        self.definitions["any"] = {
            "anyOf": [
                {"type": ["null", "boolean"]},
                {"type": "number", **_number_limits([], {"number"})},
                {"type": "string", "maxLength": MAX_LENGTH},
                {"type": "array", "items": ref, "maxItems": MAX_ITEMS},
                {"type": "object", "additionalProperties": ref},
            ]
        }
        return ref


def _place(part: _Part) -> str:
    """Return the path of the schema that a reference refers to."""
    ref = str(part.keywords["$ref"])
    return ref[1:].strip("/").replace("/", ".") if ref.startswith("#") else ref


def _property(keywords: dict[str, Any], name: str) -> Any:
    """Return the schema of a property; True if patterns of names may decide about it."""
    others = "patternProperties" in keywords or keywords.get("additionalProperties", True)
    return keywords.get("properties", {}).get(name, others)


def _positions(keywords: dict[str, Any], *, prefixed: bool) -> set[_Position]:
    """Return the places in a value for which keywords have schemas."""
    result: set[_Position] = {("properties", name) for name in keywords.get("properties", ())}
    if "items" in keywords or "prefixItems" in keywords:
        result |= {("items",), ("prefixItems",)} if prefixed else {("items", _ALL)}
    if "additionalProperties" in keywords or "patternProperties" in keywords:
        result |= {("additionalProperties",), ("patternProperties",)}
    return result


def _types(conjunction: _Conjunction) -> set[str]:
    """Return the types that all parts allow; a number may be an integer, too."""
    types = {*TYPES, "integer"}
    for part in conjunction:
        given = part.keywords.get("type", [*TYPES])
        names = {given} if isinstance(given, str) else set(given)
        types &= names | ({"integer"} if "number" in names else set())
        if (values := values_of(part.keywords)) is not None:
            types &= {name for value in values for name in _types_of(value)}
    return types


def _types_of(value: Any) -> set[str]:
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _listed(conjunctions: Iterable[_Conjunction]) -> set[Any] | None:
    """Return canonical values that include all that the conjunctions allow; None if not listed."""
    result = set()
    for one in conjunctions:
        lists = [v for part in one if (v := values_of(part.keywords)) is not None]
        if not lists:
            return None
        result |= set(map(_canonical, lists[0]))
    return result


def _canonical(value: Any) -> Any:
    """Return an object that equals another if JSON says that the values are equal."""
    if isinstance(value, list):
        return ("array", *map(_canonical, value))
    if isinstance(value, dict):
        return ("object", *((name, _canonical(value[name])) for name in sorted(value)))
    return value if isinstance(value, str) else (type(value) is bool, value)


def _range(keywords: Iterable[dict[str, Any]]) -> tuple[float, float]:
    low, high = -math.inf, math.inf
    for one in keywords:
        low = max(low, one.get("minimum", low), one.get("exclusiveMinimum", low))
        high = min(high, one.get("maximum", high), one.get("exclusiveMaximum", high))
    return low, high


def _number_limits(keywords: Sequence[dict[str, Any]], types: set[str]) -> dict[str, Any]:
    """Return limits of numbers that have none."""
    low, high = _range(keywords)
    limits: dict[str, Any] = {}
    if not types & {"number", "integer"}:
        return limits
    if low == -math.inf:
        limits["minimum"] = -MAX_INTEGER if high > -MAX_INTEGER / 2 else -FAR
    if high == math.inf and low < FAR:
        limits["maximum"] = MAX_INTEGER if low < MAX_INTEGER / 2 else FAR
    coarse = all(x == 0 or abs(x) > 1e-6 for x in (low, high)) and high - low > 1e-6
    if "number" in types and coarse and not any("multipleOf" in one for one in keywords):
        limits["multipleOf"] = 10**-DECIMALS
    return limits


def _check_names(conjunction: _Conjunction) -> None:
    """Raise SchemaError for an object that needs several properties of open names, since a text may
    have a name twice."""
    if "object" not in _types(conjunction):
        return
    keywords = [part.keywords for part in conjunction]
    required = {name for one in keywords for name in one.get("required", ())}
    for part in conjunction:
        if part.keywords.get("minProperties", 0) > len(required) + 1:
            raise SchemaError(
                join(part.path, "minProperties"),
                "several properties beside the required ones are not supported",
                "name them in required, or use a smaller minProperties",
            )


def _closed_names(keywords: Sequence[dict[str, Any]]) -> Iterable[str] | None:
    """Return the properties of an object that is closed by default; None for an open one."""
    if any(key in one for one in keywords for key in ("additionalProperties", "const", "enum")):
        return None
    properties = [one["properties"] for one in keywords if "properties" in one]
    has_patterns = any(one.get("patternProperties") for one in keywords)
    # Properties that are only forbidden come from `not` and the like.
    declares = any(not one or any(v is not False for v in one.values()) for one in properties)
    if not declares and not has_patterns:
        return None
    names = [name for one in properties for name, value in one.items() if value is not False]
    names += [name for one in keywords for name in one.get("required", ())]
    unique = dict.fromkeys(names)
    fewest = max(one.get("minProperties", 0) for one in keywords)
    return unique if has_patterns or fewest <= len(unique) else None
