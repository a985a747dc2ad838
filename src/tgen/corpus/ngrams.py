"""Counts of n-grams in a corpus: tables of frequent ones for drafts, and all pairs of tokens.

Generation drafts tokens from the tables. The logits of a new model can start from the pairs.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tgen.storage.disk_array import Array, blocks

Tokens = NDArray[np.uint16 | np.uint32]

_LENGTHS = (2, 3, 4)
_MAX_TOKENS = 1 << 23  # corpus tokens to count
_MIN_GAIN = 15  # percentage points by which a longer context must beat a shorter one
_MAX_BIGRAM_TOKENS = 1 << 25  # of the text's beginning


class _Ngrams(NamedTuple):
    """The most frequent n-gram per context, sorted."""

    tokens: Tokens  # (m, n): the context and the next token
    counts: NDArray[np.int64]  # (m,): occurrences of the n-gram
    percent: Tokens  # (m,): of the occurrences of the context


def ngram_tables(text: Array, *, max_bytes: int) -> dict[str, Tokens]:
    """Return `ngrams_n` (m, n + 1) for n = 2, 3, 4, sorted, in the dtype of `text`.

    A row is a context, its most frequent next token (at least two occurrences), and that token's
    share in percent. A longer context is included only if it predicts another token than the
    shorter one, or is more certain. The most frequent n-grams are kept, up to `max_bytes`.
    """
    tokens: Tokens = text[:_MAX_TOKENS]
    max_rows = [max_bytes // ((n + 1) * tokens.itemsize) for n in _LENGTHS]
    counted = [_most_frequent(tokens, n, rows) for n, rows in zip(_LENGTHS, max_rows, strict=True)]
    grams = counted[:1] + [_drop_redundant(a, b) for a, b in pairwise(counted)]
    counts = np.concatenate([part.counts for part in grams])
    columns = np.repeat([n + 1 for n in _LENGTHS], [len(part.tokens) for part in grams])
    order = np.argsort(-counts, kind="stable")
    selected = np.zeros(len(counts), bool)
    selected[order[np.cumsum(columns[order]) * tokens.itemsize <= max_bytes]] = True
    ends = np.cumsum([len(part.tokens) for part in grams])[:-1]
    tables = zip(_LENGTHS, grams, np.split(selected, ends), strict=True)
    return {
        f"ngrams_{n}": np.column_stack([part.tokens, part.percent])[mask]
        for n, part, mask in tables
    }


def _most_frequent(tokens: Tokens, n: int, max_rows: int) -> _Ngrams:
    """Return the `max_rows` most frequent contexts whose top next token occurs at least twice."""
    if len(tokens) < n:
        return _Ngrams(
            np.zeros((0, n), tokens.dtype), np.zeros(0, np.int64), np.zeros(0, tokens.dtype)
        )
    windows = sliding_window_view(tokens, n)
    windows = windows[np.lexsort(windows.T[::-1])]
    is_first = np.append(True, (windows[1:] != windows[:-1]).any(axis=1))
    counts = np.diff(np.append(np.flatnonzero(is_first), len(windows)))
    ngrams = windows[is_first]
    new_context = np.append(True, (ngrams[1:, :-1] != ngrams[:-1, :-1]).any(axis=1))
    totals = np.add.reduceat(counts, np.flatnonzero(new_context))
    contexts = np.cumsum(new_context) - 1
    order = np.lexsort((-counts, contexts))
    best = order[new_context]  # sorting does not move the contexts
    percent = (100 * counts[best] / totals).astype(tokens.dtype)
    repeated = np.flatnonzero(counts[best] > 1)
    top = np.sort(repeated[np.argsort(-counts[best][repeated], kind="stable")[:max_rows]])
    return _Ngrams(ngrams[best][top], counts[best][top], percent[top])


def _drop_redundant(shorter: _Ngrams, longer: _Ngrams) -> _Ngrams:
    """Drop the longer n-grams that the shorter ones predict about as well."""
    known = {tuple(row): p for row, p in zip(shorter.tokens.tolist(), shorter.percent, strict=True)}
    useful = [
        percent > known.get(tuple(row[1:]), -_MIN_GAIN) + _MIN_GAIN
        for row, percent in zip(longer.tokens.tolist(), longer.percent.tolist(), strict=True)
    ]
    return _Ngrams(*(field[np.array(useful, bool)] for field in longer))


def count_bigrams(tokens: Array, vocab_size: int) -> NDArray[np.float32]:
    """Return how often each token of `tokens` (n,) follows each other one, (V, V)."""
    counts = np.zeros(vocab_size * vocab_size, np.float32)
    previous = np.zeros(0, np.int64)
    for block in blocks(tokens[:_MAX_BIGRAM_TOKENS]):
        stream = np.concatenate([previous, block]).astype(np.int64)
        pairs, n = np.unique(stream[:-1] * vocab_size + stream[1:], return_counts=True)
        counts[pairs] += n
        previous = stream[-1:]
    return counts.reshape(vocab_size, vocab_size)
