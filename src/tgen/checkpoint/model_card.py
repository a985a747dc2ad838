"""Model cards, README.md in the form of the Hugging Face Hub, and how an edited one is recognized.

The last line of a card that tgen writes has the digest of the lines before it. A README.md without
such a line, or with another digest, is the user's: it is never replaced or removed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files

FILE_NAME = "README.md"
_LIMIT = 1 << 20  # bytes of a card that is read as text, which tgen's are
_SEAL = re.compile(rb"\n<!-- Written by tgen, sha256 ([0-9a-f]{64}): an edited card stays\. -->\n\Z")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENSE = re.compile(r"^(license|license_name|license_link): *(.+?) *$", re.MULTILINE)
_BASE_MODEL = re.compile(r"^(base_model): *(.+?) *$", re.MULTILINE)
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
    path = folder / FILE_NAME
    try:
        return files.read(path, limit=_LIMIT) if path.is_file() else b""
    except (TgenError, OSError):
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
    """Return the license and the base model that a card's front matter or a GGUF file names, as
    YAML values."""
    if folder.is_file():
        return _read_gguf_fields(folder)
    front = _FRONT_MATTER.match(_read(folder).decode(errors="replace"))
    if not front:
        return {}
    return dict([*_LICENSE.findall(front[1]), *_BASE_MODEL.findall(front[1])])


def _read_gguf_fields(path: Path) -> dict[str, str]:
    from tgen.checkpoint.gguf.header import read_header  # slow: most models have no need of it

    try:
        fields = read_header(path).fields
    except (TgenError, OSError):
        return {}
    values = {name: fields.get(field) for name, field in GGUF_FIELDS.items()}
    return {name: json.dumps(value) for name, value in values.items() if isinstance(value, str)}


def exported(source: Path, target: Path) -> Iterable[bytes] | None:
    """Return the card, in blocks, of a model at `source` that is exported to `target`, whose own
    stays if it was edited; None: there is none. A merged adapter's card is one of a model."""
    if is_unedited(source) and not is_edited(target):
        card = _SEAL.sub(b"", _read(source))
        return [_seal(card.replace(b"\nlibrary_name: peft\n", b"\nlibrary_name: transformers\n"))]
    path = (target if is_edited(target) else source) / FILE_NAME
    return _blocks(path) if os.path.lexists(path) else None


def _blocks(path: Path) -> Iterator[bytes]:
    with files.open_regular(path) as file:
        while block := file.read(1 << 20):
            yield block
