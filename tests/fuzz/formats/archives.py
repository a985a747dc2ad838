"""Archives, compressed files and texts in other encodings: their bytes are changed."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path
from random import Random

from fuzz.mutations import ESCAPES
from tgen import corpus

_TEXT = "Größere Füße hören früh die Vögel.\r\nСлышно птиц над рекой. 朝早く鳥の声。\n" * 9
_CODECS = ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp1252", "koi8-r", "shift_jis", "gb18030"]
_CODECS += ["iso2022_jp", "euc-kr", "mac-roman"]
_PACK = [gzip.compress, bz2.compress, lzma.compress]


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name * 40)  # longer than a header has room for
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


_MEMBERS = {f"{codec}.txt": _TEXT.encode(codec, "ignore") for codec in _CODECS[:5]}
_MEMBERS |= {"../a.gz": gzip.compress(b"a"), ESCAPES: b"b", "c.zip": _zip({"d": b"d"})}
_FILES = [
    _zip(_MEMBERS),
    _tar(_MEMBERS),
    gzip.compress(_tar(_MEMBERS)),
    _zip({"a": bytes(1 << 20)}),
]
_FILES += [pack(_TEXT.encode()) for pack in _PACK]
_FILES += [_TEXT.encode(codec, "ignore") for codec in _CODECS]


class Archives:
    """A file whose bytes are changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "file"

    def change(self, i: int, rng: Random) -> str:
        """Cut, repeat, swap and replace bytes, and pack the result again."""
        content = bytearray(_FILES[i % len(_FILES)])
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(content))
            noise = rng.randbytes(rng.randrange(5)) * rng.choice((1, 1, 1, 300))
            content[at : at + rng.choice((0, 1, 2, 4, 4, 100))] = noise or b"\xff\xff\xff\xff"
        data = bytes(
            content[: rng.choice((len(content), len(content), rng.randrange(len(content)))) or 1]
        )
        for _ in range(rng.choice((0, 0, 0, 1, 2, 6))):
            data = rng.choice(_PACK)(data)
        self._path.write_bytes(data)
        return f"file {i % len(_FILES)}"

    def read(self) -> None:
        """Read the file as a corpus."""
        text = corpus.read([str(self._path)])
        for document in text.documents:
            for part in document:
                part[:]
        text.close()
