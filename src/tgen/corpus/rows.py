"""Rows that are not canonical JSON Lines, converted once into a temporary file of them.

A file has rows if its content begins as JSON Lines, as a list of JSON objects, as such objects one
after another or as an object around a list of them, or if it is a table. Rows are read one at a
time: at most 128 Mi characters of JSON are in RAM, with their values.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from tgen.corpus import tables
from tgen.corpus.conversation import check_messages
from tgen.corpus.jsonl import read_lines
from tgen.corpus.row_forms import (
    MESSAGES,
    TEXTS,
    LeftOut,
    PreferenceError,
    Row,
    begins_with_answer,
    find_answer,
    find_form,
    has_additions,
    is_message,
    map_columns,
    map_row,
    pair_to_messages,
    shown,
    shown_key,
)
from tgen.corpus.sources import Source
from tgen.corpus.steps import Steps
from tgen.corpus.tables import NumberedRow
from tgen.errors import CorpusError
from tgen.reports.number_format import count
from tgen.storage import files

_NAMES = (".jsonl", ".ndjson", ".jsonlines")
_BLOCK = 1 << 20  # bytes per read, and bytes per write
_MAX_JSON = 1 << 27  # characters of a value
_NEAR_END = 16  # characters: an error there may be due to an incomplete text
_STEP = 0.001  # of the source, until progress is reported again
_SAMPLE = 100  # rows that tell the form
_SAMPLE_BYTES = 1 << 24  # after which no more rows tell it
_LONG = 25  # average characters of a column that has text
_SHOWN = 20  # keys in a note
_MAX_BAD = 5  # rows in an error
_MAX_REASON = 120  # characters
# Keys of an object around a list of rows; if the object has one key, any.
_WRAPPERS = ("data", "rows", "train", "examples", "instances", "items", "records", "samples")
_HELD_OUT = ("test", "validation", "val", "valid", "dev", "eval")
_LIST = re.compile(r'\[\s*(?:\[\s*)?\{\s*["}]')
_CELLS = re.compile(r'\[\s*(?:\[\s*)?["\d-]')  # texts, or lists of cells
_OBJECT = re.compile(r'\{\s*["}]')
_MEMBER = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
# Objects as pandas writes tables with an `orient` of columns, index, split and table.
_PANDAS = re.compile(
    r'\{\s*(?:"[^"]*"\s*:\s*\{\s*"0"|"0"\s*:\s*\{|"columns"\s*:\s*\[|"schema"\s*:\s*\{\s*"fields")'
)
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

    The kinds are "json lines", "json list", "json objects", "csv", "tsv", "parquet" and "arrow".
    """
    name = name.lower()
    if kind := tables.table_kind(name, head):
        return kind
    text = head.decode("utf-8-sig", errors="ignore").lstrip()
    if _PANDAS.match(text):
        return "json objects"  # which are refused
    first, _, rest = text.partition("\n")
    is_line, by_name = _parse(first) is not None, "json lines" if name.endswith(_NAMES) else None
    if text.strip() == "[]" and name.endswith((*_NAMES, ".json")):
        return "json list"  # which is refused
    if text.startswith("["):
        cells = name.endswith((*_NAMES, ".json")) and _CELLS.match(text)
        if not (cells or _LIST.match(text)):
            return by_name
        return "json lines" if is_line and rest.lstrip().startswith("[") else "json list"
    if not _OBJECT.match(text):
        return by_name
    if is_line and rest.lstrip().startswith("{"):
        return "json lines"
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        if by_name and not is_line and rest and first.strip() != "{":
            return by_name  # the first line is not valid
        value, end = dict(_members(text)), len(text)
    if text[end:].lstrip().startswith("{"):
        return "json objects"
    if not text[end:].strip() and _has_inner_rows(value):
        return "json objects"
    if _is_row(value):
        return "json lines" if is_line or "\n" not in text else "json objects"
    return by_name


