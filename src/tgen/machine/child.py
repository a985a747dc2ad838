"""Child processes of this Python, with what this process imports from."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

WALL_TIME = 12  # seconds per second of CPU time, since a busy machine has little of it
_CPU_LIMIT = -24  # killed by SIGXCPU


def command(*program: str) -> list[str]:
    """Return the command that runs a program, such as "-m" and a module."""
    return [sys.executable, "-P", *program]  # -P: do not import from the current directory


def environment() -> dict[str, str]:
    """Return the environment of a child, which imports from the same directories."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Child:
    """A process that starts at the first use, and again after it was killed or has exited."""

    def __init__(self, *program: str, **options: Any) -> None:
        self._program, self._lock = program, threading.Lock()  # one use at a time
        self._options = {"stdin": subprocess.PIPE, **options}
        self.process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def use(self, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
        """Yield the process. Kill it after these seconds, and after any exception in the block,
        which is a TimeoutError if the time was over."""
        with self._lock:
            process = self.process
            if process is None or process.poll() is not None:
                process = self.process = subprocess.Popen(
                    command(*self._program),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment(),
                    **self._options,
                )
                weakref.finalize(self, kill, process)
            timed_out = threading.Event()

            def end() -> None:
                timed_out.set()
                process.kill()

            timer = threading.Timer(seconds, end)
            timer.daemon = True
            timer.start()
            try:
                yield process
            except BaseException as error:
                kill(process)
                if timed_out.is_set() and isinstance(error, Exception):
                    raise TimeoutError from None
                raise
            finally:
                timer.cancel()
                timer.join()
                if timed_out.is_set():  # perhaps just after the last answer
                    kill(process)

    def ask(self, request: Mapping[str, Any], seconds: float, *, limit: int = -1) -> dict[str, Any]:
        """Return the answer to a request, both lines of JSON, the answer of up to `limit` bytes.

        Raises TimeoutError if it takes more than `seconds` of CPU time, or `WALL_TIME` as many of
        the clock, and EOFError if the process ends otherwise.
        """
        process = None
        try:
            with self.use(WALL_TIME * seconds) as process:
                assert process.stdin
                assert process.stdout
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                return dict(json.loads(process.stdout.readline(limit)))
        except TimeoutError:
            raise
        except (OSError, ValueError):  # killed, or it exited
            raise (TimeoutError if has_used_its_cpu_time(process) else EOFError) from None

    def close(self) -> None:
        """Kill the process, unless another thread uses it."""
        if self.process is not None and self._lock.acquire(blocking=False):
            kill(self.process)
            self._lock.release()


def has_used_its_cpu_time(process: subprocess.Popen[bytes] | None) -> bool:
    """Return whether a child that is over was killed because of its RLIMIT_CPU."""
    return process is not None and process.returncode == _CPU_LIMIT


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait for its end."""
    process.kill()
    with suppress(OSError), process:  # what it has not read is lost
        pass
