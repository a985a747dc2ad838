"""Compressed files and archives: their texts, and bounds on what they expand to."""

import bz2
import errno
import gzip
import io
import lzma
import random
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tgen import corpus
from tgen.corpus import archives
from tgen.errors import CorpusError
from tgen.storage.files import RandomAccessFile

TEXT = b"the king said\n" * 50


def read(path):
    result = corpus.read([str(path)])
    return [part for document in result.documents for part in document], result.notes


def make_zip(members, **options):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zstd(content):
    if sys.version_info >= (3, 14):
        from compression import zstd as library
    else:
        from backports import zstd as library
    return library.compress(content)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_compressed_file_is_its_text(compress, tmp_path):
    for content in (TEXT, TEXT.replace(b"\n", b"\r\n"), "the kïng\n".encode("utf-16") * 20, b"x"):
        (tmp_path / "raw.txt").write_bytes(content)
        (tmp_path / "any name").write_bytes(compress(content))
        assert read(tmp_path / "any name") == read(tmp_path / "raw.txt")
    (tmp_path / "two").write_bytes(compress(TEXT) * 2)
    assert read(tmp_path / "two") == ([TEXT * 2], [])
    (tmp_path / "cut").write_bytes(compress(random.Random(1).randbytes(500).hex().encode())[:-200])
    with pytest.raises(CorpusError, match="is damaged"):
        corpus.read([str(tmp_path / "cut")])


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_members_are_read_by_the_same_rule(make, tmp_path):
    members = {
        "deep/a.txt": TEXT,
        "../../up.txt": b"only a name",
        "b.txt.gz": gzip.compress(b"packed"),
        "inner.zip": make_zip({"c.txt": "größer".encode("utf-16")}),
        ".hidden/x.txt": b"no",
        "__MACOSX/._a.txt": b"no",
        "picture.png": b"\x89PNG\0\0",
    }
    (tmp_path / "texts").write_bytes(make(members))
    texts, notes = read(tmp_path / "texts")
    assert texts == [TEXT, b"only a name", b"packed", "größer".encode()]
    assert notes[-1] == f"skipped {tmp_path / 'texts'}/picture.png: a PNG picture"
    assert not (tmp_path.parent / "up.txt").exists()


def test_bombs_end_at_their_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_MIN_BOUND", 1 << 20)
    zeros = bytes(b"a" * (1 << 22))
    bombs = [gzip.compress(zeros), lzma.compress(zeros), bz2.compress(zeros)]
    bombs += [make_zip({"a": zeros}), make_zip({str(i): zeros[: 1 << 19] for i in range(9)})]
    bombs += [gzip.compress(make_tar({"a": zeros})), gzip.compress(gzip.compress(zeros))]
    for bomb in bombs:
        (tmp_path / "bomb").write_bytes(bomb)
        with pytest.raises(CorpusError, match="bomb expands to more than 100 times its size"):
            corpus.read([str(tmp_path / "bomb")])
    (tmp_path / "good.txt").write_bytes(b"good")
    texts, [note] = read(tmp_path)
    assert texts == [b"good"]
    assert "expands to more than" in note


@pytest.mark.parametrize(
    "wrap", [lambda data: make_zip({"a": data}), lambda data: make_tar({"a": data}), gzip.compress]
)
def test_deep_nesting_is_an_error(wrap, tmp_path):
    content = TEXT
    for depth in range(40):
        content = wrap(content)
        (tmp_path / "nested").write_bytes(content)
        if depth < 4:
            assert read(tmp_path / "nested") == ([TEXT], [])
    with pytest.raises(CorpusError, match="nested more than 4 deep"):
        corpus.read([str(tmp_path / "nested")])


