"""Ctrl-C, SIGTERM and SIGHUP: the first one asks a training run to save and stop.

`runs.trainer` calls `StopSignal.is_requested` after every step and saves when it returns True.
`runs.uninterrupted` makes signals wait for the import of torch.
"""

import signal
import sys
from collections.abc import Iterator
from typing import Any

from tgen import distributed
from tgen.cli import console


class StopSignal:
    """Handler of signals during training: the first requests a stop, the second exits."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0: none
        self.is_training = False  # steps check for a request; until then, signals exit at once
        self.has_started = False  # the run can be saved
        self.is_repeated = False  # a second signal came before the run was saved
        for number in _handled_signals():
            signal.signal(number, self._handle)

    def is_requested(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def explain(self) -> None:
        """Print why nothing was saved: before the first step, or after a second signal."""
        if not distributed.is_rank_zero():
            return
        if self.number and not self.has_started:
            console.print_line("stopped before the first step: nothing to save")
        elif self.number and not self.is_training:
            text = "stopped before the first step: --resume starts it again"
            console.print_line(text)
        elif self.is_repeated:
            text = "stopped at once by a second signal: --resume continues from the newest state"
            console.print_line(text)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if self.number and distributed.launched():
            return  # torchrun forwards a signal that the terminal has sent to all ranks already
        exits = self.number or not self.is_training
        self.is_repeated = self.number != 0 and self.is_training
        # If Python drops SystemExit, raised inside a callback, the first step stops the run.
        self.number = self.number or number
        if exits:
            sys.exit(128 + number)


def listen() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def restore_default_handlers() -> None:
    """Make signals end the process silently while Python exits."""
    for number in _handled_signals():
        signal.signal(number, signal.SIG_DFL)


def _handled_signals() -> Iterator[signal.Signals]:
    """Yield the signals that were not ignored from the start, as under nohup."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            yield number
