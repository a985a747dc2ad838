"""Read whole files within a size limit; write them so that a crash never leaves half a file.

`replacing` writes under a temporary name beside the target, flushes the content to the device,
renames it over the target, and flushes the directory. A reader sees the old file or the new one.

While a process has temporary files in a directory, it shares the lock of that directory. The system
frees the lock when the process ends, so a process that gets it exclusively may remove all temporary
files.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tgen.errors import TgenError

TEMPORARY = ".tmp-"  # prefix of temporary names
_OLD = "-old"  # suffix of the directory in which a replaced directory waits for its removal
_TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]{12}(-old|[a-z0-9_]{8})?")
_ABANDONED_SECONDS = 24 * 3600.0  # age of a leftover, where directories cannot be locked

Content = bytes | Sequence[bytes | memoryview]  # a file's bytes, whole or in blocks


def read(path: Path, *, limit: int | None = None) -> bytes:
    """Return a regular file's bytes; raise TgenError if it is unreadable or larger than `limit`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise TgenError(
                f"{path} is too large ({size} bytes, limit {limit})",
                "check that this is the right file",
            )
        return file.read()


def read_if_possible(path: Path) -> bytes:
    """Return a regular file's bytes, b"" if it cannot be read: other systems may lack it."""
    try:
        return read(path)
    except (TgenError, OSError):
        return b""


def sha256(path: Path) -> bytes:
    """Return the SHA-256 digest of a regular file of any size."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise TgenError for a directory, pipe or device."""
    with open(_open_descriptor(path), "rb") as file:
        yield file


def is_pipe(path: str) -> bool:
    """Return whether a path is that of a pipe, such as a shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _open_descriptor(path: Path) -> int:
    try:  # non-blocking, so that a named pipe without a writer does not hang the open
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise TgenError(f"{path} does not exist", "check the spelling of the path") from None
    except OSError as error:
        raise TgenError(f"cannot open {path}: {error.strerror}", "check its permissions") from None
    except ValueError:
        hint = "remove the NUL character"
        raise TgenError(f"{str(path)!r} cannot be a path", hint) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        hint = "name a regular file, or pipe into -, where a command reads stdin"
        raise TgenError(f"{path} is not a regular file", hint)
    return fd


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """Open a file, pipe or device that is read once from start to end."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise TgenError(f"{path} does not exist", "check the spelling of the path") from None
    except OSError as error:
        raise TgenError(f"cannot open {path}: {error.strerror}", "name a readable file") from None
    with file:
        yield file


