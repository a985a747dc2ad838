"""Word's .docx: paragraphs, lists, tables, notes and text boxes in the order of the document."""

import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from tgen.documents.package import Event, Package, without
from tgen.documents.text_builder import TablePart, TextBuilder

_SKIPPED = {  # deleted text, second forms of drawings, furigana, positions of tabs
    *("del", "moveFrom", "Fallback", "rt", "tabs", "sectPr", "rPrChange", "pPrChange"),
}  # fmt: skip
# Only rPr of a run (r) hides text: pPr has that of the paragraph mark, ctrlPr that of brackets.
_WITH_PROPERTIES = {"r", "rPr", "pPr", "ctrlPr"}
_TABLE_PARTS: dict[str, TablePart] = {"tbl": "table", "tr": "row", "tc": "cell"}
_RAISED = {"sup": "^", "sub": "_"}  # what is written before parts of equations that have text
_CHARACTERS = {"tab": "\t", "ptab": "\t", "noBreakHyphen": "\u2011"}


def read_docx(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text. Tables of contents, comments, headers and footers are left out."""
    package = Package(file)
    main = "word/document.xml"
    if "_rels/.rels" in package:
        for kind, _, attributes in package.events("_rels/.rels"):
            if kind == "start" and attributes.get("Type", "").endswith("/officeDocument"):
                main = package.resolve("", attributes.get("Target", main))
    notes: dict[tuple[str, str], str] = {}
    for kind in ("footnote", "endnote"):
        name = posixpath.join(posixpath.dirname(main), f"{kind}s.xml")
        if name in package:
            notes |= _read_notes(package.events(name), kind, left_out)
    builder = TextBuilder(left_out)
    _read_body(package.events(main), builder, notes)
    yield builder.finish()


def _read_notes(
    events: Iterable[Event], kind: str, left_out: Counter[str]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the kind and number of each note, and its text."""
    note: list[Event] = []
    number = ""
    for event in events:
        if event[:2] == ("start", kind):
            note, number = [], event[2].get("id", "")
        elif event[:2] == ("end", kind):
            builder = TextBuilder(left_out)
            _read_body(note, builder, {})
            yield (kind, number), builder.finish()
        else:
            note.append(event)


def _read_body(
    events: Iterable[Event], builder: TextBuilder, notes: dict[tuple[str, str], str]
) -> None:
    fields: list[bool] = []  # that are open: whether each is a table of contents
    brackets: list[dict[str, str]] = []  # of the open parts of equations
    sign = raised = ""  # of a sum or an integral; before the next text
    in_text = in_instruction = in_list = was_list = in_contents = False
    in_properties = hidden = False  # of a run
    is_drop_cap = False  # the paragraph before: a large first letter of this one

    def add(text: str) -> None:
        if not (hidden or in_contents or any(fields)):
            builder.add(text)

    for kind, name, attributes in without(events, _SKIPPED):
        if in_properties:
            if (kind, name) == ("start", "vanish"):
                hidden = attributes.get("val") not in ("0", "false", "off")
            in_properties = (kind, name) != ("end", "rPr")
        elif name in _WITH_PROPERTIES and kind != "text":
            hidden = hidden and name == "rPr"
            in_properties = (kind, name) == ("start", "rPr")
        elif kind == "text":
            if in_instruction and fields:
                fields[-1] |= name.split()[:1] == ["TOC"]
            elif in_text:
                add(raised + name)
                raised = ""
        elif kind == "start":
            if name == "p":
                if not is_drop_cap:
                    builder.paragraph()
                is_drop_cap = False
                was_list, in_list, in_contents = in_list, False, False
            elif name == "pStyle":
                in_contents = attributes.get("val", "").startswith("TOC")
            elif name == "framePr":
                is_drop_cap = attributes.get("dropCap") in ("drop", "margin")
            elif name == "numPr":
                in_list = True
                if was_list:
                    builder.join_items()
            elif name in ("t", "instrText"):
                in_text, in_instruction = name == "t", name == "instrText"
            elif name == "d":
                brackets.append({"begChr": "(", "endChr": ")"})
            elif name in ("begChr", "endChr") and brackets:
                brackets[-1][name] = attributes.get("val", "")
            elif name == "e" and brackets:
                add(brackets[-1].pop("begChr", ""))
            elif name in ("naryPr", "chr"):
                sign = attributes.get("val", "\u222b")
            elif name == "den":
                add("/")
            elif name in _RAISED:
                raised = _RAISED[name]
            elif name == "sym":  # of a font of its own: no character
                builder.left_out["symbol"] += 1
            elif name in _CHARACTERS:
                add(_CHARACTERS[name])
            elif name in ("br", "cr"):
                is_page = attributes.get("type", "textWrapping") != "textWrapping"
                builder.paragraph() if is_page else builder.line_break()
            elif name == "fldChar":
                if attributes.get("fldCharType") == "begin":
                    fields.append(False)
                elif attributes.get("fldCharType") == "end" and fields:
                    fields.pop()
            elif name in ("footnoteReference", "endnoteReference"):
                key = name.removesuffix("Reference"), attributes.get("id", "")
                builder.add_aside(notes.get(key, ""))
            elif name in ("blip", "imagedata"):
                builder.left_out["picture"] += 1
            elif name == "chart":
                builder.left_out["chart"] += 1
            elif name == "txbxContent":
                builder.begin_aside()
            elif name in _TABLE_PARTS:
                builder.begin(_TABLE_PARTS[name])
        elif name in ("t", "instrText"):
            in_text = in_instruction = False
        elif name == "d" and brackets:
            add(brackets.pop()["endChr"])
        elif name == "naryPr":
            add(sign)
        elif name in _RAISED:
            raised = ""
        elif name == "txbxContent":
            builder.end_aside()
        elif name == "p":
            builder.end_paragraph()
        elif name in _TABLE_PARTS:
            builder.end(_TABLE_PARTS[name])
