"""Progress of tokenizing a corpus."""

import time
from collections.abc import Generator
from typing import TypeVar

from tgen.reports.training import PhaseReport

_REPORT_SECONDS = 1.0

T = TypeVar("T")


class TokenizingProgress:
    """Tokenizing progress, reported once per second."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._started_at = self._reported_at = time.monotonic()
        self.bytes_before = 0  # bytes processed before the current `report`

    def report(self, steps: Generator[int, None, T]) -> Generator[PhaseReport, None, T]:
        """Run `steps`, which yields the number of processed bytes, and return its result."""
        yield PhaseReport(phase="tokenizing")
        while True:
            try:
                n_done = self.bytes_before + next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            now = time.monotonic()
            if now - self._reported_at >= _REPORT_SECONDS:
                self._reported_at = now
                fraction = n_done / self._n_bytes
                seconds_left = (now - self._started_at) * (1 - fraction) / fraction
                yield PhaseReport(
                    phase="tokenizing", fraction_done=fraction, seconds_left=seconds_left
                )
