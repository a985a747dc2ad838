"""Tables: CSV and TSV in the dialects that programs write, parquet and Arrow."""

import csv
import errno
import io
import json
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.corpus import tables
from tgen.corpus.rows import convert_rows, row_kind
from tgen.corpus.sources import Source
from tgen.corpus.steps import finish
from tgen.errors import CorpusError
from tgen.machine.child import Child
from tgen.storage.files import RandomAccessFile

TEXTS = ['the "king",\nsaid; a|b\tc', "日本 é", "x", 'a "b"', ""]


def read(content, name="a.csv", **options):
    """Convert a table; return its form, notes and rows."""
    content = content.encode() if isinstance(content, str) else content
    kind = row_kind(name, content[:65536])
    converted = finish(convert_rows(Source(name, content), kind, Reading(**options)))
    lines = converted.spool.read(0, 1 << 27).splitlines()
    return converted.form, converted.notes, [json.loads(line) for line in lines]


def write(records, **dialect):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, **dialect).writerows(records)
    return buffer.getvalue()


@pytest.mark.parametrize("delimiter", list(",;\t|"))
@pytest.mark.parametrize("dialect", [{}, {"quoting": csv.QUOTE_ALL}, {"lineterminator": "\n"}])
@pytest.mark.parametrize("begin", ["", "\ufeff", "sep"])
def test_dialect_is_recognized(delimiter, dialect, begin):
    records = [["id", "text", "n"], *([i, text, 2] for i, text in enumerate(TEXTS))]
    begin = f"sep={delimiter}\r\n" if begin == "sep" else begin
    form, notes, found = read(begin + write(records, delimiter=delimiter, **dialect))
    assert form == "text"
    assert notes == ["1 empty row left out", "keys that are not used: id, n"]
    assert found == [{"text": text} for text in TEXTS if text]


def test_quotes_that_are_escaped_or_plain():
    escaped = '"id","text"\n"1","the \\"king\\", said"\n"2","a"\n'
    assert read(escaped)[2] == [{"text": 'the "king", said'}, {"text": "a"}]
    assert read('text\r\n"a\r\nb"\r\n')[2] == [{"text": "a\nb"}]
    plain = 'id\ttext\n1\t"So," he said\n2\t"a\n'
    assert read(plain, "a.tsv")[2] == [{"text": '"So," he said'}, {"text": '"a'}]


def test_spaces_before_quotes_are_removed():
    expected = [{"prompt": "a", "completion": "b, c"}, {"prompt": 'd "e"', "completion": "f"}]
    spaced = 'prompt, completion\n"a", "b, c"\n"d ""e""", f\n'
    assert read(spaced)[2] == expected
    assert read(spaced.replace(", ", ",  "))[2][1] == expected[1]
    assert read("sep=^\n" + spaced.replace(", ", "^ "))[2][1] == expected[1]
    rows = [['Say, "x"', " b"], ["d", ' "e"']]
    kept = [dict(zip(("prompt", "completion"), row, strict=True)) for row in rows]
    assert read(write([["prompt", "completion"], *rows]))[2] == kept


def test_dialect_of_one_row_is_recognized():
    for row in ("w, x;y, é", '"w";y'):
        (found,) = read(f"prompt;b, c\n{row}\n", columns=["prompt", "b, c"])[2]
        assert found == dict(
            zip(("prompt", "completion"), row.replace('"', "").split(";"), strict=True)
        )


@pytest.mark.parametrize("delimiter", list(",;\t|"))
def test_table_of_another_name_is_read_as_rows(tmp_path, delimiter):
    path, reading = tmp_path / "table.txt", Reading(read_as="rows", columns=("q", "a, b"))
    for rows in (
        [("Who, me?", "yes"), ("Why", "x\ny")],
        [("x" * 70_000, "a\n[x] b")],
        [('as JSON\n{"a": 1}', "a")],
        [("page\fbreak\u2028line", "a"), ("two\v\u2028", "b")],
        [("w, x; y\tz|", "a, b; c\td|")],
    ):
        table = write([["q", "a, b"], *rows], delimiter=delimiter)
        for codec in ("utf-8", "utf-16"):
            path.write_bytes(table.encode(codec))
            found = corpus.read([str(path)], reading=reading).documents
            assert [*found] == [(q.encode(), a.encode()) for q, a in rows], (rows, codec)
    path.write_bytes("q;a, b\nw, x;y, z\n".encode("utf-16"))
    assert [*corpus.read([str(path)], reading=reading).documents] == [(b"w, x", b"y, z")]
    for text in ("One line, and\nanother line.\n", 'A, b\n{"q": 1, "a": 2}\n{"q": 1, "a": 2}\n'):
        path.write_text(text)
        with pytest.raises(CorpusError, match="not valid JSON"):
            corpus.read([str(path)], reading=reading)


