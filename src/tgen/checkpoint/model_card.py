"""Model cards, README.md in the form of the Hugging Face Hub, and how an edited one is recognized.

The last line of a card that tgen writes has the digest of the lines before it. A README.md without
such a line, or with another digest, is the user's: it is never replaced or removed.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files

FILE_NAME = "README.md"
_LIMIT, _COPY_LIMIT = 1 << 20, 1 << 26  # bytes of a card to parse, and of one to copy
_SEAL = re.compile(rb"\n<!-- Written by tgen, sha256 [0-9a-f]{64}: an edited card stays\. -->\n\Z")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_FIELD = re.compile(r"^(license|license_name|license_link|base_model): *(.+?) *$", re.MULTILINE)
GGUF_FIELDS = {  # of a GGUF file, by the name in a card
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "base_model": "general.base_model.0.name",
}


def _seal(card: bytes) -> bytes:
    digest = hashlib.sha256(card).hexdigest()
    return card + f"\n<!-- Written by tgen, sha256 {digest}: an edited card stays. -->\n".encode()


def _read(folder: Path) -> bytes:
    """Return the card in a directory; nothing without a readable one of limited size."""
    with suppress(TgenError, OSError):
        return files.read(folder / FILE_NAME, limit=_LIMIT)
    return b""


def is_unedited(folder: Path) -> bool:
    """Return whether the card in a directory is as tgen wrote it."""
    card = _read(folder)
    found = _SEAL.search(card)
    return found is not None and _seal(card[: found.start()]) == card


def is_edited(folder: Path) -> bool:
    """Return whether a directory has a README.md that is not as tgen wrote it."""
    return os.path.lexists(folder / FILE_NAME) and not is_unedited(folder)


def save(folder: Path, text: str) -> None:
    """Write a card, unless the directory has one that the user wrote or edited."""
    if not is_edited(folder):
        files.publish(folder / FILE_NAME, _seal(text.encode(errors="replace")))


def read_fields(folder: Path) -> dict[str, str]:
    """Return the license and base model that a card or a GGUF file names, as YAML values."""
    if folder.is_file():
        from tgen.checkpoint.gguf.header import read_header  # slow: most models have no need of it

        with suppress(TgenError, OSError):
            fields = read_header(folder).fields
            named = {name: fields.get(field) for name, field in GGUF_FIELDS.items()}
            return {name: json.dumps(text) for name, text in named.items() if isinstance(text, str)}
    front = _FRONT_MATTER.match(_read(folder).decode(errors="replace"))
    return dict(_FIELD.findall(front[1])) if front else {}


def exported(source: Path, target: Path) -> bytes | None:
    """Return the card of a model at `source` that is exported to `target`, whose own stays
    if it was edited; None: there is none. A merged adapter's card is one of a model."""
    if is_unedited(source) and not is_edited(target):
        card = _SEAL.sub(b"", _read(source))
        return _seal(card.replace(b"\nlibrary_name: peft\n", b"\nlibrary_name: transformers\n"))
    path = (target if is_edited(target) else source) / FILE_NAME
    return files.read(path, limit=_COPY_LIMIT) if os.path.lexists(path) else None
