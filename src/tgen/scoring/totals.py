"""Sums of scores, by units of text that vary independently: documents, or blocks of long ones."""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.reports.score import Score, Unit
from tgen.reports.standard_error import bits_per_byte_error

Floats = NDArray[np.float64]

MAX_BLOCKS = 64  # per document
MIN_UNITS = 10  # fewer give no usable standard error
_BYTES_PER_TOKEN = 4  # a block has at least the bytes of a context of such tokens


class Units(NamedTuple):
    """The scores of n units."""

    unit: Unit
    nats: Floats  # (n,)
    n_bytes: Floats  # (n,)

    @property
    def standard_error(self) -> float | None:
        """The standard error of all units' bits per byte; None for too few."""
        enough = len(self.nats) >= MIN_UNITS
        return bits_per_byte_error(self.nats, self.n_bytes) if enough else None


def count_blocks(n_bytes: int, context_length: int) -> int:
    """Return the number of blocks to split a document into: none is shorter than a context."""
    return max(1, min(MAX_BLOCKS, n_bytes // (_BYTES_PER_TOKEN * context_length)))


class BlockSums:
    """The negative log-likelihood of a document in `n` blocks of equal numbers of bytes.

    A token across a border counts in both blocks, in proportion to its bytes, so that the blocks of
    models with different tokens cover the same text.
    """

    def __init__(self, n: int, n_bytes: int) -> None:
        self.nats: Floats = np.zeros(n)
        self._borders = np.arange(1, n) * (n_bytes / n)  # between the blocks
        self.n_bytes = 0  # of the tokens added

    def add(self, nats: Floats, n_bytes: NDArray[np.int64]) -> None:
        """Add tokens: the nats and bytes of each, both (n,)."""
        edges = self.n_bytes + np.concatenate([[0], np.cumsum(n_bytes)])
        sums = np.concatenate([[0], np.cumsum(nats)])
        first, end = np.searchsorted(self._borders, [edges[0], edges[-1]], side="right")
        cuts = np.interp(self._borders[first:end], edges, sums)
        self.nats[first : end + 1] += np.diff([0, *cuts, sums[-1]])
        self.n_bytes = int(edges[-1])


class ScoreTotals:
    """The sum of many scores. Documents are the units from 10 on, else their blocks."""

    def __init__(self) -> None:
        self._nats, self._bytes = array("d"), array("d")  # by document
        self._block_nats, self._block_bytes = array("d"), array("d")
        self._n_bytes = self._n_tokens = 0

    def add(self, nats: float, *, n_bytes: int, n_tokens: int, blocks: Floats) -> None:
        """Add a document; `blocks` (n,) are the nats of its equal parts."""
        self._n_bytes += n_bytes
        self._n_tokens += n_tokens
        if n_bytes:
            self._nats.append(nats)
            self._bytes.append(n_bytes)
            if len(self._nats) < MIN_UNITS:
                self._block_nats.extend(blocks)
                self._block_bytes.extend([n_bytes / len(blocks)] * len(blocks))

    def units(self) -> Units:
        """Return the scores of the units."""
        if len(self._nats) >= MIN_UNITS:
            return Units("documents", np.array(self._nats), np.array(self._bytes))
        return Units("blocks", np.array(self._block_nats), np.array(self._block_bytes))

    def score(self) -> Score:
        """Return the score of all documents together."""
        units = self.units()
        return Score(
            n_bytes=self._n_bytes,
            n_tokens=self._n_tokens,
            nats=float(np.sum(self._nats)),
            standard_error=units.standard_error,
            unit=units.unit,
            n_units=len(units.nats),
        )
