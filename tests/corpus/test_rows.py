"""Rows in the forms people have: what they become, and what is said of the others."""

import json
import math
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config.input_files import Reading
from tgen.corpus import json_rows, rows
from tgen.corpus.conversation import check_messages
from tgen.corpus.row_forms import FORMS, MESSAGES
from tgen.corpus.rows import convert_rows, row_kind
from tgen.corpus.sources import Source
from tgen.corpus.steps import finish
from tgen.errors import CorpusError

QA = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
ALPACA = {"instruction": "q", "input": "", "output": "a"}


def read(content, name="rows.json", *, chat=False, **options):
    """Convert a file with this text, or with these values as JSON Lines; return the result, with
    the bytes of its spool, and the rows."""
    if not isinstance(content, (str, bytes)):
        content = "\n".join(map(json.dumps, content))
    content = content.encode() if isinstance(content, str) else content
    source = Source(name, content)
    kind = row_kind(name, content[:65536])
    assert kind is not None
    converted = finish(convert_rows(source, kind, Reading(**options), chat=chat))
    spool = None if converted.spool is None else converted.spool.read(0, 1 << 27)
    lines = (content if spool is None else spool).splitlines()
    return replace(converted, spool=spool), [json.loads(line) for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        (ALPACA, "Alpaca", {"messages": QA}),
        (ALPACA | {"text": "x"}, "Alpaca", {"messages": QA}),
        (
            ALPACA | {"input": "i", "system": "s", "history": [["q", "a"]]},
            "Alpaca",
            {"messages": [SYSTEM, *QA, {"role": "user", "content": "q\n\ni"}, QA[1]]},
        ),
        ({"INSTRUCTION": "q", "RESPONSE": "a"}, "Dolly", {"messages": QA}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "ShareGPT",
            {"messages": QA},
        ),
        ({"conversations": QA, "system": "s"}, "conversations", {"messages": [SYSTEM, *QA]}),
        ({"messages": [SYSTEM | {"role": "developer"}, *QA]}, "messages", None),
        ({"question": "q", "answer": 4}, "question and answer", {"prompt": "q", "completion": "4"}),
        ({"question": "q", "response": "a", "system_prompt": "s"}, "question and response", None),
        ({"prompt": "q", "response": "a"}, "prompt and response", None),
        ({"prompt": QA[:1], "completion": QA[1:]}, "prompt and completion", {"messages": QA}),
        ({"prompt": QA[:1], "completion": "a"}, "prompt and completion", {"messages": QA}),
        (QA, "messages", {"messages": QA}),
        ("text", "text", {"text": "text"}),
    ],
)
def test_form_is_recognized_by_its_keys(row, form, expected):
    converted, found = read([row, row], "rows.jsonl")
    assert (converted.form, converted.n_rows) == (form, 2)
    assert found[0] == found[1]
    if expected is None:
        expected = (
            {"messages": [SYSTEM, *QA]}
            if "messages" in found[0]
            else {"prompt": "q", "completion": "a"}
        )
    assert found[0] == expected
    for text in (json.dumps([row]), json.dumps([row], indent=1), json.dumps({"data": [row]})):
        if isinstance(row, dict):
            assert read(text)[1] == found[:1]


def test_what_a_message_has_besides_its_text_is_left_out_and_counted():
    row = {
        "messages": [
            QA[0] | {"name": "bob", "content": [{"type": "text", "text": "q"}]},
            QA[1] | {"reasoning_content": "hm", "tool_calls": None, "weight": 0},
            QA[1] | {"reasoning_content": "hm", "train": True},
        ],
        "tools": [{"type": "function"}],
        "id": 7,
    }
    converted, found = read([row, row], "rows.jsonl")
    assert found == [{"messages": [QA[0], QA[1] | {"weight": 0}, QA[1]]}] * 2
    assert converted.notes == [
        "left out: tools of 2 rows, reasoning_content of 4 messages, name of 2 messages",
        "keys that are not used: id",
    ]
    assert read([{"messages": QA, "tools": [{}]}], "rows.jsonl")[1] == [{"messages": QA}]
    greeting, _ = read([{"messages": [QA[1], *QA]}], "rows.jsonl")
    assert greeting.notes == [
        "the assistant begins 1 conversation: the first message is excluded from the loss"
    ]
    assert greeting.spool is None


