"""safetensors files: the header checked strictly, each tensor read by position into its own array.

The library's own NumPy reader holds the file twice and refuses bfloat16; writing is the library's.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from tgen.errors import ModelError
from tgen.storage import files
from tgen.storage.disk_array import IN_MEMORY, Array, DiskArray, blocks

_MAX_HEADER = 25_000_000
_DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "?",
    **dict.fromkeys(("I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), "u1"),  # known, so that they are named
    "I16": "<i2",
    "U64": "<u8",
}
_NAMES = {np.dtype(_DTYPES[n]): n for n in ("F32", "F16", "F64", "I64", "I32", "U8", "U32", "BOOL")}
_FLOATS = {"F32", "F16", "BF16", "F64"}
_CHECKED = 1 << 20  # numbers that are looked at together
_DAMAGED = "the file is damaged or incomplete: fetch or train it again"


class Entry(NamedTuple):
    """One tensor's place in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # from the beginning of the file
    end: int


def serialize(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """A whole safetensors file; arrays must be contiguous."""
    return save(dict(arrays), metadata={"format": "pt"})


def serialize_weights(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """As `serialize`; here uint16 are the bits of bfloat16, which the library's NumPy does not
    know."""
    return b"".join(in_parts(arrays, uint16="BF16"))


def in_parts(
    arrays: Mapping[str, NDArray[Any]], *, uint16: str = "U16"
) -> list[bytes | memoryview]:
    """As `serialize`, byte for byte, but without a copy of the arrays: for what is large and saved
    often."""
    order = _aligned(arrays)
    shapes = {name: arrays[name].shape for name in order}
    kinds = {name: arrays[name].dtype for name in order}
    flat = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in order]
    header = _header(shapes, kinds, {"format": "pt"}, uint16=uint16)
    return [header, *(array.data for array in flat)]


def stream(vectors: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """A safetensors file of tokens and masks, (n,) each, that need not be in memory, in blocks."""
    order = _aligned(vectors)
    shapes = {name: (len(vectors[name]),) for name in order}
    yield _header(shapes, {name: vectors[name].dtype for name in order}, metadata)
    for name in order:
        for block in blocks(vectors[name]):
            yield block.tobytes()


def _aligned(arrays: Mapping[str, Any]) -> list[str]:
    """The names in an order that keeps all numbers aligned: the widest first, as the library's."""
    return sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))


def _header(
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, np.dtype[Any]],
    metadata: Mapping[str, str],
    *,
    uint16: str = "U16",
) -> bytes:
    """What stands before the tensors, which follow in the order of `shapes`."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * kinds[name].itemsize
        dtype = uint16 if kinds[name] == np.uint16 else _NAMES[kinds[name]]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_vectors(path: Path) -> dict[str, Array]:
    """What `stream` wrote; what is long stays on the disk."""
    found: dict[str, Array] = {}
    entries = read_header(path)
    file = files.by_position(path)
    for name, (dtype, shape, start, end) in entries.items():
        if len(shape) != 1:
            raise ModelError(f"{path}: {name} has {len(shape)} dimensions, not 1", _DAMAGED)
        vector = DiskArray(file, start, shape[0], _DTYPES[dtype])
        found[name] = vector if end - start > IN_MEMORY else vector[:]
    return found


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file; raises ModelError unless they cover it exactly."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = int.from_bytes(start, "little")
        refuse_pointer(path, start)
        if len(start) < 8 or not 2 <= n <= min(_MAX_HEADER, size - 8):
            raise ModelError(f"{path} is no safetensors file", _DAMAGED)
        header = file.read(n)
    try:
        table = json.loads(header, parse_constant=_no_constant)
        table.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + n) for name, value in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has an unreadable header: {error}", _DAMAGED) from None
    position = 8 + n
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            raise ModelError(f"{path} has a hole or an overlap at byte {position}", _DAMAGED)
        position = entry.end
    if position != size:
        raise ModelError(f"{path} has {size} bytes, its header says {position}", _DAMAGED)
    return entries


def read(
    path: Path, entries: Mapping[str, Entry], *, rename: Callable[[str], str] = str
) -> dict[str, NDArray[Any]]:
    """The arrays of these entries, bfloat16 as its uint16 bits, in memory of their own."""
    arrays: dict[str, NDArray[Any]] = {}
    with files.open_regular(path) as file:
        for name, entry in entries.items():
            array = np.empty(entry.shape, _DTYPES[entry.dtype])
            file.seek(entry.start)
            if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # type: ignore[attr-defined]
                raise ModelError(
                    f"{path} ended while it was read", "something else is writing to it"
                )
            arrays[rename(name)] = array
    return arrays


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raises ModelError for what Git LFS leaves in a file's place until it is fetched."""
    if content.startswith(b"version "):
        raise ModelError(f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`")


def check_types(path: Path, entries: Mapping[str, Entry]) -> None:
    """Raises ModelError where weights are no floating numbers, but quantised."""
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: {name} is {entry.dtype}",
                "tgen reads float32, float16 and bfloat16: fetch the model before it was quantised",
            )


def check_finite(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raises ModelError where a weight is infinite or NaN; uint16 are the bits of bfloat16."""
    for name, array in arrays.items():
        if not _all_finite(array):
            raise ModelError(
                f"{str(path)!r}: {name} holds numbers that are not finite",
                "its training went wrong or the file is damaged: use an earlier one",
            )


def _all_finite(array: NDArray[Any]) -> bool:
    flat = array.reshape(-1)
    parts = (flat[i : i + _CHECKED] for i in range(0, len(flat), _CHECKED))
    if array.dtype == np.uint16:
        return all((part & 0x7F80).max() < 0x7F80 for part in parts)
    return all(np.isfinite(part).all() for part in parts)


def _entry(value: Any, base: int) -> Entry:
    dtype, shape = value["dtype"], tuple(value["shape"])
    start, end = value["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError("sizes must be whole numbers")
    if end - start != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError("a tensor's bytes do not match its shape")
    return Entry(dtype, shape, base + start, base + end)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
