"""Deferral of signals while a library is imported or a run is locked."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_signals() -> Iterator[None]:
    """Run Python's signal handlers after the block instead of inside it.

    An exception raised during the import of a library may be dropped, or abort its C++ code.
    """
    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    installed = {number: signal.getsignal(number) for number in numbers if number is not None}
    handlers = {number: handler for number, handler in installed.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # only the main thread gets signals
    received: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)
