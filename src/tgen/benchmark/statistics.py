"""From the times of several trials to a median, an interval, and what to doubt.

Intervals are those of Wilcoxon's rank sums (Hodges & Lehmann 1963), of the logarithms of times:
exact for any number of trials, if times of one kind lie evenly around their middle, and hardly
moved by one slow trial. A bootstrap of so few numbers would promise more than it holds.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tgen.reports import Interval, Timing

_RESAMPLED = 2000
_EXACT = 60  # values up to which rank sums are counted, not approximated
_OUTLIER = 10  # median deviations from the median, as of a normal distribution: hyperfine's bound
_NORMAL = 1.4826  # standard deviations of a normal distribution in a median deviation
_SLOW_FIRST = 1.1  # times the median of the others
_SHORTEST = 1e-3  # seconds; what else the machine does is not small beside shorter trials
Floats = NDArray[np.float64]


def timing(seconds: Sequence[float]) -> Timing:
    """Median and 10th to 90th percentile: one slow trial moves neither far."""
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Timing(seconds=list(seconds), median=float(median), low=float(low), high=float(high))


def hodges_lehmann(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Where the middle lies of what positive values come from.

    The ends are 0 and infinite where there are too few for that confidence: below 6 for 95 %, below
    8 for 99 %.
    """
    x = np.log(np.asarray(values, np.float64))
    i, j = np.triu_indices(len(x))
    return _interval((x[i] + x[j]) / 2, _signed_rank_sums(len(x)), confidence)  # Walsh's averages


def paired_ratio(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Interval:
    """How many times `b` is as large as `a`, trial by trial: of trials that took turns."""
    return hodges_lehmann((np.asarray(b) / np.asarray(a)).tolist(), confidence=confidence)


def ratio(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Interval:
    """How many times `b` is as large as `a`, of trials that have nothing to do with each other.

    The ends are 0 and infinite where there are too few: below 4 each for 95 %, below 5 for 99 %.
    """
    x, y = (np.log(np.asarray(values, np.float64)) for values in (a, b))
    return _interval((y[:, None] - x).ravel(), _rank_sums(len(x), len(y)), confidence)


def bootstrap(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Where the mean of what values come from lies, by the means of samples drawn from them anew
    (Efron 1979): what others report. Of few trials it promises more than it holds."""
    x = np.asarray(values, np.float64)
    means = np.random.default_rng(0).choice(x, (_RESAMPLED, len(x))).mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(low=float(low), middle=float(x.mean()), high=float(high), confidence=confidence)


def doubts(seconds: Sequence[float]) -> list[str]:
    """What to say about trials that do not look alike, or are too short."""
    x = np.asarray(seconds)
    said = []
    if len(x) and float(np.median(x)) < _SHORTEST:
        said.append(f"a trial takes {np.median(x) * 1e3:.2f} ms, too short to be sure of")
    if len(x) < 3:
        return said
    others = float(np.median(x[1:]))
    if x[0] > _SLOW_FIRST * others and x[0] > x[1:].max():
        said.append(f"the first trial took {x[0] / others:.1f} times as long as the others")
    off = np.abs(x - np.median(x))
    deviation = float(np.median(off)) * _NORMAL
    n = int((off > _OUTLIER * deviation).sum()) if deviation > 0 else 0
    if n:
        said.append(f"{n} of {len(x)} trials lie far from the rest: something else was running")
    return said


def _interval(estimates: Floats, chances: Floats, confidence: float) -> Interval:
    """Between the k-th smallest and the k-th largest of all estimates, where at most half of what
    is missing from `confidence` lies at rank sums (with these chances) below k."""
    k = int(np.searchsorted(np.cumsum(chances), (1 - confidence) / 2, side="right"))
    ordered = np.sort(estimates)
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)
    center = float(np.median(ordered))
    return Interval(
        low=math.exp(low), middle=math.exp(center), high=math.exp(high), confidence=confidence
    )


@cache
def _signed_rank_sums(n: int) -> Floats:
    """The chances of each sum of a random part of 1, 2, ... n."""
    if n > _EXACT:
        return _normal(n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) / 24)
    chances = np.ones(1)
    for rank in range(1, n + 1):
        both = np.zeros(len(chances) + rank)
        both[: len(chances)] += chances / 2
        both[rank:] += chances / 2
        chances = both
    return chances


@cache
def _rank_sums(n: int, m: int) -> Floats:
    """The chances of each number of pairs, of n * m, in which the one is above the other (Mann &
    Whitney 1947)."""
    if n + m > _EXACT:
        return _normal(n * m, n * m * (n + m + 1) / 12)
    ways: dict[tuple[int, int], Floats] = {}

    def count(n: int, m: int) -> Floats:
        """The largest of all is one of the n, above all m, or one of the m, above none."""
        if n == 0 or m == 0:
            return np.ones(1)
        if (n, m) not in ways:
            found = np.zeros(n * m + 1)
            above, below = count(n - 1, m), count(n, m - 1)
            found[m : m + len(above)] += above
            found[: len(below)] += below
            ways[n, m] = found
        return ways[n, m]

    for i in range(1, n + 1):  # from small to large: no deep recursion
        for j in range(1, m + 1):
            count(i, j)
    return count(n, m) / math.comb(n + m, n)


def _normal(largest: int, variance: float) -> Floats:
    """What both distributions come to for many values."""
    normal = NormalDist(largest / 2, math.sqrt(variance))
    edges = np.array([normal.cdf(i + 0.5) for i in range(-1, largest + 1)])
    return np.diff(edges)
