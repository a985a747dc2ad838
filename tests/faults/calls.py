"""Intercept the calls by which storage/files.py changes the disk: count, fail, shorten, or kill."""

import builtins
import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tgen.storage import files

CHANGING = ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir", "ftruncate")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))

Hook = Callable[..., Any]  # hook(name, real, *arguments, **named) -> result of the call
_write, _kill = os.write, os.kill


@contextmanager
def intercept_calls(hook: Hook) -> Iterator[None]:
    """Route every call in `CHANGING` or `open` of this process through `hook`."""
    originals = {name: getattr(os, name) for name in CHANGING}

    def redirect(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: hook(name, real, *arguments, **named)

    def open_file(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if mode.startswith("r"):
            return builtins.open(path, mode, *arguments, **named)
        return hook("open", builtins.open, path, mode, *arguments, **named)

    for name, real in originals.items():
        setattr(os, name, redirect(name, real))
    files.open = open_file  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del files.open  # type: ignore[attr-defined]
        for name, real in originals.items():
            setattr(os, name, real)


class CallCounter:
    """Hook that makes all calls and records their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.names.append(name)
        return real(*arguments, **named)


class Killer(CallCounter):
    """Hook that kills the process at call number `at`; with `torn`, after half of a write."""

    def __init__(self, at: int, *, torn: bool) -> None:
        super().__init__()
        self.at, self.torn = at, torn

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if len(self.names) + 1 == self.at:
            if name == "write" and self.torn:
                _write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            _kill(os.getpid(), signal.SIGKILL)
        return super().__call__(name, real, *arguments, **named)


class FailingCalls(CallCounter):
    """Hook that fails the calls selected by number and name; `error` None: shorten writes."""

    def __init__(self, fails: Callable[[int, str], bool], error: OSError | None) -> None:
        super().__init__()
        self.fails, self.error = fails, error
        self.names_failed: set[str] = set()

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.fails(len(self.names) + 1, name):
            self.names_failed.add(name)
            if self.error:
                self.names.append(name)
                raise OSError(*self.error.args)
            if name == "write":
                arguments = (arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
        return super().__call__(name, real, *arguments, **named)
