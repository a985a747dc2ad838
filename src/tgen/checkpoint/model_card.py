"""Model cards, README.md in the form of the Hugging Face Hub, and how an edited one is recognized.

The last line of a card that tgen writes has the digest of the lines before it. A README.md without
such a line, or with another digest, is the user's: it is never replaced or removed.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files
from tgen.version import __version__

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


def front_matter(fields: Mapping[str, str], *, is_adapter: bool = False) -> list[str]:
    """Return the first lines of a card; `fields` are YAML values by name."""
    library, tags = ("peft", ["- lora"]) if is_adapter else ("transformers", [])
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ["---", *lines, "tags:", "- tgen", *tags, "---"]


def license_section(fields: Mapping[str, str], source: str, *, depends_on: str) -> list[str]:
    """Return the last lines of a card: the license in `fields`, which is that of `source`, or what
    one `depends_on`."""
    licenses = [text.strip("\"'") for name, text in fields.items() if name.startswith("license")]
    text = f"Not stated. It depends on {depends_on}: add `license:` at the top of this file."
    if licenses:
        text = f"Inherited from {source}: {plain_text(', '.join(licenses))}."
    return ["\n## License\n", text]


def plain_text(text: str) -> str:
    """Return a text on one line, without markup."""
    return "".join(f"\\{c}" if c in "<[*_`" else c for c in " ".join(text.split()))


def inline_code(text: str) -> str:
    """Return a text on one line, as code."""
    return f"`{' '.join(text.replace('`', '').split())}`"


def model_name(path: Path) -> str:
    """Return the Hub's name of a model in its cache, else the name of its file or directory."""
    for part in reversed(path.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return path.absolute().name


def export_card(source: Path, target: Path, description: str) -> bytes:
    """Return the card of a model at `source` that is exported to `target`: its own, or a new one
    with a `description` such as "llama, 15.20 M parameters"."""
    card = _copied(source, target)
    if card is not None:
        return card
    fields, name = read_fields(source), inline_code(model_name(source))
    title = f"\n# {plain_text(target.name)}\n"
    text = f"A language model ({description}), exported by tgen {__version__} from {name}."
    lines = [*front_matter(fields), title, text, *license_section(fields, name, depends_on=name)]
    return _seal(("\n".join(lines) + "\n").encode(errors="replace"))


def _copied(source: Path, target: Path) -> bytes | None:
    """Return the card at `source`, or that at `target` if it was edited; None: there is none. A
    merged adapter's card is one of a model."""
    if is_unedited(source) and not is_edited(target):
        card = _SEAL.sub(b"", _read(source))
        return _seal(card.replace(b"\nlibrary_name: peft\n", b"\nlibrary_name: transformers\n"))
    path = (target if is_edited(target) else source) / FILE_NAME
    return files.read(path, limit=_COPY_LIMIT) if os.path.lexists(path) else None
