"""The process in which grammars of requests are compiled first: one JSON request per line, one
JSON answer per line, in any order.

A grammar may take minutes or all memory to compile, and llguidance cannot be interrupted. So each
is compiled in a fork of this process, which has the vocabulary already and ends after its time.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tgen.errors import UsageError
from tgen.generation.constrained import Grammars

_BYTES = 1 << 30  # of memory that a grammar may take
_POLL_SECONDS = 0.02  # until the end of a fork is noticed
_QUICK_SECONDS = 0.1  # most grammars take less; others get the lowest priority
_LOWEST_PRIORITY = 19


def main() -> None:
    """Read the vocabulary from the first line, then answer requests until the end of stdin.

    A request has an `id`, the `constraint` (kind, value, banned strings) and the `seconds` that it
    may take; or an `id` and `cancel`. The answer has the `id` and, if the grammar is invalid, the
    `message` and its `hint`; without an answer from the fork, `died`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    grammars: Grammars | None = None
    forks: dict[int, _Fork] = {}  # by number of the request
    stdin, rest = sys.stdin.fileno(), b""
    while True:
        ready, _, _ = select.select([stdin], [], [], _POLL_SECONDS if forks else None)
        if ready:
            data = os.read(stdin, 1 << 20)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if grammars is None:
                    first = json.loads(line)
                    tokens = [token.encode("latin-1") for token in first["tokens"]]
                    grammars = Grammars(tokens, first["ends"], lambda _: [])
                else:
                    _start(json.loads(line), grammars, forks)
        for number, fork in list(forks.items()):
            if os.waitpid(fork.process, os.WNOHANG)[0]:
                del forks[number]
                _answer({"id": number, "died": True})  # ignored after an answer of its own
            elif time.monotonic() > fork.start + _QUICK_SECONDS:
                os.setpriority(os.PRIO_PROCESS, fork.process, _LOWEST_PRIORITY)
    for fork in forks.values():
        os.kill(fork.process, signal.SIGKILL)


class _Fork(NamedTuple):
    process: int
    start: float  # by time.monotonic


def _start(request: dict[str, Any], grammars: Grammars, forks: dict[int, _Fork]) -> None:
    number = request["id"]
    if "cancel" in request:
        if number in forks:
            os.kill(forks[number].process, signal.SIGKILL)
        return
    process = os.fork()
    if process:
        forks[number] = _Fork(process, time.monotonic())
        return
    _limit(request["seconds"])
    kind, value, ban = request["constraint"]
    answer: dict[str, Any] = {"id": number}
    try:
        grammars.compile(kind, value, tuple(ban))
    except UsageError as error:
        answer |= {"message": error.message, "hint": error.hint}
    except (MemoryError, RecursionError):
        os._exit(1)
    _answer(answer)
    os._exit(0)


def _limit(seconds: float) -> None:
    """End this process after its time, whatever runs; its alarm cannot be delayed by Python."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    os.write(sys.stdout.fileno(), line)  # at most 4 KB, so that lines of forks do not mix


if __name__ == "__main__":
    main()
