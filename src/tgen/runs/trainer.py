"""A run as it goes: trains, saves, samples, rolls back, and hands on every report."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from tgen import distributed
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.reports import DoneReport, EvalReport, RollbackReport, RunReport, StepReport
from tgen.runs.checkpoint_saver import CheckpointSaver
from tgen.runs.final_report import closing_reports, sample
from tgen.runs.load_state import go_back
from tgen.runs.prepared import PreparedRun
from tgen.runs.storage import log as run_log
from tgen.runs.storage import state as run_state
from tgen.training.early_stopping import begin_early_decay, evaluation_is_due
from tgen.training.loop import done_report, train
from tgen.training.report import tensorboard
from tgen.training.state import TrainState

_ROLLBACKS = 3

Stopped = Callable[[], bool]


class Trainer:
    """What saving and rolling back need to know beside the state."""

    def __init__(
        self, out: Path, prepared: PreparedRun, log: run_log.RunLog, stopped: Stopped
    ) -> None:
        self.out, self.prepared, self.log, self.stopped = out, prepared, log, stopped
        self.store = prepared.store()
        self.nothing_held_out = self.store.held_out_bytes == 0
        self.saver = CheckpointSaver(out, prepared, log)

    def recorded(self, state: TrainState) -> Iterator[RunReport]:
        """The run's reports, as TensorBoard's events too where they are wanted."""
        reports = self.reports(state)
        if self.prepared.record.tensorboard and distributed.is_rank_zero():
            folder = run_state.folder(self.out) / "tensorboard"
            reports = tensorboard.recorded(reports, folder, after_step=state.progress.step)
        yield from reports

    def reports(self, state: TrainState) -> Iterator[RunReport]:
        """The run to its end, going back where that helps."""
        record = self.prepared.record
        while True:
            left = state.progress
            try:
                yield from self._until_done(state)
                if not left.go_back:
                    return
                notes = go_back(self.out, record, state, from_step=left.best_step)
                self.saver.go_back(state.progress.step)
                begin_early_decay(state.progress, self.prepared.record.plan.train)
                reason = "the held-out text is no longer predicted better"
            except DivergedError as error:
                if left.rollbacks == _ROLLBACKS:
                    raise TrainingError(
                        f"{error.message}, after {_ROLLBACKS} returns to a good state",
                        "begin anew with --overwrite and rates below "
                        f"learning_rate={self.prepared.record.plan.train.learning_rate:g} and "
                        "matrix_learning_rate="
                        f"{self.prepared.record.plan.train.matrix_learning_rate:g}",
                    ) from None
                notes = go_back(self.out, record, state)
                self.saver.go_back(state.progress.step)
                state.progress.rollbacks = left.rollbacks + 1
                state.progress.rate_scale = left.rate_scale / 2
                reason = error.message
            state.progress.ways_back += 1
            report = RollbackReport(
                step=state.progress.step,
                left_step=left.step,
                reason="; ".join([*notes, reason]),
                rate_scale=state.progress.rate_scale,
            )
            self.log.add(report)
            with suppress(OSError, TgenError):  # a run that goes on from there finds it out again
                self.log.flush()
                if distributed.is_rank_zero():
                    run_state.save_progress(self.out, asdict(state.progress))
            yield report

    def _until_done(self, state: TrainState) -> Iterator[RunReport]:
        progress, config = state.progress, self.prepared.record.plan.train
        for report in train(state.model, self.store, config, state):
            if isinstance(report, DoneReport):
                yield from self._saved(state, weights=self.nothing_held_out)
                yield from map(self.log.add, self.saver.finish(state))
                closing = closing_reports(self.out, self.prepared, self.store, report)
                told = list(map(self.log.add, closing))
                yield from self._saved(state, weights=False)  # the end of the log
                yield from map(self.log.add, self.saver.finish(state))
                yield from told
                return
            self.log.add(report)
            due = evaluation_is_due(progress, config)
            sound = progress.skipped_in_a_row == 0
            if isinstance(report, StepReport) and due and not self.nothing_held_out:
                yield report
                continue  # its evaluation comes first: a state is saved after it, not between
            samples = list(map(self.log.add, sample(self.prepared, state))) if due else []
            # What a state's step has to say is in the log before it: a run that goes on from there
            # does not say it again.
            if isinstance(report, EvalReport):
                yield from self._saved(state, weights=report.best)
            elif due and sound:
                yield from self._saved(state, weights=True)
            elif not due and sound:
                yield from map(self.log.add, self.saver.again(state))
            yield report
            yield from samples
            if distributed.any_rank(self.stopped()) and not progress.go_back:
                done = done_report(progress, config, self.store, finished=False)
                done = self.log.add(replace(done, out=str(self.out)))
                if sound:  # better an early model than none
                    there = distributed.broadcast((self.out / "config.json").exists())
                    early = self.nothing_held_out or not there
                    yield from self._saved(state, weights=early)
                    yield from map(self.log.add, self.saver.finish(state))
                yield done
                return

    def _saved(self, state: TrainState, *, weights: bool) -> Iterator[RunReport]:
        yield from map(self.log.add, self.saver.save(state, weights=weights))
