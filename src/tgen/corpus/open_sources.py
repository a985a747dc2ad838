"""The door of a corpus: every file, however it was named, becomes texts or rows by one rule.

A file is unpacked, recognized by its first bytes and its name, and read as what it is: as a
document, as rows, or as a text in some encoding. Plain UTF-8 with LF stays the file itself, and
canonical JSON Lines too; the content of other files is converted into one temporary file.
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from tgen.config.input_files import Reading
from tgen.corpus.binary_kinds import GGUF, SAFETENSORS, binary_kind
from tgen.corpus.encodings import Changes, Encoding, decode, find_encoding, unknown_encoding
from tgen.corpus.json_rows import may_hold_rows
from tgen.corpus.jsonl import contains_rows
from tgen.corpus.rows import convert_rows, row_kind
from tgen.corpus.sources import Source, Spool, read_pipe
from tgen.corpus.steps import Steps, as_part, finish
from tgen.corpus.tables import SAMPLE_BYTES, has_columns, table_kind
from tgen.documents.convert import close_converter, convert_document
from tgen.documents.kinds import ANY_ENCODING, document_kind
from tgen.errors import CorpusError
from tgen.reports.number_format import count, format_bytes
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.corpus.archives import Bounds

HEAD = 1 << 16  # bytes that tell what a file is
_BINARY_HEAD = 1 << 13  # bytes of a text without NUL
_MAX_LISTED = 8  # files in notes of one kind
_MAX_REPLACED = 0.01  # characters per byte that an encoding may lack
_OPENED = 0.75  # of the time to read a file; the rest is to find its documents
_ENCODING_FOUND = 0.2  # of the time to open a text
_LOCK = "LOCK"  # file of a run
_DATASET_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")  # beside its tables
_PACKED = (  # names of files that are never empty, besides those of documents, CSV and TSV
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tzst"),
    *(".parquet", ".arrow", ".arrows", ".feather", ".ipc"),
)
_NUL_BYTES = "binary data with NUL bytes"

OwnFiles = Callable[[Path], set[str]]
Origin = Literal["name", "directory", "pattern"]


@dataclass
class ReadingReport:
    """The ways in which the files of a corpus were read, and the skipped files."""

    skipped: dict[str, str] = field(default_factory=dict)  # file -> reason
    models: dict[str, None] = field(default_factory=dict)  # directories and files, in order
    rows: Counter[str] = field(default_factory=Counter)  # by form
    n_documents: int = 0
    document_bytes: int = 0  # of text
    left_out: Counter[str] = field(default_factory=Counter)  # of documents
    encodings: Counter[str] = field(default_factory=Counter)  # texts by encoding
    detected: dict[str, str] = field(default_factory=dict)  # file -> encoding
    n_line_breaks: int = 0  # texts whose lines ended in CRLF or CR
    n_marked: int = 0  # texts with byte order marks inside
    unknown: list[str] = field(default_factory=list)  # notes on bytes that are not UTF-8
    other: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return lines for the user; none for plain texts and canonical rows."""
        lines = [f"{count(n, 'row')}, read as {form}" for form, n in self.rows.items()]
        if self.n_documents:
            left_out = ", ".join(count(n, what) for what, n in self.left_out.items())
            size = f"{count(self.n_documents, 'document')}, {format_bytes(self.document_bytes)}"
            lines.append(f"{size} of text" + (f"; left out: {left_out}" if left_out else ""))
        lines += [f"{count(n, 'text')}, {how}" for how, n in self.encodings.items()]
        if self.n_line_breaks:
            n = count(self.n_line_breaks, "text")
            lines.append(f"{n} with CRLF or CR at the end of lines, read as LF")
        if self.n_marked:
            lines.append(f"{count(self.n_marked, 'text')} with byte order marks inside, left out")
        lines += _shorten(self.unknown) + _shorten(self.other)
        lines += _shorten([f"skipped {name}: {why}" for name, why in self.skipped.items()])
        if self.models:
            names, n_models = list(self.models), len(self.models)
            more = f" and {n_models - _MAX_LISTED} more" if n_models > _MAX_LISTED else ""
            what = "1 model or run" if n_models == 1 else f"{n_models} models and runs"
            lines.append(f"skipped {what} in the corpus: {', '.join(names[:_MAX_LISTED])}{more}")
        return lines


