"""Documents: their bytes, the files in their archives and the elements in these are changed."""

import io
import re
import zipfile
from pathlib import Path
from random import Random

from fuzz.mutations import ESCAPES
from support import documents
from support.documents import make_docx, make_epub, make_odt, make_pdf, make_zip, paragraph
from tgen.corpus.steps import finish
from tgen.documents import convert
from tgen.documents.kinds import document_kind
from tgen.errors import CorpusError

_TABLE = f"<w:tbl><w:tr><w:tc>{paragraph('a')}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr></w:tbl>"
_NOTES = f'<w:footnote w:id="2">{paragraph("note")}</w:footnote>'
_BOX = f"<w:txbxContent>{paragraph('box')}</w:txbxContent>"
_DOCX = make_docx(
    paragraph("One", "<w:br/>", "two", '<w:footnoteReference w:id="2"/>') + _TABLE
    + paragraph('<w:fldChar w:fldCharType="begin"/>', "<w:instrText>TOC</w:instrText>", _BOX)
    + paragraph('<w:fldChar w:fldCharType="end"/>', "<a:blip/>", "<w:tab/>"),
    footnotes=_NOTES,
)  # fmt: skip
_ODT = make_odt(
    "<text:h>T</text:h><text:p>One<text:s text:c='3'/><text:line-break/>two<text:note>"
    "<text:note-body><text:p>n</text:p></text:note-body></text:note></text:p><text:list><text:list-item><text:p>x"
    "</text:p></text:list-item></text:list><table:table><table:table-row><table:table-cell><text:p>c"
    "</text:p></table:table-cell></table:table-row></table:table><draw:frame><draw:image/></draw:frame>"
)
_EPUB = make_epub({"nav.xhtml": "<p>n</p>", "a.xhtml": documents.HTML, "b.xhtml": "<p>&nbsp;b</p>"})
_LINES = [(50, 700 - 12 * i, 10, f"Line {i} of a text that is exam-") for i in range(4)]
_PDF = make_pdf([_LINES, [*_LINES, (300, 20, 8, "2")], None])
_DOCUMENTS: list[tuple[str, bytes]] = [
    (name, content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    for name, content in (
        ("a.docx", _DOCX), ("a.odt", _ODT), ("a.epub", _EPUB), ("a.html", documents.HTML),
        ("a.pdf", _PDF), ("a.rtf", documents.RTF), ("a.ipynb", documents.NOTEBOOK),
        ("a.eml", documents.MAIL), ("a.mbox", documents.MBOX), ("a.srt", documents.SRT),
        ("a.vtt", documents.VTT), ("a.txt", documents.WHATSAPP), ("b.txt", documents.ANDROID),
        ("a.json", documents.TELEGRAM), ("b.json", documents.DISCORD),
        ("a.md", "---\ntitle: x\n---\n\n# A\n"),
    )
]  # fmt: skip
_PIECES = [
    *(b"<", b">", b"&", b"\0", b"\xff", b"]]>", b"<!--"),
    *(b"<![CDATA[", b"%", b"\\", b"{", b"}", b"(", b")"),
    *(b'<!DOCTYPE x [<!ENTITY a "b">]>', b"&a;", b"<?xml version='1.0' encoding='utf-16'?>"),
    *(b"<table>", b"</table>", b"<td>", b"<tr>", b"<script>", b"<nav>", b"<pre>", b"<div hidden>"),
    *(b"<sup>", b"</sup>", b"<a href='#'>", b"<w:tbl>", b"<w:tc>", b"</w:tc>", b"<w:p>", b"</w:p>"),
    *(b"<w:txbxContent>", b"</w:txbxContent>", b"<text:note-body>", b"</text:note-body>"),
    *(b"\\par", b"\\cell", b"\\bin99999", b"\\u99999?"),
    *(b"\\ansicpg65001", b"\\ansicpg99999", b"\\'", b"\\pict"),
    *(b"../", b"/etc/passwd", b"99999999999", b"-1", b"0"),
    *(b"1e999", b"[[[[", b"null", b'{"a":', b'"'),
    *(b"charset=utf-7", b"charset=idna", b"charset=rot13"),
    *(b"Content-Type: multipart/mixed; boundary=a\n",),
    *(b"Content-Transfer-Encoding: base64\n", b"From x\n"),
    *(b">", b"--\n", b"--> ", b"00:00:00,000 --> "),
    *(b" obj", b"endobj", b"stream\n", b"/Kids[2 0 R]"),
    *(b"/Length 99999999", b"/Filter/LZWDecode", b" 0 R"),
    *(ESCAPES.encode(), "\u202e\ud800".encode("utf-8", "surrogatepass")),
    *(b"<|endoftext|>", b"a" * 5000),
]  # fmt: skip


class Documents:
    """Each format in turn; half of the archives are changed inside."""

    prints = False
    starts_processes = True

    def __init__(self, folder: Path) -> None:
        convert.SECONDS = 2
        self._folder = folder
        self._path = folder / "a"

    def change(self, i: int, rng: Random) -> str:
        """Change the bytes of a document, or of a file in it."""
        name, content = _DOCUMENTS[i % len(_DOCUMENTS)]
        what = ""
        if content.startswith(b"PK") and rng.random() < 0.8:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                files = {member: archive.read(member) for member in archive.namelist()}
            member = rng.choice(list(files))
            files[member], what = _change(files[member], rng)
            content, what = make_zip(files), f"{member}: {what}"
        else:
            content, what = _change(content, rng)
        self._path.unlink(missing_ok=True)
        self._path = self._folder / name
        self._path.write_bytes(content)
        return f"{name}: {what}"

    def read(self) -> None:
        """Convert the document as the commands do."""
        with open(self._path, "rb") as file:
            kind = document_kind(self._path.name, file.read(4096))
        if kind is not None:
            try:
                spool = finish(convert.convert_document(self._path, kind)).spool
            except CorpusError as error:
                # For a few kilobytes, the limits are no excuse; pypdf repairs some files slowly.
                is_slow = "takes more" in error.message and kind != "pdf"
                if "crashed" in error.message or is_slow:
                    raise AssertionError(error.message) from None
                raise
            text = spool.read(0, spool.stamp[0]).decode()
            controls = re.findall("[\0-\x08\x0b-\x1f\x7f-\x9f]", text)
            assert kind in ("markdown", "notebook") or not controls, controls
            assert text.strip()


def _change(content: bytes, rng: Random) -> tuple[bytes, str]:
    changes = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        end = min(end, start + rng.choice((1, 8, 200, 5000)))
        kind = rng.randrange(6)
        if kind < 2:
            piece = rng.choice(_PIECES)
            content = content[:start] + piece + content[start if kind else end :]
            changes.append(f"{piece[:30]!r} at {start}")
        elif kind == 2:
            content = content[:start] + content[end:]
            changes.append(f"removed {start} to {end}")
        elif kind == 3:
            content = content[:start] + content[start:end] * rng.choice((2, 2, 100)) + content[end:]
            changes.append(f"repeated {start} to {end}")
        elif kind == 4 and content:
            position = min(start, len(content) - 1)
            content = content[:position] + bytes([rng.randrange(256)]) + content[position + 1 :]
            changes.append(f"byte {position}")
        elif elements := [match.span() for match in re.finditer(rb"<[^<>]*>|\d+", content)]:
            (a, b), (c, d) = rng.choice(elements), rng.choice(elements)
            content = content[:a] + content[c:d] + content[b:]
            changes.append(f"{content[a : a + d - c][:30]!r} at {a}")
    return content, "; ".join(changes)
