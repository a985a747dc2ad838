"""How a token is shown in a table: one function that every byte string survives."""

import unicodedata

from rich.cells import cell_len, set_cell_size

MARGIN = 14  # columns of a row's number and label
_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def label(token: bytes, *, width: int | None = None) -> str:
    """Printable text of a token's bytes, cut with `…` at `width` cells.

    White space becomes visible, control and invisible characters their code point, bytes that are
    no whole character their hexadecimal values.
    """
    try:
        text = "".join(_visible(character) for character in token.decode())
        if unicodedata.category(text[:1] or " ").startswith("M"):
            text = "◌" + text  # nothing before it to stand on
    except UnicodeDecodeError:
        text = f"‹{token.hex(' ').upper()}›"
    text = text or "‹end›"
    return text if width is None else cut(text, width)


def cut(text: str, width: int) -> str:
    """At most `width` cells of a label, the last of them … where it was longer."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def row_label(row: int, text: str) -> str:
    """A row's number and label in the margin; a label that is the number stands once."""
    shown = "" if text == str(row) else f" {cut(text, MARGIN - 6)}"
    return set_cell_size(f"{row:>4}{shown}", MARGIN)


def _visible(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    category = unicodedata.category(character)
    if category.startswith(("C", "Z")):
        return f"‹U+{ord(character):04X}›"
    return character
