"""Matrix rows in the kernels' layout: panels of rows in one of the dtypes, and rounding to it."""

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Array, Floats, to_bfloat16, to_float32
from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT32, GROUP, INT4, INT8, PANEL, QUAD

_LARGEST = np.float16(65504)
_FITS = 2  # least-squares fits of a 4-bit group, each to the integers of the previous one


def to_panels(rows: Array, dtype: int) -> Array:
    """Pack (m, n), with zeros to whole panels: float32 as (m / PANEL, n, PANEL), bfloat16 as
    (m / PANEL, n / 2, PANEL, 2), integers as (m / PANEL, n / GROUP, bytes of a group).

    The result may be a view of `rows`.
    """
    if dtype == INT8:
        return int8_panels(*to_int8(rows))
    if dtype == INT4:
        return int4_panels(*to_int4(rows))
    rows = _whole_panels(rows)
    rows = to_float32(rows) if dtype == FLOAT32 else to_bfloat16(rows)
    step = 2 if dtype == BFLOAT16 else 1
    panels = rows.reshape(-1, PANEL, rows.shape[1] // step, step).swapaxes(1, 2)
    return panels if step > 1 else panels[..., 0]


def to_int8(rows: Array) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantize (m, n): integers from -127 to 127 (m, n), and a scale per group (m, n / GROUP).

    A scale is the largest magnitude / 127, rounded up to float16.
    """
    groups = to_float32(rows).reshape(len(rows), -1, GROUP)
    exact = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    scales = _to_float16(exact)
    with np.errstate(over="ignore"):
        above = np.nextafter(scales, np.float16(np.inf))
    scales = np.minimum(np.where(scales < exact, above, scales), _LARGEST)
    wide = scales.astype(np.float32)
    numbers = np.rint(np.clip(groups / np.where(wide > 0, wide, 1), -127, 127)).astype(np.int8)
    return numbers.reshape(len(rows), -1), wide[:, :, 0].astype(np.float16)


def to_int4(rows: Array) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Quantize (m, n) to scale * integer + minimum: integers from 0 to 15 (m, n), and a scale and a
    minimum per group (m, n / GROUP).

    They begin as the range of the group, and are then fitted to its integers by least squares; of
    all, those with the smallest squared error are kept.
    """
    groups = to_float32(rows).reshape(-1, GROUP)
    minima = groups.min(axis=1)
    scales = (groups.max(axis=1) - minima) / np.float32(15)
    best: tuple[Array, ...] = _round_to_int4(groups, scales, minima)
    for _ in range(_FITS):
        numbers, error = best[0], best[3]
        fitted = _round_to_int4(groups, *_fit(groups, numbers))
        better = fitted[3] < error
        best = tuple(
            np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(fitted, best, strict=True)
        )
    numbers, *factors, _ = best
    scale, minimum = (factor.reshape(len(rows), -1) for factor in factors)
    return numbers.reshape(rows.shape), scale, minimum


def _round_to_int4(groups: Floats, scales: Floats, minima: Floats) -> tuple[Array, ...]:
    """Return the integers, scales and minima in float16, and the squared error of each group."""
    scale, minimum = _to_float16(scales), _to_float16(minima)
    step, start = (a.astype(np.float32)[:, None] for a in (scale, minimum))
    numbers = np.rint((groups - start) / np.where(step == 0, 1, step))
    np.clip(numbers, 0, 15, out=numbers)
    errors = step * numbers + start - groups
    return numbers.astype(np.uint8), scale, minimum, np.einsum("ij,ij->i", errors, errors)


def _fit(groups: Floats, numbers: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Return the scale and the minimum of each group with the smallest squared error."""
    x = numbers.astype(np.float32)
    centered = x - x.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", centered, centered)
    scales = np.einsum("ij,ij->i", centered, groups) / np.where(variance == 0, 1, variance)
    return scales, groups.mean(axis=1) - scales * x.mean(axis=1)


def _to_float16(numbers: Array) -> NDArray[np.float16]:
    return np.clip(numbers, -np.float32(_LARGEST), np.float32(_LARGEST)).astype(np.float16)


def int8_panels(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Per group, four columns of all rows after each other, each number 128 larger; then the scales
    of the rows."""
    return _groups(_quads(numbers.view(np.uint8) ^ 0x80), scales)


def int4_panels(
    numbers: NDArray[np.uint8], scales: NDArray[np.float16], minima: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Per group, eight columns of all rows after each other, the first four in the low halves of
    the bytes; then the scales and the minima of the rows."""
    quads = _quads(numbers)
    return _groups(quads[:, :, 0::2] | quads[:, :, 1::2] << 4, scales, minima)


def _whole_panels(rows: Array) -> Array:
    missing = -len(rows) % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _quads(numbers: Array) -> Array:
    """(m, n) -> (m / PANEL, n / GROUP, GROUP / QUAD, PANEL, QUAD)."""
    panels = _whole_panels(numbers).reshape(
        -1, PANEL, numbers.shape[1] // GROUP, GROUP // QUAD, QUAD
    )
    return panels.transpose(0, 2, 3, 1, 4)


def _groups(quads: Array, *factors: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Join the bytes of each group and its factors, which are (m, n / GROUP)."""
    n_panels, n_groups = quads.shape[:2]
    parts = [quads.reshape(n_panels, n_groups, -1)]
    for factor in factors:
        columns = _whole_panels(factor).reshape(n_panels, PANEL, n_groups).swapaxes(1, 2)
        rows = np.ascontiguousarray(columns)
        parts.append(rows.view(np.uint8))
    return np.concatenate(parts, axis=2)
