"""Options for reading files, which `tgen train`, `tokenize` and `score` share."""

import codecs
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tgen.config.option import check_ranges, option, require
from tgen.errors import UsageError

PANEL = "Reading files"
ReadAs = Literal["bytes", "text", "rows", "document"]
_reading = partial(option, panel=PANEL)
_OF_ROWS = ("columns", "text_column", "skip_bad_rows")
_UNUSED = {"bytes": ("encoding", *_OF_ROWS), "text": _OF_ROWS, "document": _OF_ROWS}
_NAME = re.compile(r'\s*(?:"((?:[^"]|"")*)"\s*|([^,]*)),')  # in quotes, with "" for a quote, or not
_NOT_TEXT = {"idna", "punycode", "undefined"}  # codecs of names, not of texts


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The way from files to texts or rows. Raises UsageError for values that cannot be combined."""

    read_as: ReadAs | None = _reading(
        None,
        "Type of every file: bytes (read unchanged), text, rows or document.",
        "--as",
        shown_default="recognized by content and name",
    )
    encoding: str | None = _reading(
        None,
        "Encoding of texts that are not UTF-8, for example cp1252 or shift_jis.",
        "--encoding",
        metavar="NAME",
        shown_default="detected",
    )
    columns: tuple[str, ...] | None = _reading(
        None,
        "Columns or keys of rows, separated by commas: a text, or a prompt and a completion.",
        "--columns",
        metavar="NAMES",
        shown_default="recognized by name",
        excludes="text_column",
    )
    text_column: str | None = _reading(
        None,
        "Column or key of rows that has the text.",
        "--text-column",
        metavar="NAME",
        shown_default="the only one with text",
    )
    skip_bad_rows: bool = _reading(
        False, "Skip invalid rows instead of ending with an error.", "--skip-bad-rows"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.columns is not None:
            names = split_names(self.columns) if isinstance(self.columns, str) else self.columns
            is_valid = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
            require(is_valid, "columns", names, "names of columns")
            require(len({*names}) == len(names), "columns", ",".join(names), "different names")
            object.__setattr__(self, "columns", tuple(names))
        if self.encoding is not None:
            _check_encoding(self.encoding)
        for name in _UNUSED.get(self.read_as or "", ()):
            if getattr(self, name) not in (None, False):
                raise UsageError(
                    f"{name}: has no effect on files read as {self.read_as}",
                    f"remove {name}, or read the files in another way",
                    field=name,
                )

    def check_used(self, files: str = "the corpus") -> None:
        """Raise UsageError if columns are named, but `files` were read without rows."""
        for name in ("columns", "text_column"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}: has no effect, {files} was not read as rows",
                    f"remove {name}, or name a file with rows, or add --as rows",
                    field=name,
                )


def split_names(text: str) -> tuple[str, ...]:
    """Return the names between commas; names that have a comma are in quotes."""
    names = _NAME.findall(f"{text},")
    return tuple(quoted.replace('""', '"') or plain.strip() for quoted, plain in names)


def _check_encoding(name: str) -> None:
    try:
        codec = codecs.lookup(name)
        known = codec._is_text_encoding and codec.name not in _NOT_TEXT
    except (LookupError, ValueError):
        known = False
    if not known:
        hint = "name one that Python knows, for example cp1252, utf-16, shift_jis or gb18030"
        raise UsageError(f"encoding: unknown encoding {name!r:.60}", hint, field="encoding")
