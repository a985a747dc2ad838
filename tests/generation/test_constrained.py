"""Texts of a given form are of that form, whoever draws them; what is cut off says so."""

import json
import re

import pytest

from support.command import tgen
from tgen.api import load
from tgen.config import SamplingConfig
from tgen.errors import UsageError

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


def fits(document):
    assert set(document) == {"name", "tags", "age"}
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 12
    assert len(document["tags"]) <= 3
    assert all(isinstance(tag, str) and len(tag) <= 5 for tag in document["tags"])
    assert type(document["age"]) is int
    assert 0 <= document["age"] <= 150


def test_two_hundred_seeds_write_two_hundred_valid_documents(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    given = ["--json-schema", tmp_path / "schema.json", "--samples", 200, "--jsonl", "-n", 300]
    result = tgen("generate", "-p", "The king: ", "--seed", 0, "-t", 1.5, *given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({one["text"] for one in found}) > 150
    for one in found:
        assert one["complete"]
        assert one["finish_reason"] == "stop"
        fits(json.loads(one["text"]))
        assert not re.search(r"\s{2}|[\n\t]", re.sub(r'"(\\.|[^"\\])*"', "", one["text"]))


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"choices": ["yes", "no", "日本", 'a"b\\']}, 'yes|no|日本|a"b\\\\'),
        ({"regex": r"[A-Z][a-z]{2,8}(, [a-z]+){0,2}\."}, r"[A-Z][a-z]{2,8}(, [a-z]+){0,2}\."),
        ({"regex": r"[0-9]{4}-[0-9]{2}"}, r"[0-9]{4}-[0-9]{2}"),
    ],
)
def test_what_ends_by_itself_matches(trained, given, pattern):
    model = load(trained, threads=1)
    for seed in range(20):
        ids = [model.encode("What is ")]
        sampling = SamplingConfig(temperature=2.0, max_new_tokens=200, seed=seed, **given)
        for draft in ("off", "auto"):
            tokens = list(model.tokens(ids, sampling=sampling, draft=draft))
            text = b"".join(token.text for token in tokens).decode()
            if tokens[-1].finish == "stop":
                assert re.fullmatch(pattern, text)
                assert tokens[-1].complete
            else:
                assert not tokens[-1].complete


def test_what_is_cut_off_is_said_to_be(trained):
    given = ["generate", "-m", trained, "-p", "a", "--regex", "[a-z]{40}", "-n", 3, "-q"]
    result = tgen(*given)
    assert result.returncode == 1
    assert b"incomplete" in result.stderr
    assert json.loads(tgen(*given, "--json").stdout)["complete"] is False
    nothing = tgen(*given[:-3], "-n", 0, "-q")
    assert (nothing.returncode, nothing.stdout) == (1, b"")
    assert b"incomplete after 0 tokens" in nothing.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "("}, "regex: "),
        ({"regex": ""}, "regex is empty"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": {"type": "nothing"}}, "json_schema: "),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema: "),
        ({"choices": [b"\xff"]}, "UTF-8"),
        ({"choices": ["a"], "regex": "b"}, "alone"),
        ({"choices": ["a"], "stop": ["b"]}, "stop"),
    ],
)
def test_forms_that_cannot_be_are_refused(trained, given, words):
    with pytest.raises(UsageError) as error:
        list(load(trained, threads=1).generate("a", **given))
    assert words in f"{error.value.message} {error.value.hint}"
