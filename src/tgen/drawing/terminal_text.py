"""Text that any terminal shows as it is: without control characters, in the terminal's encoding.

Tokens get printable labels, whatever their bytes.
"""

import unicodedata
from functools import cache

from rich.cells import cell_len, set_cell_size

# Format characters (category Cf) that scripts need and that cannot reorder other text: soft hyphen,
# zero-width space, (non-)joiner, direction marks, Arabic, Syriac and Kaithi signs.
_NEEDED = frozenset(
    "\u00ad\u061c\u06dd\u070f\u08e2\u200b\u200c\u200d\u200e\u200f"
    "\u0600\u0601\u0602\u0603\u0604\u0605\u0890\u0891\U000110bd\U000110cd"
)
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Replacements for drawing characters that an encoding lacks; each group is replaced as a whole, so
# that the levels of a scale stay distinct.
_FALLBACKS = (
    ("▁▂▃▄▅▆▇█", "1234567#"),
    ("▀░", '"-'),
    ("━╸╺─│├┤└", "-  -|+++"),
    ("○●↑→", "oO^>"),
    ("‹›⏎⇥␍◌", "<>$>^o"),
    ("·", "."),
    ("…", "~"),
    ("‘’", "''"),
    ("–−", "--"),
    ("±", "~"),
    ("Δ", "D"),
    ("µ", "u"),
)
_BRAILLE = 0x2800
_BRAILLE_ROWS = (0b00001001, 0b00010010, 0b00100100, 0b11000000)  # dots by row, the top row first
MARGIN = 14  # columns of a row's number and label
_WHITESPACE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def printable(text: str) -> str:
    """Escape control characters, and format characters that hide or reorder text, as JSON does.

    Line breaks and tabs stay, and so do joiners and direction marks, which many languages need.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def decode_printable(text: bytes) -> str:
    """Return `printable` text; bytes that are not valid UTF-8 are replaced."""
    return printable(text.decode(errors="replace"))


def one_line(text: str) -> str:
    """Return `printable` text with a space for each line break."""
    return printable(" ".join(text.splitlines()))


def _escaped(character: str) -> str:
    if character in "\n\t" or character in _NEEDED:
        return character
    if unicodedata.category(character) not in _UNSAFE:
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


@cache
def drawing_fallbacks(encoding: str) -> dict[int, str]:
    """Return a table for `str.translate` for the drawing characters that `encoding` lacks.

    Every replacement is one column wide; braille dots become - ' . or | by their height.
    """
    table: dict[int, str] = {}
    for characters, replacements in _FALLBACKS:
        if not _can_encode(characters, encoding):
            table |= dict(zip(map(ord, characters), replacements, strict=True))
    if not _can_encode(chr(_BRAILLE), encoding):
        table |= {_BRAILLE + dots: _braille_fallback(dots) for dots in range(256)}
    return table


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _braille_fallback(dots: int) -> str:
    rows = [i for i, row in enumerate(_BRAILLE_ROWS) if dots & row]
    if not rows:
        return " "
    if len(rows) > 2:
        return "|"
    return "'--."[round(sum(rows) / len(rows))]


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
