"""Constrained generation: complete texts match, incomplete ones are reported."""

import json
import re

import pytest
from llguidance import LLParserLimits

from support.command import tgen
from tgen.config import EngineOptions, SamplingConfig
from tgen.errors import UsageError
from tgen.generation import constrained
from tgen.loaded_model import Decoding, open_model
from tgen.python_api import load

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 5}},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def check_document(document):
    assert set(document) == {"name", "tags", "age"}
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 12
    assert len(document["tags"]) <= 3
    assert all(isinstance(tag, str) and len(tag) <= 5 for tag in document["tags"])
    assert type(document["age"]) is int
    assert 0 <= document["age"] <= 150


def test_json_schema_gives_valid_documents_for_200_seeds(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    options = ["--json-schema", tmp_path / "schema.json", "--samples", 200, "--jsonl", "-n", 300]
    result = tgen("generate", "-p", "The king: ", "--seed", 0, "-t", 1.5, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({one["text"] for one in found}) > 150
    for one in found:
        assert one["complete"]
        assert one["finish_reason"] == "stop"
        check_document(json.loads(one["text"]))
        assert not re.search(r"\s{2}|[\n\t]", re.sub(r'"(\\.|[^"\\])*"', "", one["text"]))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"choices": ["yes", "no", "日本", 'a"b\\']}, 'yes|no|日本|a"b\\\\'),
        ({"regex": r"[A-Z][a-z]{2,8}(, [a-z]+){0,2}\."}, r"[A-Z][a-z]{2,8}(, [a-z]+){0,2}\."),
        ({"regex": r"[0-9]{4}-[0-9]{2}"}, r"[0-9]{4}-[0-9]{2}"),
    ],
)
def test_complete_text_matches_the_constraint(trained, options, pattern):
    model = open_model(trained, EngineOptions(threads=1))
    for seed in range(20):
        ids = [model.encode("What is ")]
        sampling = SamplingConfig(temperature=2.0, max_new_tokens=200, seed=seed, **options)
        for draft in ("off", "auto"):
            tokens = list(model.tokens(ids, sampling=sampling, decoding=Decoding(draft=draft)))
            text = b"".join(token.text for token in tokens).decode()
            if tokens[-1].finish == "stop":
                assert re.fullmatch(pattern, text)
                assert tokens[-1].complete
            else:
                assert not tokens[-1].complete


def test_truncated_text_is_reported_as_incomplete(trained):
    options = ["generate", "-m", trained, "-p", "a", "--regex", "[a-z]{40}", "-n", 3, "-q"]
    result = tgen(*options)
    assert result.returncode == 1
    assert b"incomplete" in result.stderr
    assert json.loads(tgen(*options, "--json").stdout)["complete"] is False
    nothing = tgen(*options[:-3], "-n", 0, "-q")
    assert (nothing.returncode, nothing.stdout) == (1, b"")
    assert b"incomplete after 0 tokens" in nothing.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "("}, "regex: "),
        ({"regex": ""}, "regex: "),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": {"type": "nothing"}}, "json_schema: "),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema: "),
        ({"json_schema": "[" * 100_000}, "nesting is too deep"),
        ({"json_schema": {"const": -(2**63)}}, "beyond 9e+18"),  # these would end the process
        ({"json_schema": {"enum": [1, {"minimum": [-(2**63)]}]}}, "beyond 9e+18"),
        ({"json_schema": {"type": "integer", "minimum": -1e19, "maximum": -1e19}}, "below -9e+18"),
        ({"choices": [b"\xff"]}, "UTF-8"),
        ({"choices": ["a"], "regex": "b"}, "cannot be combined"),
        ({"choices": ["a"], "min_tokens": 2}, "min_tokens"),
        ({"choices": []}, "choices: invalid value []"),
        ({"choices": ()}, "choices: invalid value []"),
        ({"regex": r"[^\s\S]"}, "regex: no text matches"),
        ({"json_schema": {"$ref": "#"}}, "refers only to itself"),
        ({"json_schema": False}, "json_schema: no text matches"),
        ({"json_schema": "false"}, "json_schema: no text matches"),
        ({"json_schema": {"enum": []}}, "json_schema: no text matches"),
        ({"json_schema": "3"}, "json_schema: not an object, true or false"),
        ({"json_schema": 3}, "json_schema: invalid value 3"),
    ],
)
def test_invalid_constraints_raise(trained, options, words):
    with pytest.raises(UsageError) as error:
        load(trained, threads=1).generate("a", **options)
    assert words in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a(b"}, "regex: unclosed group"),
        ({"regex": "a|(b"}, "regex: unclosed group"),
        ({"regex": r"\1"}, "regex: backreferences are not supported"),
        ({"regex": r"\b"}, r"regex: lookarounds not supported yet; WordUnicode in regex /\b/"),
        ({"regex": "ab\\"}, "regex: incomplete escape sequence at the end"),
        (
            {"json_schema": {"type": "string", "pattern": "a(b"}},
            "json_schema: pattern: unclosed group",
        ),
        (
            {"json_schema": {"type": "string", "pattern": "a\\\\\\"}},
            "json_schema: pattern: incomplete escape sequence at the end",
        ),
    ],
)
def test_messages_name_the_error_without_positions_in_a_grammar(trained, options, message):
    with pytest.raises(UsageError) as error:
        load(trained, threads=1).generate("a", **options)
    assert error.value.message == message


def test_classes_of_regular_expressions_are_ascii_unless_asked_for_unicode(trained):
    model = load(trained, threads=1)
    bias = {bytes([byte]): 99.0 for byte in (0xC3, 0xD9)}  # first bytes of letters and digits
    for regex in (r"\d{4}", r"[^\D]{4}", r"\w{4}", r"[\w-]{4}", r"\\?(?-i:\d)"):
        assert model.generate("a", regex=regex, bias=bias, seed=3).isascii()
    assert not model.generate("a", regex=r"(?u)\w{4}", bias=bias, seed=3).isascii()
    assert model.generate("a", regex=r"\\d", seed=3) == r"\d"


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_schema_true_allows_any_json(trained, schema):
    text = load(trained, threads=1).generate(
        "a", json_schema=schema, bias={"7": 99}, max_new_tokens=1
    )
    assert text == "7"


def test_texts_do_not_fail_because_of_the_states_of_others(monkeypatch):
    schema = {"type": "string", "pattern": "(.*a.{40}){2}"}
    options = {"json_schema": json.dumps(schema), "max_new_tokens": 30, "temperature": 1.0}

    def texts(max_states):
        limits = LLParserLimits(max_lexer_states=max_states)
        monkeypatch.setattr(constrained, "_LIMITS", limits)
        model = load("shakespeare", threads=1)
        return [model.generate("x", seed=seed, **options) for seed in range(8)]

    assert texts(1500) == texts(250_000)  # each needs fewer states, but not all together
    with pytest.raises(UsageError, match="too many states") as error:
        texts(100)
    assert error.value.hint == "simplify it"
