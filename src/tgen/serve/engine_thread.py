"""The thread that owns the engine: texts wait in a queue, join the running batch and leave it.

The event loop submits and cancels; the thread answers through one list of events, for which it
wakes the event loop once, however many tokens a pass gives.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from tgen.errors import TgenError
from tgen.generation.logprobs import TokenLogprobs
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.reports.generation import Token
from tgen.serve.http_error import HttpError, busy, internal_error, to_http, unavailable

_BEGINNING = -1  # in place of a request's number: the loop does not know the text yet
_log = logging.getLogger("tgen.serve")


class PromptScores(NamedTuple):
    """The log-probabilities of a prompt's tokens, if requested."""

    tokens: list[TokenLogprobs]
    last: bool  # whether the text ends here


Event = tuple[int, Token | PromptScores]  # number of the text within its job


class Job:
    """The texts of one HTTP request. The event loop reads the events as they come.

    `n_top`: the number of top tokens per token of a prompt; None without their log-probabilities.
    `names`: those of fields in errors, see `http_error.to_http`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        stream: bool,
        n_top: int | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.requests, self.stream, self.n_top, self.names = requests, stream, n_top, names
        self.scored: tuple[Sequence[int], list[TokenLogprobs]] = ((), [])  # the last prompt
        self.arrived = asyncio.Event()  # there are events, of all texts unless it is a stream
        self.submitted = time.perf_counter()
        self.started: float | None = None  # when the first text joined the batch
        self.first_token: float | None = None
        self._events: list[Event] = []
        self._error: HttpError | None = None
        self._n_left = len(requests)

    def add(self, text: int, event: Token | PromptScores | HttpError) -> None:
        """Take an event of a text."""
        if isinstance(event, HttpError):
            self._error = self._error or event
        else:
            self.first_token = self.first_token or time.perf_counter()
            self._events.append((text, event))
            self._n_left -= event.last
        if self.stream or self._error or not self._n_left:
            self.arrived.set()

    async def events(self) -> list[Event]:
        """Wait for events and return them; raises HttpError if a text failed."""
        await self.arrived.wait()
        self.arrived.clear()
        if self._error:
            raise self._error
        events, self._events = self._events, []
        return events


class EngineThread:
    """A queue of texts and the thread that generates them, created by a running event loop."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        batch_size: int,
        queue_size: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_failure` is called in the event loop if the engine fails."""
        self._model, self._batch_size, self.queue_size = model, batch_size, queue_size
        self._on_failure, self._loop = on_failure, asyncio.get_running_loop()
        self._changed = threading.Condition()  # guards everything up to the blank line
        self._waiting: deque[tuple[Job, int]] = deque()
        self._running: dict[int, tuple[Job, int]] = {}  # by number of the request
        self._cancelled: set[int] = set()
        self._n_reserved = self._n_requests = 0
        self._stopping = False

        self._events: deque[tuple[Job, int, Token | PromptScores | HttpError]] = deque()
        self._delivery_scheduled = False
        self.draining = False
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def n_running(self) -> int:
        """Number of texts in the batch."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of texts in the queue, including those that are being prepared."""
        return len(self._waiting) + self._n_reserved

    def check_open(self) -> None:
        """Raise HttpError if no new texts are accepted."""
        if self.failed:
            raise unavailable("the engine has failed", "engine_failed")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")

    def reserve(self, n: int) -> None:
        """Reserve room in the queue for texts that are about to be prepared, or raise HttpError."""
        self.check_open()
        with self._changed:
            if self.n_waiting + n > self.queue_size:
                raise busy(f"the queue is full (limit {self.queue_size:,} texts)", "queue_full")
            self._n_reserved += n

    def release(self, n: int) -> None:
        """Give up reserved room."""
        with self._changed:
            self._n_reserved -= n

    def submit(self, job: Job) -> None:
        """Append a job's texts to the queue, into reserved room; raises HttpError."""
        self.release(len(job.requests))
        self.check_open()
        with self._changed:
            self._waiting += [(job, text) for text in range(len(job.requests))]
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Remove a job's texts from queue and batch; texts that have ended are ignored."""
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)
            numbers = [number for number, entry in self._running.items() if entry[0] is job]
            for number in numbers:
                del self._running[number]
            self._cancelled.update(numbers)

    def drain(self) -> None:
        """Accept no more texts, and drop the jobs of which none has started."""
        self.draining = True
        with self._changed:
            dropped = {job for job, _ in self._waiting if job.started is None}
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in dropped)
        self._fail(dropped)

    def stop(self) -> None:
        """End all texts and the thread."""
        self.draining = True
        with self._changed:
            left = {job for job, _ in (*self._waiting, *self._running.values())}
            self._stopping = True
            self._waiting.clear()
            self._cancelled.update(self._running)
            self._running.clear()
            self._changed.notify()
        self._fail(left)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    def _fail(self, jobs: Collection[Job]) -> None:
        for job in jobs:
            job.add(0, unavailable("the server is shutting down", "shutting_down"))

    # The methods below run in the thread, but for _deliver and _finish.

    def _run(self) -> None:
        try:
            tokens = self._model.complete(
                self._next,
                batch_size=self._batch_size,
                cancelled=self._take_cancelled,
                on_error=self._on_error,
            )
            for token in tokens:
                self._emit(token.sequence, token, ends=token.last)
        except Exception:
            _log.exception("the engine failed")
            self.failed = True
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._finish)

    def _next(self, wait: bool) -> Request | None:
        """Return the next request; see `generation.loop.RequestSource`."""
        while True:
            with self._changed:
                while wait and not self._waiting and not self._stopping:
                    self._changed.wait()
                if not self._waiting:
                    return None
                job, text = self._waiting.popleft()
                self._running[_BEGINNING] = job, text
                job.started = job.started or time.perf_counter()
            request = job.requests[text]
            if job.n_top is not None or not request.sampling.max_new_tokens:
                self._score_prompt(job, request)
            with self._changed:
                if self._running.pop(_BEGINNING, None) is None:  # it has ended
                    if wait:
                        continue
                    return None  # the running texts are next
                self._running[self._n_requests] = job, text
                self._n_requests += 1
            return request

    def _score_prompt(self, job: Job, request: Request) -> None:
        """Emit the log-probabilities of a prompt, if requested; texts of one prompt share them."""
        if job.n_top is not None and job.scored[0] is not request.prompt:
            try:
                job.scored = request.prompt, self._model.score_prompt(request.prompt, job.n_top)
            except Exception as error:
                self._on_error(_BEGINNING, error)
                return
        ends = not request.sampling.max_new_tokens
        self._emit(_BEGINNING, PromptScores(job.scored[1], ends), ends=ends)

    def _take_cancelled(self) -> Collection[int]:
        if not self._cancelled:
            return ()
        with self._changed:
            numbers, self._cancelled = self._cancelled, set()
        return numbers

    def _on_error(self, number: int, error: Exception) -> None:
        if not isinstance(error, TgenError):
            _log.error("a text failed", exc_info=error)
        self._emit(number, error, ends=True)

    def _emit(self, number: int, event: Token | PromptScores | Exception, *, ends: bool) -> None:
        with self._changed:
            entry = self._running.pop(number, None) if ends else self._running.get(number)
        if entry is None:  # cancelled
            return
        if isinstance(event, Exception):
            event = to_http(event, entry[0].names)
        self._events.append((*entry, event))
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._delivery_scheduled = False  # before the list is read: what follows wakes us again
        while self._events:
            job, text, event = self._events.popleft()
            job.add(text, event)

    def _finish(self) -> None:
        if self.failed:
            for job in {job for job, _ in (*self._waiting, *self._running.values())}:
                job.add(0, internal_error())
            self._on_failure()
