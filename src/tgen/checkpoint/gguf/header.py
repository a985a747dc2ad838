"""GGUF headers, read within the file's size: no count in them is trusted.

The package gguf maps the whole file and trusts it; here it is only used for rare types.
"""

import math
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.checkpoint.gguf.quantized_matrix import BLOCKS, QuantizedMatrix, Rows
from tgen.checkpoint.git_lfs import reject_lfs_pointer
from tgen.checkpoint.safetensors_file import read_bytes
from tgen.checkpoint.stored_models import gguf_parts, join_names
from tgen.errors import ModelError
from tgen.storage import files

MAGIC = b"GGUF"
_MIXED = "download all parts again: they are of different files"
_DAMAGED = "download or export the file again: it is damaged or incomplete"
_STRUCT_CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # by GGUF value type
_STRING, _ARRAY = 8, 9
_MAX_NAME, _MAX_DIMENSIONS = 100, 4
_MAX_HEADER, _MAX_STRINGS = 64 << 20, 1 << 21  # bytes, and strings or list items: far above models'
_ALIGNMENT = 32
_FIRST_READ = 1 << 20  # bytes
# Lists of at least this many strings are first read as strings of this many bytes on average.
_MANY, _SHORT = 16, 48
POSITIONS = "position_embd.weight"  # looked up by row, so never kept quantized
_PLAIN = {0: "<f4", 1: "<f2", 30: "<u2"}  # read without the package
_PLAIN_NAMES = {0: "float32", 1: "float16", 30: "bfloat16"}

Value: TypeAlias = "int | float | bool | str | list[str] | array[Any]"


class TensorEntry(NamedTuple):
    """Type, shape and location of one tensor in a file."""

    ggml_type: int
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    n_bytes: int
    path: Path  # the file, one of several if the model is split

    @property
    def quantized(self) -> bool:
        """Whether the values are stored in fewer bits than a number of their own takes."""
        return self.ggml_type not in _PLAIN


class Header(NamedTuple):
    """A model's fields and tensors."""

    fields: dict[str, Value]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> Header:
    """Read the fields and tensors of a file, or of all parts of a model, of which `path` is any.

    Raises ModelError unless all parts are there and everything lies inside them.
    """
    header = _read_file(path)
    n_parts = header.fields.get("split.count", 1)
    if n_parts in (0, 1):
        return header
    parts = gguf_parts(path)
    if len(parts) != n_parts:
        raise ModelError(
            f"{path} is one of {n_parts!r} parts, but its name does not say which"[:300],
            "name the parts as llama-gguf-split does: NAME-00001-of-0000N.gguf",
        )
    if missing := [part.name for part in parts if not part.exists()]:
        lacks = f"{join_names(missing, 3)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ModelError(
            f"{path} is one of {n_parts} parts, and {lacks} beside it",
            "download the missing parts into the same directory",
        )
    headers = [_read_file(part) for part in parts]
    tensors: dict[str, TensorEntry] = {}
    for i, (part, (fields, own)) in enumerate(zip(parts, headers, strict=True)):
        if fields.get("split.no") != i or fields.get("split.count") != n_parts:
            number = f"{fields.get('split.no')!r} of {fields.get('split.count')!r}"[:100]
            raise ModelError(f"{part} has the number {number} (expected {i} of {n_parts})", _MIXED)
        if twice := tensors.keys() & own.keys():
            raise ModelError(f"{part} has {min(twice)}, and so has another part", _MIXED)
        tensors |= own
    expected = headers[0].fields.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ModelError(
            f"the parts of {path} have {len(tensors)} tensors (expected {expected!r})"[:300], _MIXED
        )
    return Header(headers[0].fields, tensors)


