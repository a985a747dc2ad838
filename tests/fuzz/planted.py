"""Inputs with known problems: the fuzzer must find each of them, and go on.

python tests/fuzz/planted.py
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads cannot be forked

import asyncio
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from starlette.types import Receive, Scope, Send

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import runner
from fuzz.exchange import exchange
from tgen.drawing.terminal_text import printable
from tgen.errors import TgenError

_ESCAPE = "\x1b[2J"


def _raise(error: BaseException) -> None:
    raise error


def _block_and_wait() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    time.sleep(600)


def _answer(kind: bytes, body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    """Check the response of a server."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        head = [(b"content-type", kind), *headers]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    response = asyncio.run(exchange(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", app))
    try:
        response.check()
    except AssertionError as error:  # the end tells findings apart
        raise AssertionError(f"{error} [{kind[-6:].decode()}:{status}]") from None


_CASES: list[tuple[str, Callable[[], object]]] = [  # part of the finding, empty for none
    ("", lambda: None),
    ("", lambda: _raise(TgenError(f"a value {_ESCAPE}\nof several lines", "x" * 10_000))),
    ("ValueError: planted", lambda: _raise(ValueError("planted"))),
    ("SystemExit", lambda: sys.exit(3)),
    ("ended with -11", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    ("MemoryError", lambda: np.ones(1 << 28)),
    ("for writing", lambda: open(__file__, "ab").close()),
    ("opened '/etc/hostname'", lambda: open("/etc/hostname").close()),
    ("os.remove", lambda: os.unlink("/nothing")),
    ("output: 'planted", lambda: print("planted")),
    ("control characters", lambda: os.write(2, _ESCAPE.encode())),
    ("", lambda: printable(_ESCAPE)),
    ("UserWarning: planted", lambda: warnings.warn("planted", stacklevel=1)),
    ("Ctrl-C would be lost", lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)),
    ("subprocess.Popen", lambda: subprocess.run(["true"], check=True)),
    ("", lambda: open("inside", "wb").close()),
    ("", partial(_answer, b"application/json", b"{}")),
    ("status 500", partial(_answer, b"application/json", b"{}", 500)),
    ("JSONDecodeError", partial(_answer, b"application/json", b"{")),
    ("NaN in JSON", partial(_answer, b"application/x-ndjson", b"{}\nNaN\n")),
    ("an event does not end", partial(_answer, b"text/event-stream", b"data: {}\n\ndata: {}")),
    ("RemoteProtocolError", partial(_answer, b"text/plain", b"", 200, (b"content-length", b"9"))),
]
_HANGS: list[tuple[str, Callable[[], object]]] = [
    ("takes more than", lambda: time.sleep(600)),
    ("Ctrl-C does not end it", _block_and_wait),
]


class Planted:
    """One case per problem."""

    prints = starts_processes = False

    def __init__(self, cases: list[tuple[str, Callable[[], object]]], _: Path) -> None:
        self._cases = cases

    def change(self, i: int, rng: Random) -> str:
        """Choose the case."""
        del rng
        self._case = self._cases[i][1]
        return self._cases[i][0]

    def read(self) -> None:
        """Run it."""
        self._case()


def main() -> int:
    """Print what was not found, or found in vain."""
    runner._INTERRUPT_SECONDS = 0.5
    status = 0
    for cases, seconds in ((_CASES, 30.0), (_HANGS, 1.0)):
        total = runner.run(
            {"planted": partial(Planted, cases)},
            [runner.Chunk("planted", 0, len(cases))],
            seed=0,
            seconds=seconds,
        )["planted"]
        for i, (expected, _) in enumerate(cases):
            problems = [finding.problem for finding in total.findings if finding.case == i]
            found = any(expected in problem for problem in problems) if expected else not problems
            if not found:
                print(f"case {i}: expected {expected!r}, found {problems}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
