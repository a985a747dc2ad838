"""The start of training from a bigram model.

With an input and an output table of their own, a model without blocks computes for each token a
row of logits of rank d_model. The tables start as the best such approximation of the logarithms of
the training text's bigram probabilities, and the output projections of the blocks start at zero. So
the first step already predicts as well as a bigram model of low rank. `corpus.count_bigrams` counts
the bigrams.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_RMS = 0.3  # of the input table
_LONGEST = 0.995  # quantile of the rows' lengths: longer rows are shortened to it
_EXTRA_RANK, _ITERATIONS = 16, 3  # accuracy of the singular vectors


def start_from_bigrams(
    arrays: Mapping[str, NDArray[Any]], bigram_counts: NDArray[np.float32], *, seed: int
) -> dict[str, NDArray[Any]]:
    """Return the weights `arrays` with tables that predict as the bigrams counted (V, V) do."""
    counts = torch.from_numpy(bigram_counts)
    log_probabilities = kneser_ney(counts).log_()
    shares = counts.sum(1) + 0.5
    width = arrays["lm_head.weight"].shape[1]
    tables = low_rank_tables(log_probabilities, shares / shares.sum(), width, seed=seed)
    names = "token_embedding.weight", "lm_head.weight"
    started = dict(zip(names, (table.numpy() for table in tables), strict=True))
    zeros = {
        name: np.zeros_like(array)
        for name, array in arrays.items()
        if name.endswith((".o_proj.weight", ".down_proj.weight"))
    }
    return {**arrays, **started, **zeros}


def kneser_ney(counts: Tensor) -> Tensor:
    """Return bigram probabilities (V, V) by interpolated Kneser-Ney smoothing (Ney et al. 1994)."""
    n_once, n_twice = ((counts == n).sum().item() for n in (1, 2))
    discount = n_once / max(1, n_once + 2 * n_twice)
    seen = counts > 0
    continuation = seen.sum(0) + 0.5
    continuation = continuation / continuation.sum()
    totals = counts.sum(1, keepdim=True)
    backoff = torch.where(totals > 0, discount * seen.sum(1, keepdim=True) / totals.clamp(1), 1.0)
    # A discount of 0 would leave unseen bigrams without a probability.
    backoff = backoff.clamp(min=1e-3)
    direct = (counts - discount).clamp(min=0) / totals.clamp(1)
    probabilities = direct + backoff * continuation
    return probabilities / probabilities.sum(1, keepdim=True)


def low_rank_tables(
    log_probabilities: Tensor, shares: Tensor, width: int, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Return an input and an output table (V, width) whose logits, after an RMSNorm, are the best
    approximation of rank `width` - 1, weighted by the tokens' shares (V,), of the rows (V, V).

    Singular value decomposition of the weighted rows, by random projections (Halko et al. 2011).
    """
    n, generator = len(shares), torch.Generator().manual_seed(seed)
    rank = min(width - 1, n)
    roots = shares.sqrt()
    centered = log_probabilities - (log_probabilities @ shares)[:, None]  # softmax ignores it
    weighted = centered * roots[:, None] * roots
    q = torch.randn(n, min(n, rank + _EXTRA_RANK), generator=generator)
    q = torch.linalg.qr(weighted @ q).Q
    for _ in range(_ITERATIONS):
        q = torch.linalg.qr(weighted.T @ q).Q
        q = torch.linalg.qr(weighted @ q).Q
    u, values, v = torch.linalg.svd(q.T @ weighted, full_matrices=False)
    left, right = (q @ u)[:, :rank], v[:rank].T
    # The signs of singular vectors are arbitrary: they would differ with the number of threads.
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    left, right = left * signs, right * signs
    scale = values[:rank].sqrt()
    inputs, outputs = (side * scale / roots[:, None] for side in (left, right))
    # RMSNorm gives all rows one length: one more coordinate makes them equally long before.
    lengths = inputs.norm(dim=1, keepdim=True)
    longest = lengths.quantile(_LONGEST)
    inputs = inputs * (longest / lengths).clamp(max=1)
    rest = (longest**2 - inputs.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    inputs = torch.cat([inputs, rest, torch.zeros(n, width - rank - 1)], 1)
    outputs = torch.cat([outputs, torch.zeros(n, width - rank)], 1)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    root = width**0.5
    return (inputs @ rotation) * (_RMS * root / longest), (outputs @ rotation) * (longest / root)
