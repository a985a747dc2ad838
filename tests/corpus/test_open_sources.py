"""One rule for all files: what is named and cannot be read is an error, other files are skipped."""

import io
import json
import os
import sys
import threading
import zipfile
from itertools import pairwise

import pytest

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.errors import CorpusError, TgenError, UsageError
from tgen.runs.run_record import RunRecord

BINARY = {
    "a.png": (b"\x89PNG\r\n\x1a\n\0\0", "a PNG picture"),
    "b.jpg": (b"\xff\xd8\xff\xe0JFIF", "a JPEG picture"),
    "c.txt": (b"\x7fELF\0", "an executable"),
    "d": (b"SQLite format 3\0", "an SQLite database"),
    "e.gguf": (b"GGUF\3\0\0\0", "a GGUF model"),
    "f": (b"\x02\0\0\0\0\0\0\0{}", "a safetensors file"),
    "g.pkl": (b"\x80\x04\x95\0", "a Python pickle"),
    "h.bin": (b"abc\0def" * 9, "binary data with NUL bytes"),
    "i.7z": (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
}


def texts(*paths, **options):
    result = corpus.read([*map(str, paths)], reading=Reading(**options))
    return [part[:] for document in result.documents for part in document], result.notes


def test_binary_file_is_an_error_if_named_and_skipped_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.md").write_bytes(b"OTTO said: ID3 and GIF8 are words")
    for name, (content, kind) in BINARY.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError, match=f"{name} is {kind}, not text"):
            texts(name)
        for found in (".", "*"):
            read, [note] = texts(found)
            assert read == [b"OTTO said: ID3 and GIF8 are words"]
            assert note == f"skipped {name}: {kind}"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(CorpusError, match=f"- is {kind}"):
            texts("-")
        assert texts(name, read_as="bytes") == ([content], [])
        (tmp_path / name).unlink()


def _csv() -> bytes:
    return b"prompt,completion\n" + b"".join(b"%d,%d\n" % (i, i + 1) for i in range(9999))


def test_progress_of_long_files_is_reported(tmp_path, monkeypatch):
    import gzip

    table = _csv()
    rows = [dict(zip(("prompt", "completion"), map(str, (i, i)), strict=True)) for i in range(9999)]
    (tmp_path / "a.csv").write_bytes(table)
    (tmp_path / "b.csv").write_bytes(table)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text").write_bytes("Käse\n".encode("utf-16") * 99_999)
    (tmp_path / "plain").write_bytes("Käse\n".encode() * 9999)
    (tmp_path / "bytes").write_bytes(b"K\xe4se\n" * 9999)
    with gzip.open(tmp_path / "a.csv.gz", "wb", 1) as packed:
        packed.write(table)
    for module in ("archives", "document_table", "encodings", "jsonl", "sources"):
        monkeypatch.setattr(f"tgen.corpus.{module}._BLOCK", 9999)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as packed:
        packed.writestr("a.csv", table)
        packed.writestr("b.csv", table)
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as packed:
        packed.write(tmp_path / "plain", "plain")
    one_file = ("rows.jsonl", "text", "plain", "bytes", "a.csv.gz", "two.zip", "one.zip")
    n_updates: dict[str, int] = {}
    for names in (["a.csv", "b.csv"], *([name] for name in one_file)):
        done: list[float] = []
        corpus.read([str(tmp_path / name) for name in names], done.append)
        assert done == sorted(done), names
        assert all(0 < fraction <= 1 for fraction in done), names
        assert max(b - a for a, b in pairwise([0.0, *done, 1.0])) <= 0.2, names
        n_updates[names[0]] = len(done)
    assert n_updates["one.zip"] > n_updates["plain"]  # it is unpacked first


