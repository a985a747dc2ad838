"""Rows that are not canonical JSON Lines, converted once into a temporary file of them.

A file has rows if its content begins as rows in JSON do, or if it is a table.
"""

import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from tgen.config.input_files import Reading
from tgen.corpus import tables
from tgen.corpus.conversation import check_messages, pair_messages
from tgen.corpus.json_rows import json_kind, read_json, read_json_lines
from tgen.corpus.row_forms import (
    TEXTS,
    LeftOut,
    PreferenceError,
    Row,
    begins_with_answer,
    find_answer,
    find_form,
    has_additions,
    map_columns,
    map_row,
    note_unused,
    shown,
    shown_key,
)
from tgen.corpus.sources import Source, storing
from tgen.corpus.steps import Steps
from tgen.corpus.tables import NumberedRow
from tgen.errors import CorpusError
from tgen.reports.number_format import count
from tgen.storage import files

_BLOCK = 1 << 20  # bytes per write
_STEP = 0.001  # of the source, until progress is reported again
_SAMPLE = 100  # rows that tell the form
_SAMPLE_BYTES = 1 << 24  # after which no more rows tell it
_LONG = 25  # average characters of a column that has text
_MAX_BAD = 5  # rows in an error
_MAX_REASON = 120  # characters
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a pair, or alone
_SKIP_HINT = "correct them, or leave them out with --skip-bad-rows"


@dataclass(frozen=True)
class ConvertedRows:
    """The rows of a source, and what the plan says of them."""

    spool: files.RandomAccessFile | None  # canonical JSON Lines; None: the source already is
    form: str  # such as "Alpaca"
    n_rows: int
    notes: list[str]


def row_kind(name: str, head: bytes) -> str | None:
    """Return the kind of a file's rows by its name and first bytes; None if it has none.

    The kinds are those of `json_rows.json_kind` and `tables.KINDS`.
    """
    return tables.table_kind(name.lower(), head) or json_kind(name.lower(), head)


def convert_rows(
    source: Source, kind: str, reading: Reading, *, chat: bool = False
) -> Steps[ConvertedRows]:
    """Read the rows of a source of a kind of `row_kind`, and write them as canonical JSON Lines.

    `reading.columns` are the names of a prompt's parts and of its answer, or of one text or list of
    messages. With `chat`, prompts with answers are conversations. Raise CorpusError for rows of no
    known form, for preference rows, and, unless `reading.skip_bad_rows`, for invalid ones.
    """
    return _Conversion(source, kind, reading, chat).convert()