def test_columns_have_names_or_numbers():
    assert read("name\nemma\nava\n")[0] == "text of the column 'name'"
    assert read("1,a long text of several words\n2,another long text of words\n")[2][0] == {
        "text": "a long text of several words"
    }
    assert read(",Text,Text\n0,a,b\n", text_column="3")[2] == [{"text": "b"}]
    assert read("Question,Answer\na,b\n")[2] == [{"prompt": "a", "completion": "b"}]
    messages = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    assert read(write([["messages"], [messages]]))[2] == [{"messages": json.loads(messages)}]
    one, other = ("a long text of several words", "another long text of words")
    with pytest.raises(CorpusError, match=rf"no known form: one \('{one}'\), two \('{other}'\)"):
        read(f"one,two\n{one},{other}\n")


def test_bad_records_have_their_lines():
    text = 'id,text\n1,"a\nb"\n2,too,many\n3,"c" d\n4,e\n5,"open\n'
    with pytest.raises(CorpusError, match=r"a\.csv: 3 of 5 rows are not valid") as error:
        read(text)
    for words in ("line 4: 3 cells (the header has 2)", "line 5: not valid CSV", "line 7: not v"):
        assert words in error.value.message
    assert read(text, skip_bad_rows=True)[2] == [{"text": "a\nb"}, {"text": "e"}]
    with pytest.raises(CorpusError, match="line 3: not UTF-8") as error:
        read("id,text\n1,a\n2,é\n".encode("latin-1"))
    assert "--encoding" in error.value.hint


def test_a_quote_that_is_never_closed_is_bounded(monkeypatch):
    monkeypatch.setattr(tables, "_MAX_RECORD", 100)
    with pytest.raises(CorpusError, match="has a row of more than 100 bytes"):
        read('text,n\n"' + "a\n" * 200)
    assert len(read("text,n\n" + "a,1\n" * 200)[2]) == 200


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@settings(max_examples=40, deadline=None)
@given(records=st.lists(st.tuples(cells, cells), min_size=1, max_size=6))
def test_cells_come_back(records):
    text = write([["prompt", "completion"], *records], quoting=csv.QUOTE_ALL)
    expected = [{"prompt": q, "completion": a} for q, a in records if a]
    assume(expected)
    assert read(text)[2] == expected


@pytest.fixture
def table():
    pyarrow = pytest.importorskip("pyarrow")
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 300
    texts = pyarrow.array([f"text {i}" for i in range(300)]).dictionary_encode()
    pictures = pyarrow.array([b"\xff"] * 300)
    return pyarrow.table({"text": texts, "messages": messages, "picture": pictures})


def to_bytes(table, kind):
    import pyarrow
    from pyarrow import ipc, parquet

    sink = pyarrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table, sink)
    else:
        new = {"file": ipc.new_file, "stream": ipc.new_stream}[kind]
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_parquet_and_arrow_have_their_rows(table):
    messages = table.column("messages").to_pylist()
    for kind, name in (("parquet", "a"), ("file", "a.feather"), ("stream", "a.arrow")):
        content = to_bytes(table, kind)
        form, notes, found = read(content, name)
        assert (form, notes) == ("messages", ["keys that are not used: picture, text"])
        assert [row["messages"] for row in found] == messages
    assert read(content, name, text_column="text")[2][299] == {"text": "text 299"}


def test_nan_in_a_column_is_empty():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"prompt": ["a", "b"], "completion": [math.nan, 2.5]})
    _, notes, found = read(to_bytes(table, "parquet"), "a.parquet")
    assert (notes, found) == (["1 empty row left out"], [{"prompt": "b", "completion": "2.5"}])


def test_bytes_of_a_column_are_text_or_a_bad_row():
    pa = pytest.importorskip("pyarrow")
    cells = ["ä".encode(), b"caf\xe9", b""]
    content = to_bytes(pa.table({"text": cells, "picture": [b"\xff"] * 3}), "parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet, line 2: 'text' is not UTF-8") as error:
        read(content, "a.parquet")
    assert "--skip-bad-rows" in error.value.hint
    _, notes, found = read(content, "a.parquet", skip_bad_rows=True)
    assert found == [{"text": "ä"}]
    assert [note.partition(": ")[0] for note in notes] == [
        *("1 bad row left out", "1 empty row left out", "keys that are not used")
    ]
    content = to_bytes(pa.table({"messages": [b"\xff"]}), "parquet")
    with pytest.raises(CorpusError, match=r"\(got bytes that are not UTF-8\)"):
        read(content, "a.parquet")


