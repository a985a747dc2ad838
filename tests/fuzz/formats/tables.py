"""Rows and tables in other forms than JSON Lines, from their bytes to canonical rows."""

import csv
import io
import json
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import Mutator, dump
from tgen.config.input_files import Reading
from tgen.corpus.conversation import is_conversation, parse_conversation
from tgen.corpus.jsonl import parse_row
from tgen.corpus.rows import convert_rows, row_kind
from tgen.corpus.sources import Source
from tgen.corpus.steps import finish

_MESSAGES = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
_PARTS = [{"role": "developer", "content": [{"type": "text", "text": "c"}], "name": "d"}]
_ANSWER = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f", "train": True}]
_FILES: list[Any] = [
    [{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "f"}],
    [{"conversations": [*_MESSAGES, *_MESSAGES[:1], {"from": "gpt", "value": ""}], "tools": "[]"}],
    {"version": 1, "data": [{"messages": _PARTS + _ANSWER, "tools": [{}], "id": None}]},
    [{"prompt": _PARTS, "completion": _ANSWER[1:]}, {"prompt": "a", "completion": _ANSWER}],
    [{"question": "a", "answer": 1.5, "context": None}, {"Question": "b", "ANSWER": "c"}],
    {"columns": ["text", "id"], "index": [0, 1], "data": [["a", 1], ["b\u2028\x1b[2J", 2]]},
    {"text": {"0": "a", "1": "b"}, "id": {"0": 1, "1": 2}},
    {"text": ["a", "b"], "id": [1, 2]},
    {"Who?": "I", "Why not?": ["a", "b"]},
    {"x": {"prompt": "a", "completion": "b"}, "y": {"text": "c"}},
    {"rows": [{"row_idx": 0, "row": {"body": "a"}}], "features": [{}]},
    [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"text": "a", "label": True}],
    [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], ["a", 1], "c"],
]
_RECORDS = [["id", "text", ""], ["1", 'a "b"\n;,', "\t|"], ["2", "é\0\x1b[2J", "[{"], ["3", "", ""]]
_OPTIONS: list[dict[str, Any]] = [
    {"reading": Reading()},
    {"reading": Reading(skip_bad_rows=True)},
    {"reading": Reading(columns=("text", "id"))},
    {"reading": Reading(text_column="body", skip_bad_rows=True)},
    {"reading": Reading(skip_bad_rows=True), "chat": True},
]


class Tables:
    """A file of rows or a table that is changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "table.json"
        self._mutators = [Mutator(document) for document in _FILES]
        self._options = _OPTIONS[0]

    def change(self, i: int, rng: Random) -> str:
        """Change values, or cut, repeat and swap bytes."""
        self._options = rng.choice(_OPTIONS)
        name = f"table.{rng.choice(('json', 'jsonl', 'txt'))}"
        what = "bytes"
        if i % 3:
            mutator = self._mutators[i % len(self._mutators)]
            document, what = mutator.change(i // len(self._mutators), rng)
            content = dump(document)
            if i % 3 == 2 and isinstance(document, list):
                content = rng.choice((b"\n", b"\r\n", b"\n\n")).join(map(dump, document))
        else:
            buffer = io.StringIO(newline="")
            csv.writer(buffer, delimiter=rng.choice(",;\t|")).writerows(_RECORDS * 2)
            content = buffer.getvalue().encode()
            name = f"table.{rng.choice(('csv', 'tsv', 'csv', 'json'))}"
            if name.endswith("json"):
                content = json.dumps(rng.choice(_FILES), indent=rng.choice((None, 1))).encode()
            text = bytearray(content)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(text))
                noise = rng.choice((rng.randbytes(2), b'"', b"\\", b"\n", b"[" * 2000, b"{", b","))
                text[at : at + rng.randrange(4)] = noise
            content = bytes(text)
        self._path.unlink(missing_ok=True)
        self._path = self._path.with_name(name)
        self._path.write_bytes(rng.choice((b"", b"", b"\xef\xbb\xbf", b" \n")) + content)
        return f"{name} {self._options}: {what}"

    def read(self) -> None:
        """Convert the rows; each must be canonical."""
        source = Source(self._path.name, self._path)
        kind = row_kind(source.name, source.read(0, 1 << 16))
        if kind is None or kind in ("parquet", "arrow"):
            return
        converted = finish(convert_rows(source, kind, **self._options))
        content = (converted.spool or source).read(0, 1 << 27)
        lines = [line for line in content.splitlines() if line.strip()]
        assert len(lines) == converted.n_rows, f"{len(lines)} of {converted.n_rows} rows"
        for line in lines:
            if is_conversation(line):
                parse_conversation(line)
            else:
                assert parse_row(line) is not None, f"not canonical: {line[:200]!r}"