def _shorten(lines: list[str]) -> list[str]:
    n = len(lines) - _MAX_LISTED
    return [*lines[:_MAX_LISTED], f"{count(n, 'more note')} of this kind"] if n > 1 else lines


class BinaryError(CorpusError):
    """A file has no text; `kind` says what it is."""

    def __init__(self, name: str, kind: str) -> None:
        as_text = "save a text as UTF-8, or add --encoding NAME; " if kind == _NUL_BYTES else ""
        hint = f"name a text or a document; {as_text}--as bytes trains on bytes as they are"
        super().__init__(f"{name} is {kind}, not text", hint)
        self.kind = kind


def open_sources(
    paths: Sequence[str],
    report: ReadingReport,
    own_files: OwnFiles = lambda _: set(),
    reading: Reading | None = None,
    *,
    known_encodings: dict[str, str] | None = None,
    chat: bool = False,
    keep_rows: bool = False,
    stdin_head: bytes = b"",
) -> Iterator[Source | float]:
    """Open everything the paths name, in order; add to `report` how. Besides the sources, yield the
    fraction of all files' bytes that are read, now and then.

    A file that cannot be read is an error if it is named, and skipped in directories, archives and
    among the matches of patterns. `own_files` returns the names of the files of a model or a run in
    a directory: below a directory or a pattern, a directory with such files is skipped; in itself,
    only these files are. `known_encodings` are those detected earlier. With `keep_rows`, JSON and
    CSV stay text; `chat`: rows of prompts and completions are conversations. `stdin_head` was read
    from stdin before.

    Without `reading`, only the names of files matter, as in runs that do not record how files are
    read.
    """
    own_files = cache(own_files)
    opener = _Opener(report, reading, known_encodings or {}, chat=chat, keep_rows=keep_rows)
    found = [entry for path in paths for entry in _list_files(path, report, own_files)]
    n_done, n_bytes = 0, sum(map(_size_of, found))
    try:
        for name, origin in found:
            if origin == "name" and (name == "-" or files.is_pipe(name)):
                source = read_pipe(name, stdin_head if name == "-" else b"")
                n_bytes += source.n_bytes
            else:
                source = Source(name, Path(name))
            start, size = n_done, source.n_bytes
            n_done += size
            total = max(1, n_bytes, n_done)
            end = start + _OPENED * size
            opened = yield from as_part(opener.open(source, origin), start / total, end / total)
            n_opened = sum(text.n_bytes for text in opened)
            for text in opened:
                end += (1 - _OPENED) * size * text.n_bytes / max(1, n_opened)
                text.done = end / total
                yield text
    finally:
        close_converter()
    if reading is not None and not opener.has_rows:
        reading.check_used()


def fingerprint(paths: Sequence[str], own_files: OwnFiles) -> str:
    """Return a hash of the files that the paths name, by their names, sizes and first bytes: it
    tells other files apart without converting them."""
    digest = hashlib.sha256()
    for path in paths:
        if path == "-" or files.is_pipe(path):
            continue
        for name, _ in _list_files(path, ReadingReport(), cache(own_files)):
            source = Source(name, Path(name))
            label = f"{Path(name).name}\0{source.n_bytes}\0"  # folders may differ
            digest.update(label.encode(errors="surrogateescape"))
            digest.update(source.read(0, HEAD))
            source.close()
    return digest.hexdigest()


