"""Tokens taken apart: other tokens, the same text, and only until the rate falls."""

import dataclasses

import numpy as np
import pytest

from conftest import TEXT
from test_runs import contents, request
from tgen import corpus, runs
from tgen.config import TrainConfig
from tgen.corpus import TokenStore
from tgen.corpus.token_split import take_apart
from tgen.reports import StepReport
from tgen.tokenizer import Tokenizer, train_bpe, train_char

UMLAUTS = "für Bären, déjà vu — 東京 🙂 ".encode() * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=400)


def store(tokenizer: Tokenizer, **values: object) -> TokenStore:
    documents = [(line, line) for line in TEXT.splitlines(keepends=True) if line.strip()]
    train = corpus.tokenise(documents, tokenizer)
    arrays = corpus.arrays(train, corpus.tokenise([], tokenizer))
    known = dict(held_out_bytes=0, context_length=24, batch_size=5, seed=3)
    more = dict(end_of_text=tokenizer.end_of_text, halves=tokenizer.halves())
    return TokenStore(**arrays | known | more | values)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_the_text_stays_the_same(tokenizer, share):
    windows = store(tokenizer).batch(4).tokens
    random = np.random.default_rng(0)
    apart, places = take_apart(windows, tokenizer.halves(), share, random)
    assert apart.shape == places.shape == windows.shape
    assert not np.array_equal(apart, windows)
    for old, new, place in zip(windows, apart, places, strict=True):
        assert tokenizer.decode(old).startswith(tokenizer.decode(new))
        for i in range(place[-1]):  # the last place may not be there whole
            assert tokenizer.decode(new[place == i]) == tokenizer.decode([old[i]])


def test_each_token_is_taken_apart_with_the_probability_given(tokenizer):
    halves = tokenizer.halves()
    (whole,) = np.flatnonzero(halves[:, 0] >= 0)[:1]  # its halves are bytes
    windows = np.full((1, 40_000), whole)
    apart, _ = take_apart(windows, halves, 0.25, np.random.default_rng(1))
    n_whole = (apart == whole).sum()
    assert n_whole / (n_whole + (apart != whole).sum() / 2) == pytest.approx(0.75, abs=0.01)


def test_halves_make_up_their_token(tokenizer):
    for made in (tokenizer, train_char([UMLAUTS]), train_bpe([UMLAUTS], vocab_size=300)):
        merged = [i for i, half in enumerate(made.halves()) if half[0] >= 0]
        assert merged
        for i in merged:
            assert made.decode(made.halves()[i]) == made.token_bytes(i)


def test_a_batch_is_a_function_of_the_step_and_keeps_what_is_scored(tokenizer):
    batches = store(tokenizer)
    plain, apart = batches.batch(7), batches.batch(7, token_split=0.5)
    again = store(tokenizer).batch(7, token_split=0.5)
    assert all(np.array_equal(a, b) for a, b in zip(apart, again, strict=True))
    same = batches.batch(7, token_split=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(same, plain, strict=True))
    for row in range(5):
        marks = [byte_marks(tokenizer, b.tokens[row], b.scored[row]) for b in (plain, apart)]
        pairs = [pair for pair in zip(*marks, strict=False) if None not in pair]
        assert pairs
        assert all(a == b for a, b in pairs)
    assert any(False in plain.scored[row] and True in plain.scored[row] for row in range(5))


def byte_marks(tokenizer: Tokenizer, tokens: np.ndarray, scored: np.ndarray) -> list[bool | None]:
    """Whether each byte counts; None for those of the first token, which is no target."""
    marks = [None, *scored.tolist()]
    return [m for m, i in zip(marks, tokens, strict=True) for _ in tokenizer.token_bytes(i)]


def test_a_run_resumes_exactly_and_sees_whole_tokens_while_the_rate_falls(tmp_path):
    values = {"tokenizer": "bpe", "vocab_size": 300}
    losses = []
    for share in ("0", "0.4"):
        whole = request(tmp_path, f"whole{share}", overrides={"token_split": share}, **values)
        losses.append([r.loss for r in runs.start(whole) if isinstance(r, StepReport)])
    assert losses[0][0] != losses[1][0]
    parts = dataclasses.replace(whole, out=tmp_path / "parts")
    stops = iter([False] * 6 + [True])
    list(runs.start(parts, stopped=lambda: next(stops)))
    list(runs.resume(parts.out))
    assert contents(whole.out) == contents(parts.out)
    frozen = {"learning_rate": "1e-30", "matrix_learning_rate": "1e-30", "dropout": "0"}
    for share in ("0", "0.4"):
        still = dataclasses.replace(
            whole,
            out=tmp_path / f"still{share}",
            overrides=whole.overrides | frozen | {"token_split": share},
            train=TrainConfig(steps=10),
        )
        losses.append([r.loss for r in runs.start(still) if isinstance(r, StepReport)])
    plain, apart = losses[2:]
    assert plain[7:] == apart[7:]  # the last three tenths
    assert all(a != b for a, b in zip(plain[:7], apart[:7], strict=True))
