"""Markdown: the text without front matter."""

import re
from collections import Counter
from collections.abc import Iterator

_FRONT_MATTER = re.compile(  # lines of YAML: prose between two scene breaks is none
    r"---[ \t]*\n(?:(?:[ \t#\]}-][^\n]*|[\w\"'][^:\n]*:[^\n]*)?\n)*?(?:---|\.\.\.)[ \t]*(?:\n|$)"
)


def read_markdown(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text as it is written, without YAML between `---` at its beginning."""
    found = _FRONT_MATTER.match(text)
    left_out["front matter"] += found is not None
    yield text[found.end() :].lstrip("\n") if found else text
