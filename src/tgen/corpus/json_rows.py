"""Rows in JSON: recognized by the beginning of a file, and read one at a time.

They are its lines, the elements of its list, objects one after another, or in its only object: a
list of rows, a list per column, rows by a key of their own, or answers by their questions. At most
128 Mi characters of JSON are in RAM, with their values.
"""

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tgen.corpus.conversation import parse_json
from tgen.corpus.jsonl import read_lines
from tgen.corpus.row_forms import (
    MESSAGES,
    TEXTS,
    LeftOut,
    PreferenceError,
    Row,
    find_answer,
    find_form,
    is_message,
    shown,
    shown_key,
)
from tgen.corpus.sources import Source
from tgen.corpus.tables import NumberedRow
from tgen.errors import CorpusError

_NAMES = (".jsonl", ".ndjson", ".jsonlines")
_BLOCK = 1 << 20  # bytes per read
_MAX_JSON = 1 << 27  # characters of a value
_NEAR_END = 16  # characters: an error there may be due to an incomplete text
_SHOWN = 20  # keys in a note
# Keys of an object around a list of rows; if the object has one key, any.
_WRAPPERS = ("data", "rows", "train", "examples", "instances", "items", "records", "samples")
_HELD_OUT = ("test", "validation", "val", "valid", "dev", "eval")
_LIST = re.compile(r'\[\s*(?:\[\s*)?\{\s*["}]')
_CELLS = re.compile(r'\[\s*(?:\[\s*)?["\d-]')  # texts, or lists of cells
_OBJECT = re.compile(r'\{\s*["}]')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|[\[\]{},]', re.DOTALL)
_BEGUN_TEXT = re.compile(r'\s*,?\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
# Objects as pandas writes tables with an `orient` of columns, index, split and table.
_PANDAS = re.compile(
    r'\{\s*(?:"[^"]*"\s*:\s*\{\s*"0"|"0"\s*:\s*\{|"columns"\s*:\s*\[|"schema"\s*:\s*\{\s*"fields")'
)
_QUESTION_MARKS = ("?", "\uff1f")
_NULL_CONSTANTS: Any = {"parse_constant": lambda _: None}  # NaN, Infinity: missing values of pandas


def json_kind(name: str, head: bytes) -> str | None:
    """Return how a file has rows, by its name in lower case and first bytes; None if it has none.

    The kinds are "json lines", "json list" and "json objects".
    """
    text = head.decode("utf-8-sig", errors="ignore").lstrip()
    if _PANDAS.match(text):
        return "json objects"  # which are refused
    first, _, rest = text.partition("\n")
    is_line = parse_json(first) is not None
    by_name = "json lines" if name.endswith(_NAMES) else None
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
        value, end = _parse_beginning(text), len(text)
    if text[end:].lstrip().startswith("{"):
        return "json objects"
    if not text[end:].strip() and _has_inner_rows(value):
        return "json objects"
    if _is_row(value):
        return "json lines" if is_line or "\n" not in text else "json objects"
    return by_name


def may_hold_rows(head: bytes) -> bool:
    """Return whether a file that has no rows may have been meant to: an object of several texts."""
    value = _parse_beginning(head.decode("utf-8-sig", errors="ignore"))
    if not isinstance(value, dict):
        return False
    values = list(value.values())
    values = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return len(values) > 1 and all(isinstance(one, str) for one in values)


def read_json_lines(source: Source) -> Generator[NumberedRow]:
    """Yield the value of each line that is not blank."""
    for number, (start, line) in enumerate(read_lines(source), 1):
        if line.strip():
            try:
                value = _name_cells(json.loads(line.rstrip(b"\r\n"), **_NULL_CONSTANTS))
            except (ValueError, RecursionError) as error:
                value = _json_error(error, line)
            yield NumberedRow(number, value, (start, line), start + len(line))
        else:
            yield NumberedRow(number, None, (start, line))


def _json_error(error: Exception, line: bytes) -> CorpusError:
    got = f"(got {shown(line[:200].decode(errors='replace'))})"
    if isinstance(error, json.JSONDecodeError):
        what = f"not valid JSON: {_problem(error)} at column {error.colno:,} {got}"
        return CorpusError(what, "complete or remove the line: each is one JSON object")
    if isinstance(error, UnicodeDecodeError):
        return CorpusError(f"not UTF-8 {got}", "save the file as UTF-8, or add --encoding NAME")
    return CorpusError("a number is too long, or the nesting too deep", "shorten or remove the row")


def _problem(error: json.JSONDecodeError) -> str:
    """Return what is wrong, without the words that Python puts before the place."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def read_json(source: Source, left_out: LeftOut) -> Generator[NumberedRow]:
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
        self._json = json.JSONDecoder(**_NULL_CONSTANTS)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._at_end = "", 0, False
        self._line, self._column = 1, 1  # at which `_text` begins
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
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_near = error.pos >= len(self._text) - _NEAR_END
                if self._at_end or not (is_near or error.msg.startswith("Unterminated")):
                    self._at = error.pos
                    raise self._error(_problem(error)) from None
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
        self._line, self._column = self._place()
        block = self._source.read(self.position, max(_BLOCK, len(self._text) - self._at))
        self.position += len(block)
        self._at_end = not block
        try:
            added = self._decoder.decode(block, final=self._at_end)
        except UnicodeDecodeError:
            raise self._error("not UTF-8") from None
        self._text, self._at = self._text[self._at :] + added, 0

    def _place(self) -> tuple[int, int]:
        """Return the line and the column of the next character, from 1."""
        before = self._text[: self._at]
        column = self._at - before.rfind("\n")
        n_lines = before.count("\n")
        return self._line + n_lines, column if n_lines else self._column + self._at

    def _error(self, what: str) -> CorpusError:
        line, column = self._place()
        return CorpusError(
            f"{self._source.name}, line {line:,}, column {column:,}: {what}",
            "correct the JSON, or add --as text to train on the file as it is",
        )


def _is_row(value: Row) -> bool:
    """Return whether an object alone in a file is a row: its form is known, and it is not one whose
    values are lists or objects of a column's cells. Lists of messages are not cells."""
    try:
        form = find_form(value)
    except PreferenceError:
        return True
    if form in (*MESSAGES, "ShareGPT"):
        return not isinstance(value[find_answer(value) or ""], dict)
    if form is None:
        return False
    lists = [one for one in value.values() if isinstance(one, (list, dict))]
    return len(lists) < len(value) or any(one and all(map(is_message, one)) for one in lists)


class _InnerRows(NamedTuple):
    rows: Iterable[Any]
    unused: Sequence[str] = ()  # keys beside them


def _find_inner_rows(value: Any) -> _InnerRows | None:
    """Return the rows in an object; None for another value.

    Raises CorpusError for several lists of rows, and for columns that do not fit together.
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
    pairs = _answers_by_question(value)
    if pairs is not None:
        return _InnerRows(pairs)
    if all(isinstance(one, list) for one in value.values()):
        return _columns_to_rows(value)
    rows = list(value.values())
    is_table = all(isinstance(row, dict) for row in rows) and find_form(rows[0]) is not None
    return _InnerRows(rows) if is_table else None


def _answers_by_question(value: Row) -> list[Row] | None:
    """Return a row per answer of an object whose keys are questions; None for another one."""
    is_text = all(isinstance(one, str) for one in value.values())
    n = sum(key.endswith(_QUESTION_MARKS) or (is_text and " " in key) for key in value)
    answers = {key: one if isinstance(one, list) else [one] for key, one in value.items()}
    if 2 * n <= len(value) or not all(isinstance(a, str) for a in chain(*answers.values())):
        return None
    return [{"question": key, "answer": a} for key, found in answers.items() for a in found]


def _columns_to_rows(value: dict[str, list[Any]]) -> _InnerRows | None:
    """Return the rows of an object with a list per column; None if it may be anything else, such as
    settings. Raises CorpusError for columns of different lengths."""
    is_known = find_form(value) is not None or any(key.lower() in TEXTS for key in value)
    cells = list(zip(*value.values(), strict=False))
    if any(len(column) != len(cells) for column in value.values()):
        if not is_known:
            return None
        sizes = ", ".join(f"{shown_key(key)} ({len(column):,})" for key, column in value.items())
        hint = "write as many cells for each, or one JSON object per row"
        raise CorpusError(f"columns of different lengths: {sizes}", hint)
    # One list is of texts, not of names, if it has words.
    is_table = len(value) > 1 or any(isinstance(cell, str) and " " in cell for (cell,) in cells)
    if not is_known and not (is_table and len(cells) > 1):
        return None
    return _InnerRows(dict(zip(value, row, strict=True)) for row in cells)


def _has_inner_rows(value: Any) -> bool:
    try:
        return _find_inner_rows(value) is not None
    except CorpusError:  # rows of no use
        return True


def _parse_beginning(text: str) -> Any:
    """Return the value that an incomplete text begins, without its last element unless that is a
    text; None if it is not valid."""
    open_brackets: list[str] = []
    end = n_open = 0  # of the last place at which an element may end
    for token in _TOKEN.finditer(text):
        if token[0] in ("[", "{"):
            open_brackets.append("]" if token[0] == "[" else "}")
        elif token[0] in ("]", "}") and open_brackets:
            open_brackets.pop()
        if token[0][0] != '"':
            end, n_open = token.start() if token[0] == "," else token.end(), len(open_brackets)
    begun = _BEGUN_TEXT.match(text, end)
    closing = "".join(reversed(open_brackets[:n_open]))
    return parse_json(text[:end] + (begun[0] + '"' if begun else "") + closing)