def convert_rows(
    source: Source,
    kind: str,
    *,
    columns: Sequence[str] | None = None,
    text_column: str | None = None,
    skip_bad_rows: bool = False,
    chat: bool = False,
) -> Steps[ConvertedRows]:
    """Read the rows of a source of a kind of `row_kind`, and write them as canonical JSON Lines.

    `columns` are the names of a prompt's parts and of its answer, or of one text or list of
    messages; `text_column` is that of a text. With `chat`, prompts with answers are conversations.
    Raise CorpusError for rows of no known form, for preference rows, and, unless `skip_bad_rows`,
    for invalid ones.
    """
    if text_column is not None:
        columns = (text_column,)
    is_lines, is_table = kind == "json lines", kind in tables.KINDS
    left_out = LeftOut(Counter(), Counter(), {})
    if is_lines:
        rows = _read_json_lines(source)
    elif is_table:
        rows = tables.read_table(source, kind, columns or ())
    else:
        rows = _read_json(source, left_out)
    with closing(rows):  # ends the process that reads a table
        sample = []
        for row in islice(rows, _SAMPLE):
            sample.append(row)
            if row.end > _SAMPLE_BYTES:
                break
        form = ""
        if columns is None:
            columns = _choose_columns(source.name, [row.value for row in sample])
        elif not is_table and all(isinstance(row.value, str) for row in sample):
            columns = None  # a list of texts has no columns
        if columns is not None:
            form = (
                f"text of the column {shown_key(columns[0])!r}"
                if len(columns) == 1
                else ", ".join(columns)
            )
            if columns == ["text"] or columns == ("text",):
                form = "text"
        conversion = _Conversion(
            source, columns, form, left_out, chat=chat, skips=skip_bad_rows, kind=kind
        )
        return (yield from conversion.convert(chain(sample, rows)))


class _Conversion:
    """The state of one conversion."""

    def __init__(
        self,
        source: Source,
        columns: Sequence[str] | None,
        form: str,
        left_out: LeftOut,
        *,
        chat: bool,
        skips: bool,
        kind: str,
    ) -> None:
        self._source, self._columns, self._form, self._left_out = source, columns, form, left_out
        self._is_chat: bool | None = chat or None
        self._skips = skips
        self._is_lines, self._is_table = kind == "json lines", kind in tables.KINDS
        self._spool = None if self._is_lines else files.open_temporary(None)
        self._pending = bytearray()
        self._forms: Counter[str] = Counter()
        self._bad: list[tuple[int, str, str]] = []  # number, message and hint of the first ones
        self._n_bad = self._n_empty = self._n_greetings = 0

    def convert(self, rows: Iterator[NumberedRow]) -> Steps[ConvertedRows]:
        """Convert all rows."""
        n_bytes, shown = max(1, self._source.n_bytes), 0.0
        try:
            for row in rows:
                self._add(row)
                done = min(1.0, row.fraction or row.end / n_bytes)
                if done >= shown + _STEP:
                    shown = done
                    yield done
            self._flush()
            n_rows = self._forms.total()
            if self._n_bad and not (self._skips and n_rows):
                raise self._bad_rows_error(n_rows)
        except OSError as error:
            self._spool = None
            raise CorpusError(
                f"cannot store the rows of {self._source.name} in a temporary file: "
                f"{error.strerror}",
                "free disk space",
            ) from None
        except BaseException:
            self._spool = None  # closed now, whoever keeps the error
            raise
        return ConvertedRows(
            self._spool,
            " and ".join(form for form, _ in self._forms.most_common(3)),
            n_rows,
            self._notes(),
        )

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
            canonical = self._canonical(row.value)
        except PreferenceError as error:
            raise CorpusError(f"{self._source.name} has {error.message}", error.hint) from None
        except CorpusError as error:
            self._add_bad(row, error)
            return
        if canonical is not row.value:
            self._write(_dump(canonical), row.line)
        elif self._spool is not None:
            assert row.line is not None
            self._write(row.line[1].rstrip(b"\r\n") + b"\n")

    def _add_bad(self, row: NumberedRow, error: CorpusError) -> None:
        self._n_bad += 1
        if len(self._bad) < _MAX_BAD:
            self._bad.append((row.number, error.message, error.hint))
        if self._is_lines:
            self._write(b"\n", row.line)  # later rows keep the numbers of their lines

    def _canonical(self, value: Any) -> Row:
        """Return the canonical row of a value, which is the value itself if it already is."""
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
            row = row if row is value else pair_to_messages(row)
        elif "messages" in row and not self._is_chat:
            raise CorpusError(
                "a row of messages, but the first row of the file has none",
                "add --chat if the other rows are prompts and completions, else write the "
                "conversations to a file of their own",
            )
        self._forms[form] += 1
        self._n_greetings += "messages" in row and begins_with_answer(row)
        return row

    def _is_empty(self, cells: Row) -> bool:
        """Return whether the text or the answer is missing."""
        key = find_answer(cells) if self._columns is None else self._columns[-1]
        return key in cells and cells[key] in (None, "")

    def _write(self, content: bytes, line: tuple[int, bytes] | None = None) -> None:
        """Write a row; the first time, after the lines before it, which are canonical."""
        if self._spool is None:
            assert line is not None
            self._spool = files.open_temporary(None)
            for start in range(0, line[0], _BLOCK):
                self._spool.append(self._source.read(start, min(_BLOCK, line[0] - start)))
        self._pending += content
        if len(self._pending) >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._spool is not None:
            self._spool.append(self._pending)
            self._pending = bytearray()

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