class _Conversion:
    """The state of one conversion."""

    def __init__(self, source: Source, kind: str, reading: Reading, chat: bool) -> None:
        self._source, self._kind, self._form = source, kind, ""
        self._columns = reading.columns
        if reading.text_column is not None:
            self._columns = (reading.text_column,)
        self._left_out = LeftOut(Counter(), Counter(), {})
        self._is_chat: bool | None = chat or None
        self._skips = reading.skip_bad_rows
        self._is_lines, self._is_table = kind == "json lines", kind in tables.KINDS
        self._spool: files.RandomAccessFile | None = None
        if not self._is_lines:
            self._store(())
        self._pending = bytearray()
        self._forms: Counter[str] = Counter()
        self._bad: list[tuple[int, str, str]] = []  # number, message and hint of the first ones
        self._n_bad = self._n_empty = self._n_greetings = 0

    def convert(self) -> Steps[ConvertedRows]:
        """Convert all rows."""
        n_bytes, shown = max(1, self._source.n_bytes), 0.0
        try:
            with closing(self._read()) as rows:
                sample = []
                for row in islice(rows, _SAMPLE):
                    sample.append(row)
                    if row.end > _SAMPLE_BYTES:
                        break
                self._choose_form([row.value for row in sample])
                for row in chain(sample, rows):
                    self._add(row)
                    done = min(1.0, row.fraction or row.end / n_bytes)
                    if done >= shown + _STEP:
                        shown = done
                        yield done
                self._flush()
            n_rows = self._forms.total()
            if self._n_bad and not (self._skips and n_rows):
                raise self._bad_rows_error(n_rows)
            if not (n_rows or self._is_lines):
                content = f"only empty rows ({self._n_empty:,})" if self._n_empty else "no rows"
                raise CorpusError(f"{self._source.name} has {content}", "name a file with rows")
        except BaseException:
            self._spool = None  # closed now, whoever keeps the error
            raise
        return ConvertedRows(
            self._spool,
            " and ".join(form for form, _ in self._forms.most_common(3)),
            n_rows,
            self._notes(),
        )

    def _read(self) -> Generator[NumberedRow]:
        """Yield the rows; closing this ends the process that reads a table."""
        if self._is_lines:
            return read_json_lines(self._source)
        if self._is_table:
            return tables.read_table(self._source, self._kind, self._columns or ())
        return read_json(self._source, self._left_out)

    def _choose_form(self, values: Sequence[Any]) -> None:
        """Set the columns and the name of the form, unless the keys of each row tell its form."""
        if self._columns is None:
            self._columns = _choose_columns(self._source.name, values)
            if self._columns is not None:
                keys = chain.from_iterable(row for row in values if isinstance(row, dict))
                note_unused((key for key in keys if key not in self._columns), self._left_out)
        elif not self._is_table and all(isinstance(value, str) for value in values):
            self._columns = None  # a list of texts has no columns
        if self._columns == ("text",):
            self._form = "text"
        elif self._columns is not None:
            self._form = ", ".join(self._columns)
            if len(self._columns) == 1:
                self._form = f"text of the column {shown_key(self._columns[0])!r}"

    def _add(self, row: NumberedRow) -> None:
        if row.value is None:  # a blank line
            if self._spool is not None:
                self._write(b"\n")
            return
        if isinstance(row.value, CorpusError):
            self._add_bad(row, row.value)
            return
        if self._is_table and self._is_empty(row.value):
            self._n_empty += 1
            return
        try:
            canonical, form = self._canonical(row.value)
            content = _serialize(canonical, row)
        except PreferenceError as error:
            raise CorpusError(f"{self._source.name} has {error.message}", error.hint) from None
        except CorpusError as error:
            self._add_bad(row, error)
            return
        self._forms[form] += 1
        self._n_greetings += "messages" in canonical and begins_with_answer(canonical)
        if canonical is not row.value or self._spool is not None:
            self._write(content, row.line)

    def _add_bad(self, row: NumberedRow, error: CorpusError) -> None:
        self._n_bad += 1
        if len(self._bad) < _MAX_BAD:
            self._bad.append((row.number, error.message, error.hint))
        if self._is_lines:
            self._write(b"\n", row.line)  # later rows keep the numbers of their lines

    def _canonical(self, value: Any) -> tuple[Row, str]:
        """Return the canonical row of a value, which is the value itself if it already is, and its
        form."""
        if self._columns is not None:
            row, form = map_columns(value, self._columns, self._left_out), self._form
        else:
            form = find_form(value) or ""
            is_canonical = self._is_lines and _is_canonical(
                value, form, self._is_chat, self._left_out
            )
            row = value if is_canonical else map_row(value, self._left_out)
        if self._is_chat is None:
            self._is_chat = "messages" in row
        if self._is_chat and "messages" not in row:
            if "completion" not in row:
                raise CorpusError(
                    "a row of text in a file of conversations",
                    "write the rows of text to a file of their own",
                )
            if row is not value:
                row = {"messages": pair_messages(row["prompt"], row["completion"])}
        elif "messages" in row and not self._is_chat:
            raise CorpusError(
                "a row of messages, but the first row of the file has none",
                "add --chat if the other rows are prompts and completions, else write the "
                "conversations to a file of their own",
            )
        return row, form

    def _is_empty(self, cells: Row) -> bool:
        """Return whether the text or the answer is missing."""
        key = find_answer(cells) if self._columns is None else self._columns[-1]
        return key in cells and cells[key] in (None, "")

    def _write(self, content: bytes, line: tuple[int, bytes] | None = None) -> None:
        """Write a row; the first time, after the lines before it, which are canonical."""
        if self._spool is None:
            assert line is not None
            self._store(self._source.blocks(0, line[0]))
        self._pending += content
        if len(self._pending) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._spool is not None:
            self._store([self._pending])
            self._pending = bytearray()

    def _store(self, blocks: Iterable[bytes | bytearray]) -> None:
        with storing(f"the rows of {self._source.name}"):
            self._spool = self._spool or files.open_temporary(None)
            for block in blocks:
                self._spool.append(block)

    def _bad_rows_error(self, n_good: int) -> CorpusError:
        name = self._source.name
        if self._n_bad == 1:
            ((number, message, hint),) = self._bad
            hint = f"{hint}, or add --skip-bad-rows" if n_good else hint
            return CorpusError(f"{name}, {self._unit} {number:,}: {message}", hint)
        n = f"{self._n_bad:,} of {self._n_bad + n_good:,} rows"
        what = f"{name}: {n} are not valid: {self._list_bad()}"
        return CorpusError(what, _SKIP_HINT if n_good else self._bad[0][2])

    @property
    def _unit(self) -> str:
        return "line" if self._is_lines or self._is_table else "row"

    def _list_bad(self) -> str:
        more = "; ..." if self._n_bad > len(self._bad) else ""
        reasons = (f"{self._unit} {n:,}: {what[:_MAX_REASON]}" for n, what, _ in self._bad)
        return "; ".join(reasons) + more

    def _notes(self) -> list[str]:
        """Return what the rows have that is not learned."""
        notes = []
        if self._n_bad:
            notes.append(f"{count(self._n_bad, 'bad row')} left out: {self._list_bad()}")
        if self._n_empty:
            notes.append(f"{count(self._n_empty, 'empty row')} left out")
        parts = [f"{shown_key(key)} of {count(n, 'row')}" for key, n in self._left_out.rows.items()]
        parts += [
            f"{shown_key(key)} of {count(n, 'message')}"
            for key, n in self._left_out.messages.most_common(5)
        ]
        if parts:
            notes.append(f"left out: {', '.join(parts)}")
        if self._left_out.keys:
            notes.append(f"keys that are not used: {', '.join(sorted(self._left_out.keys))}")
        if self._n_greetings:
            n = count(self._n_greetings, "conversation")
            notes.append(f"the assistant begins {n}: the first message is excluded from the loss")
        return notes


