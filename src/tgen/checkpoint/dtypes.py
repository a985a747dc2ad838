"""Conversion between float32, float16 and bfloat16, whose bits are stored as uint16."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tgen.errors import ModelError

Dtype = Literal["float32", "float16", "bfloat16"]
Array = NDArray[Any]
Floats = NDArray[np.float32]


def dtype_of(array: Array) -> Dtype:
    """Return the dtype that an array's values are stored in."""
    names: dict[str, Dtype] = {"uint16": "bfloat16", "float16": "float16"}
    return names.get(array.dtype.name, "float32")


def main_dtype(arrays: Iterable[Array]) -> Dtype:
    """Return the dtype of most values; float32 without arrays."""
    sizes: Counter[Dtype] = Counter()
    for array in arrays:
        sizes[dtype_of(array)] += array.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def to_float32(array: Array) -> Floats:
    """Convert float32, float16 or bfloat16 bits to float32: exact; no copy of float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def stack(arrays: Sequence[Array]) -> Array:
    """Concatenate on the first axis, as float32 if the dtypes differ; no copy of a single array."""
    if len(arrays) == 1:
        return arrays[0]
    if len({dtype_of(array) for array in arrays}) > 1:
        arrays = [to_float32(array) for array in arrays]
    return np.concatenate(arrays)


def to_bfloat16(array: Array) -> NDArray[np.uint16]:
    """Convert to bfloat16 bits, rounding to nearest, ties to even; no copy of bfloat16."""
    if array.dtype == np.uint16:
        return array
    wide = np.ascontiguousarray(to_float32(array))
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)  # NaN must not round to infinity


def cast(name: str, array: Array, dtype: Dtype) -> Array:
    """Convert to `dtype`, rounding to nearest, ties to even; no copy if nothing changes.

    Raises ModelError, with the tensor's `name`, if a finite value is too large for `dtype`.
    """
    if dtype_of(array) == dtype:
        return array
    wide = to_float32(array)
    if dtype == "float32":
        return wide
    with np.errstate(over="ignore"):
        narrow: Array = wide.astype(np.float16) if dtype == "float16" else to_bfloat16(wide)
    if not np.isfinite(to_float32(narrow)).all() and np.isfinite(wide).all():
        largest = float(np.abs(wide).max())
        raise ModelError(f"{name}: {largest:.4g} is too large for {dtype}", "use --type f32")
    return narrow
