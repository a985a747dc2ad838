"""Signals to a run: the first asks it to save and stop."""

import signal
import sys
from collections.abc import Iterator
from typing import Any

from tgen import distributed
from tgen.cli import console


class StopSignal:
    """Once the run stands, the first signal asks it to save and stop; another ends the process."""

    def __init__(self) -> None:
        self.number = 0  # of the first that came
        self.running = False  # a signal is obeyed at the next step
        self.begun = False
        for number in _not_ignored():
            signal.signal(number, self._catch)

    def any(self) -> bool:
        """Whether one has come."""
        return self.number != 0

    def explain(self) -> None:
        """Says why nothing is there, where one came before there was something to save."""
        if self.number and not self.begun:
            quiet = not distributed.is_rank_zero()
            console.print_status(
                "stopped before the first step: there was nothing to save", quiet=quiet
            )

    def _catch(self, number: int, frame: Any) -> None:
        del frame
        if self.number and distributed.launched():
            return  # torchrun sends on what a terminal has sent to all; it kills who is too slow
        at_once = self.number or not self.running
        # Python drops an exception that comes while it runs a callback: then the run stops later.
        self.number = self.number or number
        if at_once:
            sys.exit(128 + number)


def listen() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def restore_default_handlers() -> None:
    """From here on a signal ends the process and says nothing: Python is on its way out."""
    for number in _not_ignored():
        signal.signal(number, signal.SIG_DFL)


def _not_ignored() -> Iterator[signal.Signals]:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            yield number
