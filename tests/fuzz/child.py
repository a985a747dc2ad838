"""The process that runs cases: its limits, and what it watches while it reads a case.

Every case ends with success or a TgenError. Anything else is a finding: another exception, memory,
a file outside the case's folder, another process, a warning, a changed signal handler, or a control
character on the terminal.
"""

import io
import os
import re
import resource
import signal
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Protocol

import tgen
from tgen.cli import console, rich_console
from tgen.errors import TgenError
from tgen.machine import memory

MAX_BYTES = 1 << 30  # of memory, above what the process has at its start
_MAX_MESSAGE = 2000  # characters of an error
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit events that change the disk, and how many of their arguments are paths
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown"), 1
    ),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copyfile"), 2),
    **dict.fromkeys(("shutil.rmtree", "shutil.copytree", "os.utime", "os.setxattr"), 1),
}
_PROCESSES = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
_PROCESSES |= {"subprocess.Popen", "socket.connect", "socket.bind", "pty.spawn", "ctypes.dlopen"}
_READABLE = [sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/usr", "/etc/localtime"]
_READABLE += [str(Path(__file__).parents[2]), str(Path(tgen.__file__).parent)]
_HARMLESS = "\n\t\u200c\u200d"  # as in `console.printable`


class Format(Protocol):
    """One kind of input."""

    prints: bool  # output is expected
    starts_processes: bool

    def change(self, i: int, rng: Random) -> str:
        """Write case `i` to the folder; return what was changed."""

    def read(self) -> None:
        """Read the case as the commands do."""


class Terminal(io.FileIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class Watch:
    """Records what must not happen while a case is read."""

    def __init__(self, folder: Path, screen: int, *, prints: bool, starts_processes: bool) -> None:
        self.problems: list[str] = []
        self._folder = str(folder) + os.sep
        self._active = False
        self._prints, self._starts_processes = prints, starts_processes
        self._screen = screen
        self._take_output()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.dont_write_bytecode = True
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # as Python does
        warnings.showwarning = self._on_warning  # type: ignore[assignment]
        sys.addaudithook(self._on_event)
        for module in (memory, sys.modules.get("tgen.machine.device")):  # a small machine
            if module is not None:
                module.free_ram = lambda *_: MAX_BYTES  # type: ignore[attr-defined]
        soft = _data_bytes() + MAX_BYTES
        resource.setrlimit(
            resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1])
        )
        self._max_kilobytes = _peak_kilobytes() + MAX_BYTES // 1024

    def run(self, read: Callable[[], None]) -> bool:
        """Read a case; return whether it was accepted. `problems` are those of the case."""
        self.problems = []
        self._active, caught = True, None
        try:
            read()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            caught = error
        finally:
            self._active = False
        if isinstance(caught, TgenError):
            self._check_message(caught)
        elif caught is not None:
            self.problems.append(_describe(caught))
        if output := self._take_output():
            self._check_text(output)
            if not self._prints:
                self.problems.append(f"output: {output[:300]!r}")
        changed = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if changed or signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            self.problems.append("Ctrl-C would be lost afterwards")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if _peak_kilobytes() > self._max_kilobytes:
            self.problems.append("more than 1 GiB of memory")
            self._max_kilobytes = _peak_kilobytes() + (1 << 18)
        return caught is None

    def _check_message(self, error: TgenError) -> None:
        text = error.message + error.hint
        if text.isprintable() and len(text) <= _MAX_MESSAGE:
            return
        self._check_text(self._take_output())
        console.print_error(error.message, error.hint)
        shown = self._take_output()
        self._check_text(shown, place(error))
        if len(shown.splitlines()) > 2 or len(shown) > 2 * _MAX_MESSAGE:
            self.problems.append(
                f"a message of {len(shown)} characters{place(error)}: {shown[:300]!r}"
            )

    def _take_output(self) -> str:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if not os.fstat(self._screen).st_size:
            return ""
        text = os.pread(self._screen, 1 << 20, 0).decode(errors="replace")
        os.ftruncate(self._screen, 0)
        return text

    def _check_text(self, text: str, where: str = "") -> None:
        controls = {
            c for c in text if c not in _HARMLESS and unicodedata.category(c) in ("Cc", "Cf")
        }
        if controls:
            self.problems.append(
                f"control characters {sorted(controls)} on the terminal{where}: {text[:300]!r}"
            )

    def _on_warning(
        self, message: object, category: type, filename: str, line: int, *_: Any
    ) -> None:
        self.problems.append(f"{category.__name__}: {message} ({filename}:{line})")

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open":
            self._check_open(*arguments)
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                if not self._inside(path):
                    self.problems.append(f"{event} of {path!r}")
        elif event in _PROCESSES and not self._starts_processes:
            self.problems.append(f"{event} {str(arguments)[:200]}")

    def _check_open(self, path: Any, _: Any, flags: Any) -> None:
        if isinstance(path, int) or self._inside(path):
            return
        real = os.path.abspath(os.fsdecode(path))
        if not any(real.startswith(folder) for folder in _READABLE):
            self.problems.append(f"opened {real[:200]!r}")
        elif isinstance(flags, int) and flags & _WRITING and not real.startswith("/dev/"):
            self.problems.append(f"opened {real[:200]!r} for writing")

    def _inside(self, path: Any) -> bool:
        return isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(self._folder)


def open_screen(folder: Path) -> int:
    """Make a file in the folder the terminal of this process; return its descriptor."""
    screen = os.open(folder / "screen", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(screen, number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(Terminal(n, "wb", closefd=False)), "utf-8", "backslashreplace"
        )
        for n in (1, 2)
    )
    os.environ |= {"TMPDIR": str(folder), "TERM": "dumb", "NO_COLOR": "1"}
    os.environ |= {"COLUMNS": "10000", "TGEN_WEIGHTS_CACHE": "0"}  # messages stay lines
    for one in (rich_console.out, rich_console.err):  # Rich takes a dumb terminal for narrow
        one._width, one._height = 10_000, 25
    return screen


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}{place(error)}"


def place(error: BaseException) -> str:
    """Return the innermost calls inside tgen."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tgen/" in f.filename]
    places = [f"{f.filename.rpartition('/tgen/')[2]}:{f.lineno}" for f in frames[-3:]]
    return f" [{' > '.join(places)}]"


def _data_bytes() -> int:
    (line,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def _peak_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
