"""The difference of two models' scores on the same text, and whether it may be chance."""

import math

import numpy as np

from tgen.reports.score import ScoreDifference
from tgen.scoring.document_blocks import Floats
from tgen.scoring.totals import MIN_UNITS, Units

_MAX_EXACT = 20  # differences whose 2^n signs are all tried; above, their sum is almost normal


def compare(one: Units, other: Units) -> ScoreDifference:
    """Return the bits per byte of `one` minus those of `other`, of the same units of text."""
    assert one.unit == other.unit
    assert np.array_equal(one.n_bytes, other.n_bytes)
    difference = Units(one.unit, one.nats - other.nats, one.n_bytes)
    enough = len(difference.nats) >= MIN_UNITS
    return ScoreDifference(
        bits_per_byte=float(difference.nats.sum() / math.log(2) / difference.n_bytes.sum()),
        standard_error=difference.standard_error,
        p_value=permutation_p_value(difference.nats) if enough else None,
        unit=difference.unit,
        n_units=len(difference.nats),
    )


def permutation_p_value(differences: Floats) -> float:
    """Return the two-sided p-value of the paired permutation test of differences (n,).

    If two models are equally good, each difference is as likely with either sign (Pitman 1937). The
    p-value is the probability of a sum as far from 0 as the one found: exact up to 20 differences,
    a normal approximation above.
    """
    sizes = np.abs(differences)
    total, scale = abs(float(differences.sum())), float(sizes.sum())
    if scale == 0:
        return 1.0
    if len(sizes) > _MAX_EXACT:
        return math.erfc(total / math.sqrt(2 * float(sizes @ sizes)))
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums - size, sums + size])
    return float((np.abs(sums) >= total - 1e-12 * scale).mean())
