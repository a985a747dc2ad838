"""The request queue and its writer: what they store of texts, and how many texts may wait for one
before them."""

import json
import tracemalloc
from itertools import count
from types import SimpleNamespace

import pytest

from tgen.cli.generate import request_queue
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.generate.output import TextWriter, Writer
from tgen.cli.generate.request_queue import RequestQueue
from tgen.config import SamplingConfig
from tgen.distributed import Ranks
from tgen.errors import ModelError, TgenError
from tgen.generation.sequence import Request
from tgen.reports.generation import Token

ENDLESS = SamplingConfig(max_new_tokens=10**9)


def token(sequence=0, *, finish=None, text=b"ab "):
    return Token(
        sequence=sequence,
        id=1000,
        text=text,
        logprob=-1.0,
        rank=0,
        entropy=1.0,
        top_logprobs=[],
        removed=[],
        finish=finish,
        complete=True,
    )


def to_json(generation):
    record = {"row": generation.row, "tokens": [one.id for one in generation.tokens]}
    return json.dumps(record | {"error": str(generation.error)}).encode() + b"\n"


def make_queue(writer, lines=None, request=Request, **options):
    model = SimpleNamespace(
        engine=SimpleNamespace(context_length=64), encode=lambda _: [1], request=request
    )
    given = GenerateOptions(input_file=None if lines is None else "rows", **options)
    queue = RequestQueue(model, ENDLESS, writer, given, ranks=Ranks(0, 1, 0, 1))
    if lines is None:
        queue.add(b"x")
    else:
        queue.read(SimpleNamespace(next=lambda **_: next(lines, None)), jsonl=False)
    return queue


def growth(run, n=3000):
    """Return the bytes that stay after the second half of `n` calls."""
    for _ in range(n // 2):
        run()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(n // 2):
            run()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_endless_text_keeps_no_tokens(monkeypatch):
    written = [0]
    monkeypatch.setattr(
        "tgen.cli.console.write", lambda data: written.__setitem__(0, written[0] + len(data))
    )
    writer = TextWriter(several=False)
    queue = make_queue(writer)
    assert queue.next(True) is not None
    assert growth(lambda: writer.add(token())) < 20_000
    assert written[0] == 3000 * 3


@pytest.mark.parametrize("as_json", [False, True])
def test_texts_wait_for_a_slow_one_in_bounded_memory(monkeypatch, as_json):
    out = []
    monkeypatch.setattr("tgen.cli.console.write", out.append)
    monkeypatch.setattr(request_queue, "_MAX_WAITING_BYTES", 100_000)
    lines = (b"row %d" % i for i in count())
    writer = Writer(to_json, keep_tokens=True) if as_json else TextWriter(several=True)
    queue = make_queue(writer, lines, jsonl=as_json)
    assert queue.next(True) is not None  # row 0, the slow one
    n = 0
    while queue.next(False) is not None:
        n += 1
        for _ in range(5):
            writer.add(token(n))
        writer.add(token(n, finish="stop"))
        assert n < 100
    assert n > 10
    writer.add(token(0))
    assert queue.next(False) is None
    writer.add(token(0, finish="length"))
    assert writer.waiting_bytes == 0
    assert b"".join(out).count(b"\n") == n + 1
    assert queue.next(False) is not None


@pytest.mark.parametrize("max_new_tokens", [0, 8])
def test_samples_wait_for_a_slow_text_in_bounded_memory(monkeypatch, max_new_tokens):
    monkeypatch.setattr("tgen.cli.console.write", lambda _: None)
    monkeypatch.setattr(request_queue, "_MAX_WAITING_BYTES", 100_000)
    rows = iter([b'{"prompt": "a"}', b'{"prompt": "b", "n": %d, "samples": 500}' % max_new_tokens])
    writer = Writer(to_json, keep_tokens=True)
    queue = make_queue(writer, rows, jsonl=True)
    assert queue.next(True) is not None  # the slow text
    n = 1
    while queue.next(False) is not None:
        writer.add(token(n, finish="stop"))
        n += 1
    assert 100_000 < writer.waiting_bytes < 120_000
    writer.add(token(0, finish="stop"))
    assert writer.waiting_bytes == 0
    while queue.next(True) is not None:
        writer.add(token(n, finish="stop"))
        n += 1
    assert n == (501 if max_new_tokens else 1)


def test_finished_json_texts_wait_without_their_tokens(monkeypatch):
    monkeypatch.setattr("tgen.cli.console.write", lambda _: None)
    writer = Writer(to_json, keep_tokens=True)
    queue = make_queue(writer, (b"" for _ in count()), jsonl=True)
    queue.next(True)
    numbers = count(1)

    def run():
        number = next(numbers)
        queue.next(False)
        for _ in range(50):
            writer.add(token(number))
        writer.add(token(number, finish="stop"))

    assert growth(run, 400) < 200 * 4096


def test_failing_text_and_row_become_errors_in_their_places(monkeypatch, capsys):
    out = []
    monkeypatch.setattr("tgen.cli.console.write", out.append)

    def request(prompt, sampling):
        if next(calls) == 2:
            raise ModelError("the chat template failed")
        return Request(prompt, sampling)

    calls = count()
    lines = iter([b"a", b"b", b"c", b"d"])
    writer = Writer(to_json, keep_tokens=True)
    queue = make_queue(writer, lines, request=request, jsonl=True)
    for _ in range(3):
        assert queue.next(False) is not None
    for number in range(3):
        writer.add(token(number))
    writer.on_error(1, TgenError("regex: too complex", "simplify it"))
    writer.on_error(2, ValueError("a bug"))
    writer.add(token(0, finish="stop"))
    records = [json.loads(line) for line in b"".join(out).splitlines()]
    assert [one["row"] for one in records] == [0, 1, 2, 3]
    assert [one["error"] for one in records][:3] == [
        "None",
        "regex: too complex",
        "the chat template failed",
    ]
    assert "ValueError: a bug" in records[3]["error"]
    assert "error: line 2: regex: too complex" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a bug"):  # once all rows are written
        writer.finish(queue.n_rows)
    assert writer.n_failed == 3


def test_byte_order_mark_is_not_part_of_the_first_prompt():
    prompts = []
    writer = SimpleNamespace(
        waiting_bytes=0, begin=lambda one: prompts.append(one.prompt), start=lambda _: None
    )
    make_queue(writer, iter([b"\xef\xbb\xbfTo be"])).next(wait=True)
    assert prompts == [b"To be"]