CANONICAL = [
    [{"text": "a", "meta": 1}, {"prompt": "a", "completion": "b"}, {"text": ""}],
    [{"prompt": "a", "completion": "b", "id": None}],
    [{"messages": QA, "tools": None}, {"messages": [*QA, QA[1] | {"weight": 0}]}],
]


@pytest.mark.parametrize("values", CANONICAL)
def test_canonical_lines_are_not_copied(values):
    text = "\n\n".join(map(json.dumps, values)).encode() + b"\r\n"
    for name in ("rows.jsonl", "rows.NDJSON", "rows.jsonl.txt", "-", "rows"):
        assert row_kind(name, text) == "json lines"
        converted = finish(
            convert_rows(Source(name, b"\xef\xbb\xbf" + text), "json lines", Reading())
        )
        assert converted.spool is None
        assert converted.n_rows == len(values)
        unused = sorted({key for row in values for key in row} & {"meta", "id"})
        assert converted.notes == [f"keys that are not used: {key}" for key in unused]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a", "system": "s", "history": [["q", "a"]]},
        {"prompt": "q", "completion": "a", "System_Prompt": "s", "title": "t"},
        {"messages": QA, "system": "s", "id": 1},
        {"messages": QA, "history": [["q", "a"]]},
        {"prompt": "q", "completion": "a", "system": None, "history": [], "title": "t"},
        {"text": "a", "system": "s", "title": "t"},
    ],
)
def test_a_row_is_the_same_in_each_format(row):
    as_lines, as_list = read([row, row], "rows.jsonl"), read(json.dumps([row, row]))
    assert as_lines[0].notes == as_list[0].notes
    keys = as_list[1][0].keys()
    assert [{key: one[key] for key in keys} for one in as_lines[1]] == as_list[1]
    assert ("system" in row and bool(row["system"]) and "text" not in row) <= ("messages" in keys)


def test_rows_keep_the_numbers_of_their_lines():
    lines = [{"text": "a"}, "", {"body": 1, "text": "b"}, "bad", {"content": "c", "text": 2}]
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    converted, _ = read(text, "rows.jsonl", skip_bad_rows=True)
    assert converted.spool.splitlines() == [
        *(b'{"text": "a"}', b"", b'{"body": 1, "text": "b"}', b"", b'{"text": "2"}')
    ]
    assert converted.notes[0].startswith("1 bad row left out: line 4: not valid JSON")


def test_all_bad_rows_are_counted_and_the_first_five_shown():
    bad = ['{"text": null}', "nope", '{"txt": 1}', "[1]", '{"text": []}', '{"text": {}}', "7"]
    text = "\n".join(['{"text": "a"}', *bad, '{"text": "b"}'])
    with pytest.raises(CorpusError, match=r"rows.jsonl: 7 of 9 rows are not valid") as error:
        read(text, "rows.jsonl")
    assert [f"line {n}:" in error.value.message for n in range(1, 9)] == [
        False,
        *[True] * 5,
        *[False] * 2,
    ]
    assert "--skip-bad-rows" in error.value.hint
    converted, found = read(text, "rows.jsonl", skip_bad_rows=True)
    assert converted.n_rows == 2
    assert found == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(CorpusError, match=r"rows.json, row 2: 'output' is null"):
        read(json.dumps([ALPACA, ALPACA | {"output": None}]))
    with pytest.raises(CorpusError, match="nope"):
        read("nope\nnope", "rows.jsonl", skip_bad_rows=True)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows"])
@pytest.mark.parametrize("n", [1, 2])
def test_lists_of_messages_are_read_alone_too(name, n):
    row = {"prompt": [SYSTEM, QA[0]], "completion": QA[1:]}
    assert read([row] * n, name)[1] == [{"messages": [SYSTEM, *QA]}] * n


