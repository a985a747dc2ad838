"""Banned, biased and stop strings match across token boundaries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.generation.logits_processors import LogitsProcessors, Repeats, dry
from tgen.generation.vocabulary import Completions, TokenIndex, Vocabulary

few = st.binary(min_size=0, max_size=6).map(lambda b: bytes(97 + c % 3 for c in b))
some = few.filter(bool)


@given(text=some, vocabulary=st.lists(few, min_size=1, max_size=12), written=few)
def test_token_completes_a_string_wherever_it_starts(text, vocabulary, written):
    result = Completions(text, TokenIndex(vocabulary)).after(written).tolist()
    for i, token in enumerate(vocabulary):
        whole = written + token
        ends = [at + len(text) for at in range(len(whole)) if whole.startswith(text, at)]
        assert (i in result) == any(end > len(written) for end in ends)


class CountedBytes(bytes):
    """A token that counts how often it is searched or compared."""

    n = 0

    def __contains__(self, other):
        CountedBytes.n += 1
        return super().__contains__(other)

    def __getitem__(self, key):
        CountedBytes.n += 1
        return super().__getitem__(key)

    def startswith(self, *arguments):
        CountedBytes.n += 1
        return super().startswith(*arguments)


def test_long_string_costs_no_pass_over_the_vocabulary_per_byte():
    tokens = [CountedBytes(bytes([i % 256, i // 256])) for i in range(1000)]
    index = TokenIndex(tokens)
    CountedBytes.n = 0
    text = bytes([3, 3, 4]) * 3000
    completions = Completions(text, index)
    assert CountedBytes.n < 2 * len(tokens)
    assert completions.after(text[:-1]).tolist() == [4, 260, 516, 772]
    assert completions.after(text[:-3]).tolist() == []


def test_too_many_strings_are_refused():
    for name in ("stop", "ban", "require", "dry_breakers"):
        with pytest.raises(UsageError, match=f"{name}: too many strings"):
            SamplingConfig(**{name: [f"{i}" for i in range(1001)]})
    with pytest.raises(UsageError, match="bias: too many strings"):
        SamplingConfig(bias={f"{i}": 1.0 for i in range(1001)})


def process(sampling, text, prompt_length, *, tokens=(), ends=(), own=(), n_left=99, size=6):
    def encode(data):
        pieces = [data] if data in tokens else [data[i : i + 1] for i in range(len(data))]
        if not {*pieces} <= {*tokens}:
            raise UsageError(f"a byte of {data!r} is in no token")
        return [tokens.index(piece) for piece in pieces]

    vocabulary = Vocabulary(tokens, ends, encode)
    written = b"".join(vocabulary.bytes_of(token) for token in text[prompt_length:])
    logits = np.zeros(size, np.float32)
    processors = LogitsProcessors(sampling, vocabulary)
    processors.apply(logits, text, prompt_length, written, n_left, ends=own)
    return logits.tolist()


def test_bans_biases_and_required_strings():
    tokens = [b"", b"+", b"-", b"+-", b"-+", b"c"]
    sampling = SamplingConfig(ban=["+-"], bias={"c": 2.0}, require=["--"], stop=["+c"])
    options = dict(tokens=tokens, ends=[0])
    inf = -np.inf
    # After "+" no token that starts with -, and no end before "--" is present.
    assert process(sampling, [1, 1], 1, **options) == [inf, 0, inf, inf, inf, inf]
    assert process(sampling, [5, 2], 1, **options) == [inf, 0, 0, inf, 0, 2]
    assert process(sampling, [5, 2, 2], 1, **options) == [0, 0, 0, inf, 0, 2]
    assert LogitsProcessors(SamplingConfig(), Vocabulary()).inactive


def test_biased_ids_and_ends_before_enough_tokens():
    options = dict(tokens=[b"", b"a", b"b", b"ab", b"ba", b""], ends=[0], own=[5])
    inf = -np.inf
    biases: dict[Any, float] = {"1": -100, 3: 2.5, "3": 1.5}  # JSON has strings
    sampling = SamplingConfig(logit_bias=biases)
    assert process(sampling, [1], 1, **options) == [0, -100, 0, 1.5, 0, 0]
    sampling = SamplingConfig(min_tokens=2, stop=["bb"], stop_token_ids=[3])
    assert process(sampling, [2, 2], 1, **options) == [inf, 0, inf, inf, inf, inf]
    assert process(sampling, [2, 2, 1], 1, **options) == [0] * 6
    assert process(SamplingConfig(ignore_eos=True), [1], 1, **options) == [inf, 0, 0, 0, 0, inf]
    sampling = SamplingConfig(ignore_eos=True, stop_token_ids=[3])
    assert process(sampling, [1], 1, **options) == [inf, 0, 0, 0, 0, inf]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": 5}, "logit_bias: invalid value 5"),
        ({"logit_bias": {"1": 101}}, "logit_bias: invalid value '1': 101"),
        ({"logit_bias": {"x": 1}}, "logit_bias: invalid value 'x': 1"),
        ({"logit_bias": {-1: 1}}, "logit_bias: invalid value -1: 1"),
        ({"logit_bias": dict.fromkeys(range(1001), 1)}, "logit_bias: too many ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids: invalid value"),
        ({"stop_token_ids": "12"}, "stop_token_ids: invalid value"),
        ({"regex": "a*", "ignore_eos": True}, "ignore_eos cannot be combined with regex"),
        ({"choices": ["a"], "min_tokens": 1}, "min_tokens cannot be combined with choices"),
    ],
)
def test_impossible_ids_and_ends_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingConfig(**options)


def test_required_strings_are_forced_when_no_room_is_left():
    tokens = [b"", b"+", b"-", b"+-", b"-+", b"*"]
    sampling = SamplingConfig(require=["*", "+-"])
    options = dict(tokens=tokens, ends=[0])
    assert process(sampling, [1], 0, n_left=3, **options).count(0) == 5
    text = [1]
    for n_left in (2, 1):
        (token,) = np.flatnonzero(
            np.array(process(sampling, text, 0, n_left=n_left, **options)) == 0
        )
        text.append(int(token))
    assert text == [1, 5, 3]
    assert process(sampling, [3, 5], 0, n_left=1, **options).count(0) == 6  # both are present


def test_dry_does_not_overflow_for_long_repeats():
    logits = np.zeros(3, np.float32)
    repeats = Repeats()
    repeats.read([1] * 3000)
    dry(logits, repeats, SamplingConfig(dry_multiplier=1))
    assert logits.tolist() == [0, np.float32(-1e30), 0]


@settings(deadline=None)
@given(st.integers(0, 99))
def test_penalties_use_the_window_and_the_prompt_setting(seed):
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    text = [1, 2, 3, 4, 5]
    for fields, seen in [
        ({}, [1, 2, 3, 4, 5]),
        ({"penalty_window": 2}, [4, 5]),
        ({"penalize_prompt": False}, [4, 5]),
        ({"penalize_prompt": False, "penalty_window": 1}, [5]),
    ]:
        result = logits.copy()
        processors = LogitsProcessors(SamplingConfig(presence_penalty=1.0, **fields), Vocabulary())
        processors.apply(result, text, 3, b"", 9)
        assert result == pytest.approx([x - (i in seen) for i, x in enumerate(logits)])
