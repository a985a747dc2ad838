"""safetensors files: headers are checked strictly, each tensor is read into its own array.

The library's NumPy reader needs twice the file's size in memory and rejects bfloat16.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from tgen.checkpoint.git_lfs import reject_lfs_pointer
from tgen.errors import ModelError
from tgen.storage import files
from tgen.storage.disk_array import IN_MEMORY, Array, DiskArray, blocks

_MAX_HEADER = 25_000_000  # bytes
_MAX_SIZE, _MAX_DIMENSIONS = 1 << 60, 32  # limits of NumPy
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
    **dict.fromkeys(("I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), "u1"),  # only named in an error
    "I16": "<i2",
    "U64": "<u8",
}
ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in _DTYPES.items()}
_NAMES = {np.dtype(_DTYPES[n]): n for n in ("F32", "F16", "F64", "I64", "I32", "U8", "U32", "BOOL")}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_CHECK_BLOCK = 1 << 20  # values checked at a time
_READERS = 4  # threads for large files: the pages of new memory cost more than the copy
_LARGE = 1 << 24  # bytes
_DAMAGED = "download the file or train the model again: the file is damaged or incomplete"


class TensorEntry(NamedTuple):
    """Dtype, shape and location of one tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int
    strides: tuple[int, ...] | None = None  # in values, if they are not in the order of the axes


class StoredTensor:
    """A tensor in one file, or by rows in several; rows are read when a slice is taken."""

    def __init__(self, pieces: Sequence[tuple[Path, TensorEntry]]) -> None:
        """Take the pieces in their order; raise ModelError if they do not fit together."""
        path, (dtype, shape, *_) = pieces[0]
        for path, entry in pieces[1:]:
            if entry.dtype != dtype or not shape or entry.shape[1:] != shape[1:]:
                raise ModelError(f"{path} does not continue {pieces[0][0]}", _DAMAGED)
        self._pieces = pieces
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[dtype])
        n_rows = sum(entry.shape[0] for _, entry in pieces) if shape else 0
        self.shape = (n_rows, *shape[1:]) if shape else shape

    def __getitem__(self, rows: slice | EllipsisType) -> NDArray[Any]:
        """Read a slice of rows with step 1, or all of the tensor."""
        if rows is ...:
            if len(self._pieces) == 1:
                return _read_array(*self._pieces[0])
            rows = slice(None)
        first, last, _ = rows.indices(self.shape[0])
        array: NDArray[Any] = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        at = 0  # row at which the piece begins
        for path, entry in self._pieces:
            start, end = max(first, at), min(last, at + entry.shape[0])
            if start < end:
                rows_of_piece = array[start - first : end - first]
                _read_into(rows_of_piece, path, entry.start + (start - at) * row_bytes)
            at += entry.shape[0]
        return array


def open_tensors(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of files by name; those in several are rows in the order of the files."""
    pieces: dict[str, list[tuple[Path, TensorEntry]]] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            pieces.setdefault(name, []).append((path, entry))
    return {name: StoredTensor(parts) for name, parts in pieces.items()}


def serialize(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a safetensors file; arrays must be contiguous."""
    return save(dict(arrays), metadata={"format": "pt"})


def serialize_in_parts(
    arrays: Mapping[str, NDArray[Any]],
    *,
    uint16: str = "U16",
    metadata: Mapping[str, str] | None = None,
) -> list[bytes | memoryview]:
    """Serialize as `serialize`, byte for byte, but without copying: for large, frequent saves.

    `uint16` is the dtype of uint16 arrays; "BF16" for bits of bfloat16, which NumPy lacks.
    """
    header = _make_header(arrays, metadata or {"format": "pt"}, uint16)
    ordered = (np.ascontiguousarray(arrays[name]) for name in _aligned(arrays))
    return [header, *(array.reshape(-1).view(np.uint8).data for array in ordered)]


def serialize_vectors(vectors: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield a safetensors file of vectors, (n,), in blocks; they may be larger than the memory."""
    yield _make_header(vectors, metadata, "U16")
    for name in _aligned(vectors):
        for block in blocks(vectors[name]):
            yield block.tobytes()


def _aligned(arrays: Mapping[str, Any]) -> list[str]:
    """Names in the library's order, widest dtype first, which keeps all values aligned."""
    return sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))


