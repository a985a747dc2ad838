"""Tables: the rows of CSV, TSV, parquet and Arrow files as objects, one at a time.

CSV is read by the standard library. Its delimiter is the one that splits the first records into
equally many cells. Parquet and Arrow files are read by pyarrow in a process of its own.
"""

import csv
import io
import json
import re
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tgen.corpus.jsonl import read_lines
from tgen.corpus.sources import Source
from tgen.errors import CorpusError
from tgen.machine.child import WALL_TIME, Child, has_used_its_cpu_time

if TYPE_CHECKING:
    import _csv

KINDS = ("csv", "tsv", "parquet", "arrow")
_DELIMITERS = ",;\t|"
_MAX_CELL = 1 << 24  # characters
_MAX_RECORD = 1 << 27  # bytes of a row that the other process sends
SAMPLE_BYTES = 1 << 18  # that tell the dialect
_SAMPLE_RECORDS = 50
_MAX_TABLE = 1 << 30  # bytes of all rows as JSON, and as many times its own bytes:
_MAX_EXPANSION = 100
_SECONDS, _BYTES_PER_SECOND = 60, 100_000  # of CPU time
_SCRIPT = Path(__file__).with_name("table_child.py")  # it imports little besides pyarrow
_MAX_HEADING = 64  # characters of a column's name
_SEPARATOR_LINE = re.compile(r"sep=([,;\t|:^~])[\r\n]*", re.IGNORECASE)  # Excel's
_BEGINS_JSON = re.compile(r'\s*(\{\s*["}]|\[\s*["{\[])')
_NUMBER = re.compile(r"[-+]?[\d.,]*\d([eE][-+]?\d+)?%?")
_DECODER = json.JSONDecoder(  # of the other process
    parse_constant=lambda _: None,  # NaN and Infinity
    object_hook=lambda value: b"" if "bytes that are not UTF-8" in value else value,
)
_limit_lock = threading.Lock()  # the limit of cells is the process's


class Dialect(NamedTuple):
    """The characters that separate the cells of a table."""

    delimiter: str
    quoted: bool  # cells may be in quotes
    escaped: bool  # quotes in cells have a backslash, as Spark and MySQL write them
    spaced: bool  # spaces after a delimiter are not part of the cell

    def reader(self, lines: Iterable[str]) -> "_csv.Reader":
        """Return a reader of records that are valid."""
        return csv.reader(
            (line.replace('\\"', '""') for line in lines) if self.escaped else lines,
            delimiter=self.delimiter,
            quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            skipinitialspace=self.spaced,
            strict=True,
        )


class NumberedRow(NamedTuple):
    """A row: its number in its file, its value or what is wrong with it, if it is a line, its start
    and its bytes, the bytes that were read until its end, and the fraction of the file that they
    are, unless they are bytes of the file itself."""

    number: int
    value: Any
    line: tuple[int, bytes] | None = None
    end: int = 0
    fraction: float = 0.0


def table_kind(name: str, head: bytes) -> str | None:
    """Return the kind of a table by its name and first bytes; None for another file."""
    if head.startswith(b"PAR1"):
        return "parquet"
    is_stream = head[:4] == b"\xff\xff\xff\xff" and name.endswith((".arrow", ".arrows", ".ipc"))
    if head.startswith((b"ARROW1\0\0", b"FEA1")) or is_stream:
        return "arrow"
    if name.endswith(".csv"):
        return "csv"
    return "tsv" if name.endswith((".tsv", ".tab")) else None


def has_columns(beginning: bytes, *, is_cut: bool) -> bool:
    """Return whether most of the first records of a text in UTF-8 have several cells, as many as
    the first, and none begins as a JSON object or list does."""
    _, dialect, lines = _find_dialect(beginning.decode("utf-8-sig", errors="replace"), is_cut)
    records = _sample(lines, dialect, is_cut)
    has_several, share, *_ = _fit(records)
    has_json = any(_BEGINS_JSON.match(cells[0]) for cells in records if cells)
    return has_several and share > 0.5 and not has_json


