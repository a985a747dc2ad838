"""Putting a run on the disk, which may be full or fail: then training goes on, and it is tried
again."""

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen import __version__, distributed, files
from tgen.checkpoint import directory, run_log, run_state
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.model.device import what_computes
from tgen.reports import SavingReport
from tgen.runs.prepared import Prepared
from tgen.training.state import TrainState

_LONGEST_WAIT = 60.0  # seconds until the next try
_LAST_WAITS = (0.5, 1.0, 2.0)  # seconds, where there is nothing else left to do


class Saver:
    """Saves a run's weights and states in `out`, whose lock is held. All ranks call it alike, for
    they share the numbers; rank 0 writes."""

    def __init__(self, out: Path, prepared: Prepared, log: run_log.RunLog) -> None:
        self.out, self.prepared, self.log = out, prepared, log
        self._weights: Mapping[str, NDArray[Any]] | None = None  # that are to be on disk, and wait
        self._failures = 0  # since the last success
        self._next = 0.0  # by time.monotonic: the next try
        self._needed = 0  # bytes

    def save(self, state: TrainState, *, weights: bool) -> Iterator[SavingReport]:
        """Saves the state and, before it, the weights: a run that is killed in between comes past
        this step again. A report where that fails, or succeeds after it had failed.

        Raises DivergedError where a weight is not finite.
        """
        if distributed.any_of(not state.is_finite()):
            raise DivergedError(f"a weight became infinite at step {state.progress.step}")
        if weights:
            self._weights = state.weights()
        yield from self._try(state)

    def again(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries once more, if the last try failed long enough ago."""
        if distributed.any_of(self._failures > 0 and time.monotonic() >= self._next):
            yield from self.save(state, weights=False)

    def finish(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries for some seconds more if the last try failed; raises TrainingError in the end."""
        for seconds in _LAST_WAITS:
            if distributed.any_of(self._failures > 0):
                time.sleep(seconds)
                yield from self._try(state)
        if self._failures:
            raise TrainingError(
                f"the end of the run could not be saved in {self.out}: it needs "
                f"{self._needed:,} bytes, {files.free_bytes(self.out):,} are free",
                f"make room, then: tgen train --resume --out {self.out}",
            )

    def _try(self, state: TrainState) -> Iterator[SavingReport]:
        step, reason = state.progress.step, ""
        arrays = state.to_arrays()
        if not distributed.is_first():
            return
        self._needed = sum(a.nbytes for a in [*arrays.values(), *(self._weights or {}).values()])
        try:
            if self._weights is not None:
                directory.save(
                    self.out,
                    state.model.config,
                    self.prepared.tokenizer,
                    self._weights,
                    ngrams=self.prepared.ngrams,
                )
                self._weights = None
            self.log.flush()  # a state is never ahead of its log
            run_state.save_state(
                self.out,
                asdict(state.progress),
                arrays,
                run=self.prepared.record.run_id,
                made_by=made_by(self.prepared),
                keep=self.prepared.record.plan.train.keep,
            )
        except OSError as error:
            reason = error.strerror or str(error)
        except TgenError as error:
            reason = error.message
        if reason:
            self._failures += 1
            self._next = time.monotonic() + min(_LONGEST_WAIT, 2.0**self._failures)
            yield SavingReport(
                step=step,
                failed=reason,
                needed_bytes=self._needed,
                free_bytes=files.free_bytes(self.out),
            )
        elif self._failures:
            self._failures = 0
            yield SavingReport(step=step, failed="", needed_bytes=0, free_bytes=0)


def made_by(prepared: Prepared) -> dict[str, Any]:
    """What the numbers of a state depend on beside the run's settings."""
    return {
        "tgen": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **what_computes(prepared.device),
        "ranks": distributed.ranks().world_size,
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, in words; nothing: the numbers will be the same."""
    then = {"ranks": 1, **then}
    return ", ".join(
        f"{name} {then.get(name)} is {now[name]} now" for name in now if then.get(name) != now[name]
    )