def _read_file(path: Path) -> Header:
    with files.open_regular(path) as file:
        source = _HeaderReader(path, file, os.fstat(file.fileno()).st_size)
        magic = source.take(4)
        if magic == b"vers":
            reject_lfs_pointer(path, magic + source.take(4))
        if magic != MAGIC:
            hint = "name a model directory or a file ending in .gguf"
            if path.suffix == ".safetensors":
                hint = f"name its directory: {path.parent}"
            raise ModelError(f"{path} is not a GGUF file", hint)
        version = source.number("I")
        if version in (2 << 24, 3 << 24):
            raise ModelError(
                f"{path} has big-endian numbers", "convert it with gguf_convert_endian of gguf"
            )
        if version not in (2, 3):
            raise ModelError(f"{path} has GGUF version {version}", "convert it to version 2 or 3")
        n_tensors, n_fields = source.number("Q"), source.number("Q")
        fields = {}
        for _ in range(n_fields):
            name = source.string()
            fields[name] = source.value(source.number("I"))
        tensors = [source.tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise source.damaged(f"has general.alignment={alignment!r}"[:200])
        start = -(-source.position // alignment) * alignment
        return Header(fields, _locate(source, tensors, start))


def read_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, Array | QuantizedMatrix]:
    """Read arrays: float32, float16, bfloat16 as uint16 bits. Quantized matrices stay quantized;
    other quantized tensors, which llama.cpp does not write, are dequantized."""
    arrays: dict[str, Array | QuantizedMatrix] = {}
    for name, entry in entries.items():
        data = read_bytes(entry.path, entry.start, entry.n_bytes)
        if entry.ggml_type in _PLAIN:
            arrays[name] = data.view(_PLAIN[entry.ggml_type]).reshape(entry.shape)
        else:
            rows = data.reshape(math.prod(entry.shape[:-1]), -1)
            matrix = QuantizedMatrix([Rows(rows, entry.ggml_type)], entry.shape[-1])
            whole = len(entry.shape) != 2 or name == POSITIONS
            arrays[name] = matrix[:].reshape(entry.shape) if whole else matrix
    return arrays


class _HeaderReader:
    """A sequential reader of a header, never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.position = self.n_strings = 0
        self._data = b""  # the beginning of the file, as far as it was needed

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} {reason}", _DAMAGED)

    def take(self, n: int) -> bytes:
        start, end = self.position, self.position + n
        if n > self.size - start:
            raise self.damaged(f"ends at byte {self.size}, inside its header")
        if end > _MAX_HEADER:
            raise self.damaged(f"has a header of more than {_MAX_HEADER:,} bytes")
        if end > len(self._data):
            self._read_up_to(end)
            if end > len(self._data):
                raise self.damaged("shrank while it was read")
        self.position = end
        return self._data[start:end]

    def _read_up_to(self, end: int) -> None:
        n = len(self._data)  # at least doubled, so that all copies together are of linear size
        self._data += self.file.read(min(max(end - n, n, _FIRST_READ), _MAX_HEADER - n))

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, n: int) -> list[str]:
        """Return the next strings; bytes that are not UTF-8 become U+FFFD."""
        self.n_strings += n
        if self.n_strings > _MAX_STRINGS:
            raise self.damaged(f"has more than {_MAX_STRINGS:,} strings in its header")
        texts = self._short_strings(n) if n >= _MANY else None
        if texts is None:
            raw = (self.take(self.number("Q")) for _ in range(n))
            texts = [text.decode("utf-8", errors="replace") for text in raw]
        return texts

    def _short_strings(self, n: int) -> list[str] | None:
        """Return the next strings, without a loop over them; None unless that is exact.

        The length of a string of 1 to 255 bytes is that byte and seven zeros. If each such byte is
        followed by as many bytes as it says, and then by the next, they are the strings' lengths.
        """
        start = self.position
        if len(self._data) < start + _SHORT * n:
            self._read_up_to(min(start + _SHORT * n, self.size))
        region = np.frombuffer(bytearray(self._data[start : start + _SHORT * n]), np.uint8)
        if len(region) < 8:
            return None
        is_zero = region == 0
        is_length = is_zero[1:-6].copy()  # followed by seven zeros
        for i in range(2, 8):
            is_length &= is_zero[i : len(is_zero) - 7 + i]
        at = np.flatnonzero(is_length)[:n]
        lengths = region[at].astype(np.int64)
        ends = at + 8 + lengths
        if len(at) < n or at[0] or (ends[:-1] != at[1:]).any() or ends[-1] > len(region):
            return None
        region[at] = ord("\n")  # so that all of it is UTF-8, if the strings are
        self.position = start + int(ends[-1])
        text = region[: ends[-1]].tobytes().decode("utf-8", errors="replace")
        return text[8:].split("\n" + bytes(7).decode())

    def value(self, value_type: int) -> Value:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            item_type, n = self.number("I"), self.number("Q")
            if n > _MAX_STRINGS:
                raise self.damaged(f"has a list of {n:,} values (limit {_MAX_STRINGS:,})")
            if item_type in _STRUCT_CODES:
                numbers = array(_STRUCT_CODES[item_type].replace("?", "B"))
                numbers.frombytes(self.take(n * numbers.itemsize))
                if sys.byteorder == "big":
                    numbers.byteswap()
                return numbers
            if item_type == _STRING:
                return self.strings(n)
            raise self.damaged(f"has a list of values of unknown type {item_type}")
        if value_type not in _STRUCT_CODES:
            raise self.damaged(f"has a value of unknown type {value_type}")
        number: Value = self.number(_STRUCT_CODES[value_type])
        return number

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, ggml type, shape (GGUF stores the axes in reverse) and offset."""
        name, n = self.string(), self.number("I")
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self.damaged(f"has a tensor named {name[:_MAX_NAME]!r}")
        if not 1 <= n <= _MAX_DIMENSIONS:
            raise self.damaged(f"has a tensor of {n} dimensions")
        shape = tuple(self.number("Q") for _ in range(n))[::-1]
        ggml_type, offset = self.number("I"), self.number("Q")
        return name, ggml_type, shape, offset


def _locate(
    source: _HeaderReader, tensors: list[tuple[str, int, tuple[int, ...], int]], start: int
) -> dict[str, TensorEntry]:
    """Locate each tensor; none may extend past the end of the file or into another."""
    entries: dict[str, TensorEntry] = {}
    for name, ggml_type, shape, offset in tensors:
        if name in entries:
            raise source.damaged(f"has two tensors {name!r}")
        try:
            _, n_values, n_bytes = describe_type(ggml_type)
        except ModelError as error:
            raise ModelError(f"{source.path}: {error.message}", error.hint) from None
        if shape[-1] % n_values:
            raise source.damaged(
                f"has {name} of shape {list(shape)}, but stores it in blocks of {n_values}"
            )
        n_bytes *= math.prod(shape) // n_values
        if n_bytes > source.size - start - offset:
            raise source.damaged(
                f"has {source.size} bytes, too few for {name} of shape {list(shape)}"
            )
        entries[name] = TensorEntry(ggml_type, shape, start + offset, n_bytes, source.path)
    end = 0
    for entry in sorted(entries.values(), key=lambda e: e.start):
        if entry.start < end:
            raise source.damaged(f"has two tensors at byte {entry.start}")
        end = entry.start + entry.n_bytes
    return entries


@cache
def describe_type(ggml_type: int) -> tuple[str, int, int]:
    """Return a ggml type's name, such as float16 or q8_0, and its block size in values and in
    bytes. Raises ModelError for types that are not supported."""
    if ggml_type in _PLAIN:
        return _PLAIN_NAMES[ggml_type], 1, np.dtype(_PLAIN[ggml_type]).itemsize
    if ggml_type in BLOCKS:
        return BLOCKS[ggml_type][:3]
    import gguf

    known = {member.value: member for member in gguf.GGMLQuantizationType}
    name = known[ggml_type].name if ggml_type in known else f"number {ggml_type}"
    try:
        n_values, n_bytes = gguf.GGML_QUANT_SIZES[known[ggml_type]]
        gguf.quants.dequantize(np.zeros((1, n_bytes), np.uint8), known[ggml_type])
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"weights of GGUF type {name} are not supported",
            "export it with another type, for example Q8_0",
        ) from None
    return name.lower(), int(n_values), int(n_bytes)
