"""Stop strings and streaming: every byte is written at once, except those of a stop string."""

import json
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command import tgen
from tgen.config import EngineOptions, SamplingConfig
from tgen.generation.sequence import StopStringMatcher
from tgen.loaded_model import Decoding, open_model
from tgen.tokenizer import TextStream

few_bytes = st.binary(min_size=0, max_size=6).map(lambda b: bytes(97 + c % 3 for c in b))
some_bytes = few_bytes.filter(bool)


def test_stream_writes_every_byte():
    """100,000 strings of characters of 1 to 4 bytes, parts of them, and stray bytes."""
    random = np.random.default_rng(1)
    parts = ["a", "\n", "é", "日", "🦋", "\u0301", "\x00"]
    pool = [part.encode() for part in parts] + [b"\xff", b"\xc3", b"\xe6\x97", b"\xf0\x9f", b"\xa5"]
    picks = random.integers(0, len(pool), (100_000, 6))
    cuts = np.sort(random.integers(0, 20, (100_000, 4)), axis=1)
    for chosen, splits in zip(picks.tolist(), cuts.tolist(), strict=True):
        text = b"".join(pool[i] for i in chosen)
        stream, shown = TextStream(), b""
        for start, end in zip([0, *splits], [*splits, len(text)], strict=True):
            piece = stream.feed(text[start : max(start, end)])
            shown += piece
        rest = stream.flush()
        assert shown + rest == text
        assert len(rest) < 4


def test_stop_strings_match_across_token_boundaries(trained):
    model = open_model(trained, EngineOptions(threads=1))

    def run(**more):
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=60, seed=2, **more)
        return b"".join(token.text for token in model.tokens([ids], sampling=sampling))

    ids = model.encode("What")
    free = run()
    for start in range(20):
        for length in (1, 2, 5):
            stop = free[start : start + length]
            assert run(stop=[stop]) == free[: free.index(stop)]


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_stop_strings_end_constrained_texts_only_where_they_are_complete(trained, draft):
    model = open_model(trained, EngineOptions(threads=1))

    def run(seed, **more):
        sampling = SamplingConfig(temperature=2.0, max_new_tokens=100, seed=seed, **more)
        tokens = [*model.tokens([ids], sampling=sampling, decoding=Decoding(draft=draft))]
        return b"".join(token.text for token in tokens), tokens[-1]

    ids, cut = model.encode("What"), 0
    schema = {"properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    for seed in range(20):
        whole = {"json_schema": schema | {"type": "object"}}
        assert run(seed, stop=["e", '"', "}", "\n"], **whole)[0] == run(seed, **whole)[0]
        free, limited = {"regex": "[a-z ]{50}[a-z ]*"}, {"regex": "[a-z ]*"}
        assert run(seed, stop=["e"], **free)[0].find(b"e", 50 + 10) < 0
        text, last = run(seed, stop=["e", " "], **limited)
        assert re.fullmatch(b"[a-df-z]*", text)
        cut += last.finish == "stop" and last.complete
    assert cut > 10


@pytest.mark.parametrize("options", [[], ["--draft", "off"], ["--no-kv-cache"]])
def test_command_stops_at_stop_strings(trained, options):
    command = ["generate", "-m", trained, "-p", "What", "-n", 60, "--seed", 2, *options]
    free = tgen(*command, "-q").stdout
    line = tgen(*command, "--until-newline", "-q").stdout
    assert line == free.split(b"\n")[0]
    stop = free[5:8]
    stops = ["--stop", os.fsdecode(stop), "--stop", "\x01"]
    assert tgen(*command, *stops, "-q").stdout == free[: free.index(stop)]
    assert json.loads(tgen(*command, *stops, "--json").stdout)["finish_reason"] == "stop"


def test_text_is_withheld_only_as_long_as_necessary():
    matcher = StopStringMatcher([b"END"])
    assert [matcher.feed(piece) for piece in (b"aE", b"N", b"x", b"EN", b"END", b"y")] == [
        b"a", b"", b"ENx", b"", b"EN", b"",
    ]  # fmt: skip


@given(stops=st.lists(some_bytes, max_size=3), pieces=st.lists(few_bytes, max_size=12))
def test_stop_strings_are_never_shown_and_everything_else_is(stops, pieces):
    matcher, shown = StopStringMatcher(stops), b""
    for i, piece in enumerate(pieces):
        shown += matcher.feed(piece)
        so_far = b"".join(pieces[: i + 1])
        assert so_far.startswith(shown)
        if matcher.found is None:  # only a possible start of a stop string is withheld
            withheld = so_far[len(shown) :]
            assert not withheld or any(
                stop.startswith(withheld) and stop != withheld for stop in stops
            )
    text = b"".join(pieces)
    # The stop string that ends first ends the text; of several, the longest.
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if not ends:
        assert matcher.found is None
        assert shown + matcher.flush() == text
    else:
        result = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert matcher.found == result
        assert shown == text[: ends[0] - len(result)]
        assert matcher.feed(b"abc") + matcher.flush() == b""
