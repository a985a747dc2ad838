"""Where a long text may be cut without changing its tokens, lest the library see it whole.

A cut must not fall into a word. Where words are no help, because all of the text is one, the
vocabulary may prove that no token has anything visible behind a line break.
"""

import re
from collections.abc import Iterator

from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS, BYTE_TOKENS, SPACE
from tgen.tokenizer.patterns import CUTS, LINES
from tgen.tokenizer.spec import TokenizerSpec

_BLOCK = 1 << 17  # characters that a thread encodes at a time
_NEWLINE = BYTE_CHARACTERS[10]
_WHITE = "".join(BYTE_CHARACTERS[byte] for byte in b"\t\n\v\f\r ")
_CROSSING = {
    True: re.compile(f"{_NEWLINE}[^{_WHITE}]"),
    False: re.compile(rf"\n[^\s{SPACE}]|.{BYTE_TOKENS[10]}|{BYTE_TOKENS[10]}.", re.DOTALL),
}

_LONGEST = 1024  # characters of a word; what is longer is none
_PART = 128  # of what is none: the shorter, the quicker learnt from
_KINDS = (r"(?:[^\W\d_])", r"\s", r"(?:[^\w\s]|_)")  # of which words are: letters, white, others
_ENDLESS = re.compile("|".join(f"(?<!{kind}){kind}{{{_LONGEST + 1},}}" for kind in _KINDS))


def bounded(text: str) -> Iterator[str]:
    """A text in parts, cut only within runs of one kind of character that are longer than any word:
    learning from a word takes its length squared."""
    start = 0
    for run in _ENDLESS.finditer(text):
        for end in range(run.start() + _PART, run.end(), _PART):
            yield text[start:end]
            start = end
    yield text[start:]


def blocks(text: str, cut: re.Pattern[str] | None) -> Iterator[str]:
    """A long text in parts of about `_BLOCK` characters; as it is where it may not be cut."""
    start = 0
    while start < len(text):
        found = cut.search(text, start + _BLOCK) if cut and len(text) - start > _BLOCK else None
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def where_to_cut(layout: TokenizerSpec) -> re.Pattern[str] | None:
    """Matches where a text of this tokenizer may be cut; None if that cannot be told."""
    in_text = [token for token in layout.added if not token.special]
    if any("\n" in token.content for token in layout.added):
        return None
    if any(token.lstrip or token.rstrip or token.single_word for token in in_text):
        return None  # they look at what is beside them
    if layout.prefix and in_text:
        return None  # each stretch between them begins anew, with a space put before it
    for pattern in layout.splits:
        if CUTS[pattern]:
            return CUTS[pattern]
    if layout.ignore_merges:
        return None  # a part might be a token as a whole
    crossing = _CROSSING[layout.byte_level]
    return None if any(map(crossing.search, layout.vocab)) else LINES
