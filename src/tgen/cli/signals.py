"""Ctrl-C, SIGTERM and SIGHUP: the first one asks a training run to save and stop.

`runs.trainer` calls `StopSignal.is_requested` after every step and saves when it returns True.
"""

import signal
import sys
from collections.abc import Iterator
from typing import Any

from tgen import distributed
from tgen.cli import console


class StopSignal:
    """While a run trains, the first signal requests a stop, and the second ends the process."""

    def __init__(self) -> None:
        self.number = 0  # number of the first signal
        self.is_training = False  # a step will notice the request; before, a signal exits at once
        self.has_started = False  # there is a run to save
        for number in _handled_signals():
            signal.signal(number, self._handle)

    def is_requested(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def explain(self) -> None:
        """Print why nothing was saved, if a signal arrived before the first step."""
        if self.number and not self.has_started:
            console.print_status(
                "stopped before the first step: nothing to save",
                quiet=not distributed.is_rank_zero(),
            )

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if self.number and distributed.launched():
            return  # torchrun forwards a signal that the terminal has already sent to all ranks
        exits = self.number or not self.is_training
        # Python drops an exception raised inside a callback: then the first step stops the run.
        self.number = self.number or number
        if exits:
            sys.exit(128 + number)


def listen() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def restore_default_handlers() -> None:
    """Make a signal end the process silently, while Python exits."""
    for number in _handled_signals():
        signal.signal(number, signal.SIG_DFL)


def _handled_signals() -> Iterator[signal.Signals]:
    """Yield the signals that were not ignored from the start, as under nohup."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            yield number