def test_saved_dataset_is_read_without_its_metadata(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "data-00000-of-00001.arrow").write_bytes(
        to_bytes(table, "stream")
    )
    metadata = ["data/dataset_dict.json", "data/train/dataset_info.json", "data/train/state.json"]
    for name in metadata:
        (tmp_path / name).write_text('{"splits": ["train"]}')
    for path in ("data", "data/**"):
        read = corpus.read([path], reading=Reading())
        assert len(read.documents) == table.num_rows
        assert read.notes[-3:] == [f"skipped {name}: metadata of a dataset" for name in metadata]
    (tmp_path / "state.json").write_text("words")
    assert [*corpus.read(["*.json"], reading=Reading()).documents] == [(b"words",)]


def test_damaged_parquet_is_an_error(table, monkeypatch):
    content = to_bytes(table, "parquet")
    for damaged in (content[:100], b"PAR1" + bytes(100) + b"PAR1", content[:-200] + b"x" * 200):
        with pytest.raises(CorpusError, match=r"cannot read a\.parquet"):
            read(damaged, "a.parquet")
    monkeypatch.setattr(tables, "_MAX_TABLE", 100 - 100 * len(content))
    with pytest.raises(CorpusError, match="expands to more than 100 bytes"):
        read(content, "a.parquet")
    monkeypatch.setattr(tables, "find_spec", lambda _: None)
    with pytest.raises(CorpusError, match="needs pyarrow") as error:
        read(content, "a.parquet")
    assert "pip install 'tgen-lm[tables]'" in error.value.hint


def test_old_feather_file_is_named():
    pytest.importorskip("pyarrow")
    with pytest.raises(CorpusError, match=r"a\.feather: it is Feather version 1, expected"):
        read(b"FEA1" + bytes(99), "a.feather")


def test_only_the_wanted_columns_are_read(table):
    for name, made in (("a.parquet", "parquet"), ("a.feather", "file"), ("a.arrow", "stream")):
        content = to_bytes(table, made)
        source, kind = Source(name, content), tables.table_kind(name, content) or ""
        last = table.schema.names[-1]
        first = next(tables.read_table(source, kind, columns=[last.upper()])).value
        assert first.keys() == {last}
        first = next(tables.read_table(source, kind, columns=[last, "missing"])).value
        assert first.keys() == set(table.schema.names)


def test_process_of_a_table_ends_with_an_error_and_after_its_time(table, monkeypatch):
    children = []

    class RecordedChild(Child):
        def __init__(self, *program, **options):
            super().__init__(*program, **options)
            children.append(self)

    monkeypatch.setattr(tables, "Child", RecordedChild)
    content = to_bytes(table, "parquet")
    with pytest.raises(CorpusError, match="not 'missing'") as error:
        read(content, "a.parquet", columns=["missing"])
    assert children[0].process.returncode is not None, error
    monkeypatch.setattr(tables, "_SECONDS", 0)
    with pytest.raises(CorpusError, match="it takes more than 0 s to read"):
        read(content, "a.parquet")


def test_process_of_a_table_has_limited_cpu_time(table, monkeypatch, tmp_path):
    script = "import sys; from tgen.machine.resource_limit import limit_cpu_time\n"
    (tmp_path / "endless.py").write_text(script + "limit_cpu_time(int(sys.argv[1]))\nwhile 1: 0\n")
    monkeypatch.setattr(tables, "_SCRIPT", tmp_path / "endless.py")
    monkeypatch.setattr(tables, "_SECONDS", 1)
    monkeypatch.setattr(tables, "WALL_TIME", 600)
    with pytest.raises(CorpusError, match="it takes more than 1 s to read"):
        read(to_bytes(table, "parquet"), "a.parquet")


def test_full_disk_is_an_error(table, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RandomAccessFile, "append", fail)
    with pytest.raises(CorpusError, match=r"cannot store a\.parquet .*: No space left"):
        read(to_bytes(table, "parquet"), "a.parquet")


def test_table_without_rows_is_an_error():
    pa = pytest.importorskip("pyarrow")
    empty = pa.table({"text": pa.array([], pa.string())})
    for name, content in (("a.csv", "text,id\n"), ("a.parquet", to_bytes(empty, "parquet"))):
        with pytest.raises(CorpusError, match=f"{name} has no rows"):
            read(content, name)
    with pytest.raises(CorpusError, match=r"a\.csv has only empty rows \(2\)"):
        read('text,id\n"",1\n"",2\n')


def test_limit_of_cells_is_restored():
    limit = csv.field_size_limit()
    assert read(f"text\n{'a' * 200_000}\n")[2] == [{"text": "a" * 200_000}]
    assert csv.field_size_limit() == limit


def test_byte_order_marks_of_joined_tables_are_left_out():
    assert read("\ufeffprompt,answer\na,b\n\ufeffc,d\n")[2] == [
        {"prompt": "a", "completion": "b"},
        {"prompt": "c", "completion": "d"},
    ]