def read_table(source: Source, kind: str, columns: Sequence[str] = ()) -> Generator[NumberedRow]:
    """Yield the rows of a table of one of `KINDS`.

    Of parquet and Arrow files, only these columns are read; () are all. Raises CorpusError if the
    table cannot be read.
    """
    if kind in ("parquet", "arrow"):
        return _read_columns(source, kind, columns)
    return _read_csv(source)


def _read_csv(source: Source) -> Generator[NumberedRow]:
    head = source.read(0, SAMPLE_BYTES).decode("utf-8-sig", errors="replace")
    n_skipped, dialect, _ = _find_dialect(head, source.n_bytes > SAMPLE_BYTES)
    record = 0  # start of the current one

    def lines() -> Iterator[str]:
        for start, line in islice(read_lines(source), n_skipped, None):
            if start - record > _MAX_RECORD:
                hint = "close the quotes of its cells"
                raise CorpusError(
                    f"{source.name} has a row of more than {_MAX_RECORD:,} bytes", hint
                )
            place[0] = start + len(line)
            text = line.decode().replace("\0", "").replace("\ufeff", "")  # marks of joined files
            yield text.replace("\r\n", "\n")

    place = [0]
    reader = dialect.reader(lines())
    columns: list[str] = []
    while True:
        number, record = n_skipped + reader.line_num + 1, place[0]
        try:
            cells = _next_record(reader)
        except StopIteration:
            return
        except UnicodeDecodeError:
            number = n_skipped + reader.line_num + 1
            hint = "add --encoding NAME, or save the file as UTF-8"
            raise CorpusError(f"{source.name}, line {number:,}: not UTF-8", hint) from None
        except csv.Error as error:
            hint = "write cells with quotes or line breaks in quotes, and double their quotes"
            what = str(error).replace("\t", "\\t")
            if "field limit" in what:
                hint = "split its long cell"
            yield NumberedRow(number, CorpusError(f"not valid CSV: {what}", hint))
            continue
        if not cells:
            continue
        if not columns:
            columns, is_header = _name_columns(cells)
            if is_header:
                continue
        if len(cells) == len(columns):
            yield NumberedRow(number, dict(zip(columns, cells, strict=True)), end=place[0])
        else:
            what = f"{len(cells)} cells (the header has {len(columns)})"
            hint = f"write cells that have a {dialect.delimiter!r} in quotes"
            yield NumberedRow(number, CorpusError(what, hint))


def _find_dialect(head: str, is_cut: bool) -> tuple[int, Dialect, list[str]]:
    """Return the number of lines before the table, the dialect in which most of the first records
    have as many cells as the first, and the first lines of the table."""
    lines = [*io.StringIO(head, newline="")]  # splitlines also splits at U+2028 and so on
    if is_cut and len(lines) > 1:
        del lines[-1]
    delimiters, n_skipped = _DELIMITERS, 0
    if lines and (match := _SEPARATOR_LINE.fullmatch(lines[0])):
        delimiters, n_skipped = match[1], 1
    dialects = [
        Dialect(delimiter, quoted, escaped, spaced)
        for delimiter in delimiters
        for quoted in ((True, False) if delimiter == "\t" else (True,))
        for escaped in ((False, True) if quoted and '\\"' in head else (False,))
        for spaced in sorted(
            {False, quoted and bool(re.search(f'{re.escape(delimiter)} +"', head))}
        )
    ]
    lines = lines[n_skipped:]
    best = max(dialects, key=lambda dialect: _fit(_sample(lines, dialect, is_cut)))
    return n_skipped, best, lines


