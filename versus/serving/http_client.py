"""A client of OpenAI's API that costs little: it shares the machine with the server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """The response to a request; `first_token` and `seconds` count from before it was written."""

    status: int = 0  # 0: no response
    text: str = ""
    n_tokens: int = 0
    finished: bool = False  # the stream ended with [DONE], or the body is complete
    error: str = ""
    first_token: float | None = None
    seconds: float = 0.0


async def post(
    port: int, body: bytes, *, leave_after: int | None = None, reply: Reply | None = None
) -> Reply:
    """Send a body to /v1/completions; leave after so many events, 0 without reading any.

    A given `reply` is filled while the answer arrives.
    """
    reply, start = reply or Reply(), time.perf_counter()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            if leave_after != 0:
                await _read(reader, reply, start, leave_after)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    except (OSError, asyncio.IncompleteReadError) as error:
        reply.error = repr(error)
    reply.seconds = time.perf_counter() - start
    return reply


async def _read(
    reader: asyncio.StreamReader, reply: Reply, start: float, leave_after: int | None
) -> None:
    reply.status = int((await reader.readline()).split()[1])
    length = 0  # of a body that is not chunked
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.lower().partition(b":")
        length = int(value) if name == b"content-length" else length
    parts = _whole(reader, length) if length else _chunks(reader)
    n_events, pending = 0, b""
    async for part in parts:
        *events, pending = (pending + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b":"):  # a comment that keeps the connection open
                continue
            n_events += 1
            _take_event(event, reply, start)
            if n_events == leave_after:
                return
    if pending and reply.status == 200:
        answer = json.loads(pending)
        reply.text, reply.finished = answer["choices"][0]["text"], True
        reply.n_tokens = answer["usage"]["completion_tokens"]


def _take_event(event: bytes, reply: Reply, start: float) -> None:
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        reply.finished = True
        return
    message = json.loads(data)
    if "error" in message:
        reply.error = message["error"]["message"]
        return
    for choice in message["choices"]:
        if choice["text"] and reply.first_token is None:
            reply.first_token = time.perf_counter() - start
        reply.text += choice["text"]
    if message.get("usage"):
        reply.n_tokens = message["usage"]["completion_tokens"]


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while n := int(await reader.readline() or b"0", 16):
        yield await reader.readexactly(n)
        await reader.readexactly(2)


async def _whole(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(length)


def encode(request: dict[str, Any], **more: Any) -> bytes:
    """Return a request as JSON."""
    return json.dumps(request | more).encode()
