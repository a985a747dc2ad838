"""SIGKILL at every system call of a run's saves, injected by strace: nothing is lost.

    python tests/faults/syscalls.py [--long | COUNT]

strace kills a process that plays `story.py` when it enters its k-th open, write, fsync and so on.
Everything promised must then be on disk, and the same saves must succeed over the remains. The
short form kills at every second call of one save, the long form at all calls.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import tiny  # before numpy is imported

# isort: split
import story

CALLS = "openat,close,write,fsync,rename,mkdir,unlink,unlinkat,rmdir,ftruncate,flock"
_SET_TRACER = 0x59616D61  # PR_SET_PTRACER


def main() -> int:
    """Kill a process at calls: all, or every second of the first `count` of a save."""
    count = tiny.count(__doc__, short=70, long=sys.maxsize)
    if shutil.which("strace") is None:
        print("SKIPPED: strace is not installed")
        return tiny.SKIPPED
    with tiny.scratch() as folder:
        story.play(folder / "warm", lambda _: None)  # import everything before the trace
        traced = trace_story(folder / "whole", ["-o", str(folder / "trace")])
        if traced.status:
            print("SKIPPED: strace cannot trace a process here")
            return tiny.SKIPPED
        points = parse_trace((folder / "trace").read_text())
        # The second save replaces files.
        begin = 0 if count >= len(points) else points.index(("promise", 2))
        n_calls = sum(name != "promise" for name, _ in points)
        chosen = [point for point in points[begin:] if point[0] != "promise"]
        chosen = chosen[: count : 2 if begin else 1]
        problems = []
        for name, k in chosen:
            problem = kill_story(folder / "out", name, k)
            if problem:
                print(f"killed at {name} number {k}: {problem}", file=sys.stderr)
                problems.append(problem)
    print(f"{len(chosen):,} of {n_calls:,} system calls killed: {len(problems)} lost")
    return int(bool(problems))


def parse_trace(trace: str) -> list[tuple[str, int]]:
    """Return calls and promises, each as a name and its number among those of that name."""
    seen: Counter[str] = Counter()
    found = []
    for line in trace.splitlines():
        name = line.split("(")[0]
        if name not in CALLS.split(","):
            continue
        seen[name] += 1
        is_promise = re.match(r'write\(\d+, "\[', line)
        seen["promise"] += bool(is_promise)
        found += [("promise", seen["promise"])] if is_promise else [(name, seen[name])]
    return found


def kill_story(out: Path, name: str, k: int) -> str:
    """Kill the process at this call; return the resulting problem, if any."""
    shutil.rmtree(out, ignore_errors=True)
    result = trace_story(out, ["-o", "/dev/null", "-e", f"inject={name}:signal=KILL:when={k}"])
    if not result.killed:
        return f"the process was not killed but exited with {result.status}"
    promise = story.Promise(*json.loads(result.lines[-1])) if result.lines else story.Promise()
    if problem := story.check(out, promise):
        return f"lost: {problem}"
    last = [story.Promise()]
    story.play(out, last.append)
    return story.check(out, last[-1])


def trace_story(out: Path, options: list[str]) -> tiny.Result:
    """Play the story in a process that strace traces from the start."""
    read_end, write_end = os.pipe()

    def play(report_line: Any) -> None:
        ctypes.CDLL(None).prctl(_SET_TRACER, ctypes.c_ulong(-1))  # any process may trace it
        report_line("ready")
        os.read(read_end, 1)
        story.play(out, lambda promise: report_line(json.dumps(astuple(promise))))

    followers = []

    def follow(pid: int) -> None:
        command = ["strace", "-e", f"trace={CALLS}", *options, "-p", str(pid)]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE)
        followers.append(strace)
        assert strace.stderr
        strace.stderr.readline()  # strace is attached
        os.write(write_end, b"!")

    result = tiny.run_forked(play, meanwhile=follow)
    for strace in followers:
        strace.communicate()
    os.close(read_end)
    os.close(write_end)
    return result._replace(lines=result.lines[1:])


if __name__ == "__main__":
    sys.exit(main())
