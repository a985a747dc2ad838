"""Jupyter notebooks: the cells, without outputs."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tgen.documents.package import DAMAGED_HINT
from tgen.errors import CorpusError


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