def test_damaged_and_locked_archives_say_so(tmp_path, monkeypatch):
    whole = make_zip({"a.txt": TEXT, "b.txt": b"fine"})
    locked = bytearray(whole)
    locked[6] |= 1
    locked[whole.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(locked)
    texts, [note] = read(tmp_path / "a.zip")
    assert texts == [b"fine"]
    assert note.endswith("a.zip/a.txt: encrypted")
    bad_size = bytearray(make_tar({"a": b"x", "b": b"y"}))
    bad_size[124:136] = b"\xff" * 11 + b"\0"  # a negative size, which would go back for ever
    long_header = bytearray(make_tar({"a": b"x"}))
    long_header[124:136], long_header[156:157] = b"77777777777\0", b"x"
    for content in (whole[:60], whole[:-30], bad_size, long_header, make_tar({"a": TEXT})[:700]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(CorpusError, match=r"damaged|is empty"):
            corpus.read([str(tmp_path / "bad")])
    monkeypatch.setattr(archives, "_MAX_MEMBERS", 1)
    (tmp_path / "many").write_bytes(whole)
    with pytest.raises(CorpusError, match="more than 1 files"):
        corpus.read([str(tmp_path / "many")])


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU tar")
def test_sparse_file_in_an_archive_is_skipped_with_a_note(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.truncate(1 << 22)
        file.write(TEXT)
    for names in (["a.txt", "sparse.txt"], ["sparse.txt", "a.txt"]):
        command = ["tar", "-S", "--format=gnu", "-cf", "x.tar", *names]
        subprocess.run(command, cwd=tmp_path, check=True)
        texts, [note] = read(tmp_path / "x.tar")
        assert texts == [TEXT]
        assert note.endswith("x.tar/sparse.txt: stored without its zero bytes")


def test_members_of_a_zip_are_counted_before_they_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(archives, "_MAX_MEMBERS", 8)
    (tmp_path / "a.zip").write_bytes(make_zip({"a": b"x"} | {f".{i}": b"" for i in range(7)}))
    assert read(tmp_path / "a.zip")[0] == [b"x"]
    (tmp_path / "a.zip").write_bytes(make_zip({"a": b"x"} | {f".{i}": b"" for i in range(8)}))
    monkeypatch.delattr(zipfile, "ZipInfo")  # of a member
    with pytest.raises(CorpusError, match="more than 8 files"):
        corpus.read([str(tmp_path / "a.zip")])


def test_archive_without_text_names_the_reason(tmp_path):
    (tmp_path / "a.zip").write_bytes(make_zip({"a.png": b"\x89PNG\0\0"}))
    with pytest.raises(CorpusError, match=r"has no text: skipped .*a\.zip/a\.png: a PNG picture"):
        corpus.read([str(tmp_path / "a.zip")])
    (tmp_path / "b.txt").write_bytes(TEXT)
    name = tmp_path / "a.zip"
    note = f"skipped {name}: has no text: skipped {name}/a.png: a PNG picture"
    assert read(tmp_path) == ([TEXT], [note])


def test_archive_of_several_files_without_text_says_how_many(tmp_path):
    (tmp_path / "a.zip").write_bytes(make_zip({"a.bin": b"\0" * 9, "b.bin": b"\0" * 9}))
    with pytest.raises(CorpusError, match=r"/b\.bin: .* \(the last of 2 files\)$"):
        corpus.read([str(tmp_path / "a.zip")])


@pytest.mark.parametrize("members", [{}, {".hidden": TEXT, "__MACOSX/a.txt": TEXT}])
def test_archive_without_files_is_an_error_if_named(members, tmp_path):
    (tmp_path / "a.zip").write_bytes(make_zip(members))
    (tmp_path / "b.txt").write_bytes(TEXT)
    with pytest.raises(CorpusError, match=r"a\.zip has no files besides hidden ones"):
        corpus.read([str(tmp_path / "a.zip"), str(tmp_path / "b.txt")])
    note = f"skipped {tmp_path / 'a.zip'}: has no files besides hidden ones"
    assert read(tmp_path) == ([TEXT], [note])


def test_full_disk_is_named_for_a_document_in_an_archive(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.tar").write_bytes(make_tar({"page.html": b"<p>text"}))
    monkeypatch.setattr(RandomAccessFile, "append", fail)
    with pytest.raises(CorpusError, match=r"cannot store .*page.html in a temporary file: No sp"):
        read(tmp_path / "a.tar")