def _sample(lines: list[str], dialect: Dialect, is_cut: bool) -> list[list[str]]:
    """Return the cells of the first records; an invalid record has none."""
    reader = dialect.reader(lines)
    records: list[list[str]] = []
    while len(records) < _SAMPLE_RECORDS:
        try:
            if cells := _next_record(reader):
                records.append(cells)
        except StopIteration:
            break
        except csv.Error:
            if not is_cut or reader.line_num < len(lines):  # the last record may be cut
                records.append([])
    return records


def _fit(records: list[list[str]]) -> tuple[bool, float, int, int]:
    """Return whether there are several columns, the share of records with as many cells as the
    first, their number, and minus the number of cells that begin with a space and a quote."""
    widths = [len(cells) for cells in records]
    n_spaced = sum(re.match(' +"', cell) is not None for cells in records for cell in cells)
    width = widths[0] if widths else 0
    return width > 1, widths.count(width) / max(1, len(widths)), width, -n_spaced


def _next_record(reader: "_csv.Reader") -> list[str]:
    """Return the cells of the next record, with a limit that other readers do not get."""
    with _limit_lock:
        limit = csv.field_size_limit(_MAX_CELL)
        try:
            return next(reader)
        finally:
            csv.field_size_limit(limit)


def _name_columns(cells: list[str]) -> tuple[list[str], bool]:
    """Return the names of columns, and whether the first record has them: short texts. A column
    without a name of its own has its number."""
    named = [cell.strip() for cell in cells if cell.strip()]
    is_header = bool(named) and not any(
        len(name) > _MAX_HEADING or _NUMBER.fullmatch(name) for name in named
    )
    names = dict.fromkeys(named) if is_header else {}
    columns = []
    for number, cell in enumerate(cells, 1):
        columns.append(cell.strip() if cell.strip() in names else str(number))
        names.pop(cell.strip(), None)
    return columns, is_header


def _read_columns(source: Source, kind: str, wanted: Sequence[str]) -> Generator[NumberedRow]:
    """Yield the rows of a parquet or an Arrow file, which a process of its own reads."""
    if find_spec("pyarrow") is None:
        raise CorpusError(
            f"{source.name} is a {kind} file, which needs pyarrow",
            "pip install 'tgen-lm[tables]', or save the table as CSV",
        )
    copy = source.copy()
    seconds = _SECONDS + source.n_bytes // _BYTES_PER_SECOND
    child, process = Child(str(_SCRIPT), str(seconds), kind, *wanted, stdin=copy), None
    columns: list[str] | None = None
    number, fraction = 0, 0.0
    n_bytes, limit = 0, _MAX_TABLE + _MAX_EXPANSION * source.n_bytes
    try:
        with child.use(WALL_TIME * seconds) as process:
            assert process.stdout
            while True:
                line = process.stdout.readline(_MAX_RECORD)
                n_bytes += len(line)
                if n_bytes > limit:
                    what = f"{source.name} expands to more than {limit:,} bytes"
                    raise CorpusError(what, "save the columns to train on as CSV")
                is_whole = line.endswith(b"\n")
                value = _DECODER.decode(line.decode()) if is_whole else None
                if isinstance(value, str):
                    raise CorpusError(f"cannot read {source.name}: {value}", "write the file again")
                if value is None:
                    if line or process.wait() != 0:
                        raise EOFError
                    return
                if isinstance(value, float):
                    fraction = value
                elif columns is None:
                    columns = value
                else:
                    number += 1
                    row = dict(zip(columns, value, strict=True))
                    yield NumberedRow(number, row, end=n_bytes, fraction=fraction)
    except (EOFError, ValueError, TimeoutError) as error:
        is_slow = isinstance(error, TimeoutError) or has_used_its_cpu_time(process)
        damaged = f"it is damaged, or has a row of more than {_MAX_RECORD:,} bytes"
        what = f"it takes more than {seconds:,} s to read" if is_slow else damaged
    finally:
        copy.close()
    raise CorpusError(
        f"cannot read {source.name}: {what}", "write the file again, or save the table as CSV"
    )