@pytest.mark.parametrize("head", ['{\n"a" }}', '{"a": 1]', '{ "" x'])
def test_invalid_object_is_recognized_by_its_name_only(head):
    assert row_kind("a.json", head.encode()) is None
    assert row_kind("a.jsonl", head.encode()) == "json lines"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_nan_is_null(name):
    rows = [{"instruction": "a", "input": math.nan, "output": "b", "id": math.inf}] * 2
    messages = [QA[0] | {"content": "a"}, QA[1] | {"content": "b"}]

    def write(rows):
        lines = [json.dumps(row) for row in rows]
        return "\n".join(lines) if name == "rows.jsonl" else f"[{','.join(lines)}]"

    assert read(write(rows), name)[1] == [{"messages": messages}] * 2
    for key, value in (("text", math.nan), ("text", -math.inf)):
        with pytest.raises(CorpusError, match=f"1: '{key}' is null"):
            read(write([{key: value}, {key: "a"}]), name)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "--columns prompt,chosen"),
        ({"chosen": QA, "rejected": QA}, "--columns chosen"),
        ({"prompt": "p", "chosen": QA, "rejected": QA}, "--columns chosen"),
        (
            {"conversations": QA[:1], "chosen": QA[1], "rejected": QA[1]},
            "--columns conversations,chosen",
        ),
        ({"messages": QA, "label": False}, "--columns messages"),
        ({"instruction": "a", "output": "b", "kto_tag": True}, "--columns instruction,output"),
    ],
)
def test_preference_rows_are_refused_by_name(row, hint):
    with pytest.raises(
        CorpusError, match=r"rows.json has preference rows \(.*does not train on"
    ) as error:
        read(json.dumps([row]))
    assert error.value.hint.endswith(hint)
    columns = hint.removeprefix("--columns ").split(",")
    assert read(json.dumps([row]), columns=columns)[0].n_rows == 1


def test_columns_choose_what_is_learned():
    row = {"a": "x", "b": "y", "c": "z", "d": QA}
    text = json.dumps([row])
    assert read(text, columns=["a", "B"])[1] == [{"prompt": "x", "completion": "y"}]
    assert read(text, columns=["a", "b", "c"])[1] == [{"prompt": "x\n\ny", "completion": "z"}]
    assert read(text, columns=["d"])[1] == [{"messages": QA}]
    assert read(text, text_column="c")[1] == [{"text": "z"}]
    assert read(text, columns=["a", "b"], chat=True)[1][0].keys() == {"messages"}
    with pytest.raises(CorpusError, match="the row has the keys 'a', 'b', 'c', 'd', not 'e'"):
        read(text, text_column="e")


def test_unknown_keys_are_named_with_examples():
    with pytest.raises(CorpusError, match=r"rows of no known form: id \('1'\), x \('a'\)") as error:
        read(json.dumps([{"id": 1, "x": "a"}] * 2))
    assert "--text-column" in error.value.hint
    assert "--as text" in error.value.hint
    assert read(json.dumps([{"id": 1, "x": "a" * 40}]))[1] == [{"text": "a" * 40}]


def test_one_file_has_text_or_conversations():
    with pytest.raises(CorpusError, match="line 2: a row of text in a file of conversations"):
        read([ALPACA, {"text": "a"}], "rows.jsonl")
    with pytest.raises(CorpusError, match="line 2: a row of messages, but the first row") as error:
        read([{"text": "a"}, ALPACA], "rows.jsonl")
    assert "--chat" in error.value.hint
    assert read([ALPACA, {"question": "q", "answer": "a"}], "r.jsonl")[1] == [{"messages": QA}] * 2


def table(orient, n):
    """Return a table as pandas writes it."""
    numbers, made = range(n), [f"text {i}" for i in range(n)]
    by_row = {str(i): {"id": i, "text": text} for i, text in enumerate(made)}
    return {
        "records": list(by_row.values()),
        "columns": {
            "id": dict(zip(by_row, numbers, strict=True)),
            "text": dict(zip(by_row, made, strict=True)),
        },
        "index": by_row,
        "split": {
            "columns": ["id", "text"],
            "index": list(numbers),
            "data": [[i, text] for i, text in enumerate(made)],
        },
        "values": [[i, f"{text} and more and more and more"] for i, text in enumerate(made)],
    }[orient]


