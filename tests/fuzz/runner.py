"""Runs cases in forked processes, watches them, and collects findings.

A process runs many cases of one format. Before each it writes the number, the time and a
description to shared memory, so that this process knows which case crashed or hangs.
"""

import ctypes
import json
import mmap
import os
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzz.child import Format, Watch, open_screen, place

_HEADER = struct.Struct("<qd")  # number of the case, when it began
_INTERRUPT_SECONDS = 5.0  # a hanging case may take so long to end after Ctrl-C
_PLACE = re.compile(r"\[[\w./]+:\d+[^\]]*\]")  # as `child.place` writes it
_PR_SET_PDEATHSIG = 1  # of Linux: the process ends with its parent
_MAX_PROBLEMS = 50  # of a process: then another one takes the rest of its cases

MakeFormat = Callable[[Path], Format]


class Finding(NamedTuple):
    """A problem and the first case that shows it."""

    problem: str
    format: str
    seed: int
    case: int
    change: str

    def __str__(self) -> str:
        replay = f"--format {self.format} --seed {self.seed} --case {self.case}"
        return f"{self.format}: {self.problem}\n    {replay}: {self.change}"


@dataclass
class Totals:
    """The results of the cases of one format."""

    cases: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0  # seconds
    slowest_case: int = -1
    findings: list[Finding] = field(default_factory=list)


class Chunk(NamedTuple):
    """Cases `first` to `end` of a format."""

    format: str
    first: int
    end: int


def run(
    formats: dict[str, MakeFormat],
    chunks: list[Chunk],
    *,
    seed: int,
    jobs: int = 1,
    seconds: float = 30.0,
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> dict[str, Totals]:
    """Run the cases, `jobs` processes at a time; a case may take `seconds`."""
    totals: dict[str, Totals] = {chunk.format: Totals() for chunk in chunks}
    waiting, running = chunks[::-1], []
    while waiting or running:
        while waiting and len(running) < jobs:
            chunk = waiting.pop()
            running.append(_Process(chunk, formats[chunk.format], seed, seconds))
        select.select([process.pipe for process in running], [], [], 0.25)
        for process in list(running):
            total = totals[process.chunk.format]
            known = {_kind(finding.problem) for finding in total.findings}
            for finding in process.poll(total):
                if _kind(finding.problem) not in known:
                    known.add(_kind(finding.problem))
                    total.findings.append(finding)
                    on_finding(finding)
            if process.ended:
                running.remove(process)
                if process.next_case < process.chunk.end:
                    waiting.append(process.chunk._replace(first=process.next_case))
    return totals


def _kind(problem: str) -> str:
    """Return the part of a problem that does not depend on the values of the case."""
    place = _PLACE.search(problem)
    return f"{problem.split(':')[0][:60]} {place[0] if place else ''}"


class _Process:
    """A forked process with cases, and what is known of it."""

    def __init__(self, chunk: Chunk, make: MakeFormat, seed: int, seconds: float) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
        self.chunk, self.seed, self._seconds = chunk, seed, seconds
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="tgen-fuzz-", dir=memory))
        self._shared = mmap.mmap(-1, 4096)
        self._set_case(chunk.first - 1)
        self.pipe, write_end = os.pipe()
        self.ended = False
        self.next_case = chunk.first
        self._interrupted_at: float | None = None
        self._rest = b""
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                os.close(self.pipe)
                self._run(make, write_end)
                status = 0
            except BaseException:
                os.write(write_end, _line(problem=traceback.format_exc()[-2000:]))
            finally:
                os._exit(status)
        os.close(write_end)
        self._pid = pid

    def _set_case(self, i: int, change: str = "") -> None:
        text = change.encode("ascii", "backslashreplace")[:2000]
        self._shared[:] = (_HEADER.pack(i, time.monotonic()) + text).ljust(4096, b"\0")

    def _case(self) -> tuple[int, float, str]:
        number, began = _HEADER.unpack_from(self._shared)
        text = self._shared[_HEADER.size :].rstrip(b"\0").decode()
        return number, began, text

    def _run(self, make: MakeFormat, write_end: int) -> None:
        folder = self._folder / "case"
        folder.mkdir()
        screen = open_screen(self._folder)
        fuzzed = make(folder)
        watch = Watch(
            self._folder, screen, prints=fuzzed.prints, starts_processes=fuzzed.starts_processes
        )
        os.chdir(folder)
        n_problems = 0
        for i in range(*self.chunk[1:]):
            rng = Random(f"{self.seed} {self.chunk.format} {i}")
            self._set_case(i)
            change = fuzzed.change(i, rng)[:1000]
            self._set_case(i, change)
            began, accepted = time.perf_counter(), False
            try:
                accepted = watch.run(fuzzed.read)
            except KeyboardInterrupt as hang:
                watch.problems.append(f"takes more than {self._seconds:g} s{place(hang)}")
            for problem in watch.problems:
                os.write(write_end, _line(problem=problem, case=i, change=change))
                n_problems += 1
            took = time.perf_counter() - began
            os.write(write_end, _line(case=i, accepted=accepted, seconds=took))
            if n_problems > _MAX_PROBLEMS:
                break

    def poll(self, total: Totals) -> Iterator[Finding]:
        """Yield new findings; interrupt or kill the process if its case hangs."""
        while select.select([self.pipe], [], [], 0)[0]:
            block = os.read(self.pipe, 1 << 16)
            if not block:
                yield from self._end()
                return
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in map(json.loads, lines):
                if "problem" in line:
                    case, change = line.get("case", -1), line.get("change", "")
                    yield Finding(line["problem"], self.chunk.format, self.seed, case, change)
                else:
                    self.next_case = line["case"] + 1
                    total.cases += 1
                    total.accepted += line["accepted"]
                    total.seconds += line["seconds"]
                    if line["seconds"] > total.slowest:
                        total.slowest, total.slowest_case = line["seconds"], line["case"]
        case, began, _ = self._case()
        now = time.monotonic()
        if case < self.next_case or now - began < self._seconds:
            self._interrupted_at = None
        elif self._interrupted_at is None:
            self._interrupted_at = now
            os.kill(self._pid, signal.SIGINT)
        elif now - self._interrupted_at > _INTERRUPT_SECONDS:
            os.kill(self._pid, signal.SIGKILL)

    def _end(self) -> Iterator[Finding]:
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        case, _, change = self._case()
        if case >= self.next_case:  # it has not ended this case
            problem = f"the process ended with {status}"
            if self._interrupted_at is not None:
                problem = f"hangs for more than {self._seconds:g} s, and Ctrl-C does not end it"
            elif status == -signal.SIGKILL:
                problem = "the process was killed"
            yield Finding(problem, self.chunk.format, self.seed, case, change)
            self.next_case = case + 1
        elif status:  # before the first case
            self.next_case = self.chunk.end
        os.close(self.pipe)
        self.ended = True
        shutil.rmtree(self._folder, ignore_errors=True)


def _line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"
