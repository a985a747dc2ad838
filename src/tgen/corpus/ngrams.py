"""What usually follows in a text: compact tables, from which generation guesses ahead."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tgen.storage.disk_array import Array

Tokens = NDArray[np.uint16 | np.uint32]

_LENGTHS = (2, 3, 4)
_MOST_TOKENS = 1 << 23  # of the text that are counted
_SURER = 15  # percent by which a longer context must be, to be kept beside a shorter


class _Grams(NamedTuple):
    """Each context's likeliest n-gram, sorted."""

    rows: Tokens  # (m, n): the context and what follows it
    counts: NDArray[np.int64]  # (m,): how often it does
    percent: Tokens  # (m,): of the times that the context occurs


def ngram_tables(text: Array, *, most_bytes: int) -> dict[str, Tokens]:
    """For n = 2, 3, 4 `ngrams_n` (m, n + 1), sorted, in the dtype of `text`.

    A row is a context, what follows it most often, at least twice, and in how many percent of the
    cases. A longer one is there if it says something else than the shorter, or surer; the most
    frequent are kept.
    """
    tokens: Tokens = text[:_MOST_TOKENS]
    rows = [most_bytes // ((n + 1) * tokens.itemsize) for n in _LENGTHS]
    found = [_likeliest(tokens, n, most) for n, most in zip(_LENGTHS, rows, strict=True)]
    grams = found[:1] + [_news(a, b) for a, b in pairwise(found)]
    counts = np.concatenate([part.counts for part in grams])
    columns = np.repeat([n + 1 for n in _LENGTHS], [len(part.rows) for part in grams])
    order = np.argsort(-counts, kind="stable")
    kept = np.zeros(len(counts), bool)
    kept[order[np.cumsum(columns[order]) * tokens.itemsize <= most_bytes]] = True
    ends = np.cumsum([len(part.rows) for part in grams])[:-1]
    tables = zip(_LENGTHS, grams, np.split(kept, ends), strict=True)
    return {
        f"ngrams_{n}": np.column_stack([part.rows, part.percent])[chosen]
        for n, part, chosen in tables
    }


def _likeliest(tokens: Tokens, n: int, most: int) -> _Grams:
    """Of the contexts with a continuation that occurs twice the `most` frequent."""
    if len(tokens) < n:
        return _Grams(
            np.zeros((0, n), tokens.dtype), np.zeros(0, np.int64), np.zeros(0, tokens.dtype)
        )
    windows = sliding_window_view(tokens, n)
    windows = windows[np.lexsort(windows.T[::-1])]
    first = np.append(True, (windows[1:] != windows[:-1]).any(axis=1))
    counts = np.diff(np.append(np.flatnonzero(first), len(windows)))
    rows = windows[first]
    new = np.append(True, (rows[1:, :-1] != rows[:-1, :-1]).any(axis=1))  # another context
    totals = np.add.reduceat(counts, np.flatnonzero(new))
    contexts = np.cumsum(new) - 1
    order = np.lexsort((-counts, contexts))
    best = order[new]  # contexts stay in their places
    percent = (100 * counts[best] / totals).astype(tokens.dtype)
    often = np.flatnonzero(counts[best] > 1)
    kept = np.sort(often[np.argsort(-counts[best][often], kind="stable")[:most]])
    return _Grams(rows[best][kept], counts[best][kept], percent[kept])


def _news(shorter: _Grams, longer: _Grams) -> _Grams:
    """What of the longer n-grams the shorter do not say."""
    said = {tuple(row): p for row, p in zip(shorter.rows.tolist(), shorter.percent, strict=True)}
    kept = [
        percent > said.get(tuple(row[1:]), -_SURER) + _SURER
        for row, percent in zip(longer.rows.tolist(), longer.percent.tolist(), strict=True)
    ]
    return _Grams(*(field[np.array(kept, bool)] for field in longer))
