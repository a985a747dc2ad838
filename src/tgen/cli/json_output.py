"""JSON for stdout without control characters; `reports.json_text` makes its values."""

import json
from typing import Any

from tgen.drawing.terminal_text import printable


def json_line(value: dict[str, Any]) -> bytes:
    """Return a JSON object as one line of `printable` UTF-8: its strings stay the same."""
    return (printable_json(value) + "\n").encode()


def printable_json(value: Any) -> str:
    """Return a JSON value as `printable` text."""
    return printable(json.dumps(value, ensure_ascii=False, allow_nan=False))
