"""Weights that torch.save wrote, such as pytorch_model.bin: only their names, shapes and places.

Unpickling such a file can run code, in torch's restricted unpickler too, as its security advisories
show. Here, nothing is unpickled: the instructions of the pickle are followed as far as dicts, lists
and tensors go, no name in them is ever looked up, and any other name is an error. The numbers
follow uncompressed and are read as from a safetensors file, without torch and without a copy.
"""

import math
import os
import pickletools
import shlex
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tgen.checkpoint.git_lfs import reject_lfs_pointer
from tgen.checkpoint.safetensors_file import ITEM_BYTES, TensorEntry
from tgen.errors import ModelError
from tgen.storage import files

_MAX_TABLE = 4 << 20  # bytes of a pickle, and of the list of a ZIP archive's members
_MAX_INSTRUCTIONS = 400_000  # a tensor takes about 40
_MAX_DIMENSIONS, _MAX_VALUES = 8, 1 << 60
_LEGACY = 0x1950A86A20F9469CFC6C  # the first of five pickles, before torch 1.6
_DTYPES = {
    "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Double": "F64", "Long": "I64",
    "Int": "I32", "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")  # of training programs
_PLAIN = {  # instructions that push their argument
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Name(NamedTuple):
    """A class or function that a pickle names: module and name, separated by a space."""

    text: str


class _Storage(NamedTuple):
    """A block of numbers that tensors are views of."""

    dtype: str
    key: str
    n_values: int


class _Tensor(NamedTuple):
    """A view of a storage; offset and strides are in values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return a file's tensors.

    Raises ModelError for a file that torch.save did not write, for anything in it but tensors, and
    for tensors outside the file.
    """
    with files.open_regular(path) as file:
        start = file.read(8)
        reject_lfs_pointer(path, start)
        file.seek(0)
        try:
            read = _read_zip if start.startswith(b"PK\3\4") else _read_legacy
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pickletools, on backslashes in names
                content, places = read(file)
            tensors = _find_tensors(content)
            size = os.fstat(file.fileno()).st_size
            return {name: _locate(tensor, places, size) for name, tensor in tensors.items()}
        except ModelError as error:
            raise ModelError(error.message.replace("FILE", str(path)), error.hint) from None
        except _UnknownNameError as error:
            raise ModelError(
                f"{path} contains {error}, which is not read: it could run code", _convert(path)
            ) from None
        except (
            *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
            *(zipfile.BadZipFile, zlib.error, MemoryError, EOFError),
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{path} is not readable: {reason}", "download it again: it is damaged"
            ) from None


class _UnknownNameError(Exception):
    """A name that is not that of a tensor, a dict or a number type."""


class _LimitedFile:
    """A file of which only small blocks are read at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, n: int = -1) -> bytes:
        if n > _MAX_TABLE:
            raise ValueError(f"its tables have more than {_MAX_TABLE:,} bytes")
        return self._file.read(n if n >= 0 else _MAX_TABLE)

    def seekable(self) -> bool:
        return True


def _read_zip(file: BinaryIO) -> tuple[Any, dict[str, int]]:
    """Return the content, and the first byte of each storage."""
    with zipfile.ZipFile(_LimitedFile(file)) as archive:
        members = {info.filename: info for info in archive.infolist()}
        (main,) = (name for name in members if name.endswith("data.pkl") and name.count("/") < 2)
        root = main.removesuffix("data.pkl")
        if main != "data.pkl" and root + "byteorder" in members:
            _require_little_endian(archive.open(root + "byteorder").read(6) == b"little")
        if members[main].file_size > _MAX_TABLE:
            raise ValueError(f"its tables have more than {_MAX_TABLE:,} bytes")
        with archive.open(main) as pickle:
            content, _ = _follow(pickle.read(_MAX_TABLE))
    places = {}
    for name, info in members.items():
        if name.startswith(root + "data/"):
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its numbers are compressed")
            file.seek(info.header_offset + 26)  # of the member's own header
            lengths = file.read(4)  # of name and extra field
            skipped = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            places[name.removeprefix(root + "data/")] = info.header_offset + 30 + skipped
    return content, places


def _read_legacy(file: BinaryIO) -> tuple[Any, dict[str, int]]:
    """Return the content, and the first byte of each storage, of the format before torch 1.6."""
    table = file.read(_MAX_TABLE)
    content, position = [], 0
    if not table.startswith(b"\x80"):
        raise _other_file()
    for _ in range(5):  # a number, protocol, system, content, keys
        part, n_bytes = _follow(table[position:])
        content.append(part)
        position += n_bytes
        if content[0] != _LEGACY:
            raise _other_file()
    _, _, system, state, keys = content
    _require_little_endian(system["little_endian"])
    sizes = {t.storage.key: ITEM_BYTES[t.storage.dtype] for t in _find_tensors(state).values()}
    places = {}
    for key in keys:
        if type(key) is not str or key not in sizes:
            raise ValueError("a storage that belongs to no tensor")
        file.seek(position)
        places[key] = position + 8
        position += 8 + int.from_bytes(file.read(8), "little") * sizes[key]
    return state, places


def _other_file() -> ModelError:
    return ModelError("FILE is not a file of torch.save", "download it again")


def _follow(pickle: bytes) -> tuple[Any, int]:
    """Return the object of a pickle of dicts, lists, tuples, plain values and tensors, and the
    pickle's length in bytes."""
    stack: list[Any] = []
    marks: list[int] = []  # lengths of the stack
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    instructions = islice(pickletools.genops(pickle), _MAX_INSTRUCTIONS)
    for opcode, argument, position in instructions:
        name = opcode.name
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(_Name(str(argument)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_Name(" ".join(stack[-2:]))]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(name[-1])
            stack[-n:] = [tuple(stack[-n:])]
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop() for _ in "kv"][::-1]
            stack[-1].update(_by_name(zip(items[::2], items[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_rebuild(function, arguments))
        elif name == "BUILD":  # the attributes of a dict, such as _metadata
            stack.pop()
        elif name == "STOP":
            return stack.pop(), int(position or 0) + 1
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the instruction {name}")
    raise ValueError(f"a pickle without an end, or of more than {_MAX_INSTRUCTIONS:,} instructions")


def _by_name(items: Iterable[Any]) -> Iterator[tuple[str | int, Any]]:
    """Yield items with valid keys. A tuple of tuples may take forever to be hashed or printed."""
    for key, value in items:
        if type(key) not in (str, int):
            raise ValueError("a key that is not a string")
        yield key, value


def _storage(description: Any) -> _Storage:
    kind, class_name, key, _, n_values, *view = description
    module, _, name = class_name.text.partition(" ")
    dtype = _DTYPES.get(name.removesuffix("Storage"))
    if type(key) is not str:
        raise ValueError("a storage without a name")
    if kind != "storage" or module not in ("torch", "torch.cuda") or dtype is None:
        raise _UnknownNameError(class_name.text.replace(" ", ".")[:100])
    if any(view):
        raise ValueError("it has views of storages, as before torch 0.4")
    return _Storage(dtype, key, n_values)


def _rebuild(function: Any, arguments: Any) -> Any:
    """Return what a function of torch makes of its arguments; others are not called."""
    match function:
        case _Name("torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor"):
            storage, offset, shape, strides, *_ = arguments
            if not isinstance(storage, _Storage) or max(len(shape), len(strides)) > _MAX_DIMENSIONS:
                raise ValueError("a tensor without a storage, or of too many dimensions")
            return _Tensor(storage, offset, tuple(shape), tuple(strides))
        case _Name("torch._utils _rebuild_parameter"):
            return arguments[0]
        case _Name("collections OrderedDict"):
            found = dict(_by_name(*arguments) if arguments else ())
            for items in arguments:
                items.clear()  # otherwise, a small pickle could copy it a million times
            return found
        case _Name(text):
            raise _UnknownNameError(text.replace(" ", ".")[:100])
    raise ValueError("a call of an unknown object")


def _find_tensors(content: Any) -> dict[str, _Tensor]:
    for key in _STATE_DICTS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in items if isinstance(value, _Tensor)}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise ModelError("FILE has no tensors by name", "use the model's pytorch_model.bin")
    return tensors


def _locate(tensor: _Tensor, places: dict[str, int], size: int) -> TensorEntry:
    """Return where a tensor is; its values must be in its storage, each of them once."""
    (dtype, key, n_values), offset, shape, strides = tensor
    numbers = (n_values, offset, *shape, *strides)
    if not all(type(n) is int and 0 <= n < _MAX_VALUES for n in numbers):
        raise ValueError("sizes must be non-negative integers")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions and {len(strides)} strides")
    reach = 1  # values from the first to the last one, by the axes in the order of their strides
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            raise ValueError("a tensor that has values several times")
        reach += stride * (n - 1)
    reach = reach if math.prod(shape) else 0
    item, start = ITEM_BYTES[dtype], places[key]
    if offset + reach > n_values or start + n_values * item > size:
        raise ValueError("a tensor outside its storage, or outside the file")
    start += offset * item
    contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    axes = zip(strides, contiguous, shape, strict=True)
    in_order = all(stride == expected or n == 1 for stride, expected, n in axes)
    order = None if in_order else strides
    return TensorEntry(dtype, shape, start, start + reach * item, order)


def _require_little_endian(value: object) -> None:
    if value is not True:
        raise ModelError("FILE has big-endian numbers", "save it on a little-endian machine")


def _convert(path: Path) -> str:
    """Return the command that converts a file that its user trusts."""
    target = path.parent / "model.safetensors"
    code = (
        "import torch, safetensors.torch as s; "
        f"w = torch.load({str(path)!r}, map_location='cpu', weights_only=False); "
        f"s.save_file({{k: v.clone() for k, v in w.items()}}, {str(target)!r}, {{'format': 'pt'}})"
    )
    return f"if you trust it, convert it: python -c {shlex.quote(code)}"
