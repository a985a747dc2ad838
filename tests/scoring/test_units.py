"""Blocks of a text: independent of the tokens, and never shorter than a context."""

import numpy as np
import pytest

from tgen.scoring.document_blocks import BlockSums, count_blocks
from tgen.scoring.totals import ScoreTotals


def test_blocks_partition_the_nats_whatever_the_tokens_and_the_pieces():
    random = np.random.default_rng(0)
    density = random.uniform(0.1, 3, 1000)  # nats of each byte
    for n_cuts in (0, 40, 999):
        cuts = np.sort(random.choice(np.arange(1, 1000), n_cuts, replace=False))
        edges = np.array([0, *cuts, 1000])
        nats = np.diff(np.concatenate([[0], np.cumsum(density)])[edges])
        sizes = np.diff(edges)
        whole = BlockSums(7, 1000)
        whole.add(nats, sizes)
        pieces = BlockSums(7, 1000)
        for part in np.array_split(np.arange(len(nats)), 9):
            pieces.add(nats[part], sizes[part])
        assert pieces.nats == pytest.approx(whole.nats)
        assert whole.nats.sum() == pytest.approx(density.sum())
        assert whole.n_bytes == 1000
    borders = np.arange(8) * (1000 / 7)  # a token per byte: exact but for the bytes at the borders
    cumulative = np.interp(borders, np.arange(1001), np.concatenate([[0], np.cumsum(density)]))
    assert whole.nats == pytest.approx(np.diff(cumulative))


def test_tokens_without_bytes_count_in_one_block():
    sums = BlockSums(2, 4)
    sums.add(np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]))
    sums.add(np.array([8.0]), np.array([0]))
    assert sums.nats.sum() == 15
    assert sums.nats[0] >= 1
    longer = BlockSums(2, 4)  # a normalized text may be longer than the original
    longer.add(np.ones(6), np.ones(6, np.int64))
    assert longer.nats.tolist() == [2, 4]


def test_blocks_are_at_least_as_long_as_a_context():
    assert count_blocks(10**6, 256) == 64
    assert count_blocks(111_540, 2048) == 13
    assert count_blocks(100, 2048) == 1
    assert count_blocks(0, 1) == 1


def test_units_are_documents_from_ten_on():
    totals = ScoreTotals()
    for i in range(9):
        totals.add(10.0 + i, n_bytes=20, n_tokens=5, blocks=np.array([4.0, 6.0 + i]))
    assert totals.units().unit == "blocks"
    assert len(totals.units().nats) == 18
    assert totals.score().standard_error is not None
    totals.add(0.0, n_bytes=0, n_tokens=0, blocks=np.zeros(1))  # says nothing about the error
    assert totals.units().unit == "blocks"
    totals.add(30.0, n_bytes=40, n_tokens=8, blocks=np.array([30.0]))
    units = totals.units()
    assert units.unit == "documents"
    assert units.nats.tolist() == [*range(10, 19), 30]
    assert units.n_bytes.tolist() == [20] * 9 + [40]
    score = totals.score()
    assert score.n_bytes == 220
    assert score.n_tokens == 53
    assert score.nats == pytest.approx(156)


def test_few_units_have_no_standard_error():
    totals = ScoreTotals()
    totals.add(10.0, n_bytes=20, n_tokens=5, blocks=np.arange(9.0))
    assert totals.score().standard_error is None
