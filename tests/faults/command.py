"""The real command line in a process of its own: started anew, or forked from one that has imported
what takes long.

A forked one begins where the interpreter hands over to `tgen.__main__`, with the signals and
streams that it would find there, and ends as a process of its own does: with all that Python does
at its end.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any, TextIO

import tiny
from tgen import __main__
from tgen.checkpoint import model_lookup
from tgen.cli import app
from tgen.cli.train import progress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def get_ready() -> None:
    """Imports what the command will; and forked ones write less and do not time the machine."""
    tiny.get_ready(cheap=False)
    from tgen.engine import cpu
    from tgen.runs import final_report, prepare

    assert all((app, cpu, model_lookup, progress))
    final_report._MEMORIZATION_SAMPLES = final_report._MEMORIZATION_TOKENS = 2
    prepare.measure_speed = lambda *_, **__: 1e9


def started(arguments: Sequence[str], **streams: Any) -> "subprocess.Popen[bytes]":
    """A new interpreter; streams as `Popen` takes them."""
    streams.setdefault("preexec_fn", lambda: _reset(signal.SIG_DFL))
    return subprocess.Popen([sys.executable, "-m", "tgen", *arguments], **streams)


class Forked:
    """As `Popen`, as far as it goes. A stream that is None is shared with this process; what goes
    to `stderr` as PIPE is in a file until the end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        ignoring: bool = False,
        not_theirs: Sequence[int] = (),
    ) -> None:
        """`not_theirs`: what is open here, and would keep a terminal alive there."""
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
        self.returncode: int | None = None
        with ExitStack() as theirs:
            streams = [stdin, stdout, stderr]
            self.stdout = self._said = None
            if stdout == subprocess.PIPE:
                here, there = os.pipe()
                self.stdout = os.fdopen(here, "rb")
                streams[1] = theirs.enter_context(os.fdopen(there, "wb"))
            if stderr == subprocess.PIPE:
                self._said = streams[2] = tempfile.TemporaryFile()  # noqa: SIM115
            sys.stdout.flush()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # none is to come before it is itself
            self.pid = os.fork()
            if self.pid == 0:
                for number, stream in enumerate(streams):
                    if stream is not None:
                        os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
                if self.stdout:
                    self.stdout.close()
                for fd in not_theirs:
                    os.close(fd)
                theirs.close()
                _become(arguments, ignoring=ignoring)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def send_signal(self, number: int) -> None:
        """It may have ended: nobody else gets its pid before it is waited for."""
        os.kill(self.pid, number)

    def communicate(self) -> tuple[bytes | None, bytes | None]:
        """Waits for its end; what is left in stdout, and all of stderr."""
        shown = self.stdout.read() if self.stdout else None
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.stdout:
            self.stdout.close()
        if self._said is None:
            return shown, None
        with self._said:
            self._said.seek(0)
            return shown, self._said.read()


def _become(arguments: Sequence[str], *, ignoring: bool) -> None:
    """The command, from where Python hands over to it; raises SystemExit."""
    _reset(signal.SIG_IGN if ignoring else signal.SIG_DFL)
    if not ignoring:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _stream(1, "strict")
    sys.stderr = _stream(2, "backslashreplace")
    sys.argv = ["tgen", *arguments]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    except KeyboardInterrupt:  # it came before the command began: Python would end as quietly
        sys.exit(128 + signal.SIGINT)
    __main__.main()


def _reset(action: signal.Handlers) -> None:
    for number in SIGNALS:
        signal.signal(number, action)


def _stream(number: int, errors: str) -> TextIO:
    """As Python makes them."""
    by_line = number == 2 or os.isatty(number)
    return os.fdopen(number, "w", 1 if by_line else -1, "utf-8", errors, closefd=False)