def _list_files(
    path: str, report: ReadingReport, own_files: OwnFiles
) -> Iterator[tuple[str, Origin]]:
    """Yield the files of a path, and how it names them."""
    if not path:  # Path would name the current directory
        raise CorpusError("the name of a file is empty (got '')", "name a file, or . for all here")
    if path.startswith(("http://", "https://")):
        raise CorpusError(f"{path} is the address of a page", "download it and name the file")
    if path != "-" and Path(path).is_dir():
        for file in _walk(Path(path)):
            if _is_included(file, Path(path), report, own_files):
                yield str(file), "directory"
    elif path != "-" and not Path(path).exists() and _has_wildcard(path):
        matches = sorted(m for m in _expand(path) if not Path(m).is_dir())
        if not matches:
            raise CorpusError(f"no file matches {path!r}", "quote the pattern and check it")
        base = Path(*takewhile(lambda part: not _has_wildcard(part), Path(path).parts))
        for match in matches:
            if _is_included(Path(match), base, report, own_files):
                yield match, "pattern"
    else:
        yield path, "name"


def _size_of(entry: tuple[str, Origin]) -> int:
    """Return the bytes of a file; 0 if they are not known, as of stdin."""
    try:
        return os.stat(entry[0]).st_size
    except (OSError, ValueError):
        return 0


def _has_wildcard(path: str) -> bool:
    return any(wildcard in path for wildcard in "*?[")


