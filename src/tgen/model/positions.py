"""How a position enters: added as a sinusoid, or turning queries and keys (rotary); and where
tokens stand, and whom they see, in rows of several documents."""

import math

import torch
from torch import Tensor

from tgen.config import RopeScaling


def sinusoid(context_length: int, d_model: int) -> Tensor:
    """(context_length, C): sin and cos of p / 10000^(2i/C), interleaved (Vaswani et al. 2017)."""
    position = torch.arange(context_length, dtype=torch.float64)[:, None]
    angle = position / 10_000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """(D/2,): the angle by which pair i turns at each position (Su et al. 2021), stretched as in
    Llama 3 where a scaling is given: long wavelengths by `factor`, short ones not at all."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = (1.0 / theta**exponents).float()
    if scaling is None:
        return frequencies
    turns = scaling.original_context_length * frequencies / (2 * math.pi)  # in that context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, share.clamp(0, 1))


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
