"""JSON schemas: texts end, are valid, and what cannot be enforced is refused with its place."""

import json

import pytest

from tgen.errors import UsageError
from tgen.generation.json_schema import MAX_INTEGER, MAX_ITEMS, MAX_LENGTH, translate
from tgen.generation.schema_keywords import FORMATS, SchemaError
from tgen.python_api import load

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"properties": {"kid": {"$ref": "#/$defs/node"}}}},
}
ANY = ("null", True, -1.5, "a", [1], {"z": 1})


@pytest.fixture(scope="module")
def accepts():
    """Return a function that tells whether the constraint of a schema allows a JSON value."""
    grammars = load("shakespeare", threads=1)._loaded.vocabulary.grammars

    def accept(schema, value):
        matcher = grammars.compile("json_schema", json.dumps(schema), ()).matcher
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        tokens = grammars._tokenizer.tokenize_bytes(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accept


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # closed objects
        (NAMED, [{}, {"name": "a"}], [{"name": "a", "b": 1}, {"b": 1}]),
        (NAMED | {"additionalProperties": True}, [{"name": "a", "b": 1}], []),
        (NAMED | {"required": ["id"]}, [{"name": "a", "id": 1}, {"id": []}], [{"id": 1, "b": 2}]),
        (NAMED | {"patternProperties": {"^x": {}}}, [{"name": "a", "xb": 1}], [{"b": 1}]),
        ({"properties": {}, "type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"properties": {}, "type": "object"}, [{}], [{"a": 1}]),
        (
            {"properties": {"a": False}, "type": "object", "minProperties": 1},
            [{"b": 1}],
            [{}, {"a": 1}],
        ),
        ({"type": "object"}, [{"b": 1}], []),
        ({"allOf": [CAT, NAMED]}, [{"kind": "cat", "name": "a"}], [{"kind": "cat", "b": 1}]),
        (
            {"$ref": "#/$defs/named", "properties": {"a": {}}, "$defs": {"named": NAMED}},
            [{"a": 1, "name": "b"}, {}],
            [{"a": 1, "b": 1}],
        ),
        (
            NAMED | {"anyOf": [CAT, DOG]},
            [{"name": "a", "kind": "cat", "lives": 9}, {"name": "a", "kind": "dog"}],
            [{"name": "a", "kind": "dog", "lives": 9}, {"name": "a", "kind": "cat", "b": 1}],
        ),
        (
            {"allOf": [{"properties": {"p": CAT}}, {"properties": {"p": NAMED}}]},
            [{"p": {"kind": "cat", "name": "a"}}],
            [{"p": {"kind": "cat", "b": 1}}],
        ),
        (
            {"allOf": [{"properties": {"": {"enum": [1, 2]}}}, {"properties": {"": {"const": 1}}}]},
            [{"": 1}],
            [{"": 2}, {"": "a"}],
        ),
        (NODE, [{"kid": {"kid": {}}}], [{"kid": {"b": 1}}]),
        # limits
        ({"type": "integer"}, [-MAX_INTEGER, 0, MAX_INTEGER], [MAX_INTEGER + 1, -MAX_INTEGER - 1]),
        ({"type": "integer", "minimum": 2**53}, [2**53, 10**17], [1]),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 4096], [2**53]),
        ({"type": "number"}, [1.5, -0.123456789], [0.1234567891, b"1e5", b"12345678901234567"]),
        ({"type": "number", "minimum": 0, "maximum": 1e-9}, [b"0.0000000005"], [b"0.1"]),
        ({"const": 0.12345678912345}, [0.12345678912345], [0.1]),
        ({"type": "string"}, ["a" * MAX_LENGTH], ["a" * (MAX_LENGTH + 1)]),
        ({"type": "array"}, [[1] * MAX_ITEMS, [["a"]]], [[1] * (MAX_ITEMS + 1)]),
        ({}, ANY, [b"1e5", "a" * (MAX_LENGTH + 1), [10**17]]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [-(9 * 10**18), 9 * 10**18],
            [2**63],
        ),
        # keywords that say nothing
        ({"type": "array", "uniqueItems": False, "minItems": 1.0, "maxItems": 2.0}, [[1]], [[]]),
        ({"type": "object", "propertyNames": True, "then": {}, "if": {}}, [{"a": 1}], []),
        ({"type": "array", "minContains": 2, "unevaluatedItems": True}, [[]], []),
        (NAMED | {"dependentRequired": {"name": []}}, [{"name": "a"}], []),
        ({"type": "string", "format": "password"}, ["a"], []),
        # keywords that llguidance lacks
        (NAMED | {"not": {"required": ["name"]}}, [], [{"name": "a"}]),
        ({"type": "string", "not": {"enum": ["ab", "a", ""]}}, ["b", "abc", "aa"], ["ab", "a", ""]),
        (
            {"type": "string", "not": {"enum": ["a" * 1200, "a" * 40]}},
            ["a" * 39, "a" * 41, "a" * 81, "a" * 41 + "b"],
            ["a" * 1200, "a" * 40],
        ),
        ({"enum": [1, "a", None], "not": {"const": "a"}}, [1, None], ["a"]),
        ({"type": "integer", "not": {"enum": [2, 4]}}, [1, 3, 5], [2, 4]),
        ({"not": {"type": ["string", "object"]}}, [1, [], None], ["a", {}]),
        (
            {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            [{"b": 1}, {"a": 1, "b": 1}, {}],
            [{"a": 1}],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}},
            [[3], [3, 1]],
            [[], [1], ["a"]],
        ),
        (
            {"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}},
            [{"a": 1, "b": 2}, {}],
            [{"c": 1}, {"a": "x"}],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"], "const": "a"}},
            [{"a": 1}],
            [{"b": 1}],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "type": "string"}},
            [{"abc": 1}],
            [{"d": 1}],
        ),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        (
            {
                "properties": {"a": {"enum": [1, 2]}, "b": {}},
                "required": ["a"],
                "if": {"properties": {"a": {"const": 1}}},
                "then": {"required": ["b"]},
            },
            [{"a": 1, "b": 1}, {"a": 2}],
            [{"a": 1}],
        ),
        # oneOf
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": DOG}}, [None], [1]),
        (
            {"oneOf": [{"properties": {"a": {}}, "required": ["a"], "type": "object"}, NAMED]},
            [{"name": "x"}],
            [{"a": 1}, {"a": 1, "name": "x"}],
        ),
        ({"oneOf": [{"const": i} for i in range(900)]}, [899], [900]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, "a"]}]}, [1, "a"], [2]),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, [1], [3]),
        # OpenAI's wrapper
        ({"name": "x", "strict": True, "schema": NAMED}, [{"name": "a"}], [{"b": 1}]),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": NAMED}}, [{}], [1]),
        ({"type": "json_schema", "json_schema": {"schema": NAMED}}, [{}], [1]),
        ({"type": "json_schema", "name": "x", "schema": NAMED, "strict": True}, [{}], [1]),
        (
            {"$id": "http://a/b", "$ref": "#c", "$defs": {"c": {"$anchor": "c", "enum": [1]}}},
            [1],
            [2],
        ),
        (
            {
                "$ref": "x",
                "enum": [{"$id": "x", "enum": [1]}, 2],
                "parts": [{"$id": "x", "enum": [1]}],
                "$defs": {"a": {"$id": "x", "enum": [2]}},
            },
            [2],
            [1],
        ),
        (
            {
                "items": {"$ref": "#/parts/a"},
                "parts": {"a": {"items": {"$ref": "#/parts/b"}}, "b": {"enum": [3]}},
            },
            [[[3]]],
            [[[1]]],
        ),
        # parts that merge
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "a": {"items": {"$ref": "#/$defs/a"}, "type": ["array", "null"]},
                    "b": {"items": {"$ref": "#/$defs/b"}, "maxItems": 2},
                },
            },
            [[[None], []], None],
            [[[], [], []], [[None, None, None]], [1]],
        ),
    ],
)
def test_schema_allows_exactly(accepts, schema, valid, invalid):
    for value in valid:
        assert accepts(schema, value), value
    for value in invalid:
        assert not accepts(schema, value), value


