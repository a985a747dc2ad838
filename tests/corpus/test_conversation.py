"""Rows of messages: what is invalid is named with its line, and copies are never split."""

import json

import pytest

from tgen import corpus
from tgen.corpus import parse_conversation
from tgen.errors import CorpusError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM, TOOL = {"role": "system", "content": "c"}, {"role": "tool", "content": "d"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*messages):
    return {"messages": list(messages)}


def test_rows_become_messages_with_the_answers_to_learn(tmp_path):
    row = chat(SYSTEM, USER, ANSWER | {"weight": 0}, TOOL, ANSWER | {"name": None}, USER)
    line = json.dumps(row | {"id": 7}).encode()
    parsed = parse_conversation(line)
    assert parsed.messages == [SYSTEM, USER, ANSWER, TOOL, ANSWER, USER]
    assert parsed.answers == [4]
    pair = {"prompt": "a", "completion": "b"}
    assert parse_conversation(json.dumps(pair).encode()) == parse_conversation(
        json.dumps(chat(USER, ANSWER)).encode()
    )
    read = corpus.read([write(tmp_path / "a.jsonl", [row, row])])
    assert read.is_chat
    assert [parse_conversation(line) for (line,) in read.documents] == [parsed, parsed]
    pairs = write(tmp_path / "b.jsonl", [pair])
    assert corpus.read([pairs], chat=True).is_chat
    assert not corpus.read([pairs]).is_chat


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (chat(), "messages is not a list of messages"),
        (chat(USER), "no assistant message with weight 1"),
        (chat(USER, ANSWER | {"weight": 0}), "no assistant message with weight 1"),
        (chat(USER, ANSWER, SYSTEM), "message 3 is a system message"),
        (chat(SYSTEM, ANSWER), "no assistant message with weight 1 after one of the user"),
        (chat(USER | {"role": "narrator"}), "message 1 has the unknown role 'narrator'"),
        (chat(USER | {"role": None}), "message 1 has an empty role"),
        (chat({"name": "Ann", "content": "a"}), "message 1 has no role .it has the keys 'name'"),
        (chat(USER, ANSWER | {"tool_calls": [1]}), "message 2 calls a tool"),
        (chat(USER | {"content": None}), "message 1 has no content"),
        (chat(USER | {"content": [{}]}), "message 1 has a part of type None, which is not text"),
        (chat(USER | {"content": "\ud800"}), "message 1 contains an unpaired surrogate"),
        (chat(USER, ANSWER | {"weight": 0.5}), r"message 2 has the weight 0.5 \(expected 0 or 1\)"),
        (chat("a"), "message 1 is not a JSON object"),
        ([chat(USER, ANSWER)], "not a JSON object"),
        ({"text": "a"}, "a row of text in a file of conversations"),
        ({"txt": "a"}, "the row has the keys 'txt', which are of no known form"),
    ],
)
def test_invalid_row_is_named_with_its_line(tmp_path, row, words):
    path = write(tmp_path / "rows.jsonl", [chat(USER, ANSWER), row])
    with pytest.raises(CorpusError, match=rf"rows\.jsonl, line 2: {words}") as error:
        corpus.read([path])
    assert error.value.hint
    assert "\n" not in error.value.message + error.value.hint


@pytest.mark.parametrize("first", [{"text": "a"}, chat(USER, ANSWER)])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', r"not valid JSON: Expecting ',' delimiter at column 13 \(got '{"),
        (b'{"text": "a', r"not valid JSON: Unterminated string at column 10 \(got '{"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"1", "not a JSON object"),
        (b"[" * 100_000, "a number is too long, or the nesting too deep"),
    ],
)
def test_broken_row_is_named_with_its_place(tmp_path, first, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(first).encode() + b"\n" + line + b"\n")
    with pytest.raises(CorpusError, match=rf"rows\.jsonl, line 2: {words}") as error:
        corpus.read([str(path)])
    assert error.value.hint


@pytest.mark.parametrize("first", [{"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_conversation_among_other_rows_is_named(tmp_path, first):
    path = write(tmp_path / "rows.jsonl", [first, chat(USER, ANSWER)])
    with pytest.raises(CorpusError, match="line 2: a row of messages, but the first") as error:
        corpus.read([path])
    assert error.value.hint.startswith("add --chat if the other rows are prompts")
    unknown = write(tmp_path / "rows.jsonl", [{"x": 1, "y": 2}])
    with pytest.raises(CorpusError, match="rows of no known form: x") as error:
        corpus.read([unknown])
    assert "--columns" in error.value.hint


def test_turns_of_one_role_and_empty_answers_are_rows():
    row = chat(USER, USER, ANSWER | {"content": ""})
    parsed = parse_conversation(json.dumps(row).encode())
    assert parsed.messages == row["messages"]
    assert parsed.answers == [2]


def test_greeting_is_context_and_each_of_two_answers_is_learned():
    parsed = parse_conversation(json.dumps(chat(SYSTEM, ANSWER, USER, ANSWER, ANSWER)).encode())
    assert parsed.messages == [SYSTEM, ANSWER, USER, ANSWER, ANSWER]
    assert parsed.answers == [3, 4]


def test_conversations_and_text_cannot_be_mixed(tmp_path):
    chats = write(tmp_path / "chats.jsonl", [chat(USER, ANSWER)])
    (tmp_path / "text.txt").write_text("to be")
    with pytest.raises(
        CorpusError, match=r"chats\.jsonl has conversations, .*text\.txt has not"
    ) as error:
        corpus.read([str(tmp_path / "text.txt"), chats])
    assert "--as text" in error.value.hint
    with pytest.raises(CorpusError, match=r"--chat: .*text\.txt has no conversations"):
        corpus.read([str(tmp_path / "text.txt")], chat=True)


@pytest.mark.parametrize(("n", "expected"), [(3, 0), (20, 5), (50, 8), (120, 12), (6000, 500)])
def test_a_tenth_of_the_rows_is_held_out_and_never_a_copy(tmp_path, n, expected):
    rows = [chat(USER | {"content": str(i % n)}, ANSWER) for i in range(n + n // 3)]
    read = corpus.read([write(tmp_path / "rows.jsonl", rows)])
    train, val = corpus.split_rows(read, 0.1)
    assert len(val) == expected
    n_dropped, _ = corpus.count_dropped(read, train, val)
    assert len(train) + len(val) + n_dropped == len(rows)
    texts = [set(documents) for documents in (train, val)]
    assert not texts[0] & texts[1]
    assert len(texts[1]) == len(val)
    assert not len(corpus.split_rows(read, 0.0)[1])
    # The same rows are held out whatever their order is.
    again = corpus.read([write(tmp_path / "again.jsonl", rows[::-1])])
    assert set(corpus.split_rows(again, 0.1)[1]) == texts[1]


def test_place_of_a_row_counts_empty_lines(tmp_path):
    text = json.dumps(chat(USER, ANSWER))
    (tmp_path / "a.jsonl").write_text(f"\n{text}\n\n{text}\r\n{text}")
    (tmp_path / "b.jsonl").write_text(text)
    read = corpus.read([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")])
    places = [read.documents.describe(i).rpartition("/")[2] for i in range(4)]
    assert places == ["a.jsonl, line 2", "a.jsonl, line 4", "a.jsonl, line 5", "b.jsonl, line 1"]
