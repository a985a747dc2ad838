"""Progress of a phase whose length is known."""

import time
from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

from tgen.reports.training import PhaseReport

_REPORT_SECONDS = 1.0

T = TypeVar("T")


class PhaseProgress:
    """Progress of a phase, reported once per second."""

    def __init__(self, phase: str, n_units: int, *, saved: bool = False) -> None:
        """`n_units` are bytes or tokens; if `saved`, the run is on disk."""
        self._start = PhaseReport(phase=phase, saved=saved)
        self._n_units = n_units
        self._started_at = self._reported_at = time.monotonic()
        self.units_before = 0  # processed before the current `report`

    def report(self, steps: Generator[int, None, T]) -> Generator[PhaseReport, None, T]:
        """Run `steps`, which yields the number of processed units, and return its result."""
        yield self._start
        while True:
            try:
                n_done = self.units_before + next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            now = time.monotonic()
            if now - self._reported_at >= _REPORT_SECONDS:
                self._reported_at = now
                fraction = n_done / self._n_units
                left = (now - self._started_at) * (1 - fraction) / fraction
                yield replace(self._start, fraction_done=fraction, seconds_left=left)
