"""SIGKILL at every system call of a run's saves, injected by strace: nothing is lost.

    python tests/faults/syscalls.py [--long | COUNT]

What `story.py` tells is told by a process that strace kills when it enters its k-th open, write,
fsync, and so on; then what it had said must be there, and the same saves done once more must
succeed over what it left. In the short form these are the calls of one save, in the long one all.
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

import tiny  # before what imports numpy

# isort: split
import story

CALLS = "openat,close,write,fsync,rename,mkdir,unlink,unlinkat,rmdir,ftruncate,flock"
_SET_TRACER = 0x59616D61  # PR_SET_PTRACER


def main() -> int:
    """Kills at each call, or at some."""
    count = tiny.count(__doc__, short=70, long=sys.maxsize)
    if shutil.which("strace") is None:
        print("SKIPPED: strace is not here")
        return tiny.SKIPPED
    with tiny.scratch() as folder:
        story.tell(folder / "warm", lambda _: None)  # what is imported on the way is no save's
        traced = told(folder / "whole", ["-o", str(folder / "trace")])
        if traced.status:
            print("SKIPPED: strace cannot follow a process here")
            return tiny.SKIPPED
        points = calls((folder / "trace").read_text())
        begin = (
            0 if count >= len(points) else points.index(("said", 2))
        )  # the second save: it replaces
        n_calls = sum(name != "said" for name, _ in points)
        chosen = [point for point in points[begin:] if point[0] != "said"][:count]
        problems = []
        for name, k in chosen:
            problem = killed(folder / "out", name, k)
            if problem:
                print(f"killed at {name} number {k}: {problem}", file=sys.stderr)
                problems.append(problem)
    print(f"{len(chosen):,} of {n_calls:,} system calls killed: {len(problems)} lost")
    return int(bool(problems))


def calls(trace: str) -> list[tuple[str, int]]:
    """Each call by its name and its number among those of its name; the words between them too."""
    seen: Counter[str] = Counter()
    found = []
    for line in trace.splitlines():
        name = line.split("(")[0]
        if name not in CALLS.split(","):
            continue
        seen[name] += 1
        is_word = re.match(r'write\(\d+, "\[', line)
        seen["said"] += bool(is_word)
        found += [("said", seen["said"])] if is_word else [(name, seen[name])]
    return found


def killed(out: Path, name: str, k: int) -> str:
    """What is wrong after the kill at this call."""
    shutil.rmtree(out, ignore_errors=True)
    ended = told(out, ["-o", "/dev/null", "-e", f"inject={name}:signal=KILL:when={k}"])
    if not ended.killed:
        return f"it was not killed but ended with {ended.status}"
    said = story.Said(*json.loads(ended.said[-1])) if ended.said else story.Said()
    if problem := story.check(out, said):
        return f"lost: {problem}"
    told_last = [story.Said()]
    story.tell(out, told_last.append)
    return story.check(out, told_last[-1])


def told(out: Path, options: list[str]) -> tiny.Ended:
    """The story, from its first word in a process that strace follows."""
    start_here, start_there = os.pipe()

    def tell(say: Any) -> None:
        ctypes.CDLL(None).prctl(_SET_TRACER, ctypes.c_ulong(-1))  # whoever wants to follow it
        say("ready")
        os.read(start_here, 1)
        story.tell(out, lambda said: say(json.dumps(astuple(said))))

    followers = []

    def follow(pid: int) -> None:
        command = ["strace", "-e", f"trace={CALLS}", *options, "-p", str(pid)]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE)
        followers.append(strace)
        assert strace.stderr
        strace.stderr.readline()  # that it is attached
        os.write(start_there, b"!")

    ended = tiny.forked(tell, meanwhile=follow)
    for strace in followers:
        strace.communicate()
    os.close(start_here)
    os.close(start_there)
    return ended._replace(said=ended.said[1:])


if __name__ == "__main__":
    sys.exit(main())
