"""Attention masks: which keys each query may see."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Rows are not split below this length, nor into shorter pieces: small calls cost more than they
# save (measured on two cores).
_MIN_SPLIT_LENGTH, _MIN_PIECE = 256, 48


class Piece(NamedTuple):
    """A part of a row of packed documents that attends only to itself."""

    length: int
    mask: Tensor | None  # (1, 1, length, length) bool; None: plain causal attention


def causal_mask(positions: Tensor, n_keys: int, window: int | None) -> Tensor:
    """Return a bool mask (..., T, S) for queries at `positions` (..., T) and S keys from 0.

    A query sees no key after itself and, with a window, at most that many keys including its own.
    """
    keys = torch.arange(n_keys, device=positions.device)
    seen = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def document_positions(documents: Tensor) -> Tensor:
    """Return the positions within documents (B, T), whose numbers (B, T) do not decrease."""
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - torch.searchsorted(documents, documents)  # minus the document's start


def document_mask(documents: Tensor, window: int | None) -> Tensor:
    """Return a bool mask (B, 1, T, T) for packed documents, whose numbers (B, T) do not decrease.

    A query sees the keys of its own document that `causal_mask` allows.
    """
    T = documents.shape[1]
    index = torch.arange(T, device=documents.device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & causal_mask(index, T, window)


def document_pieces(documents: Tensor, window: int | None) -> list[list[Piece]] | None:
    """Split each row of packed documents, whose numbers (B, T) do not decrease, into pieces that
    are equivalent to `document_mask`; None where that would not be faster.

    A piece is one document or several short ones.
    """
    B, T = documents.shape
    if T <= _MIN_SPLIT_LENGTH or documents.device.type != "cpu":
        return None
    rows = []
    for row in documents:
        starts, start = [0], 0
        for border in (row.diff().nonzero().flatten() + 1).tolist():
            if border - start >= _MIN_PIECE:
                starts.append(start := border)
        rows.append([row[start:end] for start, end in pairwise([*starts, T])])
    if 2 * sum(len(piece) ** 2 for pieces in rows for piece in pieces) > B * T * T:
        return None
    return [[_make_piece(piece, window) for piece in pieces] for pieces in rows]


def _make_piece(documents: Tensor, window: int | None) -> Piece:
    n = len(documents)
    if documents[0] == documents[-1] and (window is None or window >= n):
        return Piece(n, None)
    return Piece(n, document_mask(documents[None], window))