def test_progress_of_a_parquet_file_is_reported(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pa.table({"text": [f"row {i}" for i in range(999)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.arrow", chunksize=99)
    for name in ("a.parquet", "a.arrow"):
        done: list[float] = []
        assert len(corpus.read([str(tmp_path / name)], done.append).documents) == 999
        assert done == sorted(done)
        assert len(done) >= 3


def test_file_named_like_stdin_is_read_by_a_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("a file")
    assert texts("*")[0] == [b"a file"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"stdin")))
    assert texts("-")[0] == [b"stdin"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_patterns_do_not_follow_links_to_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b/c.txt", "b/.no/d.txt", "b/[e]/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    expected = [b"a.txt", b"b/[e]/f.txt", b"b/c.txt"]
    for pattern in ("**/*.txt", "**", "./**/**/*", f"{tmp_path}/**/?.txt"):
        assert texts(pattern) == (expected, [])
    assert texts("b/**/*.txt")[0] == expected[1:]
    assert texts("*/loop/**/c.txt")[0] == [b"b/c.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_links_that_are_not_followed_and_pipes_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("words")
    (tmp_path / "in" / "deep" / "to").symlink_to(tmp_path)
    (tmp_path / "in" / "gone").symlink_to("nothing")
    (tmp_path / "in" / ".hidden").symlink_to("nothing")
    os.mkfifo(tmp_path / "in" / "pipe")
    notes = ["skipped in/gone: a broken link", "skipped in/pipe: not a regular file"]
    folder = ["skipped in/deep/to: a link to a directory", *notes]
    assert texts("in") == ([b"words"], folder)
    assert texts("in/*") == ([b"words"], notes)
    with pytest.raises(CorpusError, match=r"has no text: skipped in/gone: a broken link"):
        texts("in/g*")


def test_empty_document_archive_or_table_is_an_error_if_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "empty.txt").touch()
    assert texts("a.txt", "empty.txt") == ([b"words"], [])
    for name in ("b.docx", "b.PDF", "b.html", "b.txt.gz", "b.zip", "b.parquet", "b.csv"):
        (tmp_path / name).touch()
        with pytest.raises(CorpusError, match=f"{name} is empty") as error:
            texts("a.txt", name)
        assert "download it again" in error.value.hint
        assert texts(".") == ([b"words"], [f"skipped {name}: empty"])
        assert texts("a.txt", name, read_as="text")[0] == [b"words"]
        (tmp_path / name).unlink()


def test_object_of_texts_that_is_not_read_as_rows_is_noted(tmp_path):
    for value in ({"hi": "Hello!", "bye": "See you"}, {"words": ["cat", "dog"]}):
        (tmp_path / "map.json").write_text(json.dumps(value))
        _, [note] = texts(tmp_path / "map.json")
        assert "map.json is one JSON object, read as text" in note
    (tmp_path / "other.json").write_text('{"version": "1", "files": ["cat", "dog"]}')
    assert texts(tmp_path / "other.json")[1] == []
    assert texts(tmp_path / "map.json", read_as="text")[1] == []


def test_many_notes_are_shortened(tmp_path):
    (tmp_path / "text").write_bytes(b"text")
    for i in range(30):
        (tmp_path / f"{i:02}.png").write_bytes(b"\x89PNG\0")
    _, notes = texts(tmp_path)
    assert len(notes) == 9
    assert notes[-1] == "22 more notes of this kind"


def test_as_overrides_the_recognition(tmp_path):
    rows = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "rows.jsonl").write_bytes(rows)
    assert texts(tmp_path / "rows.jsonl")[0] == [b"a", b"b"]
    assert texts(tmp_path / "rows.jsonl", read_as="text")[0] == [rows]
    assert texts(tmp_path / "rows.jsonl", read_as="bytes")[0] == [rows]
    (tmp_path / "page.html").write_bytes(b"<p>Words</p>\r\n")
    assert texts(tmp_path / "page.html")[0] == [b"Words"]
    assert texts(tmp_path / "page.html", read_as="text")[0] == [b"<p>Words</p>\n"]
    (tmp_path / "page").write_bytes(b"Words")
    with pytest.raises(CorpusError, match="not a document of a known format"):
        texts(tmp_path / "page", read_as="document")
    with pytest.raises(UsageError, match="no effect on files read as bytes"):
        Reading(read_as="bytes", encoding="cp1252")


def test_office_documents_have_no_plain_text(tmp_path):
    for first in ("[Content_Types].xml", "docProps/app.xml", "word/numbering.xml"):
        with zipfile.ZipFile(tmp_path / "a.docx", "w") as packed:
            packed.writestr(first, "")
            packed.writestr("word/document.xml", "<a>b</a>")
        with pytest.raises(CorpusError, match="is a Microsoft Office document"):
            texts(tmp_path / "a.docx", read_as="text")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("word/a.txt", "words")
    assert texts(tmp_path / "a.zip", read_as="text")[0] == [b"words"]


def test_names_of_columns_with_commas_are_in_quotes():
    for text, names in (
        ("a, b", ("a", "b")),
        ('"a, b",c', ("a, b", "c")),
        ('c, "a,b" ,"d"', ("c", "a,b", "d")),
        ('price,5" screen', ("price", '5" screen')),
        ('3",5"', ('3"', '5"')),
        ('"3"", wide",a,', ('3", wide', "a", "")),
        ('"a,b', ('"a', "b")),
    ):
        assert Reading(columns=text).columns == names


def test_options_of_rows_need_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\nwords,more\n")
    assert texts(tmp_path / "a.csv", columns="y")[0] == [b"more"]
    assert Reading(columns="x,y").columns == ("x", "y")
    for options in ({"columns": ("x", "y")}, {"text_column": "y"}):
        for read_as in ("bytes", "text", "document"):
            with pytest.raises(UsageError, match=f"no effect on files read as {read_as}"):
                Reading(read_as=read_as, **options)
        (tmp_path / "a.txt").write_bytes(b"words")
        with pytest.raises(UsageError, match="the corpus was not read as rows"):
            texts(tmp_path / "a.txt", **options)
        texts(tmp_path / "a.txt", tmp_path / "a.csv", **options)
    with pytest.raises(UsageError, match="no effect"):
        Reading(read_as="text", skip_bad_rows=True)
    with pytest.raises(UsageError, match="columns: invalid value"):
        Reading(columns=5)
    with pytest.raises(UsageError, match="columns: invalid value prompt,prompt") as error:
        Reading(columns="prompt,prompt")
    assert error.value.hint == "set columns to different names"


def test_document_in_another_encoding_is_decoded(tmp_path):
    subtitles = "1\n00:00:01,000 --> 00:00:02,000\n%s\n\n"
    lines = ["Größere Füße hören früh", "die schönen Vögel über", "dem großen Fluß für öde"]
    content = "".join(subtitles % line for line in lines).encode("cp1252")
    (tmp_path / "film.srt").write_bytes(content)
    read, notes = texts(tmp_path / "film.srt", encoding="cp1252")
    assert b" ".join(b"".join(read).split()).decode() == " ".join(lines)
    assert "1 text, cp1252, as --encoding says" in notes


def test_document_that_declares_its_encoding_is_not_guessed(tmp_path):
    words = "Zażółć gęślą jaźń, śpiewał młody żołnierz. " * 20
    mail = "From: a@b\nDate: x\nSubject: y\nContent-Type: text/plain; charset=iso-8859-2\n"
    mail += f"Content-Transfer-Encoding: 8bit\n\n{words}\n"
    page = f'<meta charset="iso-8859-2"><p>{words}</p>'
    for name, content in (("a.eml", mail), ("a.html", page)):
        (tmp_path / name).write_bytes(content.encode("iso-8859-2"))
        [read], [note] = texts(tmp_path / name)
        assert words.strip() in read.decode()
        assert note.startswith("1 document")
    (tmp_path / "a.html").write_bytes(page.replace("8859-2", "8859-5").encode("iso-8859-2"))
    [read], _ = texts(tmp_path / "a.html", encoding="iso-8859-2")
    assert read.decode() == words.strip()


def test_page_that_declares_no_encoding_is_decoded_or_noted(tmp_path):
    words = "日本語のページです。文字コードはどこにも書いてありません。"
    (tmp_path / "a.html").write_bytes(f"<p>{words}</p>".encode("shift_jis") * 9)
    [read], notes = texts(tmp_path / "a.html")
    assert read.decode().split() == [words] * 9
    assert "1 text, cp932, as detected" in notes
    (tmp_path / "a.html").write_bytes(f"<p>{words}</p>".encode("utf-16-le") * 9)
    assert texts(tmp_path / "a.html")[0][0].decode().split() == [words] * 9
    (tmp_path / "a.html").write_bytes("<p>Füße</p>".encode("cp1252"))
    [read], [_, note] = texts(tmp_path / "a.html")
    assert read.decode() == "Füße"
    assert "is read as cp1252" in note
    assert "--encoding NAME" in note
    (tmp_path / "a.html").write_bytes(f"<p>{words}</p>".encode()[:-5])  # ends within a character
    [read], [_, note] = texts(tmp_path / "a.html")
    assert read.decode() == words[:-1] + "\ufffd"
    assert "is read as utf-8" in note


def test_one_bad_byte_is_a_note_with_front_matter_too(tmp_path):
    for start in (b"", b"---\ntitle: a\n---\n"):
        (tmp_path / "a.md").write_bytes(start + b"words\r\n" * 500 + b"\xff\n")
        [read], notes = texts(tmp_path / "a.md")
        assert read == start + b"words\n" * 500 + b"\xff\n"
        assert any("are not UTF-8" in note for note in notes)


def test_encoding_of_the_user_makes_no_text_of_a_binary_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\0\xe9def" * 99)
    with pytest.raises(CorpusError, match="binary data with NUL bytes"):
        texts(tmp_path / "a", encoding="cp1252")
    (tmp_path / "a").write_bytes("words".encode("utf-16-be"))
    assert texts(tmp_path / "a", encoding="utf-16-be")[0] == [b"words"]


def test_run_without_a_record_reads_bytes_by_name(tmp_path):
    content = b"\xef\xbb\xbf<p>one</p>\r\ntwo\r\n"
    for name in ("crlf.txt", "page.html", "table.csv", "list.json", "a.gz"):
        (tmp_path / name).write_bytes(content)
        read = corpus.read([str(tmp_path / name)], reading=None)
        assert [*read.documents] == [(content,)]
        assert not read.notes
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    assert len(corpus.read([str(tmp_path)], reading=None).documents) == 5
    assert len(corpus.read([str(tmp_path / "*")], reading=None).documents) == 6
    assert RunRecord.__dataclass_fields__["reading"].default is None


def test_reading_survives_json():
    for reading in (Reading(), Reading(columns=("a", "b"), encoding="cp1252", skip_bad_rows=True)):
        assert Reading(**json.loads(json.dumps(vars(reading)))) == reading
    for values in ({"read_as": "tea"}, {"encoding": "no-such"}):
        with pytest.raises(UsageError):
            Reading(**values)


def test_detected_encodings_are_kept_for_a_resumed_run(tmp_path):
    path = tmp_path / "short"
    path.write_bytes("Größe\n".encode("cp1252"))
    assert "not UTF-8" in corpus.read([str(path)]).notes[0]
    read = corpus.read([str(path)], known_encodings={str(path): "cp1252"})
    assert [*read.documents] == [("Größe\n".encode(),)]


def test_text_of_a_prompt_file(tmp_path):
    (tmp_path / "prompt").write_bytes('{"Größe": 1}\r\n'.encode("utf-16"))
    done: list[float] = []
    text, notes = corpus.read_text(str(tmp_path / "prompt"), done.append)
    assert text.decode() == '{"Größe": 1}\n'
    assert notes[0] == "1 text, utf-16-le, by its byte order mark"
    assert done


def test_messages_about_a_prompt_file_name_no_options_for_corpora(tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes(b"T\xf6 be\n")
    assert corpus.read_text(str(path))[1][0].endswith("if they are text, save it as UTF-8")
    path.write_bytes(b"To\0be")
    with pytest.raises(CorpusError, match="NUL bytes") as error:
        corpus.read_text(str(path))
    assert error.value.hint == "name a text or a document; save a text as UTF-8"
    with pytest.raises(CorpusError, match="is a directory"):
        corpus.read_text(str(tmp_path))


def test_bad_row_of_a_skipped_file_is_named_by_its_line(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    assert texts(tmp_path)[1] == [f"skipped {tmp_path / 'b.jsonl'}: line 2: 'text' is null"]


def test_json_without_rows_is_named_and_skipped_in_a_directory(tmp_path):
    (tmp_path / "a.json").write_bytes(b"[]\n")
    with pytest.raises(CorpusError, match="has no rows"):
        texts(tmp_path / "a.json")
    (tmp_path / "b.txt").write_bytes(b"words")
    assert texts(tmp_path)[0] == [b"words"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("n_bytes", [100, (1 << 24) + 5])
def test_a_named_pipe_is_read_once_as_stdin_is(tmp_path, n_bytes):
    text = b"the king said\n" * (n_bytes // 14)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[text], daemon=True).start()
    read = corpus.read([str(pipe)])
    assert b"".join(part[:] for document in read.documents for part in document) == text
    threading.Thread(target=pipe.write_bytes, args=[b"a prompt\n"], daemon=True).start()
    assert corpus.read_text(str(pipe)) == (b"a prompt\n", [])


def test_a_pipe_that_is_gone_when_it_is_opened_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tgen.storage.files.is_pipe", lambda _: True)
    with pytest.raises(TgenError, match="does not exist"):
        texts(tmp_path / "gone")
