"""The response with texts: what it does outside the event loop, and how a stream ends."""

import asyncio
import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from tgen.serve.engine_thread import Job
from tgen.serve.http_response import OpenAIForm, TextResponse, dump_json


class FakeAnswer:
    """An answer that is complete when it has events."""

    def __init__(self) -> None:
        self.is_complete, self.n_described = False, 0
        self.thread: threading.Thread | None = None  # that added the events

    def add(self, events: list[Any]) -> None:
        self.is_complete, self.thread = bool(events), threading.current_thread()

    def whole(self) -> dict[str, Any]:
        return {"done": True}

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    new_chunks = last_chunks = first_chunks


def respond(n_events: int, form: OpenAIForm, *, stream: bool) -> tuple[FakeAnswer, bytes]:
    """Return an answer of so many events, and the body of its response."""
    answer, sent = FakeAnswer(), []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def main() -> None:
        job: Any = Job([], stream=stream)
        job.events = lambda: asyncio.sleep(0, [0] * n_events)
        any_answer: Any = answer
        response = TextResponse(Mock(), Mock(), job, any_answer, form, timeout=60, notes=())
        await response({"type": "http"}, receive, send)

    asyncio.run(main())
    return answer, b"".join(sent)


@pytest.mark.parametrize("stream", [False, True])
def test_many_tokens_are_added_outside_the_event_loop(stream: bool) -> None:
    few, body = respond(10, OpenAIForm(), stream=stream)
    assert few.thread is threading.main_thread()
    many, other = respond(2000, OpenAIForm(), stream=stream)
    assert many.thread is not threading.main_thread()
    assert body == other == (b"data: [DONE]\n\n" if stream else b'{"done":true}')


def test_a_stream_whose_end_fails_ends_with_an_error() -> None:
    class BrokenForm(OpenAIForm):
        def end(self, job: Job) -> bytes:
            raise ValueError(f"a bug, for {job}")

    _, body = respond(10, BrokenForm(), stream=True)
    error = json.loads(body.removeprefix(b"data: "))["error"]
    assert error["message"].startswith("internal error")


def test_a_chunk_is_one_line_for_every_client() -> None:
    value = {"text": "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10FFFF)]))}
    line = dump_json(value).decode()
    assert line.splitlines() == [line]
    assert json.loads(line) == value
    assert "é" in line
