"""Sort the suffixes of a text that begin at words, with NumPy and without recursion.

`corpus.text_index` says where words begin: each byte and the one before it decide. `END` follows
each document. Suffixes are compared up to their first `END`; equal ones are in any order.

Suffixes are first sorted by two bytes, then each group of equal ones by five more. Long equal
prefixes double (Larsson and Sadakane 2007, here from word to word): suffixes that share h bytes
share the beginnings of words in them, so the order of the suffixes at the last such beginning,
sorted already, is theirs. Therefore repetitive text takes a logarithmic number of rounds.
"""

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.steps import Steps

END = 0xFF  # no byte of UTF-8; one in other text separates documents, too
MAX_BYTES = (1 << 32) - 16  # positions have 32 bits
BYTES_PER_SUFFIX = 28  # of memory while they are sorted, besides the text and a block
_PADDING = 8
_BLOCK = 1 << 20  # suffixes in memory at a time, unless more are equal so far
_BY_BYTES = 22  # shared bytes up to which the next ones are faster to compare than words


def sort_suffixes(text: bytearray, starts: NDArray[np.uint32]) -> Steps[NDArray[np.uint32]]:
    """Return the positions `starts` (m,) in the order of the suffixes there; yield the fraction
    that is sorted. `text` ends with `END`."""
    if not len(starts):
        return starts
    padded = np.frombuffer(text + bytes(_PADDING), np.uint8)
    sorter = _Sorter(padded, starts)
    groups = sorter.split_by_two_bytes()
    while len(groups[0]):
        firsts, sizes = groups
        sums, left, n_left = np.cumsum(sizes), [], int(sizes.sum())
        i = 0
        while i < len(firsts):
            done = int(sums[i - 1]) if i else 0
            j = max(i + 1, int(np.searchsorted(sums, done + _BLOCK, side="right")))
            refined = sorter.refine(firsts[i:j].astype(np.int64), sizes[i:j].astype(np.int64))
            left.append(refined)
            n_left += int(refined[1].sum()) - int(sums[j - 1]) + done
            yield 1 - n_left / len(starts)
            i = j
        groups = (np.concatenate([f for f, _ in left]), np.concatenate([s for _, s in left]))
    ordered: NDArray[np.uint32] = starts[sorter.order]
    return ordered


Groups = tuple[NDArray[np.uint32], NDArray[np.uint32]]  # first index and size of each


class _Sorter:
    """Suffixes in groups: `order` has the number of each suffix, `rank` by number the index of its
    group's first, and `depth` the bytes that the suffixes of the group share."""

    def __init__(self, padded: NDArray[np.uint8], starts: NDArray[np.uint32]) -> None:
        n = len(padded) - _PADDING
        self._starts, self._ends = starts, np.flatnonzero(padded[:n] == END).astype(np.uint32)
        # Eight bytes from every position on, as a number
        self._bytes_at = np.ndarray((n + 1,), ">u8", padded, strides=(1,))

    def split_by_two_bytes(self) -> Groups:
        """Sort by the first two bytes; return the groups that are not sorted yet."""
        keys = np.empty(len(self._starts), np.uint16)
        for i in range(0, len(keys), _BLOCK):
            keys[i : i + _BLOCK] = self._bytes_at[self._starts[i : i + _BLOCK]] >> np.uint64(48)
        self.order = np.argsort(keys, kind="stable").astype(np.uint32)
        counts = np.bincount(keys, minlength=1 << 16)
        firsts = np.cumsum(counts) - counts
        self.rank = firsts.astype(np.uint32)[keys]
        self.depth = np.full(len(keys), 2, np.uint32)
        firsts, counts = firsts[counts > 0], counts[counts > 0]
        return self._unsorted(self.order[firsts], firsts, counts, np.full(len(firsts), 2))

    def refine(self, firsts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Groups:
        """Sort the suffixes of each group by more bytes; return the new groups that are not sorted
        yet."""
        starts, n = self._starts, int(sizes.sum())
        slots = np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes) + np.arange(n)
        suffixes = self.order[slots].astype(np.int64)
        lead = self.order[firsts].astype(np.int64)
        shared = self.depth[lead].astype(np.int64)
        ends = (starts[lead] + shared).astype(np.uint32)
        words = np.searchsorted(starts, ends) - 1 - lead  # to the last word in the shared bytes
        by_rank = (words > 0) & (shared > _BY_BYTES)
        ranked = np.repeat(by_rank, sizes)
        offsets = np.repeat(np.where(by_rank, words, shared), sizes)
        keys = np.empty(n, np.uint64)
        keys[ranked] = self.rank[suffixes[ranked] + offsets[ranked]]
        at = starts[suffixes[~ranked]] + offsets[~ranked]
        keys[~ranked] = self._bytes_at[at] >> np.uint64(24)
        keys |= np.repeat(np.arange(len(firsts), dtype=np.uint64) << np.uint64(40), sizes)
        by_key = np.argsort(keys)
        suffixes, keys = suffixes[by_key], keys[by_key]
        new = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        new_sizes = np.diff(new, append=n)
        group = (keys[new] >> np.uint64(40)).astype(np.int64)
        chosen, n_words = suffixes[new], np.where(by_rank, words, 0)[group]
        distance = starts[chosen + n_words].astype(np.int64) - starts[chosen]
        depth = distance + self.depth[chosen + n_words]
        depth += np.where(by_rank[group], 0, 5)
        self.order[slots] = suffixes
        self.rank[suffixes] = np.repeat(slots[new], new_sizes)
        self.depth[suffixes] = np.repeat(depth, new_sizes)
        return self._unsorted(chosen, slots[new], new_sizes, depth)

    def _unsorted(
        self,
        suffixes: NDArray[np.integer],
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        depth: NDArray[np.int64],
    ) -> Groups:
        """Return the groups, each with one of its suffixes, that are not equal up to an `END`."""
        several = np.flatnonzero(sizes > 1)
        starts = self._starts[suffixes[several]]
        ends = self._ends[np.searchsorted(self._ends, starts)]
        several = several[ends >= starts + depth[several]]
        return firsts[several].astype(np.uint32), sizes[several].astype(np.uint32)
