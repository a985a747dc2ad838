"""From the seconds of several trials to a median and its spread."""

from collections.abc import Sequence

import numpy as np

from tgen.reports import Timing


def timing(seconds: Sequence[float]) -> Timing:
    """Median and 10th to 90th percentile: one slow trial moves neither far."""
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Timing(seconds=list(seconds), median=float(median), low=float(low), high=float(high))