def _is_canonical(row: Any, form: str, is_chat: bool | None, left_out: LeftOut) -> bool:
    """Return whether a row of a form needs no change; if so, note its unused keys."""
    if not isinstance(row, dict):
        return False
    n, get = 1, row.get
    if form == "text":
        is_valid = isinstance(get("text"), str)
    elif form == "prompt and completion":
        n, is_valid = 2, isinstance(get("prompt"), str) and isinstance(get("completion"), str)
    elif is_valid := form == "messages" and "messages" in row and is_chat is not False:
        try:
            check_messages(row["messages"])
        except CorpusError:
            return False
    return is_valid and (len(row) == n or not has_additions(row, left_out))


def _choose_columns(name: str, values: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the column with the text if the form of the rows is not known; None if it is.

    Raises CorpusError if no column is the only one that has text, by its name or its length.
    """
    rows = [value for value in values if isinstance(value, dict)]
    try:
        known = any(find_form(value) for value in values if not isinstance(value, CorpusError))
    except PreferenceError as error:
        raise CorpusError(f"{name} has {error.message}", error.hint) from None
    if known or not rows:
        return None
    lengths: dict[str, list[int]] = {}
    for row in rows:
        for key, value in row.items():
            lengths.setdefault(key, []).append(len(value) if isinstance(value, str) else -1)
    strings = {
        key: sum(found) / len(found)
        for key, found in lengths.items()
        if max(found) > 0 and (min(found) >= 0 or len(lengths) > 1)
    }
    lower = {key.strip().lower(): key for key in reversed(strings)}
    by_name = [lower[key] for key in TEXTS if key in lower]
    by_length = [key for key, mean in strings.items() if mean >= _LONG or len(lengths) == 1]
    if by_name or len(by_length) == 1:
        return tuple((by_name or by_length)[:1])
    first = rows[0]
    listed = ", ".join(f"{shown_key(key)} ({shown(first[key])})" for key in list(first)[:20])
    hint = (
        "choose the text with --text-column NAME, or prompt and answer with --columns PROMPT,ANSWER"
    )
    if any(isinstance(value, (list, dict)) for value in first.values()):
        keys = '"text", or with "prompt" and "completion"'
        hint = f"write the values to train on as strings: one JSON object per line with {keys}"
    hint += "; --as text trains on the file as it is"
    raise CorpusError(f"{name} has rows of no known form: {listed}", hint)


def _serialize(canonical: Row, row: NumberedRow) -> bytes:
    """Return the line of a canonical row: its own, if it needs no change. Raises CorpusError."""
    own = row.line[1].rstrip(b"\r\n") + b"\n" if row.line and canonical is row.value else None
    if own is not None and not _SURROGATE.search(own):
        return own
    try:
        line = json.dumps(canonical, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        what = "the row contains an unpaired surrogate (\\ud800 to \\udfff)"
        raise CorpusError(what, "remove it") from None
    return own or line
