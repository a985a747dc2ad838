"""The chi-squared test of counts."""

import math

import torch


def critical_value(degrees, alpha):
    """Return the critical value of chi-square at level alpha (Wilson and Hilferty 1931)."""
    z = -float(torch.special.ndtri(torch.tensor(alpha, dtype=torch.float64)))
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
