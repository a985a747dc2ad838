"""Induction scores: attention of each head in repeated random text, compared with a control."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgen.inspection.attention import AttentionRecorder
from tgen.inspection.hooks import token_batch, token_losses
from tgen.model.transformer import Transformer

_MAX_BLOCK, _MIN_BLOCK = 50, 4  # tokens; shorter blocks are too short to measure
_N_SEEDS = 8
# Fields of HeadReport that `RepeatScores.head_scores` returns.
SCORES = ("duplicate", "duplicate_control", "induction", "induction_control", "induction_std")


@dataclass(frozen=True, kw_only=True)
class RepeatScores:
    """Scores (seeds, L, H) in repeated text and in a control without repetition."""

    block_length: int
    prefix_length: int  # tokens before the first block
    n_seeds: int
    duplicate: tuple[Tensor, Tensor]  # repeated, control
    induction: tuple[Tensor, Tensor]
    gain: float  # loss of the control's second block minus that of the copy, nats per token
    same_tokens: bool  # whether the control's second block reorders the first one's tokens

    def head_scores(self, layer: int, head: int) -> dict[str, float]:
        """Return one head's means over the random texts, by name."""
        means = [float(x[:, layer, head].mean()) for x in (*self.duplicate, *self.induction)]
        std = float(self.induction[0][:, layer, head].std())
        return dict(zip(SCORES, [*means, std], strict=True))


@torch.no_grad()
def score_repeats(
    model: Transformer, candidates: Sequence[int], prefix: Sequence[int]
) -> RepeatScores | None:
    """Run the model on a prefix and two equal blocks of random tokens; in the control the blocks
    differ. No token occurs twice in a block.

    Duplicate: the weight of a second-block token on its copy in the first block. Induction: its
    weight on the token after that copy (Olsson et al. 2022). A sliding window must reach the copy.
    Returns None if the context, the window or the vocabulary is too small.
    """
    config = model.config
    n = min(_MAX_BLOCK, len(candidates), (config.context_length - len(prefix)) // 2)
    windows = (config.window(layer) for layer in range(config.n_layers))
    n = min([n, *(window - 1 for window in windows if window is not None)])
    if n < _MIN_BLOCK:
        return None
    repeated, control = [], []
    for seed in range(_N_SEEDS):
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        shuffled = [candidates[i] for i in order.tolist()]
        block, other = shuffled[:n], shuffled[n : 2 * n]
        if len(other) < n:
            other = _derange(block, seed=_N_SEEDS + seed)
        repeated.append([*prefix, *block, *block])
        control.append([*prefix, *block, *other])
    second = len(prefix) + n  # where the second block starts
    duplicate, induction, x = _second_block_scores(model, repeated, second, n)
    duplicate_control, induction_control, x_control = _second_block_scores(
        model, control, second, n
    )
    gains = []
    for i in range(_N_SEEDS):
        copy_loss = token_losses(model, x[i : i + 1], repeated[i])[second:]
        control_loss = token_losses(model, x_control[i : i + 1], control[i])[second:]
        gains.append(float((control_loss - copy_loss).mean()))
    return RepeatScores(
        block_length=n,
        prefix_length=len(prefix),
        n_seeds=_N_SEEDS,
        duplicate=(duplicate, duplicate_control),
        induction=(induction, induction_control),
        gain=sum(gains) / len(gains),
        same_tokens=len(candidates) < 2 * n,
    )


def _derange(block: list[int], *, seed: int) -> list[int]:
    """Return the block in an order that leaves no token at its position."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(block), generator=generator).tolist()
        if all(i != j for i, j in enumerate(order)):
            return [block[i] for i in order]


def _second_block_scores(
    model: Transformer, sequences: Sequence[Sequence[int]], second: int, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean weights (seeds, L, H) of queries from `second` on, n and n - 1 tokens back;
    and the final vectors (seeds, T, C)."""
    shape = len(sequences), model.config.n_layers, model.config.n_heads
    duplicate, induction = torch.zeros(shape), torch.zeros(shape)

    def add(layer: int, first: int, weights: Tensor) -> None:
        skip = max(0, second - first)
        queries = weights[:, :, skip:].cpu()
        for sums, distance in ((duplicate, n), (induction, n - 1)):
            diagonal = queries.diagonal(offset=first + skip - distance, dim1=2, dim2=3)
            sums[:, layer] += diagonal[..., : queries.shape[2]].sum(dim=-1) / n

    recorder = AttentionRecorder(add, scale=model.config.score_scale)
    x = model.hidden_states(token_batch(model, sequences), recorder=recorder)
    return duplicate, induction, x
