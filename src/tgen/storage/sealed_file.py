"""Files that are written once into the user's cache directory and then mapped.

A file has a header in JSON, content, and a footer. The footer is written last, and the file appears
by a rename: a file with a valid footer is whole. Opening checks the header's digest; `is_intact`
also checks the content's. The content is mapped, so a disk that fails, or another program that
truncates a file in use, ends the process.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tgen.errors import TgenError
from tgen.storage import files
from tgen.storage.user_cache import is_own

_MAGIC = b"TGENSEAL"
_START = struct.Struct("<8sQ")  # magic, bytes of the header
_FOOTER = struct.Struct("<8sQ32s32s")  # magic, bytes of the file, SHA-256 of beginning and content
_MAX_HEADER = 1 << 24  # bytes
_PAGE = 1 << 16  # at least as large as a page of memory anywhere


class SealedFile(NamedTuple):
    """A file's header, and its content in read-only shared memory."""

    header: dict[str, Any]
    content: memoryview


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file, up to its content at a page of memory."""
    text = json.dumps(header).encode()
    return (_START.pack(_MAGIC, len(text)) + text).ljust(_content_start(len(text)), b"\0")


def sealed_size(beginning: bytes, n_bytes: int) -> int:
    """Return the size of a file with `n_bytes` of content."""
    return len(beginning) + n_bytes + _FOOTER.size


def publish_sealed(path: Path, beginning: bytes, content: Iterable[bytes | memoryview]) -> None:
    """Write a file in place of `path`, for this user only; see `encode_header`."""
    files.publish(path, _blocks(beginning, content), mode=0o600)


def open_sealed(path: Path) -> SealedFile | None:
    """Map a file; None if it is missing, damaged, incomplete or of another user."""
    try:
        with files.open_regular(path) as file:
            found = _read_header(file.fileno()) if is_own(path) else None
            if found is None:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (TgenError, OSError, ValueError, struct.error):  # the last if it shrinks meanwhile
        return None
    header, start, _ = found
    return SealedFile(header, memoryview(mapped)[start : len(mapped) - _FOOTER.size])


def is_intact(path: Path) -> bool:
    """Whether a file is whole and its content has the digest with which it was written.

    Raises TgenError or OSError if it cannot be read.
    """
    with files.open_regular(path) as file:
        found = _read_header(file.fileno())
        if found is None:
            return False
        _, start, expected = found
        digest, end = hashlib.sha256(), os.fstat(file.fileno()).st_size - _FOOTER.size
        for at in range(start, end, 1 << 20):
            digest.update(os.pread(file.fileno(), min(1 << 20, end - at), at))
        return digest.digest() == expected


def _read_header(fd: int) -> tuple[dict[str, Any], int, bytes] | None:
    """Return the header, where the content starts and its digest; None unless the file is whole."""
    n = os.fstat(fd).st_size
    if n < _START.size + _FOOTER.size:
        return None
    magic, n_header = _START.unpack(os.pread(fd, _START.size, 0))
    footer = os.pread(fd, _FOOTER.size, n - _FOOTER.size)
    end_magic, size, of_beginning, of_content = _FOOTER.unpack(footer)
    if (magic, end_magic, size) != (_MAGIC, _MAGIC, n) or n_header > min(n, _MAX_HEADER):
        return None
    content_start = _content_start(n_header)
    beginning = os.pread(fd, content_start, 0)
    if hashlib.sha256(beginning).digest() != of_beginning or content_start > n - _FOOTER.size:
        return None
    header = json.loads(beginning[_START.size : _START.size + n_header])
    return (header, content_start, of_content) if isinstance(header, dict) else None


def _content_start(n_header: int) -> int:
    return -(-(_START.size + n_header) // _PAGE) * _PAGE


def _blocks(
    beginning: bytes, content: Iterable[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    yield beginning
    n, digest = len(beginning), hashlib.sha256()
    for block in content:
        yield block
        n += len(block)
        digest.update(block)
    of_beginning = hashlib.sha256(beginning).digest()
    yield _FOOTER.pack(_MAGIC, n + _FOOTER.size, of_beginning, digest.digest())
