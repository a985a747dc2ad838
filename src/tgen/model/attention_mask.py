"""Attention masks: which keys each query may see."""

import torch
from torch import Tensor


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
