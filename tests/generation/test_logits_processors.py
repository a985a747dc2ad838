"""Strings wherever the borders of tokens fall; stop strings never shown."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.generation.logits_processors import LogitsProcessors, missing
from tgen.generation.penalties import penalise_long_repeats
from tgen.generation.stop_strings import StopStringMatcher
from tgen.generation.token_bytes import Completions, Vocabulary

few = st.binary(min_size=0, max_size=6).map(lambda b: bytes(97 + c % 3 for c in b))
some = few.filter(bool)


@given(text=some, vocabulary=st.lists(few, min_size=1, max_size=12), written=few)
def test_a_token_completes_a_string_wherever_it_begins(text, vocabulary, written):
    found = Completions(text, vocabulary).after(written).tolist()
    for i, token in enumerate(vocabulary):
        whole = written + token
        ends = [at + len(text) for at in range(len(whole)) if whole.startswith(text, at)]
        assert (i in found) == any(end > len(written) for end in ends)


@given(stops=st.lists(some, max_size=3), pieces=st.lists(few, max_size=12))
def test_nothing_of_a_stop_string_is_shown_and_all_else_is(stops, pieces):
    stopper, shown = StopStringMatcher(stops), b""
    for i, piece in enumerate(pieces):
        shown += stopper.feed(piece)
        so_far = b"".join(pieces[: i + 1])
        assert so_far.startswith(shown)
        if stopper.found is None:  # only what may become a stop string is held back
            held = so_far[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    whole = b"".join(pieces)
    # The first stop string to be complete ends the text; of several there, the longest.
    ends = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(s) for s in stops)]
    if not ends:
        assert stopper.found is None
        assert shown + stopper.flush() == whole
    else:
        found = max((s for s in stops if whole[: ends[0]].endswith(s)), key=len)
        assert stopper.found == found
        assert shown == whole[: ends[0] - len(found)]
        assert stopper.feed(b"abc") + stopper.flush() == b""


def ruled(sampling, text, prompt_length, *, tokens=(), ends=(), n_left=99, size=6):
    def encode(data):
        pieces = [data] if data in tokens else [data[i : i + 1] for i in range(len(data))]
        return [tokens.index(piece) for piece in pieces]

    vocabulary = Vocabulary(tokens, ends, encode)
    written = b"".join(vocabulary.bytes_of(token) for token in text[prompt_length:])
    logits = np.zeros(size, np.float32)
    LogitsProcessors(sampling, vocabulary).apply(logits, text, prompt_length, written, n_left)
    return logits.tolist()


def test_bans_biases_and_what_is_required():
    tokens = [b"", b"a", b"b", b"ab", b"ba", b"c"]
    sampling = SamplingConfig(ban=["ab"], bias={"c": 2.0}, require=["bb"], stop=["ac"])
    how = dict(tokens=tokens, ends=[0])
    inf = -np.inf
    # After "a" nothing that begins with b; nor what ends the text before "bb" is there.
    assert ruled(sampling, [1, 1], 1, **how) == [inf, 0, inf, inf, inf, inf]
    assert ruled(sampling, [5, 2], 1, **how) == [inf, 0, 0, inf, 0, 2]
    assert ruled(sampling, [5, 2, 2], 1, **how) == [0, 0, 0, inf, 0, 2]
    assert LogitsProcessors(SamplingConfig(), Vocabulary()).idle


def test_what_is_required_comes_at_the_last_moment_if_not_before():
    tokens = [b"", b"a", b"b", b"ab", b"ba", b"c"]
    sampling = SamplingConfig(require=["c", "ab"])
    how = dict(tokens=tokens, ends=[0])
    assert ruled(sampling, [1], 0, n_left=3, **how).count(0) == 5
    text = [1]
    for n_left in (2, 1):
        (wanted,) = np.flatnonzero(np.array(ruled(sampling, text, 0, n_left=n_left, **how)) == 0)
        text.append(int(wanted))
    assert text == [1, 5, 3]
    assert ruled(sampling, [3, 5], 0, n_left=1, **how).count(0) == 6  # both were there


def test_what_is_a_part_of_another_required_text_comes_with_it():
    assert missing([b"abcde", b"bcd", b"x", b"x"], b"") == [b"abcde", b"x"]
    assert missing([b"abcde", b"bcd"], b"..bcd") == [b"abcde"]
    assert missing([b"abcde", b"bcd"], b"abcde") == []
    with pytest.raises(UsageError, match="require"):
        SamplingConfig(require=["a word"], ban=["wor"])


def test_a_long_repeat_is_unlikely_and_no_overflow():
    logits = np.zeros(3, np.float32)
    penalise_long_repeats(
        logits, [1] * 3000, multiplier=1.0, base=1.75, allowed_length=2, breakers=()
    )
    assert logits.tolist() == [0, np.float32(-1e30), 0]


@settings(deadline=None)
@given(st.integers(0, 99))
def test_penalties_look_at_the_window_and_the_prompt_if_asked(seed):
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    text = [1, 2, 3, 4, 5]
    for fields, seen in [
        ({}, [1, 2, 3, 4, 5]),
        ({"penalty_window": 2}, [4, 5]),
        ({"penalize_prompt": False}, [4, 5]),
        ({"penalize_prompt": False, "penalty_window": 1}, [5]),
    ]:
        found = logits.copy()
        rules = LogitsProcessors(SamplingConfig(presence_penalty=1.0, **fields), Vocabulary())
        rules.apply(found, text, 3, b"", 9)
        assert found == pytest.approx([x - (i in seen) for i, x in enumerate(logits)])
