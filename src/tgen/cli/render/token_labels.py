"""Printable labels for tokens, whatever their bytes."""

import unicodedata

from rich.cells import cell_len, set_cell_size

MARGIN = 14  # columns of a row's number and label
_WHITESPACE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def label(token: bytes, *, width: int | None = None) -> str:
    """Return printable text for a token's bytes, cut to `width` columns with `…`.

    Whitespace becomes visible, control and invisible characters become code points, and bytes
    that are not valid UTF-8 become hexadecimal.
    """
    try:
        text = "".join(_printable(character) for character in token.decode())
        if unicodedata.category(text[:1] or " ").startswith("M"):
            text = "◌" + text  # a combining mark needs a base
    except UnicodeDecodeError:
        text = f"‹{token.hex(' ').upper()}›"
    text = text or "‹end›"
    return text if width is None else cut(text, width)


def cut(text: str, width: int) -> str:
    """Return a label cut to `width` columns, ending in … if it was longer."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def row_label(row: int, text: str) -> str:
    """Return a row's number and label for the margin; the number alone if they are equal."""
    suffix = "" if text == str(row) else f" {cut(text, MARGIN - 6)}"
    return set_cell_size(f"{row:>4}{suffix}", MARGIN)


def _printable(character: str) -> str:
    if character in _WHITESPACE:
        return _WHITESPACE[character]
    if unicodedata.category(character).startswith(("C", "Z")):
        return f"‹U+{ord(character):04X}›"
    return character