def test_known_formats_are_those_that_llguidance_checks(accepts):
    for name in FORMATS:
        assert not accepts({"type": "string", "format": name}, "?")


def test_unknown_formats_and_schemas_without_keywords_give_notes():
    schema = {"properties": {"a": {"type": "string", "format": "path"}}}
    assert translate(schema).notes == ['properties.a.format: "path" is not checked']
    content = {"contentEncoding": "base64", "contentSchema": {"type": "string"}}
    expected = ['contentEncoding: "base64"', 'contentSchema: {"type": "string"}']
    assert translate(content).notes == [f"{one} is not checked" for one in expected]
    assert "name" in translate({"name": "string"}).notes[0]
    assert not translate({"description": "anything"}).notes


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "properties.a: uniqueItems is not supported",
        ),
        ({"items": {"not": {"pattern": "a"}}}, "items.not: the negation of pattern"),
        ({"anyOf": [{"contains": {}, "maxContains": 1}]}, "anyOf[0]: maxContains"),
        ({"propertyNames": {"format": "uri"}}, "propertyNames: is not supported"),
        ({"allOf": [{"unevaluatedProperties": False}]}, "allOf[0]: unevaluatedProperties"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf: alternatives 0 and 1 may match"),
        (
            {"type": "object", "required": ["kid"], "properties": {"kid": {"$ref": "#"}}},
            "properties.kid: no text matches: # refers only to itself",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"uniqueItems": True}}}},
            "$defs.a.items: uniqueItems is not supported",
        ),
        ({"$ref": "http://a/b.json"}, '$ref: "http://a/b.json" is not in the schema'),
        (
            {"properties": {"a": {"type": "object", "minProperties": 2}}},
            "properties.a.minProperties: several properties beside the required ones",
        ),
        ({"properties": {"a": {"minLength": -1}}}, "properties.a.minLength: invalid value -1"),
        ({"properties": {"a": {"enum": [-(2**63)]}}}, "properties.a.enum: a number is beyond"),
        ({"enum": [2**53, 2**53 + 1]}, "enum: 9007199254740993 cannot be generated exactly"),
        ({"type": "integer", "const": 10**20}, "const: a number is beyond"),
        ({"type": "number", "minimum": 10**400}, "minimum: a number is above 9e+18"),
        (
            {"allOf": [{"properties": {"a": None}}] * 2},
            "properties.a.allOf[0]: not an object, true",
        ),
        ({"items": {"const": [{"a": float("inf")}]}}, "items.const: a number is not finite"),
        ({"oneOf": [{"minimum": i, "maximum": i} for i in range(500)]}, "combinations"),
        ({"anyOf": [{"dependentRequired": {str(i): ["z"] for i in range(20)}}]}, "combinations"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no text matches the schema"),
        ({"type": "array", "not": {"const": [1]}}, "tgen cannot generate any text of the schema"),
        ({"type": "array", "oneOf": [{"const": [1]}, {}]}, "tgen cannot generate any text"),
    ],
)
def test_refusals_name_the_place_in_the_schema_and_a_way_round(schema, words):
    with pytest.raises(SchemaError) as error:
        translate(schema)
    assert words in str(error.value)
    assert error.value.hint


def test_errors_in_regular_expressions_name_the_place(accepts):
    schema = {"properties": {"a": {"pattern": "^(?!a)b$"}, "b": {"pattern": "c"}}}
    with pytest.raises(UsageError, match=r"^json_schema: properties\.a\.pattern: look-around"):
        accepts(schema, {})


def test_a_schema_that_closing_would_empty_stays_open(accepts):
    schema = NAMED | {"allOf": [{"minProperties": 1, "not": {"required": ["name"]}}]}
    assert accepts(schema, {"b": 1})


def test_a_property_without_a_text_is_left_out(accepts):
    schema = {"properties": {"a": {"$ref": "#/$defs/no"}, "b": {}}, "$defs": {"no": False}}
    assert accepts(schema, {"b": 1})
    assert not accepts(schema, {"a": 1})


def test_names_and_values_beside_such_a_property_are_no_references(accepts):
    value = {"$ref": "#/$defs/0"}
    properties = {"a": {"$ref": "#/$defs/no"}, "$ref": {"type": "integer"}, "b": {"const": value}}
    schema = {"properties": properties, "$defs": {"no": False}}
    assert accepts(schema, {"$ref": 1, "b": value})
    assert not accepts(schema, {"a": 1})
