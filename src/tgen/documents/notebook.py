"""Jupyter notebooks and Markdown: cells without outputs, text without front matter."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tgen.documents.package import DAMAGED_HINT
from tgen.errors import CorpusError

_FRONT_MATTER = re.compile(  # lines of YAML: prose between two scene breaks is none
    r"---[ \t]*\n(?:(?:[ \t#\]}-][^\n]*|[\w\"'][^:\n]*:[^\n]*)?\n)*?(?:---|\.\.\.)[ \t]*(?:\n|$)"
)


def read_notebook(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the cells of a notebook in their order, separated by blank lines."""
    try:
        notebook = json.loads(text)
        sheets: list[Any] = notebook.get("worksheets") or [notebook]  # format 3 had sheets
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        texts = [_join(cell.get("source", cell.get("input", ""))) for cell in cells]
        left_out["cell output"] += sum(len(cell.get("outputs", ())) for cell in cells)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CorpusError("is damaged: it is not a notebook in JSON", DAMAGED_HINT) from None
    yield "\n\n".join(text.strip("\n") for text in texts if text.strip())


def _join(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def read_markdown(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text as it is written, without YAML between `---` at its beginning."""
    found = _FRONT_MATTER.match(text)
    left_out["front matter"] += found is not None
    yield text[found.end() :].lstrip("\n") if found else text
