"""Hostile documents: an error of one line with what to do, in bounded time and memory."""

import errno
import os
import threading

import pytest

from support import documents
from support.documents import make_docx, make_epub, make_odt, make_pdf, make_zip, paragraph
from tgen.corpus.steps import finish
from tgen.documents import convert
from tgen.documents.convert import convert_document
from tgen.documents.kinds import document_kind
from tgen.errors import CorpusError
from tgen.storage import files
from tgen.storage.files import RandomAccessFile

ENTITIES = '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
EXTERNAL = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]><x>&a;</x>'
PAGE = make_pdf([[(50, 700, 10, "A line of text")]])
LOOP = make_pdf([None], tree="<</Type/Pages/Count 9/Kids[2 0 R 2 0 R]>>")
LOCKED = f"/Encrypt<</Filter/Standard/V 1/R 2/O({'o' * 32})/U({'u' * 32})/P -4>>/ID[(a)(a)]"
LOCKED_ODT = {"content.xml": "x", "META-INF/manifest.xml": "<a><encryption-data/></a>"}
OUTSIDE = make_epub({"nav.xhtml": "", "../../../etc/passwd": "<p>x</p>"})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("xml.docx", make_zip({"word/document.xml": ENTITIES}), "declares XML entities"),
        ("entity.docx", make_zip({"word/document.xml": EXTERNAL}), "declares XML entities"),
        ("other.docx", make_zip({"a.txt": "x"}), "is damaged: it has no 'word/document.xml'"),
        ("cut.docx", make_docx(paragraph("x"))[:-30], "is damaged"),
        ("deep.odt", make_odt("<text:p>" + "<text:span>" * 10**5), "is damaged: its XML has"),
        ("locked.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "or encrypted"),
        ("locked.odt", make_zip(LOCKED_ODT), "is encrypted"),
        ("outside.epub", OUTSIDE, "names the file '../../../etc/passwd' outside itself"),
        ("loop.pdf", LOOP, "is damaged|has no text"),
        ("locked.pdf", make_pdf([[(50, 700, 10, "x")]], trailer=LOCKED), "is encrypted"),
        ("cut.pdf", PAGE[:40], "is damaged|has no text"),
        ("deep.ipynb", '{"cells": ' + "[" * 10**5, "is nested too deeply"),
        ("a.xlsx", make_zip({"xl/a.xml": ""}), "is a spreadsheet"),
        ("escapes.srt", "1\n00:00:01,0 --> 00:00:02,0\n\x1b[2J\n", None),
        ("empty.eml", documents.MAIL[: documents.MAIL.index("Hi")], "has no text"),
        ("empty.html", "", "has no text"),
    ],
)  # fmt: skip
def test_hostile_document_is_an_error(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = document_kind(name, path.read_bytes()[:4096])
    if problem is None:
        assert finish(convert_document(path, kind)).spool.read(0, 99) == b"[2J"
        return
    with pytest.raises(CorpusError, match=problem) as error:
        finish(convert_document(path, kind))
    assert error.value.message.startswith(str(path))
    assert error.value.message.isprintable()
    assert error.value.hint
    assert os.listdir(tmp_path) == [name]


def test_bomb_and_thousands_of_empty_pages_are_errors(tmp_path):
    bomb, empty = tmp_path / "bomb.docx", tmp_path / "empty.pdf"
    bomb.write_bytes(make_docx(" " * 80_000_000 + paragraph("x")))
    with pytest.raises(CorpusError, match="expands to more than 71 MB"):
        finish(convert_document(bomb, "docx"))
    empty.write_bytes(make_pdf([None] * 10_000))
    with pytest.raises(CorpusError, match=r"has no text: its pages \(10,000\) are empty"):
        finish(convert_document(empty, "pdf"))


def test_slow_or_large_document_ends_its_process_only(tmp_path, monkeypatch):
    convert.close_converter()
    path = tmp_path / "a.html"
    path.write_text("x" * (1 << 22))
    monkeypatch.setattr(convert, "SECONDS", 0)
    monkeypatch.setattr(convert, "SECONDS_PER_MB", 0)
    with pytest.raises(CorpusError, match="takes more than 0 s"):
        finish(convert_document(path, "html"))
    monkeypatch.undo()
    monkeypatch.setattr(convert, "_BYTES", 1 << 22)
    monkeypatch.setattr(convert, "_BYTES_PER_BYTE", 0)
    with pytest.raises(CorpusError, match=r"needs more than 4 MB of memory|crashed its reader"):
        finish(convert_document(path, "html"))
    monkeypatch.undo()
    monkeypatch.setattr(convert, "_TEXT_BYTES", 1 << 20)
    monkeypatch.setattr(convert, "_TEXT_PER_BYTE", 0)
    with pytest.raises(CorpusError, match="has more than 1 MB of text"):
        finish(convert_document(path, "html"))
    path.write_text("<p>text")
    assert finish(convert_document(path, "html")).spool.read(0, 9) == b"text"
    convert.close_converter()


def test_next_document_never_gets_the_answer_of_an_interrupted_one(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    convert.close_converter()
    path = tmp_path / "a.html"
    path.write_text("first")
    monkeypatch.setattr(RandomAccessFile, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        finish(convert_document(path, "html"))
    monkeypatch.undo()
    path.write_text("second")
    assert finish(convert_document(path, "html")).spool.read(0, 9) == b"second"
    convert.close_converter()


def test_full_disk_is_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.html"
    path.write_text("text")
    monkeypatch.setattr(RandomAccessFile, "append", fail)
    with pytest.raises(CorpusError, match=r"cannot store the text of .*a.html .*: No space left"):
        finish(convert_document(path, "html"))
    monkeypatch.setattr(files, "open_temporary", fail)
    n_threads = threading.active_count()
    with pytest.raises(OSError, match="No space"):
        finish(convert_document(path, "html"))
    assert threading.active_count() == n_threads


def test_another_thread_does_not_end_a_conversion(tmp_path, monkeypatch):
    convert.close_converter()
    path = tmp_path / "a.html"
    path.write_text("text")
    append = RandomAccessFile.append

    def close_and_append(file, text):
        thread = threading.Thread(target=convert.close_converter)
        thread.start()
        thread.join()
        assert convert._child.process.poll() is None
        append(file, text)

    monkeypatch.setattr(RandomAccessFile, "append", close_and_append)
    assert finish(convert_document(path, "html")).spool.read(0, 9) == b"text"
    convert.close_converter()
    assert convert._child.process.poll() is not None


def test_killed_reader_is_not_called_slow(tmp_path, monkeypatch):
    def exchange(child, *_):
        child.kill()
        raise EOFError

    (tmp_path / "a.html").write_text("text")
    monkeypatch.setattr(convert, "_exchange", exchange)
    with pytest.raises(CorpusError, match="crashed its reader"):
        finish(convert_document(tmp_path / "a.html", "html"))


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "pypdf.py").write_text("raise ImportError(name='pypdf')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a.pdf").write_bytes(PAGE)
    convert.close_converter()
    with pytest.raises(CorpusError, match="needs the library pypdf") as error:
        finish(convert_document(tmp_path / "a.pdf", "pdf"))
    assert error.value.hint == "install it: pip install 'tgen-lm[documents]'"
    convert.close_converter()
