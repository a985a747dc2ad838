"""JSON texts are completed within their token limit, and are otherwise what they were."""

import json

import pytest

from tgen.generation import shortest_completion
from tgen.generation.shortest_completion import Completer, place_after
from tgen.python_api import load

PEOPLE = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "born": {"format": "date"}, "id": {}},
        "required": ["name", "born"],
    },
}


@pytest.fixture(scope="module")
def model():
    return load("shakespeare", threads=1)


def tokens_of(model, schema, n, seed, **options):
    loaded = model._loaded
    given = {"json_schema": json.dumps(schema), "max_new_tokens": n, "seed": seed, **options}
    return list(loaded.tokens([model.encode("x")], sampling=loaded.sampling(given)))


def test_texts_are_complete_at_any_limit_that_has_room_for_one(model):
    for n in range(30, 80, 16):
        for seed in range(2):
            tokens = tokens_of(model, PEOPLE, n, seed, temperature=1.5)
            document = json.loads(b"".join(token.text for token in tokens))
            assert tokens[-1].complete
            assert tokens[-1].finish == "stop"
            assert all(set(one) >= {"name", "born"} for one in document)


def test_a_text_that_ends_in_time_is_the_same_with_a_higher_limit(model):
    schema = {
        "type": "array",
        "items": {"type": "string", "maxLength": 9},
        "minItems": 3,
        "maxItems": 4,
    }
    high = [token.id for token in tokens_of(model, schema, 300, 4)]
    assert len(high) > 12
    assert [token.id for token in tokens_of(model, schema, len(high), 4)] == high
    short = [token.id for token in tokens_of(model, schema, len(high) - 2, 4)]
    assert short[: len(high) - 5] == high[: len(high) - 5]
    assert len(short) == len(high) - 2


def test_a_limit_that_is_too_small_from_the_start_ends_the_text_by_length(model):
    tokens = tokens_of(model, PEOPLE, 10, 1)
    assert not tokens[-1].complete
    assert tokens[-1].finish == "length"
    assert [t.id for t in tokens] == [t.id for t in tokens_of(model, PEOPLE, 300, 1)][:10]


def test_formats_and_patterns_are_completed(model):
    patterns = ["^[A-Z]+-[0-9]{3}$", "^.{20}$", "^([a-z]+[0-9])+!$"]
    formats = ["email", "uri", "uuid", "date-time", "ipv6", "duration", "hostname"]
    strings = [{"pattern": one} for one in patterns] + [{"format": one} for one in formats]
    for schema in strings:
        tokens = tokens_of(model, schema | {"type": "string"}, 45, 2, temperature=1.5, top_k=0)
        assert tokens[-1].complete, schema


def test_each_number_and_string_has_a_short_completion(model):
    properties = {name: {"type": "integer"} for name in "abcd"}
    properties |= {name: {"type": "string", "format": "uri"} for name in "uvwx"}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    tokens = tokens_of(model, schema, 80, 1, temperature=1.5)
    assert tokens[-1].complete


def test_banned_tokens_are_not_chosen(model):
    tokens = tokens_of(model, {"type": "string"}, 12, 1, ban=['"'])
    assert b'"' not in b"".join(token.text for token in tokens)


def test_the_tokens_that_are_tried_are_bounded_and_the_text_is_complete(model, monkeypatch):
    monkeypatch.setattr(shortest_completion, "_FIRST_BUDGET", 30)
    monkeypatch.setattr(shortest_completion, "_BUDGET_PER_TOKEN", 2)
    complete, tried = Completer.complete, []

    def count(*args):
        path, n = complete(*args)
        tried.append(n)
        return path, n

    monkeypatch.setattr(Completer, "complete", count)
    schema = {"type": "array", "minItems": 20, "items": {"type": "integer"}}
    tokens = tokens_of(model, schema, 200, 1)
    assert tokens[-1].complete
    assert sum(tried) <= 30 + 2 * len(tokens) + 2 * max(tried)


def test_place_after():
    assert [place_after(0, text) for text in (b'{"a', rb'"\\"', rb'"\"', rb'"\"a" ')] == [
        1,
        0,
        1,
        0,
    ]
