"""What leaves the command: every byte, no byte of a stop string, at once."""

import json
import os

import numpy as np
import pytest

from support.command import tgen
from tgen.api import load
from tgen.config import SamplingConfig
from tgen.generation.stop_strings import StopStringMatcher
from tgen.tokenizer import TextStream


def test_streamed_is_decoded_byte_for_byte():
    """100,000 strings of characters of every length, halves of them, and stray bytes."""
    random = np.random.default_rng(1)
    parts = ["a", "\n", "é", "日", "🦋", "\u0301", "\x00"]
    pool = [part.encode() for part in parts] + [b"\xff", b"\xc3", b"\xe6\x97", b"\xf0\x9f", b"\xa5"]
    picks = random.integers(0, len(pool), (100_000, 6))
    cuts = np.sort(random.integers(0, 20, (100_000, 4)), axis=1)
    for chosen, borders in zip(picks.tolist(), cuts.tolist(), strict=True):
        whole = b"".join(pool[i] for i in chosen)
        stream, shown = TextStream(), b""
        for start, end in zip([0, *borders], [*borders, len(whole)], strict=True):
            piece = stream.feed(whole[start : max(start, end)])
            shown += piece
        rest = stream.flush()
        assert shown + rest == whole
        assert len(rest) < 4


def test_a_stop_string_is_found_wherever_tokens_end(trained):
    model = load(trained, threads=1)

    def written(**more):
        sampling = SamplingConfig(temperature=1.0, max_new_tokens=60, seed=2, **more)
        return b"".join(token.text for token in model.tokens([ids], sampling=sampling))

    ids = model.encode("What")
    free = written()
    for start in range(20):
        for length in (1, 2, 5):
            stop = free[start : start + length]
            assert written(stop=[stop]) == free[: free.index(stop)]


@pytest.mark.parametrize("options", [[], ["--draft", "off"], ["--no-kv-cache"]])
def test_the_command_stops_as_the_library_does(trained, options):
    given = ["generate", "-m", trained, "-p", "What", "-n", 60, "--seed", 2, *options]
    free = tgen(*given, "-q").stdout
    line = tgen(*given, "--until-newline", "-q").stdout
    assert line == free.split(b"\n")[0]
    stop = free[5:8]
    stops = ["--stop", os.fsdecode(stop), "--stop", "\x01"]
    assert tgen(*given, *stops, "-q").stdout == free[: free.index(stop)]
    assert json.loads(tgen(*given, *stops, "--json").stdout)["finish_reason"] == "stop"


def test_nothing_is_held_back_longer_than_it_must():
    stopper = StopStringMatcher([b"END"])
    assert [stopper.feed(piece) for piece in (b"aE", b"N", b"x", b"EN", b"END", b"y")] == [
        b"a", b"", b"ENx", b"", b"EN", b"",
    ]  # fmt: skip
