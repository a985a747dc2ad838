"""The access log: a line per request and one at the end, without texts, keys and queries."""

import io
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from typing import Any, Literal
from urllib.parse import quote

from starlette.types import Scope

from tgen.serve.answer_json import Answer

LogForm = Literal["text", "json", "off"]
_MAX_LINES = 1000  # that wait until they are written; further ones are counted only
_MAX_METHOD, _MAX_PATH = 20, 200  # characters
_SAFE = "/~:@!$&'()*+,;="  # characters of a path besides letters, digits, "_", "." and "-"
_CLOSE_SECONDS = 1.0
_CLIENT_LEFT = 499


class LogEntry:
    """The facts that one log line contains."""

    def __init__(self, scope: Scope) -> None:
        self.method = quote(scope["method"][:_MAX_METHOD])
        self.path = _escape(scope["path"][:_MAX_PATH])
        self.status = _CLIENT_LEFT  # until a response starts
        self.model: str | None = None
        self.seed: int | None = None
        self.answer: Answer | None = None
        self.started = time.perf_counter()


class _Messages(io.TextIOBase):
    """A stderr for which each write that ends a line becomes a message of the log."""

    def __init__(self, log: "AccessLog") -> None:
        # print writes a text and its end apart, so that threads would mix theirs.
        self._log, self._own = log, threading.local()

    def write(self, text: str) -> int:
        """Add to the message; log it at the end of a line."""
        whole = getattr(self._own, "text", "") + text
        self._own.text = "" if text.endswith("\n") else whole
        if text.endswith("\n") and whole.strip():
            self._log.add_message(whole.rstrip())
        return len(text)


class AccessLog:
    """A log whose lines a thread of its own writes: a reader that is slow does not delay answers.

    The event loop calls `add`; any thread calls `add_message`.
    """

    def __init__(self, form: LogForm, write: Callable[[bytes], object]) -> None:
        """`write` may wait; OSError, from a reader that has left, is ignored."""
        self._form, self._write = form, write
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_LINES)
        self._started = time.perf_counter()
        self._totals = dict.fromkeys(("requests", "errors", "prompt_tokens", "new_tokens"), 0)
        self._n_dropped = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        if form != "off":
            self._thread.start()

    def add(self, entry: LogEntry) -> None:
        """Write the line of a request that has been answered."""
        facts: dict[str, Any] = {"method": entry.method, "path": entry.path}
        facts |= {"status": entry.status, "seconds": _seconds_since(entry.started)}
        self._totals["requests"] += 1
        self._totals["errors"] += entry.status >= 400
        if (answer := entry.answer) is not None:
            tokens = {"prompt_tokens": answer.prompt_tokens, "new_tokens": answer.new_tokens}
            for name, n in tokens.items():
                self._totals[name] += n
            facts |= {"model": entry.model, **tokens, "seed": entry.seed}
            facts |= {} if answer.is_complete else {"complete": False}
        self._put(facts)

    def add_message(self, text: str) -> None:
        """Write a line about the server itself."""
        self._put({"message": text})

    def capture_stderr(self) -> AbstractContextManager[Any]:
        """Turn all other output to stderr into messages until the end of a block, if the lines are
        JSON."""
        return redirect_stderr(_Messages(self)) if self._form == "json" else nullcontext()

    def close(self) -> None:
        """Write the last line, with the sums over all requests; wait for room a short time."""
        dropped = {"dropped_lines": self._n_dropped} if self._n_dropped else {}
        seconds = _CLOSE_SECONDS if self._thread.is_alive() else 0
        self._put(self._totals | {"seconds": _seconds_since(self._started)} | dropped, seconds)
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._lines.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _put(self, facts: Mapping[str, Any], seconds: float = 0) -> None:
        """Add a line, or count it as dropped after `seconds` without room for it."""
        if self._form == "off":
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            self._lines.put(_format(now, facts, self._form).encode(), timeout=seconds)
        except queue.Full:
            self._n_dropped += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError:
                return


def _format(now: str, facts: Mapping[str, Any], form: LogForm) -> str:
    if form == "json":
        return json.dumps({"time": now, **facts}) + "\n"
    method, path, status = (facts.get(name) for name in ("method", "path", "status"))
    start = [method, path, str(status)] if method else []
    rest = [
        f"{name}={_escape(str(value))}"
        for name, value in facts.items()
        if name not in ("method", "path", "status")
    ]
    return " ".join([now, *start, *rest]) + "\n"


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 3)


def _escape(text: str) -> str:
    """Return a text in printable ASCII without spaces."""
    return quote(text, safe=_SAFE, errors="replace")
