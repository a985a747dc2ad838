"""Queries and keys turned by their position; where tokens stand, and whom they see, in rows of
several documents."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i+D/2}) by its position's angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def within_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Documents' numbers (B, T), never falling -> each token's position in its document (B, T), and
    whether a query sees a key (B, 1, T, T) bool: one of its document, and not after it."""
    T = documents.shape[1]
    place = torch.arange(T, device=documents.device)
    # A document starts at the first place that holds its number.
    positions = place - torch.searchsorted(documents, documents)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return positions, same & (place[:, None] >= place)
