"""The HTTP response with generated texts: JSON at once, or a stream of server-sent events."""

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import EngineThread, Job
from tgen.serve.http_error import HttpError, internal_error
from tgen.serve.metrics import Metrics

_PACE = 0.02  # seconds between chunks of a stream: one chunk costs as much as many tokens
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_log = logging.getLogger("tgen.serve")


class TextResponse(Response):
    """The response to a request whose job is in the queue.

    A client that leaves, and a deadline that passes, cancel the job.
    """

    def __init__(
        self,
        engine: EngineThread,
        metrics: Metrics,
        job: Job,
        answer: Answer,
        *,
        stream: bool,
        timeout: float,
    ) -> None:
        """`timeout`: seconds from now until the last token."""
        super().__init__()
        self._engine, self._metrics, self._job, self._answer = engine, metrics, job, answer
        self._stream, self._timeout = stream, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or stop when the client leaves."""
        work = self._send_stream(send) if self._stream else self._send_whole(scope, receive, send)
        sending = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # raises what it raised
        finally:
            self._engine.cancel(self._job)
            self._metrics.observe(self._job, self._answer, time.perf_counter())
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                while not self._answer.is_complete:
                    self._answer.add(await self._job.events())
        except TimeoutError:
            raise self._timed_out() from None
        await JSONResponse(self._answer.whole())(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        """Start the response with the first token: until then, errors have a status."""
        started = False
        try:
            async with asyncio.timeout(self._timeout):
                self._answer.add(await self._job.events())
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                started = True
                await _send_part(send, _format_events(self._answer.first_chunks()))
                await _send_part(send, _format_events(self._answer.new_chunks()))
                while not self._answer.is_complete:
                    await asyncio.sleep(_PACE)
                    self._answer.add(await self._job.events())
                    await _send_part(send, _format_events(self._answer.new_chunks()))
        except (HttpError, TimeoutError) as error:
            failure = error if isinstance(error, HttpError) else self._timed_out()
            if not started:
                raise failure from None
            end = _format_events([failure.content])  # no [DONE]: the texts are incomplete
        except Exception:
            if not started:
                raise
            _log.exception("a stream failed")
            end = _format_events([internal_error().content])
        else:
            end = _format_events(self._answer.last_chunks()) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _timed_out(self) -> HttpError:
        message = f"the texts did not end within {self._timeout:g} seconds"
        headers = {"x-should-retry": "false"}
        return HttpError(503, message, kind="timeout_error", code="timeout", headers=headers)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _format_events(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Return one server-sent event per chunk."""
    separators = (",", ":")
    events = (json.dumps(chunk, ensure_ascii=False, separators=separators) for chunk in chunks)
    return "".join(f"data: {event}\n\n" for event in events).encode()