def _make_header(arrays: Mapping[str, Array], metadata: Mapping[str, str], uint16: str) -> bytes:
    """Return the bytes before the arrays, which follow in the order of `_aligned`."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in _aligned(arrays):
        array = arrays[name]
        shape = [len(array)] if isinstance(array, DiskArray) else [*array.shape]
        start, end = end, end + math.prod(shape) * array.dtype.itemsize
        dtype = uint16 if array.dtype == np.uint16 else _NAMES[array.dtype]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_vectors(path: Path) -> dict[str, Array]:
    """Read what `serialize_vectors` wrote; long vectors stay on disk."""
    vectors: dict[str, Array] = {}
    entries = read_header(path)
    file = files.open_random_access(path)
    for name, (dtype, shape, start, end, _) in entries.items():
        if len(shape) != 1:
            raise ModelError(f"{path}: {name} has {len(shape)} dimensions (expected 1)", _DAMAGED)
        vector = DiskArray(file, start, shape[0], _DTYPES[dtype])
        vectors[name] = vector if end - start > IN_MEMORY else vector[:]
    return vectors


def read_header(path: Path, *, hint: str = _DAMAGED) -> dict[str, TensorEntry]:
    """Return a file's tensors; raises ModelError unless they cover the file exactly."""
    return _read_table(path, hint)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """Return a file's metadata; raises ModelError as `read_header`."""
    return _read_table(path, _DAMAGED)[1]


def _read_table(path: Path, hint: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = int.from_bytes(start, "little")
        reject_lfs_pointer(path, start)
        if len(start) < 8 or not 2 <= n <= min(_MAX_HEADER, size - 8):
            raise ModelError(f"{path} is not a safetensors file", hint)
        header = file.read(n)
    try:
        table = json.loads(header, parse_constant=_reject_constant)
        metadata = table.pop("__metadata__", None)
        entries = {name: _parse_entry(value, 8 + n) for name, value in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has an unreadable header: {error}", hint) from None
    position = 8 + n
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            raise ModelError(f"{path} has a hole or an overlap at byte {position}", hint)
        position = entry.end
    if position != size:
        raise ModelError(f"{path} has {size} bytes (expected {position})", hint)
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return entries, {key: value for key, value in texts if isinstance(value, str)}


def read_arrays(
    path: Path, entries: Mapping[str, TensorEntry], *, rename: Callable[[str], str] = str
) -> dict[str, NDArray[Any]]:
    """Read these entries into memory; bfloat16 as its uint16 bits."""
    read = partial(_read_array, path)
    if sum(entry.end - entry.start for entry in entries.values()) < _LARGE:
        return {rename(name): read(entry) for name, entry in entries.items()}
    from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

    with ThreadPoolExecutor(_READERS) as pool:
        arrays = pool.map(read, entries.values())
        return {rename(name): array for name, array in zip(entries, arrays, strict=True)}


def _read_array(path: Path, entry: TensorEntry) -> NDArray[Any]:
    values = read_bytes(path, entry.start, entry.end - entry.start).view(_DTYPES[entry.dtype])
    if entry.strides is None:
        return values.reshape(entry.shape)
    steps = [values.itemsize * stride for stride in entry.strides]
    return np.lib.stride_tricks.as_strided(values, entry.shape, steps).copy()


def read_bytes(path: Path, start: int, n: int) -> NDArray[np.uint8]:
    """Return a part of a file; raises ModelError if the file has become too short."""
    data = np.empty(n, np.uint8)
    _read_into(data, path, start)
    return data


def _read_into(array: NDArray[Any], path: Path, start: int) -> None:
    """Fill a contiguous array with the bytes of a file from `start` on."""
    with files.open_regular(path) as file:
        file.seek(start)
        if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # type: ignore[attr-defined]
            raise ModelError(f"{path} shrank while it was read", "close programs that write it")


def check_float_dtypes(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError if weights are not floating-point numbers but quantized."""
    for name, entry in entries.items():
        if entry.dtype not in FLOATS:
            raise ModelError(
                f"{path}: {name} is {entry.dtype}",
                "download the unquantized model (float32, float16 or bfloat16)",
            )


def check_finite(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ModelError if a weight is infinite or NaN; uint16 arrays are bfloat16 bits."""
    for name, array in arrays.items():
        if not _all_finite(array):
            raise not_finite_error(path, name)


def not_finite_error(path: Path, name: str) -> ModelError:
    """Return the error for a weight that is infinite or NaN."""
    return ModelError(
        f"{str(path)!r}: {name} contains infinite or NaN values",
        "training failed or the file is damaged: use an earlier model",
    )


def _all_finite(array: NDArray[Any]) -> bool:
    flat = array.reshape(-1)
    parts = (flat[i : i + _CHECK_BLOCK] for i in range(0, len(flat), _CHECK_BLOCK))
    if array.dtype == np.uint16:
        return all((part & 0x7F80).max() < 0x7F80 for part in parts)
    return all(np.isfinite(part).all() for part in parts)


def _parse_entry(value: Any, base: int) -> TensorEntry:
    dtype, shape = value["dtype"], tuple(value["shape"])
    start, end = value["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not all(type(n) is int and 0 <= n < _MAX_SIZE for n in (*shape, start, end)):
        raise ValueError("sizes must be non-negative integers")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions (limit {_MAX_DIMENSIONS})")
    if end - start != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError("a tensor's size does not match its shape")
    return TensorEntry(dtype, shape, base + start, base + end)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
