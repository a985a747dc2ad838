"""Putting a run on the disk, which may be full or fail: then training goes on, and it is tried
again."""

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tgen import __version__, files
from tgen.checkpoint.pending import Pending, Weights
from tgen.checkpoint.run_log import RunLog
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.model.device import what_computes
from tgen.reports import SavingReport
from tgen.runs.prepare import Prepared
from tgen.training.state import TrainState

_LONGEST_WAIT = 60.0  # seconds until the next try
_LAST_WAITS = (0.5, 1.0, 2.0)  # seconds, where there is nothing else left to do


class Saver:
    """Saves a run's weights and states in `out`, whose lock is held."""

    def __init__(self, out: Path, prepared: Prepared, log: RunLog) -> None:
        self.out, self.prepared = out, prepared
        self.pending = Pending(out, log)
        self._failures = 0  # since the last success
        self._reason = ""  # of the last
        self._next = 0.0  # by time.monotonic: the next try

    def save(self, state: TrainState, *, weights: bool) -> Iterator[SavingReport]:
        """Saves the state and, before it, the weights. A report where that fails, or succeeds after
        it had failed.

        Raises DivergedError where a weight is not finite.
        """
        if not all(bool(p.isfinite().all()) for p in state.model.parameters()):
            raise DivergedError(f"a weight became infinite at step {state.progress.step}")
        if weights:
            self.pending.weights = Weights(
                state.model.config,
                self.prepared.tokenizer,
                state.model.to_arrays(),
                self.prepared.ngrams,
            )
        yield from self._try(state)

    def again(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries once more, if the last try failed long enough ago."""
        if self._failures and time.monotonic() >= self._next:
            yield from self.save(state, weights=False)

    def finish(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries for some seconds more if the last try failed; raises TrainingError in the end."""
        for seconds in _LAST_WAITS:
            if self._failures:
                time.sleep(seconds)
                yield from self._try(state)
        if self._failures:
            raise TrainingError(
                f"the end of the run could not be saved in {self.out}: {self._reason}; it needs "
                f"{self._needed(state):,} bytes, {self._free():,} are free",
                f"see to that, then: tgen train --resume --out {self.out}",
            )

    def _try(self, state: TrainState) -> Iterator[SavingReport]:
        step, self._reason = state.progress.step, ""
        try:
            self.pending.save(
                asdict(state.progress),
                state.to_arrays(),
                run=self.prepared.record.run_id,
                made_by=made_by(self.prepared),
            )
        except OSError as error:
            self._reason = error.strerror or str(error)
        except TgenError as error:
            self._reason = error.message
        if self._reason:
            self._failures += 1
            self._next = time.monotonic() + min(_LONGEST_WAIT, 2.0 ** min(self._failures, 10))
            yield SavingReport(
                step=step,
                failed=self._reason,
                needed_bytes=self._needed(state),
                free_bytes=self._free(),
            )
        elif self._failures:
            self._failures = 0
            yield SavingReport(step=step, failed="", needed_bytes=0, free_bytes=0)

    def _free(self) -> int:
        try:
            return files.free_bytes(self.out)
        except OSError:  # a disk that does not even say that
            return 0

    def _needed(self, state: TrainState) -> int:
        waiting = self.pending.weights
        arrays = [*state.to_arrays().values(), *(waiting.arrays.values() if waiting else ())]
        return sum(array.nbytes for array in arrays)


def made_by(prepared: Prepared) -> dict[str, Any]:
    """What the numbers of a state depend on beside the run's settings."""
    return {
        "tgen": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **what_computes(prepared.device),
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, in words; nothing: the numbers will be the same."""
    return ", ".join(
        f"{name} {then.get(name)} is {now[name]} now" for name in now if then.get(name) != now[name]
    )
