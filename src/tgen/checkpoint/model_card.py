"""Model cards, README.md in the form of the Hugging Face Hub, and how an edited one is recognized.

The last line of a card that tgen writes has the digest of the lines before it. A README.md without
such a line, or with another digest, is the user's: it is never replaced or removed.
"""

import hashlib
import os
import re
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files

FILE_NAME = "README.md"
_LIMIT = 1 << 20  # bytes
_SEAL = re.compile(r"\n<!-- Written by tgen, sha256 ([0-9a-f]{64}): an edited card stays\. -->\n\Z")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENSE = re.compile(r"^(license|license_name|license_link): *(.+?) *$", re.MULTILINE)
_FIELD = re.compile(r"^(base_model): *(.+?) *$", re.MULTILINE)


def seal(text: str) -> bytes:
    """Return the content of a card with this text."""
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    line = f"\n<!-- Written by tgen, sha256 {digest}: an edited card stays. -->\n"
    return (text + line).encode(errors="replace")


def read(folder: Path) -> str | None:
    """Return the card in a directory; None without a readable one."""
    path = folder / FILE_NAME
    try:
        return files.read(path, limit=_LIMIT).decode(errors="replace") if path.is_file() else None
    except (TgenError, OSError):
        return None


def is_unedited(folder: Path) -> bool:
    """Return whether the card in a directory is as tgen wrote it."""
    card = read(folder)
    found = card and _SEAL.search(card)
    if not card or not found:
        return False
    return found[1] == hashlib.sha256(card[: found.start()].encode()).hexdigest()


def save(folder: Path, text: str) -> None:
    """Write a card, unless the directory has one that the user wrote or edited."""
    path = folder / FILE_NAME
    if is_unedited(folder) or not os.path.lexists(path):
        files.publish(path, seal(text))


def read_fields(folder: Path) -> dict[str, str]:
    """Return the license and the base model that a card's front matter names, as YAML values."""
    front = _FRONT_MATTER.match(read(folder) or "")
    if not front:
        return {}
    return dict([*_LICENSE.findall(front[1]), *_FIELD.findall(front[1])])


def exported(source: Path, target: Path) -> bytes | None:
    """Return the card of a model at `source` that is exported to `target`, whose own card stays if
    it was edited; None: there is none. A merged adapter's card is one of a model."""
    own = None if is_unedited(target) else read(target)
    card = own if own is not None else read(source)
    if card is None:
        return None
    if own is None and is_unedited(source):
        return seal(
            _SEAL.sub("", card).replace("\nlibrary_name: peft\n", "\nlibrary_name: transformers\n")
        )
    return card.encode(errors="replace")
