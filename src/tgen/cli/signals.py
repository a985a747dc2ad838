"""Signals to a run: the first asks it to save and stop."""

import signal
import sys
from typing import Any

from tgen import distributed
from tgen.cli import console


class Signals:
    """Once the run stands, the first signal asks it to save and stop; another ends the process."""

    def __init__(self) -> None:
        self.number = 0
        self.running = False  # a signal is obeyed at the next step
        self.begun = False
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._catch)

    def any(self) -> bool:
        """Whether one has come."""
        return self.number != 0

    def _catch(self, number: int, frame: Any) -> None:
        del frame
        if self.number and distributed.launched():
            return  # torchrun sends on what a terminal has sent to all; it kills who is too slow
        if self.number or not self.running:
            if not self.begun:
                quiet = not distributed.is_first()
                console.note(
                    "stopped before the first step: there was nothing to save", quiet=quiet
                )
            sys.exit(128 + number)
        self.number = number
