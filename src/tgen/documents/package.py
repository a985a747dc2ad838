"""ZIP archives and XML of documents, from anywhere: bounded, without entities or other files."""

import posixpath
from collections.abc import Container, Iterable, Iterator
from typing import Any, BinaryIO
from urllib.parse import unquote
from xml.parsers import expat
from zipfile import BadZipFile, ZipFile

from tgen.errors import CorpusError

_BLOCK = 1 << 16
_MAX_EXPANDED, _MAX_RATIO = 1 << 26, 100  # bytes in all: 64 MiB and 100 per byte of the file
DAMAGED_HINT = "open it in the program that made it and save it again, or download it again"
LOCKED_HINT = "save it without a password, or convert it to text"

Event = tuple[str, str, dict[str, str]]  # "start", name, attributes; "end", name; "text", text


class Package:
    """The files in a document that is a ZIP archive. Nothing is written to the disk."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            self._zip = ZipFile(file)
        except (BadZipFile, EOFError, ValueError, NotImplementedError, OverflowError) as error:
            file.seek(0)
            if file.read(4) == b"\xd0\xcf\x11\xe0":  # Office's form of encrypted documents
                raise CorpusError("is encrypted or in an old format", LOCKED_HINT) from None
            raise CorpusError(f"is damaged: {error}", DAMAGED_HINT) from None
        self.names = self._zip.namelist()
        self._allowed = self._left = _MAX_EXPANDED + _MAX_RATIO * file.seek(0, 2)

    def __contains__(self, name: str) -> bool:
        return name in self._zip.NameToInfo

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in it; raises CorpusError if that is damaged or too large."""
        try:
            with self._zip.open(name) as file:
                while block := file.read(_BLOCK):
                    self._left -= len(block)
                    if self._left < 0:
                        raise CorpusError(
                            f"expands to more than {self._allowed >> 20:,} MB",
                            "convert it to text yourself if you trust it",
                        )
                    yield block
        except KeyError:
            raise CorpusError(f"is damaged: it has no {name!r}", DAMAGED_HINT) from None
        except RuntimeError as error:
            if isinstance(error, RecursionError):
                raise
            problem = "is encrypted" if "encrypted" in str(error) else f"is damaged: {error}"
            raise CorpusError(problem, LOCKED_HINT) from None
        except (MemoryError, CorpusError):
            raise
        except Exception as error:  # each way of compression has its own
            raise CorpusError(f"is damaged: {name!r}: {error}", DAMAGED_HINT) from None

    def read(self, name: str) -> bytes:
        """Return the content of a file in it."""
        return b"".join(self.blocks(name))

    def events(self, name: str) -> Iterator[Event]:
        """Yield the XML of a file in it: starts and ends of elements, named without their
        namespace's prefix, and texts.

        Entities that the file declares are refused and other files are never read.
        """
        found: list[Event] = []
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = lambda name, attributes: found.append(
            ("start", _local(name), {_local(key): value for key, value in attributes.items()})
        )
        parser.EndElementHandler = lambda name: found.append(("end", _local(name), {}))
        parser.CharacterDataHandler = lambda text: found.append(("text", text, {}))
        parser.EntityDeclHandler = _refuse_entities
        try:
            for block in self.blocks(name):
                parser.Parse(block, False)
                yield from found
                found.clear()
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise CorpusError(f"is damaged: its XML has {error}", DAMAGED_HINT) from None
        yield from found

    def resolve(self, base: str, link: str) -> str:
        """Return the name that a link in the file `base` has; CorpusError if it is outside."""
        path = posixpath.join(posixpath.dirname(base), unquote(link.partition("#")[0]))
        name = posixpath.normpath(path).removeprefix("/")
        if name == ".." or name.startswith("../"):
            raise CorpusError(f"names the file {link!r} outside itself", DAMAGED_HINT)
        return name


def without(events: Iterable[Event], skipped: Container[str]) -> Iterator[Event]:
    """Yield the events outside of the elements with these names."""
    depth = 0
    for event in events:
        kind, name, _ = event
        if depth or (kind == "start" and name in skipped):
            depth += {"start": 1, "end": -1}.get(kind, 0)
        else:
            yield event


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def _refuse_entities(*_: Any) -> None:
    raise CorpusError("declares XML entities, which tgen does not expand", "convert it to text")