def _expand(pattern: str) -> set[str]:
    """Return the matches of a pattern; `**` does not follow links to directories, which may form a
    loop."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return set(glob.glob(pattern))
    i = parts.index("**")
    found: set[str] = set()
    for base in glob.glob(str(Path(*parts[:i]))):
        for directory, folders, _ in os.walk(base):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found |= _expand(str(Path(glob.escape(directory), *(parts[i + 1 :] or ("*",)))))
    return found


def _walk(folder: Path) -> list[Path]:
    """Return the files below a directory that are not hidden, and the links to directories, which
    are not followed. Raises CorpusError for a directory that cannot be read."""
    found: list[Path] = []
    for directory, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [name for name in folders if Path(directory, name).is_symlink()]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _raise_unreadable(error: OSError) -> NoReturn:
    message = f"cannot read {error.filename}: {error.strerror}"
    raise CorpusError(message, "make the directory readable, or name the other files") from None


def _is_included(file: Path, base: Path, report: ReadingReport, own_files: OwnFiles) -> bool:
    """Return whether an entry below `base` is a file and not part of a model or a run; if it is
    not, add that to `report`."""
    below = file.relative_to(base).parts
    for depth, name in enumerate(below):
        directory = base.joinpath(*below[:depth])
        if (own := own_files(directory)) and (depth or name in own):
            if file.name != _LOCK:  # of the run that reads this corpus, whose directory is new
                report.models[str(directory)] = None
            return False
    reason = ""
    if not file.is_file():
        reason = "a link to a directory" if file.is_dir() else "not a regular file"
        reason = reason if file.exists() else "a broken link"
    elif file.name in _DATASET_FILES:
        tables = chain.from_iterable(map(file.parent.glob, ("*.arrow", "*/*.arrow")))
        reason = "metadata of a dataset" if any(tables) else ""
    if reason:
        report.skipped[str(file)] = reason
    return not reason


class _Opener:
    """Opens files one after the other; their converted content shares a temporary file."""

    def __init__(
        self,
        report: ReadingReport,
        reading: Reading | None,
        known_encodings: dict[str, str],
        *,
        chat: bool,
        keep_rows: bool,
    ) -> None:
        self._report, self._reading, self._known = report, reading or Reading(), known_encodings
        self._by_name, self._chat, self._keep_rows = reading is None, chat, keep_rows
        self._spool = Spool()
        self.has_rows = False  # any

    def open(self, source: Source, origin: Origin) -> Steps[list[Source]]:
        """Return the texts and rows of a file; skip one that is not named and cannot be read."""
        try:
            if self._by_name:
                return [_open_by_name(source, origin)]
            return (yield from self._read(source, "" if source.name == "-" else source.name))
        except CorpusError as error:
            source.discard()
            if origin == "name":
                raise
            self._skip(source.name, error)
            return []

    def _skip(self, name: str, error: CorpusError) -> None:
        if isinstance(error, BinaryError):
            self._report.skipped[name] = error.kind
        else:
            reason = error.message.removeprefix(name).lstrip(",: ").removeprefix("is ")
            self._report.skipped[name] = reason

    def _read(
        self, source: Source, name: str, bounds: "Bounds | None" = None
    ) -> Steps[list[Source]]:
        """Return the texts and rows of a file that is called `name` where it was made."""
        read_as = self._reading.read_as
        head = source.read(0, HEAD)
        if not head and read_as not in ("bytes", "text") and _has_format(name):
            raise CorpusError(f"{source.name} is empty", "copy or download it again")
        if read_as == "bytes" or not head:
            return [source]
        kind = None if read_as in ("text", "rows") else document_kind(name, head)
        if read_as == "document" and kind is None and not _is_packed(head):
            raise CorpusError(
                f"{source.name} is not a document of a known format",
                "remove --as document to read it as text",
            )
        found = finish(self._find_encoding(source)) if self._decodes(kind, head) else None
        if kind is not None and not (kind == "markdown" and found and found.share):
            return [(yield from self._read_document(source, kind, found))]
        if unpacked := (yield from self._unpack(source, name, head, bounds)):
            return unpacked
        if read_as != "text" and (kind := _table_kind(name, head)):
            return [(yield from self._read_rows(source, kind))]
        what = binary_kind(head[:_BINARY_HEAD], source.n_bytes)
        if what is not None:
            raise BinaryError(source.name, what)
        return [(yield from self._read_text(source, name, head))]

    def _unpack(
        self, source: Source, name: str, head: bytes, bounds: "Bounds | None"
    ) -> Steps[list[Source] | None]:
        """Return the texts and rows of a compressed file or an archive, None for other files."""
        from tgen.corpus import archives

        compression, archive = archives.compression_of(head), archives.archive_of(head)
        is_binary = binary_kind(head[:_BINARY_HEAD], source.n_bytes) is not None
        if not (compression or archive) or is_binary:
            return None
        bounds = bounds or archives.Bounds(source)
        with bounds.nested():
            if compression:
                unpack = archives.decompress(source, compression, self._spool, bounds)
                inner = yield from as_part(unpack, 0.0, 0.5)
                name = archives.decompressed_name(name)
                return (yield from as_part(self._read(inner, name, bounds), 0.5, 1.0))
            opened: list[Source] = []
            skipped, n_skipped = self._report.skipped, len(self._report.skipped)
            start = done = 0.0
            for found in archives.members_of(source, archive, self._spool, bounds):
                if isinstance(found, float):  # of the archive is unpacked, half of the work
                    done = max(done, (start + found) / 2)
                    yield done
                    continue
                member, content, end = found
                if isinstance(content, CorpusError):
                    self._skip(archives.member_label(source.name, member), content)
                    continue
                try:
                    end = max(done, end)  # members may be in any order
                    opened += yield from as_part(self._read(content, member, bounds), done, end)
                    start = done = end
                except archives.ExpansionError:
                    raise
                except CorpusError as error:
                    self._skip(archives.member_label(source.name, member), error)
        if not opened:
            reasons = [f": skipped {one}: {skipped.pop(one)}" for one in [*skipped][n_skipped:]]
            problem = f"has no text{reasons[-1]}" if reasons else "has no files besides hidden ones"
            problem += f" (the last of {len(reasons)} files)" if len(reasons) > 1 else ""
            raise CorpusError(f"{source.name} {problem}", "name an archive with texts")
        return opened

    def _decodes(self, kind: str | None, head: bytes) -> bool:
        """Return whether a document does not declare its encoding, or the user's counts more."""
        if kind == "html" and self._reading.encoding is None:
            from tgen.documents.html import declares_encoding

            return not declares_encoding(head)
        return kind == "html" or kind in ANY_ENCODING

    def _read_document(self, source: Source, kind: str, found: Encoding | None) -> Steps[Source]:
        """Return the texts of a document, which may have an encoding."""
        encoding = None if found is None or found.is_plain else _with_mark(found)
        if found is not None and found.share and kind == "html":
            from tgen.documents.html import undeclared_encoding

            encoding = undeclared_encoding(source.read(0, HEAD))
            guess = found.guess and f", perhaps {found.guess}"
            self._report.unknown.append(
                f"{found.share:.2%} of the bytes of {source.name} are not UTF-8, and it declares "
                f"no encoding, so it is read as {encoding}; if that is wrong, save it as UTF-8, or "
                f"add --encoding NAME{guess}"
            )
            found = None
        content = source.path or source.copy()
        converted = yield from convert_document(content, kind, name=source.name, encoding=encoding)
        text = self._store(source.name, converted.spool)
        if found is not None:
            self._count_encoding(source, found)
        self._report.n_documents += 1
        self._report.document_bytes += text.n_bytes
        self._report.left_out.update(converted.left_out)
        return text

    def _read_rows(self, source: Source, kind: str) -> Steps[Source]:
        """Return rows as canonical JSON Lines."""
        converted = yield from convert_rows(source, kind, self._reading, chat=self._chat)
        if converted.spool is not None:
            self._report.rows[converted.form] += converted.n_rows
            rows = self._store(source.name, converted.spool)
        else:
            rows = source
        rows.has_rows = self.has_rows = True
        self._report.other += [f"{source.name}: {note}" for note in converted.notes]
        return rows

    def _store(self, name: str, spool: files.RandomAccessFile) -> Source:
        """Return the content of a temporary file, which is closed: each one needs a descriptor."""
        return finish(self._spool.store(name, Source(name, spool).blocks()))

    def _read_text(
        self, source: Source, name: str, head: bytes, encoding: Encoding | None = None
    ) -> Steps[Source]:
        """Return a text in UTF-8, or the rows in it; find its encoding if it is None."""
        if encoding is None:
            find = as_part(self._find_encoding(source), 0.0, _ENCODING_FOUND)
            encoding = yield from find
            has_nul = b"\0" in head[:_BINARY_HEAD] and self._reading.read_as is None
            if has_nul and not encoding.codec.startswith(("utf-16", "utf-32")):
                raise BinaryError(source.name, _NUL_BYTES)
        text, kind, changes = source, None, Changes()
        try:
            if self._reading.read_as != "text" and not self._keep_rows:
                begins_json = head.lstrip()[:1] in (b"[", b"{")
                if begins_json or not encoding.is_plain:
                    head = next(decode(source, encoding, Changes()), b"")
                kind = row_kind(name, head)
            if self._reading.read_as == "rows" and kind is None:
                beginning = source.read(0, SAMPLE_BYTES) if encoding.is_plain else head
                is_csv = has_columns(beginning, is_cut=source.n_bytes > SAMPLE_BYTES)
                kind = "csv" if is_csv else "json lines"
            if not encoding.is_plain or (kind is None and encoding.may_change):
                blocks = decode(source, encoding, changes, line_breaks=kind is None)
                store = self._spool.store(source.name, blocks, source)
                end = 1.0 if kind is None else 0.5
                text = yield from as_part(store, _ENCODING_FOUND, end)
        except UnicodeDecodeError:  # it looked like this encoding at first
            unknown = finish(unknown_encoding(source, encoding.codec))
            return (yield from self._read_text(source, name, head, unknown))
        if encoding.is_plain and not (changes.n_line_breaks or changes.n_marks):
            text = source
        if changes.n_replaced:
            self._check_replaced(source, changes.n_replaced, encoding)
        self._count_encoding(source, encoding)
        self._report.n_line_breaks += changes.n_line_breaks > 0
        self._report.n_marked += changes.n_marks > 0
        if kind is None and name.lower().endswith(".json") and not self._keep_rows:
            self._note_object(source.name, head)
        if kind is None and self._keep_rows:
            self._reading.check_used(source.name)
        if kind is None:
            return text
        start = _ENCODING_FOUND if text is source else 0.5
        return (yield from as_part(self._read_rows(text, kind), start, 1.0))

    def _note_object(self, name: str, head: bytes) -> None:
        """Note an object that may have been meant as rows, unless the user says that it is text."""
        if self._reading.read_as is None and may_hold_rows(head):
            self._report.other.append(
                f"{name} is one JSON object, read as text; to train on its values, write them as "
                'rows, {"text": "..."} or {"prompt": "...", "completion": "..."}'
            )

    def _check_replaced(self, source: Source, n: int, encoding: Encoding) -> None:
        """Note bytes that an encoding lacks; raise CorpusError for too many."""
        problem = f"{count(n, 'character')} of {source.name} cannot be read as {encoding.codec}"
        if n > source.n_bytes * _MAX_REPLACED:
            hint = "save it as UTF-8" if encoding.start else "pass another --encoding"
            raise CorpusError(problem, hint)
        self._report.other.append(f"{problem} and became U+FFFD")

    def _find_encoding(self, source: Source) -> Steps[Encoding]:
        known = self._known.get(source.name, "")
        return find_encoding(source, given=self._reading.encoding, known=known)

    def _count_encoding(self, source: Source, encoding: Encoding) -> None:
        """Add what is known of a text's encoding to the report."""
        if encoding.how:
            self._report.encodings[f"{encoding.codec}, {encoding.how}"] += 1
        if encoding.how == "as detected":
            self._report.detected[source.name] = encoding.codec
        if encoding.share:
            guess = encoding.guess and f", perhaps {encoding.guess}"
            self._report.unknown.append(
                f"{encoding.share:.2%} of the bytes of {source.name} are not UTF-8 and stay as "
                f"they are; if they are text, save it as UTF-8, or add --encoding NAME{guess}"
            )


