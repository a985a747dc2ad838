"""Run the real command in a new interpreter or, faster, forked from a process with all imports.

A forked command starts at `tgen.__main__` with the signals and streams of a new process, and exits
like one.
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
from tgen.cli import app, rich_console
from tgen.cli.train import progress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def import_everything() -> None:
    """Import what the command imports; make forked commands generate less and skip calibration."""
    import_modules()
    from tgen.planning import side_work
    from tgen.runs import prepare

    side_work.MEMORIZATION_SAMPLES = side_work.MEMORIZATION_TOKENS = 2
    prepare.measure_speed = lambda *_, **__: 1e9  # type: ignore[attr-defined]


def import_modules() -> None:
    """Import what the command imports."""
    tiny.import_everything(cheap=False)
    from tgen.engine import cpu

    assert all((app, cpu, model_lookup, progress))


def start_new(arguments: Sequence[str], **streams: Any) -> "subprocess.Popen[bytes]":
    """Start a new interpreter; `streams` are arguments of `Popen`."""
    streams.setdefault("preexec_fn", lambda: _set_actions(signal.SIG_DFL))
    return subprocess.Popen([sys.executable, "-m", "tgen", *arguments], **streams)


class ForkedCommand:
    """Subset of `Popen`. The child inherits a stream that is None; PIPE for `stderr` is a file."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        ignoring: bool = False,
        close_in_child: Sequence[int] = (),
        closed: int | None = None,
    ) -> None:
        """`close_in_child`: descriptors that would keep a terminal alive in the child; `closed`:
        the standard stream without a file, as after `>&-` in a shell."""
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
        self.returncode: int | None = None
        with ExitStack() as child_streams:
            streams = [stdin, stdout, stderr]
            self.stdout = self._stderr = None
            if stdout == subprocess.PIPE:
                read_end, write_end = os.pipe()
                self.stdout = os.fdopen(read_end, "rb")
                streams[1] = child_streams.enter_context(os.fdopen(write_end, "wb"))
            if stderr == subprocess.PIPE:
                self._stderr = streams[2] = tempfile.TemporaryFile()  # noqa: SIM115
            sys.stdout.flush()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # no signal before the child is ready
            self.pid = os.fork()
            if self.pid == 0:
                for number, stream in enumerate(streams):
                    if stream is not None:
                        os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
                if self.stdout:
                    self.stdout.close()
                for fd in close_in_child:
                    os.close(fd)
                child_streams.close()
                _run_command(arguments, ignoring=ignoring, closed=closed)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def send_signal(self, number: int) -> None:
        """Send a signal; `communicate` has to reap the process before its pid can be reused."""
        os.kill(self.pid, number)

    def communicate(self) -> tuple[bytes | None, bytes | None]:
        """Wait for the exit; return the rest of stdout and all of stderr."""
        output = self.stdout.read() if self.stdout else None
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.stdout:
            self.stdout.close()
        if self._stderr is None:
            return output, None
        with self._stderr:
            self._stderr.seek(0)
            return output, self._stderr.read()


def _run_command(arguments: Sequence[str], *, ignoring: bool, closed: int | None) -> None:
    """Run the command in this process; raise SystemExit."""
    _set_actions(signal.SIG_IGN if ignoring else signal.SIG_DFL)
    if not ignoring:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _stream(1, "strict")
    sys.stderr = _stream(2, "backslashreplace")
    rich_console.err.is_interactive = os.isatty(2)  # it has seen the parent's stderr
    if closed is not None:
        os.close(closed)
        setattr(sys, ("stdin", "stdout", "stderr")[closed], None)
    sys.argv = ["tgen", *arguments]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    except KeyboardInterrupt:  # before the command starts, Python exits as silently
        sys.exit(128 + signal.SIGINT)
    __main__.main()


def _set_actions(action: signal.Handlers) -> None:
    for number in SIGNALS:
        signal.signal(number, action)


def _stream(number: int, errors: str) -> TextIO:
    """Open a standard stream as Python does."""
    line_buffered = number == 2 or os.isatty(number)
    return os.fdopen(number, "w", 1 if line_buffered else -1, "utf-8", errors, closefd=False)