@pytest.mark.parametrize("n", [2, 3000])
def test_objects_that_hold_rows_are_read_as_rows(n):
    texts, labels = [f"the text {i} of this table" for i in range(n)], [*range(n)]
    qa = [{"question": f"q {i}?", "answer": f"a {i}"} for i in range(n)]
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in qa]
    for value, expected in [
        ({"text": texts, "label": labels}, [{"text": text} for text in texts]),
        ({"sentences": texts}, [{"text": text} for text in texts]),
        ({"question": [*texts], "answer": texts}, [dict.fromkeys(pairs[0], t) for t in texts]),
        ({row["question"]: row["answer"] for row in qa}, pairs),
        ({row["question"]: [row["answer"]] for row in qa}, pairs),
        ({f"id {i}": row for i, row in enumerate(qa)}, pairs),
    ]:
        for indent in (None, 1):
            assert read(json.dumps(value, indent=indent))[1] == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"text": ["a", "b"], "label": [1]}, r"different lengths: text \(2\), label \(1\)"),
        ({"step": [1, 2], "loss": [3, 4]}, "rows of no known form: step"),
        ({"a": {"prompt": "p", "chosen": "c", "rejected": "r"}}, "preference rows"),
    ],
)
def test_objects_whose_rows_are_of_no_use_are_refused(value, words):
    with pytest.raises(CorpusError, match=words) as error:
        read(json.dumps(value))
    assert error.value.hint


def test_unpaired_surrogates_make_bad_rows():
    pair, half = '{"text": "\\ud83d\\ude00"}\n', '{"text": "\\ud83d"}\n'
    assert read(pair)[1] == [{"text": "\U0001f600"}]
    for text in (pair + half, f"[{pair}, {half}]"):
        with pytest.raises(CorpusError, match=r"(line|row) 2: .* an unpaired surrogate"):
            read(text)
        assert len(read(text, skip_bad_rows=True)[1]) == 1


def test_values_that_are_not_text_are_named_with_what_can_be_done():
    with pytest.raises(
        CorpusError, match=r"'completion' is an object \(expected a string"
    ) as error:
        read([{"prompt": "p", "completion": {"text": "c"}}])
    assert "--columns" in error.value.hint
    with pytest.raises(CorpusError, match="message 1 has a content that is an object"):
        read([{"messages": [{"role": "user", "content": {"text": "c"}}]}])
    with pytest.raises(CorpusError, match="no known form: tag") as error:
        read([{"tag": "t", "patterns": ["Hi"]}] * 2)
    assert "as strings" in error.value.hint


def test_keys_beside_the_only_column_with_text_are_named():
    rows = [{"Frage": "Wer?", "Antwort": "Das ist der König von Rom, sagt man hier. " * 3}] * 2
    converted, _ = read(rows)
    assert converted.form == "text of the column 'Antwort'"
    assert converted.notes == ["keys that are not used: Frage"]


def test_keys_of_two_forms_are_named():
    both = {"text": "t", "prompt": "p", "completion": "c"}
    assert read([both])[0].notes == ["keys that are not used: completion, prompt"]


@pytest.mark.parametrize("n", [2, 3000])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("orient", ["records", "values", "columns", "index", "split"])
def test_tables_as_json_have_their_rows_or_are_refused(orient, indent, n):
    text = json.dumps(table(orient, n), indent=indent)
    if orient not in ("records", "values"):
        with pytest.raises(CorpusError, match="a table by columns or with an index") as error:
            read(text)
        assert 'orient="records"' in error.value.hint
        return
    converted, found = read(text)
    assert [row["text"].split(" and")[0] for row in found] == [f"text {i}" for i in range(n)]
    assert converted.spool is not None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "[Verse 1]\nthe king"),
        ("a.txt", "{ the king }"),
        (
            "a.json",
            json.dumps({"name": "x", "files": ["a"], "contributors": [{"name": "y"}]}, indent=1),
        ),
        ("a.json", json.dumps({"include": ["a", "b"], "exclude": ["c"]}, indent=1)),
        ("a.json", json.dumps({"messages": {"title": "a"}})),
        ("a.json", json.dumps({"name": "a long name", "version": "1"})),
        ("a.json", json.dumps({"compilerOptions": {"strict": True}, "include": ["a"]})),
        ("a.json", json.dumps({"type": "FeatureCollection", "features": [{"type": "Feature"}]})),
        ("a.md", '{\n "title": "a"\n}\n# the king'),
        ("a.txt", ""),
    ],
)
def test_other_text_has_no_rows(name, text):
    assert row_kind(name, text.encode()) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"text": "a"},\n {"text": "b"},]', "line 2, column 16: Expecting value|line 2, column"),
        ('[{"text": "a"},\n {"text": "b"', "line 2, column 14: Expecting ',' delimiter"),
        ('[{"text": "a"}, {"text": "b', "line 1, column 26: Unterminated string$"),
        ('[{"text": "a"}\n {"text": "b"}]', "line 2, column 2: expected ',' or ']'"),
        ('[{"text": "a"}] x', "line 1, column 17: text after the end of the list"),
        (
            '[{"text": "a"}, ' + "[" * 100_000,
            "line 1, column 17: a number is too long, or the nest",
        ),
        (
            '{"train": [{"text": "a"}], "test": [{"text": "a"}]}',
            "several lists of rows: 'train', 'te",
        ),
    ],
)
def test_broken_json_is_named_with_its_place(text, words):
    with pytest.raises(CorpusError, match=words) as error:
        read(text)
    assert error.value.hint


