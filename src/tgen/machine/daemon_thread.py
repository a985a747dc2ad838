"""Call a function in a thread for which the end of the process does not wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Return the future result of `function()`, called in a new thread."""
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(function, result), name=name, daemon=True).start()
    return result


def _run(function: Callable[[], T], result: Future[T]) -> None:
    # Not a closure: `traceback.clear_frames` of an error would leave its cells.
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
