"""Attention masks: which keys each query may see."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Sequences up to this length are not split, and a span shorter than this continues with the next
# document: small calls cost more than they save (measured on two cores).
_MIN_SPLIT_LENGTH, _MIN_SPAN = 256, 48


class DocumentSpan(NamedTuple):
    """A part of a sequence of packed documents that attends only to itself."""

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


def document_spans(documents: Tensor, window: int | None) -> list[list[DocumentSpan]] | None:
    """Split each sequence of packed documents, whose numbers (B, T) do not decrease, into spans
    that give the same attention as `document_mask`; None where that would not be faster.

    A span is one document, or short ones and the document after them.
    """
    B, T = documents.shape
    if T <= _MIN_SPLIT_LENGTH or documents.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    sequences = []
    for sequence in documents:
        starts, start = [0], 0
        for border in (sequence.diff().nonzero().flatten() + 1).tolist():
            if border - start >= _MIN_SPAN:
                starts.append(start := border)
        sequences.append([sequence[start:end] for start, end in pairwise([*starts, T])])
    if 2 * sum(len(span) ** 2 for spans in sequences for span in spans) > B * T * T:
        return None
    return [[_make_span(span, window) for span in spans] for spans in sequences]


def _make_span(documents: Tensor, window: int | None) -> DocumentSpan:
    n = len(documents)
    if documents[0] == documents[-1] and (window is None or window >= n):
        return DocumentSpan(n, None)
    return DocumentSpan(n, document_mask(documents[None], window))