def _choose_columns(name: str, values: Sequence[Any]) -> list[str] | None:
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
        return (by_name or by_length)[:1]
    first = rows[0]
    listed = ", ".join(f"{shown_key(key)} ({shown(first[key])})" for key in list(first)[:20])
    raise CorpusError(
        f"{name} has rows of no known form: {listed}",
        "choose the text with --text-column NAME, or prompt and answer with --columns "
        "PROMPT,ANSWER; --as text trains on the file as it is",
    )


def _read_json_lines(source: Source) -> Generator[NumberedRow]:
    """Yield the value of each line that is not blank."""
    for number, (start, line) in enumerate(read_lines(source), 1):
        if line.strip():
            try:
                value = _name_cells(json.loads(line.rstrip(b"\r\n")))
            except (ValueError, RecursionError) as error:
                value = _json_error(error, line)
            yield NumberedRow(number, value, (start, line), start + len(line))
        else:
            yield NumberedRow(number, None, (start, line))


def _json_error(error: Exception, line: bytes) -> CorpusError:
    got = f"(got {shown(line[:200].decode(errors='replace'))})"
    if isinstance(error, json.JSONDecodeError):
        what = f"not valid JSON: {error.msg} at column {error.colno:,} {got}"
        return CorpusError(what, "complete or remove the line: each is one JSON object")
    if isinstance(error, UnicodeDecodeError):
        return CorpusError(f"not UTF-8 {got}", "save the file as UTF-8, or add --encoding NAME")
    return CorpusError("a number is too long, or the nesting too deep", "shorten or remove the row")


def _read_json(source: Source, left_out: LeftOut) -> Generator[NumberedRow]:
    """Yield the elements of a list, the objects of a file one after another, or the rows in its
    only object. A list of messages is one row. Raises CorpusError for invalid JSON."""
    head = source.read(0, _BLOCK).decode("utf-8-sig", errors="replace").lstrip()
    if _PANDAS.match(head):
        hint = 'write it as rows: df.to_json("rows.jsonl", orient="records", lines=True)'
        raise CorpusError(f"{source.name} is a table by columns or with an index", hint)
    if head.strip() == "[]":
        raise CorpusError(f"{source.name} has no rows", "name a file with rows")
    values = _Values(source)
    first = next(values, None)
    second = next(values, None)
    rows: Iterable[Any] = chain([first], [] if second is None else [second], values)
    if values.in_list and is_message(first) and find_form(first) is None:
        if source.n_bytes > _MAX_JSON:
            what = f"{source.name} has a conversation of more than {_MAX_JSON:,} bytes"
            raise CorpusError(what, "write each conversation as a row of its own")
        rows = [list(rows)]
    elif second is None and not values.in_list:
        try:
            inner = _find_inner_rows(first)
        except CorpusError as error:
            raise CorpusError(f"{source.name} has {error.message}", error.hint) from None
        if inner is not None:
            rows = inner.rows
            left_out.keys.update(dict.fromkeys(inner.unused))
    for number, row in enumerate(rows, 1):
        yield NumberedRow(number, _name_cells(row), end=values.position)


def _name_cells(row: Any) -> Any:
    """Return a list of cells as an object whose keys are their numbers; other values as they are,
    and an error for those that are no rows."""
    if isinstance(row, list) and not any(isinstance(cell, (dict, list)) for cell in row):
        return {str(number): cell for number, cell in enumerate(row, 1)}
    if not isinstance(row, (dict, list, str)):
        return CorpusError(f"not a JSON object (got {shown(row)})", "remove it")
    return row