class RandomAccessFile:
    """An open file that is read by position and never memory-mapped.

    If the file shrinks, reads return fewer bytes (a mapped file would crash the process). Nothing
    stays in memory. The file is closed by `close` or with the last reference to this object.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; an `open_temporary` file is gone."""
        self._file.close()

    def read(self, start: int, n: int) -> bytes:
        """Return `n` bytes from `start` on, fewer at the end of the file."""
        blocks: list[bytes] = []
        while n > 0 and (block := self._read_some(start, n)):
            blocks.append(block)
            start, n = start + len(block), n - len(block)
        return b"".join(blocks)

    def append(self, content: bytes | bytearray) -> None:
        """Write all of `content` to the end of an `open_temporary` file."""
        self._file.seek(0, os.SEEK_END)
        _write_all(self._file.fileno(), content)

    def fileno(self) -> int:
        """Return the descriptor of the file, whose position is its start or its end."""
        return self._file.fileno()

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Size, modification time in nanoseconds and inode; they change with the content."""
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ino

    def _read_some(self, start: int, n: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), n, start)
        self._file.seek(start)
        return self._file.read(n)


def open_random_access(path: Path) -> RandomAccessFile:
    """Open a regular file; errors as `open_regular`."""
    return RandomAccessFile(open(_open_descriptor(path), "rb", buffering=0))


def open_temporary(folder: Path | None) -> RandomAccessFile:
    """Open a new unnamed file in `folder` (None: the system's temporary directory) for `append`.

    The system removes the file however the process ends.
    """
    import tempfile

    name = f"{TEMPORARY}{os.urandom(6).hex()}"
    return RandomAccessFile(tempfile.TemporaryFile(buffering=0, prefix=name, dir=folder))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` for a new file or directory; then rename it to `path`.

    The old file or directory at `path` is complete until the rename. If the block or the rename
    fails, it stays, and the temporary one is removed. Replacing a directory takes two renames; if
    the process is killed between them, the next process that writes beside `path` restores the old
    directory.
    """
    temporary = _temporary_path(path)
    old = temporary.with_name(temporary.name + _OLD)
    with _staging(path.parent):
        try:
            yield temporary
            sync(temporary)
            if temporary.is_dir() and path.is_dir():  # a rename does not replace a directory
                old.mkdir()
                os.rename(path, old / path.name)
            os.replace(temporary, path)
        except OSError as error:
            if error.errno is not None:  # otherwise the message is all that it has
                error.filename = str(path)  # the target, not the temporary path or nothing
            raise
        finally:
            if not os.path.lexists(path):
                with suppress(OSError):
                    _restore(old)
            with suppress(OSError):
                old.rmdir()  # fails unless it is empty
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def publish(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, mode: int = 0o666
) -> None:
    """Replace the file at `path`; `content` is whole or in blocks, `mode` its permissions without
    the umask."""
    with replacing(path) as temporary:
        write_new(temporary, content, mode=mode)


def publish_folder(path: Path, contents: Mapping[str, Content]) -> None:
    """Make the directory `path` with these files, and its parents."""
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.mkdir()
        for name, content in contents.items():
            write_new(temporary / name, content)


def output_problem(path: Path) -> str:
    """Return why a file cannot be written to a path that the user named; empty if it can.

    Missing parent directories are no problem: `write_output` makes them.
    """
    if "\0" in str(path):
        return "has a NUL character"
    if path.is_dir():
        return "is a directory"
    if path.exists() and not path.is_file():
        return ""  # a pipe or device
    parent = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not parent.is_dir():
        return f"{parent} is not a directory"
    return "" if os.access(parent, os.W_OK) else f"{parent} is not writable"


def write_output(path: Path, content: Content) -> None:
    """Write a file that the user named, and make its parent directories.

    Follow links, and write to a pipe or device directly.
    """
    if path.exists() and not path.is_file():
        try:
            with open(path, "wb") as file:
                file.writelines(blocks(content))
        except OSError as error:
            error.filename = str(path)
            raise
    else:
        make_folder(path.resolve().parent)
        publish(path.resolve(), content)


def write_new(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, mode: int = 0o666
) -> None:
    """Write a new file without flushing it to the device; for use inside `replacing`."""
    with open(path, "xb", buffering=0, opener=lambda p, flags: os.open(p, flags, mode)) as file:
        n_bytes = 0
        for block in blocks(content):
            _write_all(file.fileno(), block)
            n_bytes += len(block)
        if (size := os.fstat(file.fileno()).st_size) != n_bytes:
            raise OSError(errno.EIO, f"only {size} of {n_bytes} bytes were written", str(path))


def append(path: Path, content: bytes, *, at: int) -> int:
    """Append to a log of `at` valid bytes, flush it, and return its new length.

    First truncate bytes after `at`, left by a failed append. If this append fails, the log keeps
    its length. Readers must ignore a torn last line, left by a killed process.
    """
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if at < size:
            os.ftruncate(file.fileno(), at)
            size = at
        try:
            _write_all(file.fileno(), content)
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise
        return size + len(content)


def remove(path: Path) -> None:
    """Remove a file, or a directory with everything in it; do nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():  # rename it first, to hide a partial removal
        with _staging(path.parent):
            temporary = _temporary_path(path)
            os.rename(path, temporary)
            shutil.rmtree(temporary)
    elif os.path.lexists(path):
        path.unlink()
        _sync_folder(path.parent)  # before a new file replaces it


def rename(path: Path, target: Path) -> None:
    """Rename a file or a directory within its directory."""
    os.rename(path, target)
    _sync_folder(target.parent)


def make_folder(path: Path) -> None:
    """Make a directory and its parents so that they survive a power loss."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def remove_leftovers(folder: Path, *, min_age: float = 0.0) -> None:
    """Remove the temporary files of killed processes that are older than `min_age` seconds.

    No other process may be writing to `folder`. Files that cannot be removed stay. A directory
    whose replacement was interrupted gets its name back.
    """
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if _TEMPORARY_NAME.fullmatch(path.name):
                with suppress(OSError):
                    _remove_leftover(path, min_age)


def _remove_leftover(path: Path, min_age: float) -> None:
    status = path.lstat()
    if time.time() - status.st_mtime < min_age:
        return
    if stat.S_ISDIR(status.st_mode):
        if path.name.endswith(_OLD):
            _restore(path)
        shutil.rmtree(path, ignore_errors=True)
    elif stat.S_ISREG(status.st_mode):  # tgen creates no links
        path.unlink()


def _restore(old: Path) -> None:
    """Move a directory out of `old` back to its original path, unless that exists."""
    for path in old.iterdir() if old.is_dir() else ():
        target = old.parent / path.name
        if not os.path.lexists(target):
            os.rename(path, target)


@contextmanager
def _staging(folder: Path) -> Iterator[None]:
    """Share the lock of `folder`; first remove the temporary files of killed processes."""
    if sys.platform == "win32":  # directories cannot be locked
        remove_leftovers(folder, min_age=_ABANDONED_SECONDS)
        yield
        return
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process is writing
        except OSError:  # for example a network file system
            remove_leftovers(folder, min_age=_ABANDONED_SECONDS)
        else:
            remove_leftovers(folder)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Flush a file, or a directory of files, to the device."""
    is_folder = path.is_dir()
    for file_path in sorted(path.iterdir()) if is_folder else [path]:
        with open(file_path, "rb+") as file:  # Windows only flushes files open for writing
            os.fsync(file.fileno())
    if is_folder:
        _sync_folder(path)


def free_bytes(path: Path) -> int:
    """Return the free space, in bytes, of the disk that holds `path` (which need not exist)."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def blocks(content: bytes | Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """Return a file's content as blocks, in order."""
    return [content] if isinstance(content, bytes) else content


def _temporary_path(path: Path) -> Path:
    return path.parent / f"{TEMPORARY}{os.urandom(6).hex()}"


def _write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        n = os.write(fd, rest)
        if n == 0:
            raise OSError(errno.EIO, "no byte could be written")
        rest = rest[n:]


def _sync_folder(path: Path) -> None:
    if sys.platform != "win32":  # Windows cannot open a directory
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
