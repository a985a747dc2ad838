"""The process in which grammars of requests are compiled first: one JSON request per line, one
JSON answer per line, in any order.

A grammar may take minutes or all memory to compile, and llguidance cannot be interrupted. So forks
of this process, which has the vocabulary already, compile them: one after another as long as they
are quick. One that is slow keeps its fork, which ends after its time, and others get another. Only
one slow grammar runs at a time, so that many delay texts no more than one.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from tgen.errors import UsageError
from tgen.generation.constrained import Grammars
from tgen.machine.resource_limit import set_limit

_BYTES = 1 << 30  # of memory that a fork may have
_POLL_SECONDS = 0.02  # until a slow grammar is noticed
_QUICK_SECONDS = 0.03  # of CPU time; most grammars take less
_SLOW_PRIORITY = 10  # a tenth of the CPU time of others
_MAX_IDLE = 4  # forks
_LONGEST = 16  # bytes of a token


@dataclass
class _Fork:
    process: int
    connection: Connection
    start: float = 0.0  # of its grammar, in its CPU seconds
    deadline: float = 0.0
    slow: bool = False
    stopped: bool = False
    late: bool = False
    killed: bool = False  # it may have answered before

    def cpu_seconds(self) -> float:
        """Return the CPU time that its grammar has taken."""
        return _cpu_seconds(self.process) - self.start

    def kill(self) -> None:
        """End the process soon."""
        self.killed = True
        os.kill(self.process, signal.SIGKILL)


def main() -> None:
    """Read the vocabulary from the first line, then answer requests until the end of stdin.

    A request has an `id`, the `constraint` (kind, value, banned strings), the CPU `seconds` that it
    may take and the `delay` in seconds until it is given up; or an `id` and `cancel`. The answer
    has the `id` and, if the grammar is invalid, the `message` and its `hint`; `slow` if its CPU
    time was over, `late` if its delay was, `died` if the fork ended otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    grammars: Grammars | None = None
    idle: list[_Fork] = []
    busy: dict[int, _Fork] = {}  # by number of the request
    stdin, rest = sys.stdin.fileno(), b""
    while True:
        connections: list[Any] = [fork.connection for fork in busy.values()]
        ready = wait([stdin, *connections], _POLL_SECONDS if busy else None)
        for number, fork in list(busy.items()):
            if fork.connection in ready:
                del busy[number]
                _finish(number, fork, idle)
            elif time.monotonic() > fork.deadline:
                fork.late = True
                fork.kill()
            elif not fork.slow and fork.cpu_seconds() > _QUICK_SECONDS:
                fork.slow = True
                os.setpriority(os.PRIO_PROCESS, fork.process, _SLOW_PRIORITY)
        _run_one([fork for fork in busy.values() if fork.slow and not fork.late])
        if stdin in ready:
            data = os.read(stdin, 1 << 20)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for request in map(json.loads, lines):
                if grammars is None:
                    tokens = [token.encode("latin-1") for token in request["tokens"]]
                    grammars = Grammars(tokens, request["ends"], _encoder(tokens))
                elif "cancel" not in request:
                    fork = idle.pop() if idle else _make_fork(grammars)
                    fork.start = _cpu_seconds(fork.process)
                    fork.deadline = time.monotonic() + request["delay"]
                    fork.connection.send((request["constraint"], request["seconds"]))
                    busy[request["id"]] = fork
                elif request["id"] in busy:
                    busy[request["id"]].kill()
    for fork in busy.values():
        os.kill(fork.process, signal.SIGKILL)


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of a process; where the system does not tell it, the time of day."""
    try:
        return time.clock_gettime((~process << 3) | 2)  # as clock_getcpuclockid of glibc
    except (OSError, OverflowError):
        return time.monotonic()


def _encoder(tokens: Sequence[bytes]) -> Callable[[bytes], list[int]]:
    """Return a function from bytes to tokens that spell them, if any do: whether a grammar compiles
    does not depend on which."""
    ids = {token: i for i, token in enumerate(tokens)}

    def encode(text: bytes) -> list[int]:
        found, start = list[int](), 0
        while start < len(text):
            ends = range(min(start + _LONGEST, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in ids), None)
            if end is None:
                return []
            found.append(ids[text[start:end]])
            start = end
        return found

    return encode


def _run_one(slow: list[_Fork]) -> None:
    """Let the slow fork run that has used the least CPU time, and stop the others."""
    turn = min(slow, key=_Fork.cpu_seconds, default=None)
    for fork in slow:
        if fork.stopped != (stopped := fork is not turn):
            fork.stopped = stopped
            os.kill(fork.process, signal.SIGSTOP if stopped else signal.SIGCONT)


def _finish(number: int, fork: _Fork, idle: list[_Fork]) -> None:
    """Pass on the answer of a fork, and keep the fork if its grammar was quick."""
    try:
        answer = fork.connection.recv()
    except (EOFError, OSError):
        is_slow = _end(fork) == -signal.SIGPROF
        answer = {"slow" if is_slow else "late" if fork.late else "died": True}
    else:
        if fork.slow or fork.killed or len(idle) >= _MAX_IDLE:
            _end(fork)
        else:
            idle.append(fork)
    sys.stdout.write(json.dumps({"id": number} | answer) + "\n")
    sys.stdout.flush()


def _end(fork: _Fork) -> int:
    """End a fork, unless it has ended; return its exit status, or the negative of its signal."""
    os.kill(fork.process, signal.SIGKILL)
    fork.connection.close()
    return os.waitstatus_to_exitcode(os.waitpid(fork.process, 0)[1])


def _make_fork(grammars: Grammars) -> _Fork:
    ours, theirs = Pipe()
    process = os.fork()
    if not process:
        ours.close()
        _compile_all(grammars, theirs)
    theirs.close()
    return _Fork(process, ours)


def _compile_all(grammars: Grammars, connection: Connection) -> NoReturn:
    """Answer constraints until the connection or the time of one ends; end the process."""
    set_limit("RLIMIT_DATA", _BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # Python cannot delay it
    with suppress(EOFError, MemoryError, RecursionError, OSError):
        while True:
            (kind, value, ban), seconds = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer: dict[str, Any] = {}
            try:
                grammars.compile(kind, value, tuple(ban))
            except UsageError as error:
                answer = {"message": error.message, "hint": error.hint}
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)
    os._exit(1)


if __name__ == "__main__":
    main()
