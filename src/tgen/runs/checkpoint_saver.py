"""Save the model, the log and the training state, and retry failed saves later.

A save first removes states that a rollback discarded, then writes the model, its card, the log and
the state. A run that is killed in between repeats a step; no state is ahead of its log.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen import distributed
from tgen.errors import TgenError, TrainingError
from tgen.reports.training import SavingReport
from tgen.runs import log as run_log
from tgen.runs import saved_state as run_state
from tgen.storage import files

_MAX_RETRY_SECONDS = 60.0
# `model_dir.save` or `model_with_adapter.save`; the argument left is `is_new`
SaveModel = Callable[..., None]


class CheckpointSaver:
    """Saver of the run in `out`, whose lock is held; an unsaved model waits for the next save."""

    def __init__(
        self,
        out: Path,
        log: run_log.RunLog,
        *,
        run_id: str,
        environment: Mapping[str, Any],
        keep: int,
    ) -> None:
        """See `run_state.save_state` for `run_id`, `environment` and `keep`."""
        self.out, self.log = out, log
        self._run_id, self._environment, self._keep = run_id, environment, keep
        self.is_new = False  # the next model is the first of the run
        self._model: SaveModel | None = None  # waits to be saved
        self._model_bytes = 0
        self.save_card: Callable[[], None] | None = None  # waits, too
        self._last_step: int | None = None  # the next save removes later states
        self._n_failures = 0  # since the last success
        self._reason = ""  # of the last failure
        self._retry_at = 0.0  # time.monotonic, in seconds
        self._needed_bytes = 0

    @property
    def failed(self) -> bool:
        """Whether the last save failed."""
        return self._n_failures > 0

    @property
    def retry_is_due(self) -> bool:
        """Whether the last save failed long enough ago to try again."""
        return self.failed and time.monotonic() >= self._retry_at

    def save(
        self,
        progress: Mapping[str, Any],
        arrays: Callable[[], Mapping[str, NDArray[Any]]],
        state_bytes: int,
        model: SaveModel | None = None,
        model_bytes: int = 0,
    ) -> Iterator[SavingReport]:
        """Save the `model` with weights of `model_bytes`, then the training state of `state_bytes`,
        of which each rank has the `arrays`; report a failure, and the success after it. All ranks
        must call this; rank 0 has the model."""
        if model is not None:
            self._model, self._model_bytes = model, model_bytes
        del model  # its weights are freed before `arrays` is called
        self._needed_bytes = self._model_bytes + state_bytes
        self._reason = ""
        try:
            distributed.call_together(self._write_model)
            run_state.save_state(
                self.out,
                progress,
                arrays(),
                run_id=self._run_id,
                environment=self._environment,
                keep=self._keep,
            )
        except OSError as error:
            self._reason = error.strerror or str(error)
        except TgenError as error:
            self._reason = error.message
        if self._reason:
            self._n_failures += 1
            wait = min(_MAX_RETRY_SECONDS, 2.0 ** min(self._n_failures, 10))
            self._retry_at = time.monotonic() + wait
            yield SavingReport(
                step=progress["step"],
                failed=self._reason,
                needed_bytes=self._needed_bytes,
                free_bytes=self._free_bytes(),
            )
        elif self.failed:
            self._n_failures = 0
            yield SavingReport(step=progress["step"], failed="", needed_bytes=0, free_bytes=0)

    def roll_back(self, step: int) -> None:
        """Remove states and log lines after `step`; if that fails, the next save does it."""
        self._last_step = step
        with suppress(OSError):
            self._drop_states()
        with suppress(OSError, TgenError):
            self.log.trim(step)

    def raise_if_failed(self) -> None:
        """Raise TrainingError if the last save failed."""
        if self.failed:
            raise TrainingError(
                f"cannot save the end of the run in {self.out}: {self._reason} "
                f"(needs {self._needed_bytes:,} bytes, {self._free_bytes():,} are free)",
                f"fix this, then run: tgen train --resume --out {shlex.quote(str(self.out))}",
            )

    def _write_model(self) -> None:
        """Write all but the state; on rank 0 only."""
        if not distributed.is_rank_zero():
            return
        self._drop_states()
        if self._model is not None:
            self._model(is_new=self.is_new)
        self.is_new = self.is_new and self._model is None
        self._model, self._model_bytes = None, 0
        if self.save_card is not None:
            self.save_card()
        self.save_card = None
        self.log.flush()

    def _drop_states(self) -> None:
        if self._last_step is not None:
            run_state.drop_states_after(self.out, self._last_step)
            self._last_step = None

    def _free_bytes(self) -> int:
        try:
            return files.free_bytes(self.out)
        except OSError:  # even the free space cannot be read
            return 0
