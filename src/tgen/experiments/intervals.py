"""The 95% confidence interval of a mean over few runs, by Student's t distribution."""

import math
from collections.abc import Sequence
from functools import cache

from tgen.reports.comparison import MeanInterval

_CONFIDENCE = 0.95


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of values and the interval for the mean of their normal distribution."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return MeanInterval(mean=mean, half_width=math.inf, n=n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return MeanInterval(mean=mean, half_width=student_t(n - 1) * math.sqrt(variance / n), n=n)


@cache
def student_t(freedom: int) -> float:
    """Return t so that a t-distributed variable is within -t and t in 95% of all cases."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection to the precision of a float
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < _CONFIDENCE else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of |t| < tan(angle) sqrt(freedom).

    Abramowitz & Stegun 1964, equations 26.7.3 and 26.7.4.
    """
    is_odd, cosine = freedom % 2, math.cos(angle)
    term = total = cosine if is_odd else 1.0
    for i in range(3 if is_odd else 2, freedom, 2):
        term *= (i - 1) / i * cosine**2
        total += term
    if not is_odd:
        return math.sin(angle) * total
    total = math.sin(angle) * total if freedom > 1 else 0.0
    return 2 / math.pi * (angle + total)
