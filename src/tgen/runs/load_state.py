"""Where a run goes on from: its newest state, or an earlier one."""

from pathlib import Path

from tgen import distributed
from tgen.errors import TrainingError
from tgen.runs.prepared import PreparedRun
from tgen.runs.run_record import RunRecord
from tgen.runs.storage import state as run_state
from tgen.training.early_stopping import reset_best, reset_end
from tgen.training.state import Progress, TrainState

# Counters that an earlier state does not bring back.
_KEPT = (
    "steps_taken",
    "seconds",
    "setup_seconds",
    "evaluation_seconds",
    "skipped",
    "rollbacks",
    "ways_back",
    "rate_scale",
)


def newest(out: Path, record: RunRecord) -> run_state.SavedState:
    """The newest whole state; raises TrainingError as `load_state`, and if there is none."""
    saved = _read(out, record)
    if saved is None:
        damaged = run_state.damaged_states(out)
        left = f": {', '.join(damaged[:5])} cannot be read" if damaged else ""
        raise TrainingError(
            f"the run in {out} has lost its state{left}",
            run_state.recovery_hint(out),
        )
    return saved


def _read(
    out: Path, record: RunRecord, *, from_step: int | None = None
) -> run_state.SavedState | None:
    """As `load_state`, on all ranks; the arrays are with rank 0 alone."""
    if not distributed.is_rank_zero():
        told: run_state.SavedState | None = distributed.broadcast(None)
        return told
    saved = run_state.load_state(out, run=record.run_id, from_step=from_step)
    distributed.broadcast(saved and saved._replace(arrays={}))
    return saved


def counters(saved: run_state.SavedState, record: RunRecord) -> Progress:
    """A state's counters; what the run was asked for since counts before what they know.

    Raises TrainingError if there are others than this version has.
    """
    try:
        progress = Progress(**saved.progress)
    except TypeError:
        raise TrainingError(
            f"the state was made by tgen {saved.made_by.get('tgen')}, whose counters are others",
            "go on with that version",
        ) from None
    if progress.end_changes != record.end_changes:
        reset_end(progress, record.end_changes)
    reset_best(progress, record.corpus_changes)
    return progress


def restored(prepared: PreparedRun, saved: run_state.SavedState, progress: Progress) -> TrainState:
    """The state as it was, on the run's device."""
    state = prepared.new_state()
    state.restore(saved.arrays, progress)
    return state


def go_back(
    out: Path, record: RunRecord, state: TrainState, *, from_step: int | None = None
) -> list[str]:
    """Makes of `state` the newest one saved; with `from_step` the first that was saved there or
    later, if only the present one, which the disk may have refused. What there is to say of that.

    The time that has passed since then has passed all the same.
    """
    began, left = distributed.clock(), state.progress
    if from_step is None:
        saved = newest(out, record)
    elif found := _read(out, record, from_step=from_step):
        saved = found
    else:
        return [f"nothing from step {from_step:,} on could be saved"]
    state.restore(saved.arrays, counters(saved, record))
    for name in _KEPT:
        setattr(state.progress, name, getattr(left, name))
    state.progress.seconds += distributed.clock() - began
    state.progress.skipped_in_a_row = 0
    return saved.set_aside
