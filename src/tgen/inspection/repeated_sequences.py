"""Random text that comes twice: what a head does with what it has seen before."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgen.inspection.attention import AttentionRecorder, batch_of
from tgen.inspection.hooks import losses
from tgen.model.transformer import Transformer

_LONGEST, _SEEDS = 50, 8
_SHORTEST = 4  # tokens a block; shorter ones say nothing


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Scores (seeds, L, H) on repeated text and on as much that was not repeated."""

    block_length: int
    before: int  # tokens in front of the first block
    seeds: int
    duplicate: tuple[Tensor, Tensor] | None  # repeated, control
    induction: tuple[Tensor, Tensor] | None
    gain: float | None  # nats a token that the second block costs less than the control's
    same_tokens: bool  # whether the control's second block has the first one's tokens

    @property
    def n_tokens(self) -> int:
        """Of each text."""
        return self.before + 2 * self.block_length

    def scores(self, layer: int, head: int) -> dict[str, float | None]:
        """One head's means, by the fields of HeadReport."""
        names = ("duplicate", "duplicate_control", "induction", "induction_control")
        if self.duplicate is None or self.induction is None:
            return dict.fromkeys((*names, "induction_deviation"))
        of = [*self.duplicate, *self.induction]
        found: dict[str, float | None] = {
            name: float(values[:, layer, head].mean())
            for name, values in zip(names, of, strict=True)
        }
        return found | {"induction_deviation": float(self.induction[0][:, layer, head].std())}


@torch.no_grad()
def on_repeats(model: Transformer, candidates: Sequence[int], start: Sequence[int]) -> Repeats:
    """Runs the model on blocks of different tokens, each followed by itself; the control by others.

    Duplicate: the weight of a token of the second block on its copy in the first. Induction: on
    what followed that copy (Olsson et al. 2022), where a model looks that copies what came next.
    """
    room = (model.config.context_length - len(start)) // 2
    n = min(_LONGEST, len(candidates), room)
    if n < _SHORTEST:
        return Repeats(
            block_length=0, before=len(start), seeds=0, duplicate=None, induction=None, gain=None,
            same_tokens=False,
        )  # fmt: skip
    repeated, control = [], []
    for seed in range(_SEEDS):
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        drawn = [candidates[i] for i in order.tolist()]
        block, rest = drawn[:n], drawn[n : 2 * n]
        if len(rest) < n:
            rest = _elsewhere(block, seed=_SEEDS + seed)
        repeated.append([*start, *block, *block])
        control.append([*start, *block, *rest])
    first = len(start) + n
    *found, x = _offsets(model, repeated, first, n)
    *others, y = _offsets(model, control, first, n)
    gains = []
    for i, (row, other) in enumerate(zip(repeated, control, strict=True)):
        cost, instead = losses(model, x[i : i + 1], row), losses(model, y[i : i + 1], other)
        gains.append(float((instead[first:] - cost[first:]).mean()))
    return Repeats(
        block_length=n,
        before=len(start),
        seeds=_SEEDS,
        duplicate=(found[0], others[0]),
        induction=(found[1], others[1]),
        gain=sum(gains) / len(gains),
        same_tokens=len(candidates) < 2 * n,
    )


def _elsewhere(block: list[int], *, seed: int) -> list[int]:
    """The same tokens in another order, none of them where it was: those of a text are few."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(block), generator=random).tolist()
        if all(i != j for i, j in enumerate(order)):
            return [block[i] for i in order]


def _offsets(
    model: Transformer, rows: Sequence[Sequence[int]], first: int, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(seeds, L, H) mean weights of the queries from `first` on, n and n - 1 tokens back; and the
    last vectors (seeds, T, C)."""
    shape = len(rows), model.config.n_layers, model.config.n_heads
    copies, nexts = torch.zeros(shape), torch.zeros(shape)

    def take(layer: int, start: int, weights: Tensor) -> None:
        drop = max(0, first - start)
        rows = weights[:, :, drop:].cpu()
        for sums, back in ((copies, n), (nexts, n - 1)):
            there = rows.diagonal(offset=start + drop - back, dim1=2, dim2=3)
            sums[:, layer] += there[..., : rows.shape[2]].sum(dim=-1) / n

    x = model.hidden(batch_of(model, rows), recorder=AttentionRecorder(take))
    return copies, nexts, x
