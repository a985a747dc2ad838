"""Queries and keys turned by their position; where tokens stand, and whom they see, in rows of
several documents."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i+D/2}) by its position's angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def causal_mask(positions: Tensor, n_keys: int, window: int | None) -> Tensor:
    """Positions (..., T) of queries -> whether each sees each key, (..., T, S) bool: none after
    itself and, with a window, no more than that many keys, itself among them."""
    keys = torch.arange(n_keys, device=positions.device)
    seen = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def in_order(n: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The positions (T,) of `n` tokens without a past, and a mask where some do not see all."""
    positions = torch.arange(n, device=device)
    return positions, None if window is None or n <= window else causal_mask(positions, n, window)


def document_mask(documents: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Documents' numbers (B, T), never falling -> each token's position in its document (B, T), and
    whether a query sees a key (B, 1, T, T) bool: one of its document that is `causal_mask`."""
    T = documents.shape[1]
    place = torch.arange(T, device=documents.device)
    # A document starts at the first place that holds its number.
    positions = place - torch.searchsorted(documents, documents)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return positions, same & causal_mask(place, T, window)
