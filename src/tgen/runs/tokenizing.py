"""Progress while a corpus is tokenized, and the result."""

import time
from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.corpus import TokenizedCorpus
from tgen.reports.training import PhaseReport
from tgen.runs.run_record import ChatRecord

_REPORT_SECONDS = 1.0

T = TypeVar("T")


class PreparedText(NamedTuple):
    """A corpus of texts or of conversations as tokens, and what follows from it."""

    train: TokenizedCorpus
    val: TokenizedCorpus
    notes: list[str]
    sample_prompt: bytes
    begin_of_text: int | None = None  # of texts: the id before each document
    whole_tokens: int | None = None  # of texts: estimate for all of the training split
    chat: ChatRecord | None = None  # of conversations, like the following
    inherited: InheritedSettings | None = None  # with the template and the end of an answer
    context_length: int | None = None  # tokens of a window

    @property
    def n_examples(self) -> int | None:
        """Number of conversations' examples to train on."""
        return None if self.train.row_lengths is None else len(self.train.row_lengths)


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
