"""Packed rows: each once per epoch, on any number of ranks, and as if it were alone."""

import itertools
from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import make_model
from tgen.corpus import PackedRows, Tokens
from tgen.corpus.packing import assign_windows
from tgen.training.evaluation import evaluate
from tgen.training.loss import LossModule, to_device

LENGTHS = st.lists(st.integers(2, 17), min_size=1, max_size=30)


def make_rows(lengths, *, context_length=16, batch_size=3, seed=1, n_vocab=200):
    """Return rows whose tokens differ where possible, the same to train on and held out."""
    random = np.random.default_rng(0)
    n = sum(lengths)
    tokens = np.arange(1, n + 1).astype(np.uint32) if n_vocab is None else None
    if tokens is None:
        tokens = random.integers(1, n_vocab, n).astype(np.uint16)
    mask = random.random(n) < 0.6
    starts = np.cumsum([0, *lengths[:-1]])
    mask[starts] = False
    mask[starts + np.array(lengths) - 1] = True
    rows = Tokens(tokens, mask, np.array(lengths, np.int64))
    return PackedRows(
        train=rows,
        val=rows,
        val_bytes=n,
        context_length=context_length,
        batch_size=batch_size,
        seed=seed,
    )


def rows_of(batch):
    """Yield the row and the target tokens of each document of a batch, without padding."""
    tokens, mask, documents = batch
    for i in range(len(tokens)):
        last = -1
        for number in np.unique(documents[i]):
            here = np.flatnonzero(documents[i] == number)
            if not tokens[i, here].any():  # padding
                continue
            assert number == last + 1
            last = number
            end = here[-1] + 1
            ids = [*tokens[i, here].tolist()]
            if end == documents.shape[1] and tokens[i, end]:
                ids.append(int(tokens[i, end]))  # the target of the last input
            yield tuple(ids), tuple((tokens[i, 1:][here][mask[i, here]]).tolist())


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 4), st.integers(0, 3))
def test_every_row_is_seen_whole_once_per_epoch(lengths, n_ranks, seed):
    dataset = make_rows(lengths, batch_size=4, seed=seed, n_vocab=None)
    starts = np.cumsum([0, *lengths])
    rows = [dataset.train.ids[a:b] for a, b in itertools.pairwise(starts)]
    masks = [dataset.train.loss_mask[a:b] for a, b in itertools.pairwise(starts)]
    expected = Counter(
        (tuple(row.tolist()), tuple(row[mask].tolist()))
        for row, mask in zip(rows, masks, strict=True)
    )
    n_steps = dataset.n_windows  # in four windows each: four epochs
    seen: Counter = Counter()
    for step in range(n_steps):
        bounds = np.linspace(0, 4, n_ranks + 1).astype(int).tolist()
        for first, last in itertools.pairwise(bounds):
            if first < last:
                seen.update(rows_of(dataset.batch(step, rows=range(first, last))))
    assert seen == Counter({row: 4 * n for row, n in expected.items()})


@settings(max_examples=60)
@given(LENGTHS)
def test_every_held_out_row_is_evaluated_once(lengths):
    dataset = make_rows(lengths, n_vocab=None)
    windows = list(dataset.val_windows(1 << 20))
    targets = [t for batch in windows for t in batch.tokens[:, 1:][batch.loss_mask].tolist()]
    assert sorted(targets) == sorted(dataset.val.ids[dataset.val.loss_mask].tolist())
    assert dataset.val.n_targets == len(targets) == dataset.train.n_targets
    some = list(dataset.val_windows(max(1, sum(lengths) // 3)))
    assert sum(len(batch.tokens) for batch in some) <= -(-len(lengths) // 3) + 1


@given(st.lists(st.integers(1, 20), max_size=60))
def test_no_window_overflows_and_best_fit_leaves_little_room(lengths):
    lengths = sorted(lengths, reverse=True)
    windows = assign_windows(lengths, 20)
    filled = np.bincount(windows, weights=lengths) if lengths else np.zeros(0)
    assert (filled <= 20).all()
    # Johnson (1973): at most 11/9 of the optimum plus a constant below one window.
    assert len(filled) <= 11 / 9 * -(-sum(lengths) // 20) * 1.5 + 1


def test_epochs_are_shuffled_and_a_function_of_the_seed():
    dataset = make_rows([5, 5, 5, 9, 9, 3, 3] * 4, batch_size=1)
    again = make_rows([5, 5, 5, 9, 9, 3, 3] * 4, batch_size=1)
    n = dataset.n_windows
    batches = [dataset.batch(step) for step in range(2 * n)]
    assert any((a.tokens != b.tokens).any() for a, b in zip(batches, batches[n:], strict=False))
    for step in (2 * n - 1, 0, n, 1):
        assert (again.batch(step).tokens == batches[step].tokens).all()
    other = make_rows([5, 5, 5, 9, 9, 3, 3] * 4, batch_size=1, seed=2)
    assert any((other.batch(i).tokens != batches[i].tokens).any() for i in range(n))


def test_packed_rows_have_the_losses_that_they_have_alone():
    lengths = [3, 8, 17, 5, 5, 2, 11]
    dataset = make_rows(lengths, batch_size=1)
    model = make_model("llama", vocab_size=200).double()
    module = LossModule(model)
    starts = np.cumsum([0, *lengths])
    with torch.no_grad():
        alone = 0.0
        for start, n in zip(starts, lengths, strict=False):
            ids = torch.from_numpy(dataset.train.ids[start : start + n].astype(np.int64))
            log_p = model(ids[None, :-1])[0].log_softmax(-1)
            nats = -log_p[torch.arange(n - 1), ids[1:]]
            alone += float(
                nats[torch.from_numpy(dataset.train.loss_mask[start + 1 : start + n])].sum()
            )
        device = torch.device("cpu")
        batches = [dataset.batch(step) for step in range(dataset.n_windows)]
        packed = sum(float(module(to_device(batch, device))) for batch in batches)
        together = dataset.batch(0)._replace(
            tokens=np.concatenate([b.tokens for b in batches]),
            loss_mask=np.concatenate([b.loss_mask for b in batches]),
            documents=np.concatenate([b.documents for b in batches]),
        )
        assert abs(packed - alone) < 1e-9
        assert abs(float(module(to_device(together, device))) - alone) < 1e-9
        evaluation = evaluate(module, dataset)
    assert abs(evaluation.loss * dataset.val.n_targets - alone) < 1e-9


def test_fewer_rows_than_a_batch_repeat():
    dataset = make_rows([4], batch_size=3)
    batch = dataset.batch(0)
    assert len(batch.tokens) == 3
    assert (batch.tokens == batch.tokens[0]).all()