def _open_by_name(source: Source, origin: Origin) -> Source:
    """Return a file as runs read it that do not record how: rows by name, anything else as it is.

    Raises BinaryError for what they skip.
    """
    head = source.read(0, _BINARY_HEAD)
    weights = binary_kind(head, source.n_bytes)
    if origin == "pattern" and weights in (GGUF, SAFETENSORS):
        raise BinaryError(source.name, weights)
    if origin == "directory" and b"\0" in head:
        raise BinaryError(source.name, _NUL_BYTES)
    source.has_rows = contains_rows(source)
    return source


def is_plain_text(head: bytes) -> bool:
    """Return whether the first `HEAD` bytes of stdin begin a text that stays as it is."""
    whole = head.decode("utf-8", "ignore").encode()  # the last character may be cut
    encoding = finish(find_encoding(Source("-", whole if head.startswith(whole) else head)))
    is_text = encoding.is_plain and not (encoding.may_change or encoding.how or encoding.share)
    is_other = b"\0" in head or _is_packed(head) or binary_kind(head, 0)
    return is_text and not is_other and document_kind("", head) is None


def _with_mark(encoding: Encoding) -> str:
    """Return the codec that skips a byte order mark, if there is one."""
    if not encoding.start:
        return encoding.codec
    return "utf-8-sig" if encoding.codec == "utf-8" else encoding.codec[:6]


def _has_format(name: str) -> bool:
    """Return whether a file of this name is a document, an archive or a table."""
    name = name.lower()
    is_table = table_kind(name, b"") is not None
    return is_table or name.endswith(_PACKED) or document_kind(name, b"\0") is not None


def _is_packed(head: bytes) -> bool:
    from tgen.corpus.archives import archive_of, compression_of

    return bool(compression_of(head) or archive_of(head))


def _table_kind(name: str, head: bytes) -> str | None:
    """Return the kind of a binary table, or None."""
    is_binary = b"\0" in head or head.startswith((b"PAR1", b"ARROW1"))
    kind = row_kind(name, head) if is_binary else None
    return kind if kind in ("parquet", "arrow") else None
