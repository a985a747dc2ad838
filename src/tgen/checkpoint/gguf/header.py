"""A GGUF file's header, read within the file's size: no count in it is believed before.

The package gguf maps the whole file and trusts it; here it only dequantises.
"""

import math
import os
import struct
import sys
from array import array
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from tgen.checkpoint import safetensors_file as tensors
from tgen.checkpoint.dtypes import Array
from tgen.checkpoint.gguf.writer import require_package
from tgen.errors import ModelError
from tgen.storage import files

MAGIC = b"GGUF"
_DAMAGED = "the file is damaged or incomplete: fetch or export it again"
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's letters
_STRING, _ARRAY = 8, 9
_MAX_NAME, _MAX_DIMENSIONS = 100, 4
_MAX_HEADER, _MAX_TEXTS = 64 << 20, 1 << 21  # far above what models have
_ALIGNMENT = 32
_PLAIN = {0: "<f4", 1: "<f2", 30: "<u2"}  # float32, float16, bfloat16: read without the package

Value: TypeAlias = "int | float | bool | str | list[str] | array[Any]"


class Entry(NamedTuple):
    """One tensor's place in a file."""

    kind: int  # ggml's number for how it is stored
    shape: tuple[int, ...]
    start: int  # from the beginning of the file
    n_bytes: int


class Header(NamedTuple):
    """What stands before the weights."""

    fields: dict[str, Value]
    tensors: dict[str, Entry]


def read_header(path: Path) -> Header:
    """Fields and tensors of a file; raises ModelError unless all of it lies inside the file."""
    with files.open_regular(path) as file:
        source = _Source(path, file, os.fstat(file.fileno()).st_size)
        magic = source.take(4)
        if magic == b"vers":
            tensors.refuse_pointer(path, magic + source.take(4))
        if magic != MAGIC:
            raise ModelError(
                f"{path} is no GGUF file", "give a model directory, or a file that ends in .gguf"
            )
        version = source.number("I")
        if version not in (2, 3):
            raise ModelError(f"{path} is GGUF of version {version}", "tgen reads versions 2 and 3")
        n_tensors, n_fields = source.number("Q"), source.number("Q")
        fields = {}
        for _ in range(n_fields):
            name = source.text()
            fields[name] = source.value(source.number("I"))
        described = [source.tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise source.damaged(f"has general.alignment={alignment!r}"[:200])
        start = -(-source.position // alignment) * alignment
        return Header(fields, _place(source, described, start))


def read_tensors(path: Path, entries: dict[str, Entry]) -> dict[str, Array]:
    """The arrays of these entries: float32, float16, bfloat16 as its bits, or dequantised."""
    arrays: dict[str, Array] = {}
    with files.open_regular(path) as file:
        for name, entry in entries.items():
            data = np.empty(entry.n_bytes, np.uint8)
            file.seek(entry.start)
            if file.readinto(data) != data.nbytes:  # type: ignore[attr-defined]
                raise ModelError(
                    f"{path} ended while it was read", "something else is writing to it"
                )
            if entry.kind in _PLAIN:
                arrays[name] = data.view(_PLAIN[entry.kind]).reshape(entry.shape)
            else:
                gguf = require_package("reading these weights")
                rows = data.reshape(*entry.shape[:-1], -1)
                with np.errstate(all="ignore"):  # what is not finite is found out later
                    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.kind))
                arrays[name] = found.reshape(entry.shape)
    return arrays


class _Source:
    """A file that is read from its beginning, never past its end."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.position = self.n_texts = 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} {what}", _DAMAGED)

    def take(self, n: int) -> bytes:
        if n > self.size - self.position:
            raise self.damaged(f"ends at byte {self.size}, inside its header")
        self.position += n
        if self.position > _MAX_HEADER:
            raise self.damaged("has no end of its header")
        data = self.file.read(n)
        if len(data) < n:
            raise self.damaged("ended while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        self.n_texts += 1
        if self.n_texts > _MAX_TEXTS:
            raise self.damaged(f"has more than {_MAX_TEXTS:,} names and texts in its header")
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, n = self.number("I"), self.number("Q")
            if n > _MAX_TEXTS:
                raise self.damaged(f"has a list of {n:,} values")
            if inner in _NUMBERS:
                numbers = array(_NUMBERS[inner].replace("?", "B"))
                numbers.frombytes(self.take(n * numbers.itemsize))
                if sys.byteorder == "big":
                    numbers.byteswap()
                return numbers
            if inner == _STRING:
                return [self.text() for _ in range(n)]  # an end of the file ends this too
            raise self.damaged(f"has a list of values of kind {inner}")
        if kind not in _NUMBERS:
            raise self.damaged(f"has a value of kind {kind}")
        number: Value = self.number(_NUMBERS[kind])
        return number

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, kind, shape (theirs has the axes in the other order), and place."""
        name, n = self.text(), self.number("I")
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self.damaged(f"has a tensor named {name[:_MAX_NAME]!r}")
        if not 1 <= n <= _MAX_DIMENSIONS:
            raise self.damaged(f"has a tensor of {n} dimensions")
        shape = tuple(self.number("Q") for _ in range(n))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        return name, kind, shape, offset


def _place(
    source: _Source, described: list[tuple[str, int, tuple[int, ...], int]], start: int
) -> dict[str, Entry]:
    """Where each tensor lies; none may reach past the file's end or into another."""
    entries: dict[str, Entry] = {}
    for name, kind, shape, offset in described:
        if name in entries:
            raise source.damaged(f"has two tensors {name!r}")
        try:
            n_bytes = _n_bytes(name, kind, shape)
        except ModelError as error:
            raise ModelError(f"{source.path}: {error.message}", error.hint) from None
        if n_bytes > source.size - start - offset:
            raise source.damaged(
                f"has {source.size} bytes, too few for {name} of shape {list(shape)}"
            )
        entries[name] = Entry(kind, shape, start + offset, n_bytes)
    end = 0
    for entry in sorted(entries.values(), key=lambda e: e.start):
        if entry.start < end:
            raise source.damaged(f"has two tensors at byte {entry.start}")
        end = entry.start + entry.n_bytes
    return entries


def _n_bytes(name: str, kind: int, shape: tuple[int, ...]) -> int:
    numbers, n_bytes = _block(kind)
    if shape[-1] % numbers:
        raise ModelError(
            f"{name} of shape {list(shape)} is stored in groups of {numbers}", _DAMAGED
        )
    return math.prod(shape) // numbers * n_bytes


@cache
def _block(kind: int) -> tuple[int, int]:
    """How many numbers a group of ggml's type has, and its bytes."""
    if kind in _PLAIN:
        return 1, np.dtype(_PLAIN[kind]).itemsize
    gguf = require_package("reading these weights")
    known = {number.value: number for number in gguf.GGMLQuantizationType}
    name = known[kind].name if kind in known else f"number {kind}"
    try:
        numbers, n_bytes = gguf.GGML_QUANT_SIZES[known[kind]]
        gguf.quants.dequantize(np.zeros((1, n_bytes), np.uint8), known[kind])
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"weights of the GGUF type {name} cannot be read",
            "export it with another, for example Q8_0",
        ) from None
    return int(numbers), int(n_bytes)
