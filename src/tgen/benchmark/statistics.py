"""Medians, confidence intervals and warnings from the times of a few trials.

The intervals invert Wilcoxon rank-sum tests of log times (Hodges & Lehmann 1963). They are exact
for any number of trials if log times are distributed symmetrically, and robust to a slow trial. A
bootstrap of so few values covers less than its nominal confidence.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tgen.reports.benchmark import Interval, Timing

_BOOTSTRAP_SAMPLES = 2000
_MAX_EXACT = 60  # above this many values, rank sums are approximated by a normal distribution
_OUTLIER = 10  # normalized median absolute deviations from the median: hyperfine's threshold
_MAD_TO_STD = 1.4826  # standard deviations of a normal distribution per median absolute deviation
_SLOW_FIRST = 1.1  # times the median of the other trials
_MIN_SECONDS = 1e-3  # other activity of the machine distorts shorter trials
Floats = NDArray[np.float64]


def timing(seconds: Sequence[float]) -> Timing:
    """Return the median and the 10th and 90th percentiles, which are robust to a slow trial."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return Timing(seconds=list(seconds), median=float(median), p10=float(p10), p90=float(p90))


def spread(times: Timing) -> float:
    """Return half the distance from the 10th to the 90th percentile, relative to the median."""
    return (times.p90 - times.p10) / 2 / times.median


def hodges_lehmann(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Estimate the pseudomedian of the distribution of positive values.

    The interval is (0, infinity) for too few values: below 6 at 95%, below 8 at 99%.
    """
    x = np.log(np.asarray(values, np.float64))
    i, j = np.triu_indices(len(x))
    return _interval((x[i] + x[j]) / 2, _signed_rank_sums(len(x)), confidence)  # Walsh averages


def paired_ratio(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Interval:
    """Estimate the ratio b / a of paired values: interleaved trials."""
    return hodges_lehmann((np.asarray(b) / np.asarray(a)).tolist(), confidence=confidence)


def ratio(a: Sequence[float], b: Sequence[float], *, confidence: float) -> Interval:
    """Estimate the ratio b / a of independent values.

    The interval is (0, infinity) for too few values: below 4 each at 95%, below 5 at 99%.
    """
    x, y = (np.log(np.asarray(values, np.float64)) for values in (a, b))
    return _interval((y[:, None] - x).ravel(), _rank_sums(len(x), len(y)), confidence)


def bootstrap(values: Sequence[float]) -> Interval:
    """Estimate the mean by the percentile bootstrap (Efron 1979), for comparison with other tools.

    For few trials its coverage is below the nominal 95%.
    """
    x = np.asarray(values, np.float64)
    means = np.random.default_rng(0).choice(x, (_BOOTSTRAP_SAMPLES, len(x))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(low=float(low), estimate=float(x.mean()), high=float(high), confidence=0.95)


def timing_warnings(seconds: Sequence[float]) -> list[str]:
    """Return a warning for trials that are too short, a slow first trial, and outliers."""
    x = np.asarray(seconds)
    warnings = []
    if len(x) and float(np.median(x)) < _MIN_SECONDS:
        warnings.append(f"a trial takes {np.median(x) * 1e3:.2f} ms, too short for reliable timing")
    if len(x) < 3:
        return warnings
    others = float(np.median(x[1:]))
    if x[0] > _SLOW_FIRST * others and x[0] > x[1:].max():
        warnings.append(f"the first trial took {x[0] / others:.1f} times as long as the others")
    distance = np.abs(x - np.median(x))
    deviation = float(np.median(distance)) * _MAD_TO_STD
    n = int((distance > _OUTLIER * deviation).sum()) if deviation > 0 else 0
    if n:
        warnings.append(f"outliers: {n} of {len(x)} trials; another process was running")
    return warnings


def _interval(estimates: Floats, probabilities: Floats, confidence: float) -> Interval:
    """Return the interval from the k-th smallest to the k-th largest pairwise estimate.

    k is the largest number for which rank sums below k have at most half of 1 - confidence.
    """
    k = int(np.searchsorted(np.cumsum(probabilities), (1 - confidence) / 2, side="right"))
    ordered = np.sort(estimates)
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)
    center = float(np.median(ordered))
    return Interval(
        low=math.exp(low), estimate=math.exp(center), high=math.exp(high), confidence=confidence
    )


@cache
def _signed_rank_sums(n: int) -> Floats:
    """Return the probability of each sum of a random subset of 1, 2, ... n."""
    if n > _MAX_EXACT:
        return _normal(n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) / 24)
    probabilities = np.ones(1)
    for rank in range(1, n + 1):
        sums = np.zeros(len(probabilities) + rank)
        sums[: len(probabilities)] += probabilities / 2
        sums[rank:] += probabilities / 2
        probabilities = sums
    return probabilities


@cache
def _rank_sums(n: int, m: int) -> Floats:
    """Return the probability of each count, out of n * m pairs (a, b), of those with a > b.

    Mann & Whitney 1947.
    """
    if n + m > _MAX_EXACT:
        return _normal(n * m, n * m * (n + m + 1) / 12)

    @cache
    def count(n: int, m: int) -> Floats:
        """The largest value is one of the n, above all m, or one of the m, above none."""
        if n == 0 or m == 0:
            return np.ones(1)
        orders = np.zeros(n * m + 1)
        above, below = count(n - 1, m), count(n, m - 1)
        orders[m : m + len(above)] += above
        orders[: len(below)] += below
        return orders

    for i in range(1, n + 1):  # ascending, which keeps the recursion shallow
        for j in range(1, m + 1):
            count(i, j)
    return count(n, m) / math.comb(n + m, n)


def _normal(largest: int, variance: float) -> Floats:
    """Return the normal approximation of both distributions, for many values."""
    normal = NormalDist(largest / 2, math.sqrt(variance))
    edges = np.array([normal.cdf(i + 0.5) for i in range(-1, largest + 1)])
    return np.diff(edges)
