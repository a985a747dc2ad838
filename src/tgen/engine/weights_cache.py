"""Packed weights on disk: a model is packed once, then its weights are mapped in milliseconds.

The user's cache directory has a file per model and dtype. A file is used only if it belongs to this
user, is whole, and its key fits: the model's files with their inodes, sizes, times and the digests
of their headers, and the code that packed them. Files are data, never executed; a missing, foreign,
damaged or outdated one costs only the time of packing.
"""

import hashlib
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tgen.checkpoint.gguf.header import read_header
from tgen.checkpoint.model_dir import ModelBundle
from tgen.checkpoint.model_files import model_files, stamp_files
from tgen.config import ModelConfig, StoredAs
from tgen.errors import TgenError
from tgen.storage import files
from tgen.storage.sealed_file import (
    SealedFile,
    encode_header,
    is_intact,
    open_sealed,
    publish_sealed,
    sealed_size,
)
from tgen.storage.user_cache import cache_folder, is_own, is_private

if TYPE_CHECKING:
    from tgen.engine.cpu.weights import PackedWeights

LIMIT = 2 << 30  # bytes of all files; the least recently used are removed
SWITCH = "TGEN_WEIGHTS_CACHE"  # environment variable: 0 turns the cache off
_MIN_AGE = 60.0  # seconds since the model was written: training replaces it again and again
_USED = 3600.0  # seconds since a file was used, in which it is not removed for another one
_NAME = re.compile(r"[0-9a-f]{16}\.weights")
_DEFAULT = "default"  # in place of a dtype: the one that the model's files are stored in
# The code that decides what packed weights are; changes make all files outdated.
_SOURCES = ["__init__.py", "config/*.py", "checkpoint/*.py", "checkpoint/*/*.py"]
_SOURCES += ["engine/weights_cache.py", "storage/sealed_file.py"]
_SOURCES += [f"engine/cpu/{name}.py" for name in ("weights", "job_layout")]


class CachedWeights(NamedTuple):
    """A cached file whose key fits its model."""

    file: SealedFile

    @property
    def dtype(self) -> StoredAs:
        """The dtype in which the matrices are stored."""
        dtype: StoredAs = self.file.header["dtype"]
        return dtype

    @property
    def n_weights(self) -> int:
        """Number of the model's weights."""
        return int(self.file.header["n_weights"])

    @property
    def tied_embeddings(self) -> bool:
        """Whether the weights have no LM head of their own."""
        from tgen.engine.cpu.job_layout import EMBEDDING, LM_HEAD

        last = self.file.header["table"][-1]
        return bool(last[EMBEDDING] == last[LM_HEAD])

    @property
    def stamp(self) -> tuple[int, ...]:
        """The bundle's stamp, see `ModelBundle`."""
        return tuple(self.file.header["key"]["stamp"])

    def map(self, config: ModelConfig) -> "PackedWeights":
        """Return the weights; raises ModelError if they do not fit into RAM."""
        from tgen.engine.cpu.weights import map_weights

        table = np.array(self.file.header["table"], np.int64)
        return map_weights(config, self.dtype, table, np.frombuffer(self.file.content, "u1"))


def find(path: Path, dtype: StoredAs | None) -> CachedWeights | None:
    """Return a model's cached weights in this dtype (None: that of its files), or None."""
    folder = _open_folder()
    for name in (_DEFAULT, dtype) if dtype else (_DEFAULT,):
        file_path = folder and _file_path(folder, path, name)
        found = file_path and open_sealed(file_path)
        if not file_path or not found or not _fits(path, found.header):
            continue
        if dtype in (None, found.header["dtype"]):
            with suppress(OSError):  # a read-only directory
                os.utime(file_path)
            return CachedWeights(found)
    return None


def prepare_store(
    bundle: ModelBundle, weights: "PackedWeights", *, n_weights: int, is_default: bool
) -> Callable[[], None]:
    """Return a function that stores a model's weights if possible; `is_default` if they have the
    dtype of its files.

    The function starts a thread, which Python waits for at its end. Nothing is stored for a model
    with an adapter, or one written less than a minute ago.
    """
    table, arrays = weights.relocatable()  # before passes add positions
    header = {"dtype": weights.dtype, "n_weights": n_weights, "table": table.tolist()}
    dtype = _DEFAULT if is_default else weights.dtype
    bundle = replace(bundle, path=bundle.path.absolute())  # the program may change its directory

    def store() -> None:
        with suppress(OSError, TgenError):  # a full disk: the next process packs again
            _store(bundle, dtype, header, arrays)

    def start() -> None:
        with suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=store, name="weights-cache").start()

    return start


