"""Successive halving: short runs of all combinations, longer ones of the better half, and so on.

Karnin et al. (2013), Jamieson and Talwalkar (2016). The last two have the whole time.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from tgen.reports.sweep import Rung


def make_rungs(n_cells: int, *, halving: bool) -> list[Rung]:
    """Return the rungs, each with twice the time of the one before and half of its cells."""
    numbers = [n_cells]
    while halving and numbers[-1] > 2:
        numbers.append(math.ceil(numbers[-1] / 2))
    last = len(numbers) - 1
    return [Rung(n_cells=n, share=2.0 ** (i - last)) for i, n in enumerate(numbers)]


def best_cells(losses: Mapping[int, Sequence[float | None]], n: int) -> list[int]:
    """Return the `n` cells with the lowest mean loss over their seeds, in their order; None is a
    failed run."""

    def mean(cell: int) -> float:
        return fmean(math.inf if loss is None else loss for loss in losses[cell])

    return sorted(sorted(losses, key=mean)[:n])


def total_share(rungs: Sequence[Rung]) -> float:
    """Return the time of all rungs, in runs of the whole time."""
    starts = [0.0, *(rung.share for rung in rungs)]
    return sum(
        rung.n_cells * (rung.share - start) for rung, start in zip(rungs, starts, strict=False)
    )
