"""Rich Text Format, by the library striprtf."""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from tgen.documents.package import DAMAGED_HINT
from tgen.documents.text_builder import tidy
from tgen.errors import CorpusError

_CODE_PAGE = re.compile(rb"\\ansicpg(\d{1,5})")
_SYSTEM = re.compile(rb"{\\rtf\d*\s*\\(mac|pca?)(?![a-z])")
_ENCODINGS = {  # that Python has under other names
    "mac": "mac-roman", "pc": "cp437", "pca": "cp850", "10000": "mac-roman", "10001": "cp932",
    "10002": "cp950", "10003": "cp949", "10006": "mac-greek", "10007": "mac-cyrillic",
    "10008": "cp936", "10029": "mac-latin2", "10081": "mac-turkish",
}  # fmt: skip
_CHARACTER_SETS = {  # encodings of fonts for which striprtf names some that Python lacks
    78: "cp932", 79: "cp950", 80: "cp949", 82: "cp1255", 85: "cp936", 86: "mac-romanian",
    87: "mac-cyrillic", 88: "cp874", 89: "mac-latin2",
}  # fmt: skip
_BINARY = re.compile(rb"(?<!\\)\\bin(\d{1,9}) ?")
_DELETED = re.compile(r"(\{[^{}]*)(?<!\\)\\deleted(?![a-zA-Z0-9])")
_DELETED_PART = re.compile(r"(?<!\\)\\deleted(?![a-zA-Z0-9])((?:(?!\\deleted)[^{}])*)\\deleted0 ?")
_DECLARED = re.compile(r"\\ansicpg\d+")
_PARAGRAPH = re.compile(r"\\(?:par|sect|page)(?![a-zA-Z]) ?")
_CELL = re.compile(r"(?:\\par(?![a-zA-Z])([\s{}]*))?\\(?:nest)?cell(?![a-zA-Z]) ?")
_LAST_ROW = re.compile(r"\\row(?![a-zA-Z]) ?(?!(?:[\s{}]|\\pard)*\\trowd)")


def read_rtf(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text; notes, headers, footers and text boxes are left out."""
    from striprtf import striprtf

    striprtf.remove_pict_groups = str  # it ends a picture, and so may end the text, at any "}"
    striprtf.charset_map.update(_CHARACTER_SETS)
    data = _without_binary(file.read())
    encoding = _encoding(data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(encoding, "replace")
    text = _DECLARED.sub("", text)
    left_out["picture"] += text.count("\\pict") - text.count("\\nonshppict")
    left_out["text box"] += len(re.findall(r"\\shptxt(?![a-zA-Z])", text))
    left_out["footnote"] += len(re.findall(r"\\footnote(?![a-zA-Z])", text))
    text = _DELETED_PART.sub(r"{\\*\1}", text)
    text = _DELETED.sub(r"\1\\*", text)  # what striprtf skips until the end of the group
    text = text.replace("{\\field{", "{\\field {")  # striprtf would search links, slowly
    text = _CELL.sub(r"\1\\tab ", text)
    text = _PARAGRAPH.sub(r"\\par\\par ", _LAST_ROW.sub(r"\\par ", text))  # \line is one line break
    try:
        text = striprtf.rtf_to_text(text, encoding, errors="replace")
    except (ValueError, LookupError, TypeError) as error:
        raise CorpusError(f"is damaged: {error}", DAMAGED_HINT) from None
    yield tidy(text.replace("\xad", "")).strip()


def _encoding(data: bytes) -> str:
    """Return the encoding of text in a font without a character set."""
    found = _CODE_PAGE.search(data) or _SYSTEM.match(data)
    name = found[1].decode() if found else "1252"
    encoding = _ENCODINGS.get(name, f"cp{name}")
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        return "cp1252"


def _without_binary(data: bytes) -> bytes:
    """Return a document without the bytes of pictures, which may have braces."""
    parts: list[bytes] = []
    position = 0
    while found := _BINARY.search(data, position):
        parts.append(data[position : found.start()])
        position = found.end() + int(found[1])
    return b"".join([*parts, data[position:]])
