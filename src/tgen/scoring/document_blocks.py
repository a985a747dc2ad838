"""Equal blocks of a long document, whose scores vary almost independently."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_BLOCKS = 64  # per document
_BYTES_PER_TOKEN = 4  # a block has at least the bytes of a context of such tokens


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