class _Values:
    """The values of a JSON text: the elements of its list, or one after another."""

    def __init__(self, source: Source) -> None:
        self._source, self.position = source, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._at_end = "", 0, False
        self._n_lines = 0  # before `_text`
        self.in_list = self._next_character() == "["
        self._at += self.in_list
        self._is_first, self._is_closed = True, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        character = self._next_character()
        if self.in_list and character == "]" and not self._is_closed:
            self._at += 1
            self._is_closed, character = True, self._next_character()
            if character:
                raise self._error("text after the end of the list")
        if self._is_closed or not (character or self.in_list):
            raise StopIteration
        if self.in_list and not self._is_first:
            if character != ",":
                raise self._error("expected ',' or ']' after an element of the list")
            self._at += 1
            self._next_character()
        self._is_first = False
        return self._decode()

    def _decode(self) -> Any:
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_near = error.pos >= len(self._text) - _NEAR_END
                if self._at_end or not (is_near or error.msg.startswith("Unterminated")):
                    self._at = error.pos
                    raise self._error(error.msg) from None
                if len(self._text) - self._at > _MAX_JSON:
                    raise self._error(f"a value of more than {_MAX_JSON:,} characters") from None
                self._fill()
            except (ValueError, RecursionError):
                raise self._error("a number is too long, or the nesting too deep") from None
            else:
                self._at = end
                return value

    def _next_character(self) -> str:
        """Return the next character that is not white space, without taking it; "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\n\r":
                    return self._text[self._at]
                self._at += 1
            if self._at_end:
                return ""
            self._fill()

    def _fill(self) -> None:
        """Read more, as much again as there is: a long value is decoded few times."""
        self._n_lines += self._text.count("\n", 0, self._at)
        block = self._source.read(self.position, max(_BLOCK, len(self._text) - self._at))
        self.position += len(block)
        self._at_end = not block
        try:
            added = self._decoder.decode(block, final=self._at_end)
        except UnicodeDecodeError:
            raise self._error("not UTF-8") from None
        self._text, self._at = self._text[self._at :] + added, 0

    def _error(self, what: str) -> CorpusError:
        before = self._text[: self._at]
        line, column = self._n_lines + before.count("\n") + 1, self._at - before.rfind("\n")
        return CorpusError(
            f"{self._source.name}, line {line:,}, column {column:,}: {what}",
            "correct the JSON, or add --as text to train on the file as it is",
        )


def _is_row(value: Row) -> bool:
    """Return whether an object alone in a file is a row: its form is known, and it is not one whose
    values are lists or objects of a column's cells."""
    try:
        form = find_form(value)
    except PreferenceError:
        return True
    is_list = all(isinstance(one, (list, dict)) for one in value.values())
    return form is not None and (form in (*MESSAGES, "ShareGPT") or not is_list)


class _InnerRows(NamedTuple):
    rows: Iterable[Any]
    unused: Sequence[str] = ()  # keys beside them


def _find_inner_rows(value: Any) -> _InnerRows | None:
    """Return the rows of an object around a list of them; None for another value.

    Raises CorpusError for several lists of rows.
    """
    if not isinstance(value, dict) or not value or _is_row(value):
        return None
    lists = {k: v for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    if len(value) > 1:
        known = (*_WRAPPERS, *_HELD_OUT)
        lists = {key: rows for key, rows in lists.items() if key.lower() in known}
    if len(lists) > 1:
        names = ", ".join(map(shown, lists))
        raise CorpusError(f"several lists of rows: {names}", "write each to a file of its own")
    for key, rows in lists.items():
        return _InnerRows(rows, [shown_key(other) for other in value if other != key][:_SHOWN])
    return None


def _has_inner_rows(value: Any) -> bool:
    try:
        return _find_inner_rows(value) is not None
    except CorpusError:  # several lists of them
        return True


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of an object that an incomplete text begins, with an example in the place
    of a value that is not complete."""
    position = 1
    while match := _MEMBER.match(text, position):
        key, beginning = _parse(match[1]), text[match.end() : match.end() + _NEAR_END * 4]
        if key is None:
            return
        try:
            value, position = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            if _LIST.match(beginning):
                yield key, [{}]
            elif beginning.startswith('"'):
                yield key, ""
            return
        yield key, value


def _parse(text: str) -> Any:
    """Return a JSON value; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dump(row: Row) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an unpaired surrogate
        return json.dumps(row).encode() + b"\n"
