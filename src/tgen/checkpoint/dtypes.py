"""Numbers in other types: float32, float16, and bfloat16 as its uint16 bits."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tgen.errors import ModelError

Dtype = Literal["float32", "float16", "bfloat16"]
Array = NDArray[Any]
Floats = NDArray[np.float32]


def dtype_of(array: Array) -> Dtype:
    """What the numbers of an array are stored as."""
    kinds: dict[str, Dtype] = {"uint16": "bfloat16", "float16": "float16"}
    return kinds.get(array.dtype.name, "float32")


def to_float32(array: Array) -> Floats:
    """float32, float16 or bfloat16 bits -> float32: exact, and no copy where it is that."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def cast(name: str, array: Array, dtype: Dtype) -> Array:
    """The array in `dtype`, rounded to nearest, ties to even; no copy where it is that already.

    Raises ModelError, with the tensor's `name`, for finite numbers that are too large for `dtype`.
    """
    if dtype_of(array) == dtype:
        return array
    wide = to_float32(array)
    if dtype == "float32":
        return wide
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16) if dtype == "float16" else _to_bfloat16(wide)
    if not np.isfinite(to_float32(narrow)).all() and np.isfinite(wide).all():
        largest = float(np.abs(wide).max())
        raise ModelError(f"{name} holds {largest:.4g}: too large for {dtype}", "choose --type f32")
    return narrow


def _to_bfloat16(wide: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)  # NaN must not round to infinity
