"""Strings wherever the borders of tokens fall; stop strings never shown."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import SamplingConfig, StringConfig
from tgen.generation.completions import Completions
from tgen.generation.rules import Rules
from tgen.generation.stop import Stopper

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
    stopper, shown = Stopper(stops), b""
    for i, piece in enumerate(pieces):
        shown += stopper.feed(piece)
        so_far = b"".join(pieces[: i + 1])
        assert so_far.startswith(shown)
        if not stopper.stopped:  # only what may become a stop string is held back
            held = so_far[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    whole = b"".join(pieces)
    # The first stop string to be complete ends the text.
    ends = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(s) for s in stops)]
    if not stopper.stopped:
        assert not ends
        assert shown + stopper.flush() == whole
    else:
        assert not any(stop in shown for stop in stops)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)


def test_bans_and_what_is_required():
    vocabulary = [b"", b"a", b"b", b"ab", b"ba", b"c"]
    sampling = SamplingConfig(temperature=0)
    strings = StringConfig(biases={b"ab": -np.inf, b"c": 2.0}, required=(b"bb",))
    rules = Rules(sampling, strings, vocabulary, end_ids=[0])
    logits = np.zeros((3, 6), np.float32)
    found = rules.apply(logits, [[1, 1], [5, 2], [5, 2, 2]], [1, 1, 1])
    inf = -np.inf
    assert found.tolist() == [
        [inf, 0, inf, inf, inf, 2],  # after "a" nothing that begins with b
        [inf, 0, 0, inf, 0, 2],
        [0, 0, 0, inf, 0, 2],
    ]
    assert not logits.any()
    assert Rules(sampling).apply(logits, [[1]] * 3, [0] * 3) is logits


@settings(deadline=None)
@given(st.integers(0, 99))
def test_penalties_look_at_the_window_and_the_prompt_if_asked(seed):
    logits = np.random.default_rng(seed).normal(size=(1, 10)).astype(np.float32)
    text = [1, 2, 3, 4, 5]
    for fields, seen in [
        ({}, [1, 2, 3, 4, 5]),
        ({"penalty_window": 2}, [4, 5]),
        ({"penalize_prompt": False}, [4, 5]),
        ({"penalize_prompt": False, "penalty_window": 1}, [5]),
    ]:
        rules = Rules(SamplingConfig(presence_penalty=1.0, **fields))
        found = rules.apply(logits, [text], [3])[0]
        wanted = [x - (i in seen) for i, x in enumerate(logits[0])]
        assert found == pytest.approx(wanted)