def _store(
    bundle: ModelBundle, dtype: str, header: dict[str, Any], arrays: list[memoryview]
) -> None:
    folder = _open_folder()
    n_bytes = sum(map(len, arrays))
    if folder is None or bundle.adapter is not None:
        return
    model = model_files(bundle.path)
    age = time.time() - max(os.stat(file).st_mtime for file in model)
    if age < _MIN_AGE or 2 * n_bytes > files.free_bytes(folder):
        return
    key = _key(model, [_header_bytes(file) for file in model])
    beginning = encode_header({"key": key} | header)
    path = _file_path(folder, bundle.path, dtype)
    if tuple(key["stamp"]) == bundle.stamp and _make_room(path, sealed_size(beginning, n_bytes)):
        publish_sealed(path, beginning, arrays)


def cached_files() -> dict[Path, int]:
    """Return the cache's files with their sizes in bytes, the most recently used first."""
    return {path: status.st_size for path, status in _list_files()}


def clear() -> None:
    """Remove the cache's files."""
    for path in cached_files():
        path.unlink(missing_ok=True)


def check() -> Iterator[tuple[Path, bool]]:
    """Read each file: yield its path, and whether its content is what was written. Damaged files
    are removed."""
    for path in cached_files():
        try:
            intact = is_intact(path)
        except (TgenError, OSError):
            if not os.path.lexists(path):  # another process has removed it
                continue
            intact = False
        if not intact:
            path.unlink(missing_ok=True)
        yield path, intact


def _list_files() -> list[tuple[Path, os.stat_result]]:
    """Return the cache's files with their status, the most recently used first.

    Files with other names, of other users or in a directory that others can write are not its own.
    """
    folder, found = cache_folder("weights"), []
    for path in folder.iterdir() if folder and folder.is_dir() and is_private(folder) else ():
        with suppress(FileNotFoundError):  # another process has removed it
            if _NAME.fullmatch(path.name) and is_own(path):
                found.append((path, path.lstat()))
    return sorted(found, key=lambda file: -file[1].st_mtime_ns)


def _make_room(path: Path, n_bytes: int) -> bool:
    """Remove the least recently used files, so that `path` can have `n_bytes`; False, and nothing
    is removed, if that takes files that are in use."""
    unused: list[tuple[Path, float]] = []
    rest = LIMIT - n_bytes
    if rest < 0:
        return False
    for other, status in _list_files():
        if other != path:
            rest -= status.st_size
            if rest < 0:
                unused.append((other, status.st_mtime))
    if any(time.time() - used < _USED for _, used in unused):
        return False
    for other, _ in unused:
        other.unlink(missing_ok=True)
    return True


def _open_folder() -> Path | None:
    """Return the cache's directory; None if it is switched off or others can write to it."""
    folder = None if os.environ.get(SWITCH) == "0" else cache_folder("weights")
    return folder if folder and is_private(folder) else None


def _file_path(folder: Path, model: Path, dtype: str) -> Path:
    digest = hashlib.sha256(f"{os.path.realpath(model)}\0{dtype}".encode(errors="surrogateescape"))
    return folder / f"{digest.hexdigest()[:16]}.weights"


def _key(model: list[Path], header_bytes: list[int]) -> dict[str, Any]:
    """Describe the files of a model, which begin with so many bytes of headers, and the code."""
    headers = [
        hashlib.sha256(files.open_random_access(file).read(0, n)).hexdigest()
        for file, n in zip(model, header_bytes, strict=True)
    ]
    paths = [os.fsencode(os.path.realpath(file)).decode(errors="replace") for file in model]
    return {
        "files": paths,
        "devices": [os.stat(file).st_dev for file in model],
        "stamp": list(stamp_files(model)),
        "header_bytes": header_bytes,
        "headers": headers,
        "code": [_code_digest(), np.__version__],
        "machine": [sys.byteorder, platform.machine()],
    }


def _fits(path: Path, header: dict[str, Any]) -> bool:
    """Whether a file's key is that of the model and this code now."""
    try:
        return bool(header["key"] == _key(model_files(path), header["key"]["header_bytes"]))
    except (OSError, TgenError, ValueError, TypeError, LookupError):
        return False


def _header_bytes(file: Path) -> int:
    """Return how many bytes at the beginning of a model's file say what its weights are."""
    if file.suffix == ".safetensors":
        return 8 + int.from_bytes(files.open_random_access(file).read(0, 8), "little")
    if file.name == "config.json":
        return os.stat(file).st_size
    if file.suffix == ".bin":
        from tgen.checkpoint.torch_file import read_header as read_torch_header

        return min(entry.start for entry in read_torch_header(file).values())
    starts = [entry.start for entry in read_header(file).tensors.values() if entry.path == file]
    return min(starts, default=os.stat(file).st_size)


@cache
def _code_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    sources = sorted(path for pattern in _SOURCES for path in root.glob(pattern))
    package = find_spec("gguf")  # dequantizes some types
    if package and package.origin:
        sources.append(Path(package.origin).with_name("quants.py"))
    for source in sources:
        digest.update(source.name.encode() + files.read(source))
    return digest.hexdigest()
