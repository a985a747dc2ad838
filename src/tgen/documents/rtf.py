"""Rich Text Format, by the library striprtf."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from tgen.documents.package import DAMAGED_HINT
from tgen.documents.text_builder import tidy
from tgen.errors import CorpusError

_CODE_PAGE = re.compile(rb"\\ansicpg(\d{2,5})")
_PARAGRAPH = re.compile(r"\\(?:par|sect|page)(?![a-zA-Z]) ?")
_CELL = re.compile(r"(?:\\par(?![a-zA-Z])([\s{}]*))?\\(?:nest)?cell(?![a-zA-Z]) ?")
_LAST_ROW = re.compile(r"\\row(?![a-zA-Z]) ?(?!(?:[\s{}]|\\pard)*\\trowd)")


def read_rtf(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text; notes, headers and footers are left out."""
    from striprtf import striprtf

    data = file.read()
    page = _CODE_PAGE.search(data)
    text = data.decode("cp1252", "replace")
    left_out["picture"] += text.count("\\pict") - text.count("\\nonshppict")
    left_out["footnote"] += len(re.findall(r"\\footnote(?![a-zA-Z])", text))
    text = text.replace("{\\field{", "{\\field {")  # striprtf would search links, slowly
    text = _CELL.sub(r"\1\\tab ", text)
    text = _PARAGRAPH.sub(r"\\par\\par ", _LAST_ROW.sub(r"\\par ", text))  # \line is one line break
    try:
        text = striprtf.rtf_to_text(
            text, f"cp{page[1].decode()}" if page else "cp1252", errors="replace"
        )
    except (ValueError, LookupError, TypeError) as error:
        raise CorpusError(f"is damaged: {error}", DAMAGED_HINT) from None
    yield tidy(text.replace("\xad", "")).strip()
