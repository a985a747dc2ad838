"""Putting a run on the disk, which may be full or fail: then training goes on, and it is tried
again."""

import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen import __version__, distributed
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.model.device import describe_device
from tgen.reports import SavingReport
from tgen.runs.prepared import PreparedRun
from tgen.runs.storage.log import RunLog
from tgen.runs.storage.pending_save import PendingSave, Weights
from tgen.storage import files
from tgen.training.state import Progress, TrainState, weights_of

_LONGEST_WAIT = 60.0  # seconds until the next try
_LAST_WAITS = (0.5, 1.0, 2.0)  # seconds, where there is nothing else left to do


class CheckpointSaver:
    """Saves a run's weights and states in `out`, whose lock is held. All ranks call it alike, for
    they share the numbers; rank 0 writes."""

    def __init__(self, out: Path, prepared: PreparedRun, log: RunLog) -> None:
        self.out, self.prepared = out, prepared
        run, keep = prepared.record.run_id, prepared.record.plan.train.keep
        self.pending = PendingSave(out, log, run=run, made_by=environment(prepared), keep=keep)
        self._failures = 0  # since the last success
        self._reason = ""  # of the last
        self._next = 0.0  # by time.monotonic: the next try
        self._needed = 0  # bytes

    def save(self, state: TrainState, *, weights: bool) -> Iterator[SavingReport]:
        """Saves the state and, before it, the weights. A report where that fails, or succeeds after
        it had failed.

        Raises DivergedError where a weight is not finite.
        """
        if distributed.any_rank(not state.is_finite()):
            raise DivergedError(f"a weight became infinite at step {state.progress.step}")
        arrays = state.to_arrays()
        if weights and distributed.is_rank_zero():
            self.pending.weights = Weights(
                state.model.config,
                self.prepared.tokenizer,
                weights_of(arrays),
                self.prepared.ngrams,
            )
        yield from self._try(state.progress, arrays)

    def go_back(self, step: int) -> None:
        """See `Pending.go_back`."""
        if distributed.is_rank_zero():
            self.pending.go_back(step)

    def again(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries once more, if the last try failed long enough ago."""
        if distributed.any_rank(self._failures > 0 and time.monotonic() >= self._next):
            yield from self.save(state, weights=False)

    def finish(self, state: TrainState) -> Iterator[SavingReport]:
        """Tries for some seconds more if the last try failed; raises TrainingError in the end."""
        for seconds in _LAST_WAITS:
            if distributed.any_rank(self._failures > 0):
                time.sleep(seconds)
                yield from self._try(state.progress, state.to_arrays())
        if self._failures:
            raise TrainingError(
                f"the end of the run could not be saved in {self.out}: {self._reason}; it needs "
                f"{self._needed:,} bytes, {self._free():,} are free",
                f"see to that, then: tgen train --resume --out {shlex.quote(str(self.out))}",
            )

    def _try(
        self, progress: Progress, arrays: Mapping[str, NDArray[Any]]
    ) -> Iterator[SavingReport]:
        if not distributed.is_rank_zero():
            return
        step, self._reason = progress.step, ""
        weights = self.pending.weights.arrays if self.pending.weights else {}
        self._needed = sum(array.nbytes for array in [*arrays.values(), *weights.values()])
        try:
            self.pending.save(asdict(progress), arrays)
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
                needed_bytes=self._needed,
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


def environment(prepared: PreparedRun) -> dict[str, Any]:
    """What the numbers of a state depend on beside the run's settings."""
    return {
        "tgen": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **describe_device(prepared.device),
        "ranks": distributed.ranks().world_size,
    }


def environment_diff(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, in words; nothing: the numbers will be the same."""
    then = {"ranks": 1, **then}
    return ", ".join(
        f"{name} {then.get(name)} is {now[name]} now" for name in now if then.get(name) != now[name]
    )
