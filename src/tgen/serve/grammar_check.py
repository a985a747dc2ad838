"""Grammars of requests, compiled first in processes that end after their time.

See `serve.grammar_child`. Only what has compiled there is compiled in the server, so that a
grammar that takes minutes ends its own request alone.
"""

import asyncio
import hashlib
import json
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from typing import Any

from tgen.config import CONSTRAINTS, SamplingConfig
from tgen.errors import UsageError
from tgen.generation.vocabulary import Vocabulary
from tgen.machine import child
from tgen.serve.http_error import busy

_REMEMBERED = 10_000  # grammars
_MAX_AT_ONCE = 64  # grammars
_MAX_DELAY = 4  # times the CPU time that a grammar may take, in all
_SIMPLIFY = "simplify it"
_LINE_BYTES = 64 << 20


class GrammarCheck:
    """A check whether grammars compile within `seconds` of CPU time; used by one event loop."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary, self._seconds = vocabulary, seconds
        self._process: Process | None = None
        self._starting, self._places = asyncio.Lock(), asyncio.Semaphore(_MAX_AT_ONCE)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._n = 0
        # Message and hint of an invalid or slow constraint by its digest; None: a valid one.
        self._results: OrderedDict[bytes, tuple[str, str] | None] = OrderedDict()

    async def check(self, sampling: dict[str, Any]) -> None:
        """Raise UsageError if the constraint of a request's sampling fields is invalid or takes too
        long, HttpError if there was no time for it. Cancelling it ends the compilation."""
        kind = next((name for name in CONSTRAINTS if sampling.get(name)), None)
        if kind is None or not hasattr(os, "fork"):
            return
        names = (kind, "ban") if kind == "choices" else (kind,)
        try:
            config = SamplingConfig(**{name: sampling[name] for name in names if name in sampling})
        except RecursionError:
            raise UsageError(f"{kind}: the nesting is too deep", _SIMPLIFY, field=kind) from None
        constraint = json.dumps([kind, getattr(config, kind), list(config.ban)])
        key = hashlib.sha256(constraint.encode()).digest()
        if key not in self._results:
            async with self._places:
                self._results[key] = await self._compile(kind, constraint)
            if len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        if (fault := self._results[key]) is not None:
            raise UsageError(*fault, field=kind)

    def close(self) -> None:
        """End the process and what it compiles."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _start(self) -> Process:
        """Start the process, unless it runs, and send it the vocabulary."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            # The server needs it, too; raises TgenError without llguidance.
            await asyncio.to_thread(lambda: self._vocabulary.grammars)
            process = await asyncio.create_subprocess_exec(
                *child.command("-m", "tgen.serve.grammar_child"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,  # as a log in JSON has no other lines
                limit=_LINE_BYTES,
                env=child.environment(),
            )
            tokens = [token.decode("latin-1") for token in self._vocabulary.tokens]
            self._send(process, {"tokens": tokens, "ends": sorted(self._vocabulary.ends)})
            self._process = process
            self._reader = asyncio.create_task(self._read(process))
            return process

    async def _compile(self, kind: str, constraint: str) -> tuple[str, str] | None:
        """Return message and hint of a fault.

        Raises HttpError if there was no time for it, UsageError if the process did not answer.
        """
        process = await self._start()
        self._n += 1
        number = self._n
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "constraint": json.loads(constraint), "seconds": self._seconds}
        self._send(process, request | {"delay": _MAX_DELAY * self._seconds})
        try:
            result = await answer
        except asyncio.CancelledError:
            self._send(process, {"id": number, "cancel": True})
            raise
        finally:
            del self._pending[number]
        if "late" in result:
            raise busy("the server is too busy to compile the schema", "overloaded")
        if "died" in result:  # of memory, or by accident: not remembered
            raise UsageError(f"{kind}: takes too much memory to compile", _SIMPLIFY, field=kind)
        if "slow" in result:
            return f"{kind}: takes more than {self._seconds:g} s to compile", _SIMPLIFY
        return (result["message"], result["hint"]) if "message" in result else None

    @staticmethod
    def _send(process: Process, request: dict[str, Any]) -> None:
        assert process.stdin
        process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self, process: Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            answer = json.loads(line)
            future = self._pending.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
        await process.wait()
        for future in self._pending.values() if process is self._process else ():  # it was killed
            if not future.done():
                future.set_result({"died": True})
