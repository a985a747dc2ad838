"""Compressed files and archives: unpacked in pieces into a temporary file, within bounds.

Names of members are only names: nothing is written where they point.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from tgen.corpus.sources import Source, SourceFile, Spool
from tgen.corpus.steps import Steps
from tgen.errors import CorpusError

_BLOCK = 1 << 20  # bytes per read
_MAX_RATIO = 100  # expanded bytes per byte of the file; texts have 3 to 20
_MIN_BOUND = 1 << 26  # bytes that any file may expand to
_DISK_SHARE = 0.8  # of the free space
_MAX_MEMORY = 1 << 28  # bytes of an xz decoder
_MAX_WINDOW_LOG = 27  # 128 MiB of a Zstandard decoder, as the program zstd allows
_MAX_MEMBERS = 100_000
_MAX_DEPTH = 4  # .tar.gz in a .zip is 3 deep
_MAX_NAME = 200  # characters of a member's name that messages show
_ZIP_METHODS = {0, 8, 12}  # stored, deflate, bzip2
_COMPRESSED = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_ERRORS = {"error", "LZMAError", "ZstdError", "BadZipFile", "ReadError", "HeaderError"}
_ENDINGS = {".tgz": ".tar", ".tbz2": ".tar", ".txz": ".tar", ".tzst": ".tar"}


class ExpansionError(CorpusError):
    """A file expands to more than its bound, or is nested too deep."""


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    content: Source | CorpusError  # or why it has none
    end: float  # fraction of the archive until its end


class Bounds:
    """Limits on the expanded size of a file on disk and of everything nested in it."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        self._ratio_bytes = max(_MIN_BOUND, _MAX_RATIO * source.n_bytes)
        self._disk_bytes = int(shutil.disk_usage(tempfile.gettempdir()).free * _DISK_SHARE)
        self._n_bytes = self._n_members = self._depth = 0

    def count(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Pass blocks on; raise ExpansionError when there are too many."""
        for block in blocks:
            self._n_bytes += len(block)
            if self._n_bytes > self._ratio_bytes:
                raise ExpansionError(
                    f"{self._name} expands to more than {_MAX_RATIO} times its size",
                    "if you trust the file, unpack it and name the result",
                )
            if self._n_bytes > self._disk_bytes:
                raise ExpansionError(
                    f"{self._name} expands to more than the free disk space in "
                    f"{tempfile.gettempdir()} ({self._disk_bytes:,} bytes)",
                    "free disk space, or set TMPDIR to a directory on another disk",
                )
            yield block

    def count_member(self) -> None:
        """Raise ExpansionError if an archive has too many members."""
        self._n_members += 1
        self.check_members(self._n_members)

    def check_members(self, n: int) -> None:
        """Raise ExpansionError if `n` members are too many."""
        if n > _MAX_MEMBERS:
            raise ExpansionError(
                f"{self._name} has more than {_MAX_MEMBERS:,} files", "unpack it and name a part"
            )

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Count one level of nesting; raise ExpansionError for too many."""
        if self._depth == _MAX_DEPTH:
            raise ExpansionError(
                f"{self._name} has archives nested more than {_MAX_DEPTH} deep",
                "unpack the outer ones and name the result",
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def compression_of(head: bytes) -> str:
    """Return the name of the compression that a file starts with, or ""."""
    found = next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")
    return "" if found == "bzip2" and head[4:10] not in _BZIP2_BLOCKS else found


_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # of data, or the end


def archive_of(head: bytes) -> str:
    """Return "zip" or "tar" if a file starts as an archive does, or ""."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "tar" if head[257:262] == b"ustar" else ""


def decompressed_name(name: str) -> str:
    """Return the name of a compressed file's content."""
    stem, dot, ending = name.rpartition(".")
    return stem + _ENDINGS.get(f".{ending.lower()}", "") if dot else name


def decompress(source: Source, kind: str, spool: Spool, bounds: Bounds) -> Steps[Source]:
    """Return the content of a compressed file. Raise CorpusError if it is damaged."""
    with _damage_of(source, kind):
        blocks = bounds.count(_decompress(source, kind))
        return (yield from spool.store(source.name, blocks, source))


def members_of(source: Source, kind: str, spool: Spool, bounds: Bounds) -> Iterator[Member | float]:
    """Yield the files in an archive and, while one is unpacked, the fraction of the archive that
    is read; hidden files are left out. Raises CorpusError if the archive is damaged."""
    is_zip = kind == "zip"
    members = _zip_members(source, spool, bounds) if is_zip else _tar_members(source)
    with _damage_of(source, kind):
        for found in members:
            if isinstance(found, float):
                yield found
                continue
            bounds.count_member()
            if not _is_hidden(found.name):
                yield found


def member_label(archive: str, name: str) -> str:
    """Return a member's name with that of its archive."""
    return f"{archive}/{name[:_MAX_NAME]}"


def _is_hidden(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return any(p == "__MACOSX" or (p.startswith(".") and p.strip(".")) for p in parts)


@contextmanager
def _damage_of(source: Source, kind: str) -> Iterator[None]:
    """Turn the errors of the libraries into CorpusErrors."""
    try:
        yield
    except CorpusError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        reason = "it ends too early" if isinstance(error, EOFError) else str(error)[:100]
        raise CorpusError(
            f"{source.name} is damaged: it starts as {kind} but cannot be unpacked ({reason})",
            "copy or download it again",
        ) from None
    except Exception as error:  # the libraries' own classes, which are not imported here
        if type(error).__name__ not in _ERRORS:
            raise
        raise CorpusError(f"{source.name} is damaged", "copy or download it again") from None


def _decompress(source: Source, kind: str) -> Iterator[bytes]:
    """Yield the content in blocks; raise EOFError if it is cut off."""
    if kind == "gzip":
        import gzip

        with gzip.GzipFile(fileobj=SourceFile(source)) as file:
            while block := file.read(_BLOCK):
                yield block
        return
    new_decoder = _decoder_of(kind, source.name)
    position, decoder = 0, None
    while block := source.read(position, _BLOCK):
        position += len(block)
        while block:
            if decoder is None or decoder.eof:
                block = block.lstrip(b"\0")  # padding between streams
                if not block:
                    break
                decoder = new_decoder()
            yield decoder.decompress(block, _BLOCK)
            while not decoder.needs_input and not decoder.eof:
                yield decoder.decompress(b"", _BLOCK)
            block = decoder.unused_data
    if decoder is None or not decoder.eof:
        raise EOFError


def _decoder_of(kind: str, name: str) -> Callable[[], Any]:
    """Return what makes a decoder, whose memory is bounded, for each stream of a file."""
    if kind == "bzip2":
        import bz2

        return bz2.BZ2Decompressor
    if kind == "xz":
        import lzma

        return partial(lzma.LZMADecompressor, memlimit=_MAX_MEMORY)
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise CorpusError(
            f"{name} is compressed with Zstandard, which needs the package backports.zstd",
            "install it with pip install 'tgen-lm[zstd]', or unpack the file with zstd -d",
        ) from None
    parameter = zstd.DecompressionParameter.window_log_max
    return partial(zstd.ZstdDecompressor, options={parameter: _MAX_WINDOW_LOG})


class _ZipSource(SourceFile):
    """A ZIP archive whose members are counted before the library makes an object of each."""

    def __init__(self, source: Source, bounds: Bounds) -> None:
        super().__init__(source)
        self._bounds = bounds

    def read(self, n: int = -1) -> bytes:
        """Return bytes as other files do; raise ExpansionError for a directory of too many."""
        data = super().read(n)
        self._bounds.check_members(data.count(b"PK\x01\x02"))
        return data


def _zip_members(source: Source, spool: Spool, bounds: Bounds) -> Iterator[Member | float]:
    import zipfile

    with zipfile.ZipFile(_ZipSource(source, bounds)) as archive:
        for info in archive.infolist():
            if info.is_dir() or _is_hidden(info.filename):
                continue
            label = member_label(source.name, info.filename)
            content: Source | CorpusError
            if info.flag_bits & 1:
                content = CorpusError(f"{label} is encrypted", "unpack the archive")
            elif info.compress_type not in _ZIP_METHODS:
                problem = f"{label} is compressed by method {info.compress_type}"
                content = CorpusError(problem, "unpack the archive")
            else:
                with archive.open(info) as file:
                    blocks = iter(partial(file.read, _BLOCK), b"")
                    content = yield from spool.store(label, bounds.count(blocks), source)
            end = info.header_offset + info.compress_size
            yield Member(info.filename, content, min(1.0, end / source.n_bytes))


def _tar_members(source: Source) -> Iterator[Member]:
    """Members are parts of the archive, so nothing is stored."""
    import tarfile

    end = 0
    with tarfile.open(fileobj=SourceFile(source), mode="r:") as archive:
        while (info := archive.next()) is not None:
            vars(archive)["members"] = []  # or all of them stay in memory
            start, n_bytes = info.offset_data, info.size
            is_stored = info.isreg() and not info.issparse()
            if n_bytes < 0 or start <= end or (is_stored and start + n_bytes > source.n_bytes):
                raise EOFError
            end = start
            label = member_label(source.name, info.name)
            if info.issparse():
                problem = CorpusError(f"{label} is stored without its zero bytes", "unpack it")
                yield Member(info.name, problem, start / source.n_bytes)
            elif is_stored:
                part = source.part(label, start, n_bytes)
                yield Member(info.name, part, (start + n_bytes) / source.n_bytes)
