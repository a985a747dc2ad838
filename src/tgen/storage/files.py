"""The only door to the disk: whole files read within bounds, published by one rename.

Publishing means: written under a temporary name beside the target, flushed to the device, renamed
over the target, and the folder flushed too. A reader sees the old file or the new one, never half.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tgen.errors import TgenError

TEMPORARY = ".tmp-"

Content = bytes | Sequence[bytes | memoryview]  # of a file, whole or in parts


def read(path: Path, *, limit: int | None = None) -> bytes:
    """A regular file's bytes; raises TgenError if it is none, unreadable, or above `limit`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise TgenError(f"{path} has {size} bytes, not {limit} at most", "it is no such file")
        return file.read()


def sha256(path: Path) -> bytes:
    """The digest of a regular file, however large."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading; anything else (folder, pipe, device) is a TgenError."""
    with open(_regular(path), "rb") as file:
        yield file


def _regular(path: Path) -> int:
    try:  # non-blocking, so that a named pipe without a writer does not hang the open
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise TgenError(f"{path} does not exist", "check the spelling of the path") from None
    except OSError as error:
        raise TgenError(
            f"{path} cannot be opened: {error.strerror}", "check who may read it"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TgenError(f"{path} is not a regular file", "name a file that holds data")
    return fd


class ByPosition:
    """An open file that is read by position, never mapped: one that shrinks is an error then, and
    what was read does not stay in memory. It is closed with the last reference to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __del__(self) -> None:
        self._file.close()

    def read(self, start: int, n: int) -> bytes:
        """The `n` bytes from `start` on, fewer at the file's end."""
        parts: list[bytes] = []
        while n > 0 and (part := self._read_some(start, n)):
            parts.append(part)
            start, n = start + len(part), n - len(part)
        return b"".join(parts)

    def append(self, content: bytes | bytearray) -> None:
        """Writes all of `content` to the end of a file that is `temporary`."""
        _write_all(self._file.fileno(), content)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Its size, when it was written to, and which it is: other numbers are another content."""
        now = os.fstat(self._file.fileno())
        return now.st_size, now.st_mtime_ns, now.st_ino

    def _read_some(self, start: int, n: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), n, start)
        self._file.seek(start)
        return self._file.read(n)


def by_position(path: Path) -> ByPosition:
    """Opens a regular file; errors as `open_regular`."""
    return ByPosition(open(_regular(path), "rb", buffering=0))


def temporary(folder: Path | None) -> ByPosition:
    """A new file without a name in `folder` (None: where temporary files go), to be appended to; it
    is gone with the process, however that ends."""
    return ByPosition(tempfile.TemporaryFile(buffering=0, prefix=TEMPORARY, dir=folder))


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """Opens what can be read from its beginning to its end: a file, a pipe, a device."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise TgenError(f"{path} cannot be opened: {error.strerror}", "name a file") from None
    with file:
        yield file


def publish(path: Path, content: bytes) -> None:
    """Puts `content` at `path` so that the old file or the new one is there at every instant."""
    publish_stream(path, [content])


def publish_stream(path: Path, blocks: Iterable[bytes]) -> None:
    """As `publish`, of what need not be in memory all at once."""
    beside = _beside(path)
    try:
        _write(beside, blocks)
        os.replace(beside, path)
    except OSError as error:
        if error.filename:  # what was asked for, not the temporary one
            error.filename = str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def put(path: Path, content: bytes) -> None:
    """As `publish`, but links are followed, and a pipe or a device is written to as it is."""
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            file.write(content)
    else:
        publish(path.resolve(), content)


def publish_folder(path: Path, contents: Mapping[str, Content]) -> None:
    """Makes the folder `path`, which must not exist, with all its files, by one rename."""
    make_folder(path.parent)
    beside = _beside(path)
    try:
        beside.mkdir()
        for name, content in contents.items():
            _write(beside / name, parts(content))
        _sync_folder(beside)
        os.rename(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _sync_folder(path.parent)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file, or a folder with files; by one rename it becomes `path`.

    What stands there is replaced, a folder by being moved away first. Leaving the block by an error
    leaves nothing.
    """
    make_folder(path.parent)
    beside = _beside(path)
    old = _beside(path)
    try:
        yield beside
        if beside.is_dir():
            _sync_folder(beside)
        else:
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
        if path.is_dir():
            os.rename(path, old)
        try:
            os.replace(beside, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
    except OSError as error:
        if error.filename:  # what was asked for, not the temporary one
            error.filename = str(path)
        raise
    finally:
        remove(beside)
    remove(old)
    _sync_folder(path.parent)


def put_into(folder: Path, name: str, content: bytes) -> None:
    """A new file in a folder that is `staged`, made if it is not there yet."""
    folder.mkdir(exist_ok=True)
    _write(folder / name, [content])


def append(path: Path, content: bytes, *, after: int) -> int:
    """Adds to a log after so many bytes, for a call that failed may have left more, and gives its
    new length; what a killed process cut short is for the reader to leave out."""
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if after < size:
            os.ftruncate(file.fileno(), after)
            size = after
        try:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise
        return size + len(content)


def remove(path: Path) -> None:
    """Removes a file or a folder with all it holds; nothing there is no error."""
    if path.is_dir() and not path.is_symlink():  # at once by its name: half a folder is never seen
        doomed = _beside(path)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    elif os.path.lexists(path):
        path.unlink()
        _sync_folder(path.parent)  # before what takes its place


def move(path: Path, target: Path) -> None:
    """Gives a file or a folder another name in the same folder."""
    os.rename(path, target)
    _sync_folder(target.parent)


def free_bytes(path: Path) -> int:
    """Room on the disk that holds `path`, which need not be there yet."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def remove_leftovers(folder: Path) -> None:
    """Removes what an interrupted publish left in `folder`; call it under the lock."""
    for leftover in folder.glob(TEMPORARY + "*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def parts(content: Content) -> Sequence[bytes | memoryview]:
    """What a file's content is made of, in order."""
    return [content] if isinstance(content, bytes) else content


def n_bytes(content: Content) -> int:
    """How long a file it makes."""
    return sum(len(part) for part in parts(content))


def _beside(path: Path) -> Path:
    return path.parent / f"{TEMPORARY}{secrets.token_hex(6)}"


def _write(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    with open(path, "xb", buffering=0) as file:
        n_bytes = 0
        for block in blocks:
            _write_all(file.fileno(), block)
            n_bytes += len(block)
        os.fsync(file.fileno())
        if (size := os.fstat(file.fileno()).st_size) != n_bytes:
            raise OSError(errno.EIO, f"only {size} of {n_bytes} bytes arrived", str(path))


def _write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    left = memoryview(content)
    while left:
        n = os.write(fd, left)
        if n == 0:
            raise OSError(errno.EIO, "nothing could be written")
        left = left[n:]


def make_folder(path: Path) -> None:
    """Makes a folder and those it is in; a power loss does not take them with all they hold."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    if sys.platform != "win32":  # where a folder can be opened, its entries are flushed too
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
