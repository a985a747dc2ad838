"""Worker processes that answer messages in order, on this machine or on all ranks.

Messages go to the workers in rotation, and their answers are taken in the same order: each worker
has one message, so memory is bounded, and the answers equal those of a single process. A worker
exits when its stdin closes, so none outlives this process. Workers are not forked, because this
process has threads, and do not import the user's program, which needs no `__main__` guard.

A message is a list of bytes. A worker runs `python -m MODULE`, which calls `answer_messages`; its
first message says how to answer the others, and has no answer.

On several ranks, rank 0 sends each rank a message per worker and receives all answers, in rounds.
"""

import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, Any

from tgen import distributed
from tgen.errors import TgenError
from tgen.machine import child

Message = Sequence[bytes]
_LENGTH = struct.Struct("<q")  # precedes each message and each of its parts


def map_messages(
    messages: Iterable[Message],
    module: str,
    first: Message,
    *,
    processes: int,
    on_ranks: bool = False,
) -> Iterator[Message]:
    """Yield the answer to every message, in order, from workers that run `module`.

    With `on_ranks`, all ranks call this and use a number of `processes` of their own; only rank 0
    passes messages. Raises TgenError if a worker dies.
    """
    if on_ranks:
        yield from _map_on_ranks(messages, module, first, processes)
        return
    workers: list[_Worker] = []
    in_progress: deque[_Worker] = deque()
    try:
        for message in messages:
            answers: list[Message] = []
            if len(workers) < processes:
                worker = _add_worker(workers, module, first)
            else:
                worker = in_progress.popleft()
                answers.append(worker.receive())
            worker.send(message)  # before the caller processes the last answer
            in_progress.append(worker)
            yield from answers
        for worker in in_progress:
            yield worker.receive()
    finally:
        for worker in workers:
            worker.kill()


def _map_on_ranks(
    messages: Iterable[Message], module: str, first: Message, processes: int
) -> Iterator[Message]:
    rest, n_workers = iter(messages), distributed.all_gather(processes)

    def next_round() -> list[Any]:
        shares = [list(islice(rest, n)) for n in n_workers]
        return shares if any(shares) else [None] * len(shares)

    workers: list[_Worker] = []
    done: Iterable[Message] = ()
    shares = next_round()
    try:
        while (own := distributed.scatter(shares)) is not None:
            for _ in own[len(workers) :]:
                _add_worker(workers, module, first)
            for worker, message in zip(workers, own, strict=False):
                worker.send(message)
            yield from done  # while the workers work
            shares = next_round()
            answers = distributed.gather([worker.receive() for worker in workers[: len(own)]])
            done = chain(*answers or ())
        yield from done
    finally:
        for worker in workers:
            worker.kill()


def _add_worker(workers: "list[_Worker]", module: str, first: Message) -> "_Worker":
    worker = _Worker(module)
    workers.append(worker)  # so that it is killed if it does not take the message
    worker.send(first)
    return worker


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self, module: str) -> None:
        self._child = subprocess.Popen(
            child.command("-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child.environment() | {"RAYON_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is handled by this process
        )

    def send(self, message: Message) -> None:
        assert self._child.stdin
        try:
            _send(self._child.stdin, message)
        except OSError:
            raise _worker_died() from None

    def receive(self) -> Message:
        """Wait for the answer."""
        assert self._child.stdout
        answer = _receive(self._child.stdout)
        if answer is None:
            raise _worker_died()
        return answer

    def kill(self) -> None:
        child.kill(self._child)


def _worker_died() -> TgenError:
    return TgenError(
        "a tokenizer process exited unexpectedly",
        "add --threads 1 to use fewer processes: it may have run out of memory",
    )


def answer_messages(make: Callable[[Message], Callable[[Message], Message]]) -> None:
    """In a worker, answer messages from stdin on stdout; `make` receives the first one."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(source)
    if first is None:
        return
    answer = make(first)
    while (message := _receive(source)) is not None:
        _send(target, answer(message))


def _send(stream: IO[bytes], message: Message) -> None:
    stream.write(_LENGTH.pack(len(message)))
    for part in message:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def _receive(stream: IO[bytes]) -> list[bytes] | None:
    """Return one message; None at the end of the stream or if it is truncated."""
    if (n_parts := _receive_length(stream)) is None:
        return None
    parts: list[bytes] = []
    for _ in range(n_parts):
        n = _receive_length(stream)
        part = b"" if n is None else stream.read(n)
        if len(part) != n:
            return None
        parts.append(part)
    return parts


def _receive_length(stream: IO[bytes]) -> int | None:
    head = stream.read(_LENGTH.size)
    return _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else None