def test_long_files_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(json_rows, "_BLOCK", 7)
    values = [{"text": f'"é\\u00e9{i}" \\'} for i in range(20)]
    for indent in (None, 1):
        assert read(json.dumps(values, indent=indent, ensure_ascii=False))[1] == values
    several = "\n".join(json.dumps(value, indent=1) for value in values)
    assert read(several, "rows.jsonl")[1] == values
    lines = [*({"text": "a"} for _ in range(9)), {"question": "q", "answer": "a"}]
    assert len(read(lines, "rows.jsonl")[1]) == 10
    monkeypatch.setattr(json_rows, "_MAX_JSON", 100)
    with pytest.raises(CorpusError, match="a value of more than 100 characters"):
        read(json.dumps([{"text": "x" * 300}]))


def test_sample_and_list_of_messages_are_bounded(monkeypatch):
    lengths = []
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_SAMPLE_BYTES", 5)
        patch.setattr(rows, "_choose_columns", lambda _, values: lengths.append(len(values)))
        read(json.dumps([{"text": "a" * 99}] * 4))
        read("text\n" + "a\n" * 9, "a.csv")
    assert lengths == [1, 1]
    monkeypatch.setattr(json_rows, "_MAX_JSON", 200)
    with pytest.raises(CorpusError, match="a conversation of more than 200 bytes"):
        read(json.dumps(QA * 9))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
forms = st.sampled_from([form for form in FORMS if form.prompt])


@settings(max_examples=30, deadline=None)
@given(
    form=forms,
    pairs=st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_form_keeps_its_texts(form, pairs, data):
    context = data.draw(st.sampled_from([None, *form.context]))
    made = [
        {form.answer.upper(): a, form.prompt: q, "id": 1} | ({context: c} if context else {})
        for q, c, a in pairs
    ]
    converted, found = read(json.dumps(made, indent=data.draw(st.sampled_from([None, 1]))))
    assert converted.form == form.name
    for row, (q, c, a) in zip(found, pairs, strict=True):
        prompt = "\n\n".join(part for part in (q, c if context else "") if part.strip()) or q
        if form.is_chat:
            assert [one["content"] for one in row["messages"]] == [prompt, a]
            assert check_messages(row["messages"]).answers == [1]
        else:
            assert row == {"prompt": prompt, "completion": a}


@settings(max_examples=30, deadline=None)
@given(
    key=st.sampled_from(MESSAGES),
    names=st.sampled_from([("role", "content"), ("from", "value")]),
    contents=st.lists(texts, min_size=2, max_size=6),
    greets=st.booleans(),
)
def test_every_list_of_messages_keeps_its_texts(key, names, contents, greets):
    roles = ["gpt" if (i % 2 == 1) != greets else "human" for i in range(len(contents) + 1)]
    contents = [*contents, "end"]
    messages = [dict(zip(names, one, strict=True)) for one in zip(roles, contents, strict=True)]
    buffer = StringIO()
    for _ in range(2):
        buffer.write(json.dumps({key: messages}) + "\n")
    _, found = read(buffer.getvalue(), "x.jsonl")
    assert [message["content"] for message in found[1]["messages"]] == contents
    expected = ["assistant" if role == "gpt" else "user" for role in roles]
    assert [message["role"] for message in found[0]["messages"]] == expected
