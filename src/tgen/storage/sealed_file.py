"""Files that are written once and then mapped: a header in JSON, content, and a footer.

The footer is written last, and the file appears by a rename: a file with a valid footer is whole.
Opening checks the header's digest; `is_intact` also checks the content's.
"""

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tgen.errors import TgenError
from tgen.storage import files

_MAGIC = b"TGENSEAL"
_START = struct.Struct("<8sQ")  # magic, bytes of the header
_FOOTER = struct.Struct("<8sQ32s32s")  # magic, bytes of the file, SHA-256 of header and content
_MAX_HEADER = 1 << 24  # bytes
_PAGE = 1 << 16  # at least as large as a page of memory anywhere


class SealedFile(NamedTuple):
    """A file's header, and its content in memory that is read only and shared with others."""

    header: dict[str, Any]
    content: memoryview


def publish_sealed(
    path: Path, header: Mapping[str, Any], content: Iterable[bytes | memoryview]
) -> None:
    """Write a file in place of `path`; its content begins at a page of memory."""
    files.publish(path, _blocks(header, content))


def sealed_size(header: Mapping[str, Any], n_bytes: int) -> int:
    """Return the size of a file with `n_bytes` of content."""
    return len(_start(header)) + n_bytes + _FOOTER.size


def open_sealed(path: Path) -> SealedFile | None:
    """Map a file; None if it is missing, damaged, incomplete or of another user."""
    try:
        with files.open_regular(path) as file:
            found = _read_header(path, file.fileno())
            if found is None:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (TgenError, OSError, ValueError):
        return None
    header, start = found
    return SealedFile(header, memoryview(mapped)[start : len(mapped) - _FOOTER.size])


def is_intact(path: Path) -> bool:
    """Whether a file is whole and its content has the digest with which it was written."""
    try:
        with files.open_regular(path) as file:
            found = _read_header(path, file.fileno())
            if found is None:
                return False
            size, start = os.fstat(file.fileno()).st_size, found[1]
            digest = hashlib.sha256()
            for at in range(start, size - _FOOTER.size, 1 << 20):
                end = min(at + (1 << 20), size - _FOOTER.size)
                digest.update(os.pread(file.fileno(), end - at, at))
            footer = os.pread(file.fileno(), _FOOTER.size, size - _FOOTER.size)
            return bool(digest.digest() == _FOOTER.unpack(footer)[3])
    except (TgenError, OSError, ValueError):
        return False


def _read_header(path: Path, fd: int) -> tuple[dict[str, Any], int] | None:
    """Return the header and where the content starts; None unless the file is whole and ours."""
    status, link = os.fstat(fd), path.lstat()
    ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    if not ours or not stat.S_ISREG(link.st_mode):
        return None
    n = status.st_size
    beginning = os.pread(fd, _START.size, 0)
    footer = os.pread(fd, _FOOTER.size, max(0, n - _FOOTER.size))
    if len(beginning) < _START.size or len(footer) < _FOOTER.size:
        return None
    (magic, n_header), (end_magic, size, digest, _) = (
        _START.unpack(beginning),
        _FOOTER.unpack(footer),
    )
    if (magic, end_magic, size) != (_MAGIC, _MAGIC, n) or n_header > min(n, _MAX_HEADER):
        return None
    text = os.pread(fd, n_header, _START.size)
    start = _content_start(n_header)
    if hashlib.sha256(text).digest() != digest or start > n - _FOOTER.size:
        return None
    return json.loads(text), start


def _content_start(n_header: int) -> int:
    return -(-(_START.size + n_header) // _PAGE) * _PAGE


def _start(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return (_START.pack(_MAGIC, len(text)) + text).ljust(_content_start(len(text)), b"\0")


def _blocks(
    header: Mapping[str, Any], content: Iterable[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    yield (start := _start(header))
    n, digest = len(start), hashlib.sha256()
    for block in content:
        yield block
        n += len(block)
        digest.update(block)
    of_header = hashlib.sha256(json.dumps(header).encode()).digest()
    yield _FOOTER.pack(_MAGIC, n + _FOOTER.size, of_header, digest.digest())
