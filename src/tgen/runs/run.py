"""A run as it goes: trains, saves, samples, rolls back, and hands on every report."""

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tgen import corpus, files
from tgen.checkpoint import run_log, run_state
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.model.device import choose_device, set_threads
from tgen.reports import BackReport, DoneReport, EvalReport, PlanReport, RunReport, StepReport
from tgen.runs import texts
from tgen.runs.closing import closing_reports, sample
from tgen.runs.overriding import overridden
from tgen.runs.prepare import Prepared, plan_report, prepare
from tgen.runs.record import RunRecord
from tgen.runs.request import ResumeRequest, RunRequest
from tgen.runs.restoring import counters, earlier, newest, restored
from tgen.runs.saving import Saver, differences, made_by
from tgen.stored import Array
from tgen.tokenizer import Tokenizer
from tgen.training import tensorboard
from tgen.training.loop import done_report, train
from tgen.training.schedule import begin_early_decay, evaluation_is_due
from tgen.training.state import TrainState

_ROLLBACKS = 3

Stopped = Callable[[], bool]


def start(request: RunRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.start`; the lock is held."""
    began = time.monotonic() if request.began is None else request.began
    if request.tensorboard:
        tensorboard.require()
    prepared = yield from prepare(request, folder=run_state.folder(request.out))
    with run_log.RunLog(request.out) as log:
        state = prepared.new_state()
        run_state.begin(
            request.out,
            prepared.record.to_dict(),
            prepared.tokens,
            tokenizer=prepared.tokenizer.json,
            progress=asdict(state.progress),
            arrays=state.to_arrays(),
            made_by=made_by(prepared),
        )
        tokens = run_state.load_tokens(request.out, {})  # just written: they need no check
        prepared = replace(prepared, tokens=tokens, weights=None)  # the state has them
        _ = prepared.ngrams  # counted now, on the run's clock
        state.progress.seconds = state.progress.setup_seconds = time.monotonic() - began
        run_state.save_progress(request.out, asdict(state.progress))
        yield log.add(plan_report(request.out, prepared, state))
        yield from _Run(request.out, prepared, log, stopped).recorded(state)


def dry_run(request: RunRequest) -> PlanReport:
    """See `runs.dry_run`."""
    steps = prepare(request, folder=None, with_baselines=False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prepared: Prepared = end.value
            break
    return plan_report(request.out, prepared, prepared.new_state())


def resume(request: ResumeRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.resume`; the lock is held."""
    out = request.out
    kept, described = run_state.load_record(out)
    record = RunRecord.from_dict(kept)
    chosen = choose_device(record.device if request.device == "auto" else request.device)
    set_threads(request.threads or record.threads)
    if record.tensorboard:
        tensorboard.require()
    text = corpus.read(request.corpus) if request.corpus else None
    if text is not None and text.sha256 != record.corpus_sha256:
        raise TrainingError(
            f"the corpus has changed since the run in {out} began: it has {text.n_bytes:,} bytes, "
            f"and had {record.corpus_bytes:,}",
            f"resume without naming it, or learn the new one: --from {out} with another --out",
        )
    tokenizer = _tokenizer(out, record)
    try:
        tokens = run_state.load_tokens(out, described)
    except TgenError:
        if text is None or not record.read_bytes:
            raise
        tokens = yield from _tokenised_anew(out, text, record, tokenizer, described)
    with run_log.RunLog(out) as log:
        run_state.remove_leftovers(out)
        saved = newest(out, record)
        progress = counters(saved, record)
        changed = overridden(record, request, progress)
        prepared = Prepared(changed, tokenizer, tokens, chosen)
        state = restored(prepared, saved, progress)
        notes = [*saved.set_aside, *changed.overridden]
        if differs := differences(saved.made_by, made_by(prepared)):
            notes.append(f"not to the last bit as without a break: {differs}")
        if changed is not record:
            run_state.save_record(out, changed.to_dict(), described)
        log.trim(state.progress.step, ways_back=state.progress.ways_back)
        plan = plan_report(out, prepared, state)
        yield log.add(replace(plan, notes=[*plan.notes, *notes]))
        yield from _Run(out, prepared, log, stopped).recorded(state)


def _tokenizer(out: Path, record: RunRecord) -> Tokenizer:
    path = run_state.folder(out) / "tokenizer.json"
    text = files.read(path)
    if record.tokenizer_sha256 not in ("", hashlib.sha256(text).hexdigest()):
        raise TrainingError(
            f"{path} has changed since the run began", "put it back, or start with --overwrite"
        )
    return Tokenizer(text.decode(), ends=[] if record.end_of_text is None else [record.end_of_text])


def _tokenised_anew(
    out: Path,
    text: corpus.Corpus,
    record: RunRecord,
    tokenizer: Tokenizer,
    described: Mapping[str, Any],
) -> Generator[RunReport, None, dict[str, Array]]:
    """The run's tokens from its corpus, which is the same; on the disk, where they were damaged."""
    config, folder = record.plan.train, run_state.folder(out)
    found = texts.split(text, config, record.read_bytes)
    both = yield from texts.tokenised(found, tokenizer, config, folder=folder)
    if run_state.save_tokens(out, record.to_dict(), corpus.arrays(*both)) != described:
        raise TrainingError(
            f"the corpus gives other tokens than those the run in {out} began with",
            "the tokenizers library may be of another version: start with --overwrite",
        )
    return run_state.load_tokens(out, described)


class _Run:
    """What saving and rolling back need to know beside the state."""

    def __init__(
        self, out: Path, prepared: Prepared, log: run_log.RunLog, stopped: Stopped
    ) -> None:
        self.out, self.prepared, self.log, self.stopped = out, prepared, log, stopped
        self.store = prepared.store()
        self.nothing_held_out = self.store.held_out_bytes == 0
        self.saver = Saver(out, prepared, log)

    def recorded(self, state: TrainState) -> Iterator[RunReport]:
        """The run's reports, as TensorBoard's events too where they are wanted."""
        reports = self.reports(state)
        if self.prepared.record.tensorboard:
            folder = run_state.folder(self.out) / "tensorboard"
            reports = tensorboard.recorded(reports, folder, after_step=state.progress.step)
        yield from reports

    def reports(self, state: TrainState) -> Iterator[RunReport]:
        """The run to its end, going back where that helps."""
        while True:
            left = state.progress
            try:
                yield from self._until_done(state)
                if not left.go_back:
                    return
                state, notes = earlier(self.out, self.prepared, state, from_step=left.best_step)
                self.saver.pending.go_back(state.progress.step)
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
                state, notes = earlier(self.out, self.prepared, state)
                self.saver.pending.go_back(state.progress.step)
                state.progress.rollbacks = left.rollbacks + 1
                state.progress.rate_scale = left.rate_scale / 2
                reason = error.message
            state.progress.ways_back += 1
            report = BackReport(
                step=state.progress.step,
                left_step=left.step,
                reason="; ".join([*notes, reason]),
                rate_scale=state.progress.rate_scale,
            )
            self.log.add(report)
            with suppress(OSError, TgenError):  # a run that goes on from there finds it out again
                self.log.flush()
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
            if self.stopped() and not progress.go_back:
                done = done_report(progress, config, self.store, finished=False)
                done = self.log.add(replace(done, out=str(self.out)))
                if sound:  # better an early model than none
                    early = self.nothing_held_out or not (self.out / "config.json").exists()
                    yield from self._saved(state, weights=early)
                    yield from map(self.log.add, self.saver.finish(state))
                yield done
                return

    def _saved(self, state: TrainState, *, weights: bool) -> Iterator[RunReport]:
        yield from map(self.log.add, self.saver.save(state, weights=weights))
