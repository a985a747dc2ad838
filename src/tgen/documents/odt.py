"""OpenDocument's .odt: paragraphs, lists, tables, notes and text boxes in the document's order."""

from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from tgen.documents.package import LOCKED_HINT, Package, without
from tgen.documents.text_builder import TablePart, TextBuilder
from tgen.errors import CorpusError

_SKIPPED = {  # what is no text of the document, or is navigation or a number of a page or a note
    *("tracked-changes", "annotation", "forms", "scripts", "automatic-styles", "desc", "title"),
    *("note-citation", "page-number", "page-count", "ruby-text", "table-of-content"),
    *("alphabetical-index", "illustration-index", "table-index", "user-index"),
}  # fmt: skip
_TABLE_PARTS: dict[str, TablePart] = {
    "table": "table",
    "table-row": "row",
    "table-cell": "cell",
    "covered-table-cell": "cell",
}
_MAX_SPACES = 1000  # of one element


def read_odt(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text. Indexes, comments, headers and footers are left out."""
    package = Package(file)
    if "META-INF/manifest.xml" in package:
        for kind, name, _ in package.events("META-INF/manifest.xml"):
            if (kind, name) == ("start", "encryption-data"):
                raise CorpusError("is encrypted", LOCKED_HINT)
    builder = TextBuilder(left_out)
    paragraphs = lists = 0  # that are open
    is_counted = False  # the picture of the open frame, which may have several forms
    for kind, name, attributes in without(package.events("content.xml"), _SKIPPED):
        if kind == "text":
            if paragraphs:
                builder.add_words(name)
        elif kind == "start":
            if name in ("p", "h"):
                paragraphs += 1
                builder.line() if lists else builder.paragraph()
            elif name == "list":
                if not lists:
                    builder.paragraph()
                lists += 1
            elif name == "s":
                n = attributes.get("c", "1")
                builder.add(" " * min(_MAX_SPACES, int(n) if n.isdecimal() else 1))
            elif name == "tab":
                builder.add("\t")
            elif name == "line-break":
                builder.line_break()
            elif name in ("note-body", "text-box"):
                builder.begin_aside()
            elif name == "frame":
                is_counted = False
            elif name in ("image", "object", "object-ole") and not is_counted:
                left_out["picture" if name == "image" else "embedded object"] += 1
                is_counted = True
            elif name in _TABLE_PARTS:
                builder.begin(_TABLE_PARTS[name])
        elif name in ("note-body", "text-box"):
            builder.end_aside()
        elif name in ("p", "h"):
            paragraphs -= 1
            builder.end_paragraph()
        elif name == "list":
            lists -= 1
            if not lists:
                builder.paragraph()
        elif name in _TABLE_PARTS:
            builder.end(_TABLE_PARTS[name])
    yield builder.finish()
