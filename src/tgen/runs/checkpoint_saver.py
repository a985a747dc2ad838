"""Save the model, the log and the training state, and retry failed saves later.

A save first removes states that a rollback discarded, then writes the model, its card, the log and
the state. A run that is killed in between repeats a step; no state is ahead of its log.

In the background, a save copies what it writes; a thread of each rank writes it while the run
continues, and these threads exchange objects in a group of their own.
"""

import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen import distributed
from tgen.errors import TgenError, TrainingError
from tgen.machine.daemon_thread import in_daemon_thread
from tgen.reports.training import SavingReport
from tgen.runs import log as run_log
from tgen.runs import saved_state as run_state
from tgen.storage import files

_MAX_RETRY_SECONDS = 60.0
_CLOSE_SECONDS = 10.0  # that a run which fails waits for a save in the background
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
        in_background: bool = False,
    ) -> None:
        """See `run_state.save_state` for `run_id`, `environment` and `keep`; with `in_background`,
        all ranks must call this."""
        self.out, self.log = out, log
        self._run_id, self._environment, self._keep = run_id, environment, keep
        self._group = distributed.new_group() if in_background else None
        self._writing: Future[str] | None = None  # the reason of a failure, or ""
        self._began = 0.0  # `distributed.clock`, in seconds
        self.is_new = False  # the next model is the first of the run
        self._model: SaveModel | None = None  # waits to be saved
        self._model_bytes = 0
        self.save_card: Callable[[], None] | None = None  # waits, too
        self._step = 0  # of the last save
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

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing in the background."""
        return self._writing is not None and not self._writing.done()

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
        must call this; rank 0 has the model.

        In the background, the arrays are copies, the save before is finished first, and the reports
        of this one come from `finish`.
        """
        yield from self.finish()
        if model is not None:
            self._model, self._model_bytes = model, model_bytes
        del model  # its weights are freed before `arrays` is called
        self._needed_bytes = self._model_bytes + state_bytes
        self._step = progress["step"]
        if self._group is None:
            yield from self._report(self._write(progress, arrays))
            return
        copies, self._began = arrays(), distributed.clock()
        write = partial(self._write, progress, lambda: copies)
        self._writing = in_daemon_thread(write, name="checkpoint")

    def finish(self) -> Iterator[SavingReport]:
        """Wait for a save in the background, and report as `save`; all ranks must call this."""
        if self._writing is not None:
            reason, self._writing = self._writing.result(), None
            yield from self._report(reason)

    def finish_if_written(self) -> Generator[SavingReport, None, float]:
        """Finish a save in the background if all ranks have written, and return its seconds, else
        0; all ranks must call this."""
        if self._writing is None or distributed.any_rank(self.is_writing):
            return 0.0
        yield from self.finish()
        return distributed.clock() - self._began

    def close(self) -> None:
        """Wait until a save in the background has ended or removed what it had written."""
        if self._writing is not None:
            futures.wait([self._writing], timeout=_CLOSE_SECONDS)

    def _write(
        self, progress: Mapping[str, Any], arrays: Callable[[], Mapping[str, NDArray[Any]]]
    ) -> str:
        """Write everything; return why that failed, "" if it did not."""
        try:
            with distributed.in_group(self._group):
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
            return error.strerror or str(error)
        except TgenError as error:
            return error.message
        return ""

    def _report(self, reason: str) -> Iterator[SavingReport]:
        self._reason = reason
        if reason:
            self._n_failures += 1
            wait = min(_MAX_RETRY_SECONDS, 2.0 ** min(self._n_failures, 10))
            self._retry_at = time.monotonic() + wait
            yield SavingReport(
                step=self._step,
                failed=reason,
                needed_bytes=self._needed_bytes,
                free_bytes=self._free_bytes(),
            )
        elif self.failed:
            self._n_failures = 0
            yield SavingReport(step=self._step, failed="", needed_bytes=0, free_bytes=0)

    def roll_back(self, step: int) -> None:
        """Remove states and log lines after `step`; if that fails, the next save does it."""
        self._last_step = step
        with suppress(OSError):
            self._drop_states()
        with suppress(OSError, TgenError):
            self.log.trim(step)

    def raise_if_failed(self) -> None:
        """Raise TrainingError if the last save failed; all ranks must call this, and raise the
        same."""
        distributed.call_together(self._check_last)

    def _check_last(self) -> None:
        if self.failed and not run_state.folder(self.out).exists():
            raise TrainingError(
                f"{self.out} was moved or deleted while the run trained: its end is not saved",
                "resume it where it is now: tgen train --resume --out DIR",
            )
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
