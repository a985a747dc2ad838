"""The HTTP response with generated texts: JSON at once, or a stream of server-sent events."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import EngineThread, Job
from tgen.serve.http_error import HttpError, internal_error, timed_out
from tgen.serve.metrics import Metrics

_PACE = 0.02  # seconds between chunks of a stream: one chunk costs as much as many tokens
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
NOTES = "x-schema-notes"  # header
_MANY = 1000  # tokens
# Characters that end a line in Python and other languages, but not in JSON: clients that split a
# stream into lines would cut its chunks there.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_Written = TypeVar("_Written")
_log = logging.getLogger("tgen.serve")


class OpenAIForm:
    """The form of an answer, whole or in chunks: OpenAI's own, which those of other APIs translate.

    Each answer has its own, which may remember what it has written.
    """

    content_type = "text/event-stream; charset=utf-8"  # of a stream

    def whole(self, answer: dict[str, Any], _: Job) -> dict[str, Any]:
        """Return the answer that is not a stream."""
        return answer

    def chunks(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Return the next part of a stream: one server-sent event per chunk."""
        return b"".join(b"data: " + dump_json(chunk) + b"\n\n" for chunk in chunks)

    def end(self, _: Job) -> bytes:
        """Return the end of a stream whose texts have ended: nothing is missing."""
        return b"data: [DONE]\n\n"

    def error(self, error: HttpError) -> bytes:
        """Return the end of a stream that fails, without [DONE]: the texts are incomplete."""
        return self.chunks([error.content])


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
        form: OpenAIForm,
        *,
        timeout: float,
        notes: Sequence[str],
    ) -> None:
        """`timeout`: seconds from now until the last token. `notes` about schemas, for a header."""
        super().__init__()
        self._more_headers = {NOTES: json.dumps(notes)} if notes else {}
        self._engine, self._metrics, self._job, self._answer = engine, metrics, job, answer
        self._form, self._timeout = form, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or stop when the client leaves."""
        is_stream = self._job.stream
        work = self._send_stream(send) if is_stream else self._send_whole(scope, receive, send)
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
                    await self._add_events()
        except TimeoutError:
            raise self._timed_out() from None
        response = await self._write(
            lambda: JSONResponse(
                self._form.whole(self._answer.whole(), self._job), headers=self._more_headers
            )
        )
        await response(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        """Start the response with the first token: until then, errors have a status."""
        answer, form, started = self._answer, self._form, False
        headers = [(b"content-type", form.content_type.encode()), *_HEADERS]
        headers += [(name.encode(), value.encode()) for name, value in self._more_headers.items()]
        try:
            async with asyncio.timeout(self._timeout):
                await self._add_events()
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                started = True
                await _send_part(send, form.chunks(answer.first_chunks()))
                await _send_part(send, await self._write(lambda: form.chunks(answer.new_chunks())))
                while not answer.is_complete:
                    await asyncio.sleep(_PACE)
                    await self._add_events()
                    part = await self._write(lambda: form.chunks(answer.new_chunks()))
                    await _send_part(send, part)
            end = form.chunks(answer.last_chunks()) + form.end(self._job)
        except (HttpError, TimeoutError) as error:
            failure = error if isinstance(error, HttpError) else self._timed_out()
            if not started:
                raise failure from None
            end = form.error(failure)
        except Exception:
            if not started:
                raise
            _log.exception("a stream failed")
            end = form.error(internal_error())
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _add_events(self) -> None:
        """Wait for tokens and add them to the answer; those of long texts come at once."""
        events = await self._job.events()
        if len(events) > _MANY:
            await asyncio.to_thread(self._answer.add, events)
        else:
            self._answer.add(events)

    async def _write(self, work: Callable[[], _Written]) -> _Written:
        """Return what `work` writes; many log-probabilities take seconds, which others need not
        wait for."""
        many = self._answer.n_described > _MANY
        return await asyncio.to_thread(work) if many else work()

    def _timed_out(self) -> HttpError:
        return timed_out(f"the texts did not end within {self._timeout:g} seconds")


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def dump_json(value: Any) -> bytes:
    """Return a value as one line of JSON, whatever a client takes for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()
