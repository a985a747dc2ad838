"""Packed weights on disk: a model is packed once, then its weights are mapped in milliseconds.

The user's cache directory has a file per model and dtype. A file is used only if it belongs to this
user, is whole, and its key fits: the model's files with their inodes, sizes, times and the digests
of their headers, and the code that packed them. Files are data, never executed; a missing, foreign,
damaged or outdated one costs only the time of packing.
"""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tgen.checkpoint.gguf.header import read_header
from tgen.checkpoint.model_dir import ModelBundle, model_files
from tgen.config import ModelConfig, StoredAs
from tgen.errors import TgenError
from tgen.storage import files
from tgen.storage.sealed_file import SealedFile, is_intact, open_sealed, publish_sealed, sealed_size
from tgen.storage.user_cache import cache_folder, is_private

if TYPE_CHECKING:
    from tgen.engine.cpu.weights import PackedWeights

LIMIT = 2 << 30  # bytes of all files; the least recently used are removed
SWITCH = "TGEN_WEIGHTS_CACHE"  # environment variable: 0 turns the cache off
_MIN_AGE = 60.0  # seconds since the model was written: training replaces it again and again
_ENDING = ".weights"
_DEFAULT = "default"  # in place of a dtype: the one that the model's files are stored in
# The code that decides what packed weights are; changes make all files outdated.
_SOURCES = ["config/model.py", "checkpoint/*.py", "checkpoint/*/*.py"]
_SOURCES += [f"engine/cpu/{name}.py" for name in ("weights", "panels", "job_layout")]


class CachedWeights(NamedTuple):
    """A cached file whose key fits its model."""

    file: SealedFile

    @property
    def dtype(self) -> StoredAs:
        """How the matrices are stored."""
        dtype: StoredAs = self.file.header["dtype"]
        return dtype

    @property
    def n_weights(self) -> int:
        """Number of the model's weights."""
        return int(self.file.header["n_weights"])

    @property
    def tied_embeddings(self) -> bool:
        """Whether the weights have no LM head of their own."""
        return bool(self.file.header["tied_embeddings"])

    @property
    def stamp(self) -> tuple[int, ...]:
        """The bundle's stamp, see `ModelBundle`."""
        return _stamp(self.file.header["key"])

    def map(self, config: ModelConfig) -> "PackedWeights":
        """Return the weights; raises ModelError if they do not fit into RAM."""
        from tgen.engine.cpu.weights import PackedWeights

        table = np.array(self.file.header["table"], np.int64)
        return PackedWeights.map(config, self.dtype, table, np.frombuffer(self.file.content, "u1"))


def find(path: Path, dtype: StoredAs | None) -> CachedWeights | None:
    """Return a model's cached weights in this dtype (None: that of its files), if there are."""
    folder = _folder()
    for name in (_DEFAULT, dtype) if dtype else (_DEFAULT,):
        file_path = folder and _file_path(folder, path, str(name))
        found = file_path and open_sealed(file_path)
        if not file_path or not found or not _fits(path, found.header["key"]):
            continue
        if dtype in (None, found.header["dtype"]):
            with suppress(OSError):  # a read-only directory
                os.utime(file_path)
            return CachedWeights(found)
    return None


def store(
    bundle: ModelBundle, weights: "PackedWeights", *, n_weights: int, is_default: bool
) -> None:
    """Store a model's weights if possible; `is_default` if they have the dtype of its files.

    Nothing is stored for a model with an adapter, or one written less than a minute ago.
    """
    folder = _folder()
    if folder is None or bundle.adapter is not None:
        return
    with suppress(OSError, TgenError):  # a full disk: the next process packs again
        newest = max(os.stat(file).st_mtime for file in model_files(bundle.path))
        key = _key(bundle.path, [_header_bytes(file) for file in model_files(bundle.path)])
        if time.time() - newest < _MIN_AGE or _stamp(key) != bundle.stamp:
            return
        table, arrays = weights.relocatable()
        header = {
            "key": key,
            "dtype": weights.dtype,
            "n_weights": n_weights,
            "tied_embeddings": bundle.config.tied_embeddings,
            "table": table.tolist(),
        }
        size = sealed_size(header, sum(map(len, arrays)))
        path = _file_path(folder, bundle.path, _DEFAULT if is_default else weights.dtype)
        if size <= LIMIT and 2 * size <= files.free_bytes(folder):
            path.unlink(missing_ok=True)
            _make_room(LIMIT - size)
            publish_sealed(path, header, arrays)


def cached_files() -> list[Path]:
    """Return the cache's files, the most recently used first."""
    folder = cache_folder("weights")
    found: dict[Path, int] = {}
    with suppress(OSError):
        for path in folder.iterdir() if folder else ():
            if path.suffix == _ENDING:
                with suppress(FileNotFoundError):  # another process has removed it
                    found[path] = path.lstat().st_mtime_ns
    return sorted(found, key=lambda path: -found[path])


def clear() -> None:
    """Remove the cache's files."""
    for path in cached_files():
        path.unlink(missing_ok=True)


def check() -> Iterator[tuple[Path, bool]]:
    """Read each file: yield its path, and whether its content is what was written. Damaged files
    are removed."""
    for path in cached_files():
        intact = is_intact(path)
        if not intact:
            path.unlink(missing_ok=True)
        yield path, intact


def _make_room(n_bytes: int) -> None:
    """Remove the least recently used files until the others have at most `n_bytes`."""
    for path in cached_files():
        n_bytes -= path.lstat().st_size
        if n_bytes < 0:
            path.unlink(missing_ok=True)


def _folder() -> Path | None:
    folder = None if os.environ.get(SWITCH) == "0" else cache_folder("weights")
    return folder if folder and is_private(folder) else None


def _file_path(folder: Path, model: Path, dtype: str) -> Path:
    digest = hashlib.sha256(f"{os.path.realpath(model)}\0{dtype}".encode(errors="surrogateescape"))
    return folder / f"{digest.hexdigest()[:16]}{_ENDING}"


def _key(model: Path, header_bytes: list[int]) -> dict[str, Any]:
    """Describe a model and the code; `header_bytes` are the bytes of each file to compare."""
    described = []
    for file, n in zip(model_files(model), header_bytes, strict=True):
        status, digest = os.stat(file), files.open_random_access(file).read(0, n)
        numbers = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, n]
        described.append([os.path.realpath(file), *numbers, hashlib.sha256(digest).hexdigest()])
    path = os.path.realpath(model).encode(errors="surrogateescape").decode(errors="replace")
    machine = [sys.byteorder, platform.machine(), np.__version__]
    return {"path": path, "files": described, "code": _code_digest(), "machine": machine}


def _fits(model: Path, key: Any) -> bool:
    """Whether a file's key is that of the model and this code now."""
    try:
        return bool(_key(model, [int(file[5]) for file in key["files"]]) == key)
    except (OSError, TgenError, ValueError, TypeError, LookupError):
        return False


def _stamp(key: dict[str, Any]) -> tuple[int, ...]:
    return tuple(number for file in key["files"] for number in file[2:5])


def _header_bytes(file: Path) -> int:
    """Return the bytes at the beginning of a model's file that say what its weights are."""
    if file.suffix == ".safetensors":
        return 8 + int.from_bytes(files.open_random_access(file).read(0, 8), "little")
    if file.name == "config.json":
        return os.stat(file).st_size
    return min(entry.start for entry in read_header(file).tensors.values())


@cache
def _code_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for source in sorted(path for pattern in _SOURCES for path in root.glob(pattern)):
        digest.update(source.name.encode() + files.read(source))
    return digest.hexdigest()
