"""Tokens taken apart: other tokens, the same text, and only until the rate falls."""

import dataclasses
import json

import numpy as np
import pytest

from support.models import TEXT
from support.runs import contents, request, resume
from tgen import corpus, runs
from tgen.config import TrainConfig
from tgen.corpus import TokenDataset
from tgen.corpus.bpe_dropout import split_tokens
from tgen.reports import StepReport
from tgen.tokenizer import Tokenizer, train_bpe, train_char

UMLAUTS = "für Bären, déjà vu — 東京 🙂 ".encode() * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=400)


def store(tokenizer: Tokenizer, **values: object) -> TokenDataset:
    documents = [(line, line) for line in TEXT.splitlines(keepends=True) if line.strip()]
    train = corpus.tokenize(documents, tokenizer)
    arrays = corpus.arrays(train, corpus.tokenize([], tokenizer))
    known = dict(held_out_bytes=0, context_length=24, batch_size=5, seed=3)
    more = dict(end_of_text=tokenizer.end_of_text, merge_pairs=tokenizer.merge_pairs)
    return TokenDataset(**arrays | known | more | values)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_the_text_stays_the_same(tokenizer, share):
    windows = store(tokenizer).batch(4).tokens
    random = np.random.default_rng(0)
    apart, positions = split_tokens(
        windows, tokenizer.merge_pairs, probability=share, random=random
    )
    assert apart.shape == positions.shape == windows.shape
    assert not np.array_equal(apart, windows)
    for old, new, position in zip(windows, apart, positions, strict=True):
        assert tokenizer.decode(old).startswith(tokenizer.decode(new))
        for i in range(position[-1]):  # the last position may not be there whole
            assert tokenizer.decode(new[position == i]) == tokenizer.decode([old[i]])


def test_each_token_is_taken_apart_with_the_probability_given(tokenizer):
    merge_pairs = tokenizer.merge_pairs
    (whole,) = np.flatnonzero(merge_pairs[:, 0] >= 0)[:1]  # its two are bytes
    windows = np.full((1, 40_000), whole)
    apart, _ = split_tokens(windows, merge_pairs, probability=0.25, random=np.random.default_rng(1))
    n_whole = (apart == whole).sum()
    assert n_whole / (n_whole + (apart != whole).sum() / 2) == pytest.approx(0.75, abs=0.01)


def test_merge_pairs_make_up_their_token_and_spare_characters_and_special_tokens(tokenizer):
    for made in (tokenizer, train_bpe([UMLAUTS], vocab_size=300)):
        pairs = made.merge_pairs
        merged = np.flatnonzero(pairs[:, 0] >= 0)
        assert len(merged)
        for i in merged:
            assert made.decode(pairs[i]) == made.token_bytes(i)
            assert len(made.token_bytes(i).decode(errors="replace")) > 1
        assert pairs[made.end_of_text, 0] == -1
    assert (train_char([UMLAUTS]).merge_pairs == -1).all()


def test_merges_in_the_older_notation_and_several_for_one_token(tokenizer):
    described = json.loads(tokenizer.json)
    merges = described["model"]["merges"]
    older = ["#version: 0.2 - of a kind", *(" ".join(pair) for pair in merges)]
    pairs = Tokenizer(tokenizer.json).merge_pairs
    tokenizer_json = json.dumps(described | {"model": described["model"] | {"merges": older}})
    assert np.array_equal(Tokenizer(tokenizer_json).merge_pairs, pairs)
    left, right = next(pair for pair in merges if len(pair[0]) == 2 and len(pair[1]) == 1)
    tail = left[1] + right  # left[0] + tail is the same token
    assert tail not in described["model"]["vocab"]
    twice = described["model"] | {
        "vocab": described["model"]["vocab"] | {tail: tokenizer.vocab_size},
        "merges": [*merges, [left[1], right], [left[0], tail]],
    }
    again = Tokenizer(json.dumps(described | {"model": twice})).merge_pairs
    assert np.array_equal(again[:-1], pairs)


def test_a_batch_is_a_function_of_the_step_and_keeps_what_is_scored(tokenizer):
    batches = store(tokenizer)
    plain, apart = batches.batch(7), batches.batch(7, token_split=0.5)
    again = store(tokenizer).batch(7, token_split=0.5)
    assert all(np.array_equal(a, b) for a, b in zip(apart, again, strict=True))
    same = batches.batch(7, token_split=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(same, plain, strict=True))
    for row in range(5):
        marks = [byte_marks(tokenizer, b.tokens[row], b.scored[row]) for b in (plain, apart)]
        pairs = [pair for pair in zip(*marks, strict=False) if pair[0] is not None]
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
    list(resume(parts.out))
    assert contents(whole.out) == contents(parts.out)
    frozen = {"learning_rate": "1e-30", "matrix_learning_rate": "1e-30", "dropout": "0"}
    for share, in_decay in (("0", "false"), ("0.4", "false"), ("0.4", "true")):
        still = dataclasses.replace(
            whole,
            out=tmp_path / f"still{share}{in_decay}",
            overrides=whole.overrides | frozen | {"token_split": share, "split_in_decay": in_decay},
            train=TrainConfig(steps=10),
        )
        losses.append([r.loss for r in runs.start(still) if isinstance(r, StepReport)])
    plain, apart, longer = losses[2:]
    assert plain[7:] == apart[7:]  # the last three tenths
    assert all(a != b for a, b in zip(plain[:7], apart[:7], strict=True))
    assert longer[:7] == apart[:7]
    assert longer[7:] != apart[7:]
