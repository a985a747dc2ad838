"""Where a run goes on from: its newest state, or an earlier one."""

from pathlib import Path

from tgen import distributed
from tgen.checkpoint import run_state
from tgen.errors import TrainingError
from tgen.runs.prepared import Prepared
from tgen.runs.record import RunRecord
from tgen.training.schedule import forget_end, judge_anew
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


def newest(out: Path, record: RunRecord) -> run_state.Saved:
    """The newest whole state; raises TrainingError as `load_state`, and if there is none."""
    saved = _read(out, record)
    if saved is None:
        damaged = run_state.damaged_states(out)
        left = f": {', '.join(damaged[:5])} cannot be read" if damaged else ""
        raise TrainingError(
            f"the run in {out} has lost its state{left}",
            run_state.otherwise(out),
        )
    return saved


def _read(out: Path, record: RunRecord, *, from_step: int | None = None) -> run_state.Saved | None:
    """As `load_state`, on all ranks; the arrays are with rank 0 alone."""
    if not distributed.is_first():
        told: run_state.Saved | None = distributed.from_first(None)
        return told
    saved = run_state.load_state(out, run=record.run_id, from_step=from_step)
    distributed.from_first(saved and saved._replace(arrays={}))
    return saved


def counters(saved: run_state.Saved, record: RunRecord) -> Progress:
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
        forget_end(progress, record.end_changes)
    judge_anew(progress, record.corpus_changes)
    return progress


def restored(prepared: Prepared, saved: run_state.Saved, progress: Progress) -> TrainState:
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
