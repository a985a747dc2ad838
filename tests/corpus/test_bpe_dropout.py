"""BPE-dropout: other tokens, the same text, and only until the learning rate decays."""

import dataclasses
import json

import numpy as np
import pytest

from support.corpora import tokenize
from support.models import TEXT
from support.runs import contents, request, resume
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.corpus import TokenDataset
from tgen.corpus.dataset import split_tokens
from tgen.reports.training import StepReport
from tgen.tokenizer import Tokenizer, train_bpe, train_char

UMLAUTS = "für Bären, déjà vu — 東京 🙂 ".encode() * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=400)


def make_dataset(tokenizer: Tokenizer) -> TokenDataset:
    documents = [(line, line) for line in TEXT.splitlines(keepends=True) if line.strip()]
    return TokenDataset(
        train=tokenize(documents, tokenizer),
        val=tokenize([], tokenizer),
        val_bytes=0,
        context_length=24,
        batch_size=5,
        seed=3,
        end_of_text=tokenizer.end_of_text,
        merge_pairs=tokenizer.merge_pairs,
    )


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.99])
def test_split_tokens_spell_the_same_text(tokenizer, probability):
    windows = make_dataset(tokenizer).batch(4).tokens
    seeds = np.arange(len(windows), dtype=np.uint64)
    split, positions = split_tokens(
        windows, tokenizer.merge_pairs, probability=probability, seeds=seeds
    )
    assert split.shape == positions.shape == windows.shape
    assert not np.array_equal(split, windows)
    for old, new, position in zip(windows, split, positions, strict=True):
        assert tokenizer.decode(old).startswith(tokenizer.decode(new))
        for i in range(position[-1]):  # the last token may be incomplete
            assert tokenizer.decode(new[position == i]) == tokenizer.decode([old[i]])


def test_each_token_is_split_with_the_given_probability(tokenizer):
    merge_pairs = tokenizer.merge_pairs
    (whole,) = np.flatnonzero(merge_pairs[:, 0] >= 0)[:1]  # a merge of two bytes
    windows = np.full((1, 40_000), whole)
    seeds = np.ones(1, np.uint64)
    split, _ = split_tokens(windows, merge_pairs, probability=0.25, seeds=seeds)
    n_whole = (split == whole).sum()
    assert n_whole / (n_whole + (split != whole).sum() / 2) == pytest.approx(0.75, abs=0.01)


def test_merge_pairs_spell_their_token_and_exclude_characters_and_special_tokens(tokenizer):
    for trained in (tokenizer, train_bpe([UMLAUTS], vocab_size=300)):
        pairs = trained.merge_pairs
        merged = np.flatnonzero(pairs[:, 0] >= 0)
        assert len(merged)
        for i in merged:
            assert trained.decode(pairs[i]) == trained.token_bytes(i)
            assert len(trained.token_bytes(i).decode(errors="replace")) > 1
        assert pairs[trained.end_of_text, 0] == -1
    assert (train_char([UMLAUTS]).merge_pairs == -1).all()


def test_merge_pairs_of_old_notation_and_of_two_merges_for_one_token(tokenizer):
    file = json.loads(tokenizer.json)
    merges = file["model"]["merges"]
    older = ["#version: 0.2 - of a kind", *(" ".join(pair) for pair in merges)]
    pairs = Tokenizer(tokenizer.json).merge_pairs
    tokenizer_json = json.dumps(file | {"model": file["model"] | {"merges": older}})
    assert np.array_equal(Tokenizer(tokenizer_json).merge_pairs, pairs)
    left, right = next(pair for pair in merges if len(pair[0]) == 2 and len(pair[1]) == 1)
    tail = left[1] + right  # left[0] + tail is the same token
    assert tail not in file["model"]["vocab"]
    twice = file["model"] | {
        "vocab": file["model"]["vocab"] | {tail: tokenizer.vocab_size},
        "merges": [*merges, [left[1], right], [left[0], tail]],
    }
    again = Tokenizer(json.dumps(file | {"model": twice})).merge_pairs
    assert np.array_equal(again[:-1], pairs)


def test_rows_of_a_batch_are_made_alone(tokenizer):
    dataset = make_dataset(tokenizer)
    whole = dataset.batch(7, bpe_dropout=0.5)
    alone = dataset.batch(7, bpe_dropout=0.5, rows=range(1, 4))
    rows = [None if array is None else array[1:4] for array in whole]
    assert all(np.array_equal(a, b) for a, b in zip(alone, rows, strict=True))


def test_batch_is_a_function_of_the_step_and_the_loss_mask_covers_the_same_bytes(tokenizer):
    dataset = make_dataset(tokenizer)
    plain, split = dataset.batch(7), dataset.batch(7, bpe_dropout=0.5)
    again = make_dataset(tokenizer).batch(7, bpe_dropout=0.5)
    assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))
    same = dataset.batch(7, bpe_dropout=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(same, plain, strict=True))
    for tokens, mask, other_tokens, other_mask in zip(
        plain.tokens, plain.loss_mask, split.tokens, split.loss_mask, strict=True
    ):
        masks = [byte_mask(tokenizer, tokens, mask), byte_mask(tokenizer, other_tokens, other_mask)]
        pairs = [pair for pair in zip(*masks, strict=False) if pair[0] is not None]
        assert pairs
        assert all(a == b for a, b in pairs)
    assert any(False in mask and True in mask for mask in plain.loss_mask)


def byte_mask(tokenizer: Tokenizer, tokens: np.ndarray, mask: np.ndarray) -> list[bool | None]:
    """Whether each byte is in the loss; None for the first token, which is not a target."""
    masks = [None, *mask.tolist()]
    return [m for m, i in zip(masks, tokens, strict=True) for _ in tokenizer.token_bytes(i)]


def test_run_resumes_exactly_and_sees_whole_tokens_while_the_learning_rate_decays(tmp_path):
    values = {"tokenizer": "bpe", "vocab_size": 300}
    losses = []
    for share in ("0", "0.4"):
        whole = request(tmp_path, f"whole{share}", overrides={"bpe_dropout": share}, **values)
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
            overrides=whole.overrides
            | frozen
            | {"bpe_dropout": share, "bpe_dropout_in_decay": in_decay},
            train=TrainConfig(steps=10),
        )
        losses.append([r.loss for r in runs.start(still) if isinstance(r, StepReport)])
    plain, apart, longer = losses[2:]
    assert plain[7:] == apart[7:]  # the last three tenths
    assert all(a != b for a, b in zip(plain[:7], apart[:7], strict=True))
    assert longer[:7] == apart[:7]
    assert longer[7:] != apart[7:]
