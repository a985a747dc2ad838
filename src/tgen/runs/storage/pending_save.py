"""What a run is to have on the disk and has not yet; one save puts all of it there.

States of a way that was left go first, then come the weights, the log and the state: a run that is
killed in between comes past the same step again, and no state is ahead of its log.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.errors import TgenError
from tgen.runs.storage import log as run_log
from tgen.runs.storage import state
from tgen.tokenizer import Tokenizer


class Weights(NamedTuple):
    """A model, as `directory.save` takes it."""

    config: ModelConfig
    tokenizer: Tokenizer
    arrays: Mapping[str, NDArray[Any]]
    ngrams: Mapping[str, NDArray[Any]] | None = None


class PendingSave:
    """What waits to be saved of the run in `out`, whose lock is held."""

    def __init__(
        self,
        out: Path,
        log: run_log.RunLog,
        *,
        run: str,
        made_by: Mapping[str, Any],
        keep: int,
    ) -> None:
        """`run`, `made_by` and `keep` are those of `run_state.save_state`."""
        self.out, self.log = out, log
        self._run, self._made_by, self._keep = run, made_by, keep
        self.weights: Weights | None = None
        self._back_to: int | None = None

    def go_back(self, step: int) -> None:
        """States after this one, and what the log says of them, are of a way that was left: they go
        now or, where the disk refuses that, with the next save."""
        self._back_to = step
        with suppress(OSError):
            self._drop()
        with suppress(OSError, TgenError):
            self.log.trim(step)

    def save(self, progress: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Saves all that waits, and the state. Raises OSError or TgenError where that fails: what
        is not there yet waits for the next time."""
        self._drop()
        if self.weights is not None:
            config, tokenizer, weights, ngrams = self.weights
            model_dir.save(self.out, config, tokenizer, weights, ngrams=ngrams)
            self.weights = None
        self.log.flush()
        state.save_state(
            self.out, progress, arrays, run=self._run, made_by=self._made_by, keep=self._keep
        )

    def _drop(self) -> None:
        if self._back_to is not None:
            state.drop_states_after(self.out, self._back_to)
            self._back_to = None
