"""Train a prepared run: log, save, sample and roll back, as an iterator of reports."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tgen import distributed
from tgen.checkpoint import model_dir
from tgen.checkpoint.stored_models import is_model_directory
from tgen.config.training import SHARDED
from tgen.errors import DivergedError, TgenError, TrainingError
from tgen.lora import adapter as adapters
from tgen.lora import layers, model_with_adapter
from tgen.model.transformer import Transformer
from tgen.reports.training import (
    DivergedReport,
    DoneReport,
    EvalReport,
    PhaseReport,
    RollbackReport,
    RunReport,
    SavingReport,
    StepReport,
)
from tgen.runs import log as run_log
from tgen.runs import saved_state as run_state
from tgen.runs import tensorboard, tracking
from tgen.runs.checkpoint_saver import CheckpointSaver, SaveModel
from tgen.runs.forecast import forecast_run
from tgen.runs.forgetting import general_bits_per_byte
from tgen.runs.memorization import measure_memorization
from tgen.runs.model_card import save_card
from tgen.runs.output_folder import lacks_model
from tgen.runs.prepare import PreparedRun
from tgen.runs.resuming import roll_back
from tgen.runs.samples import sample
from tgen.training.early_stopping import decay_from_best
from tgen.training.evaluation import evaluate_alone, tokens_for_error
from tgen.training.loop import done_report, evaluation_is_due, train
from tgen.training.state import TrainState
from tgen.training.temperature_scaling import scale_logits

_MAX_DIVERGENCES = 3
_FINAL_RETRY_SECONDS = (0.5, 1.0, 2.0)  # delays between attempts at the final save

_RELATIVE_ERROR = 0.002  # of the last evaluation: less than runs with other seeds differ by
_LONG_CLOSING = 1.5  # seconds: evaluations and samples take long enough to be named

Stopped = Callable[[], bool]
Save = Callable[[], Iterable[SavingReport]]


class Trainer:
    """Training session of a prepared run; all ranks make the same calls, and rank 0 writes."""

    def __init__(
        self, out: Path, prepared: PreparedRun, log: run_log.RunLog, stopped: Stopped
    ) -> None:
        """If `stopped`, called after every step, returns True, save the run and end."""
        self.out, self.prepared, self.log, self.stopped = out, prepared, log, stopped
        self.dataset = prepared.dataset()
        self.has_val = self.dataset.val_bytes > 0
        self.answers = prepared.answers
        self.saver = CheckpointSaver(
            out,
            log,
            run_id=prepared.record.run_id,
            environment=prepared.environment(),
            keep=prepared.record.plan.train.keep_checkpoints,
            in_background=prepared.parallel in SHARDED,
        )

    def run(self, state: TrainState) -> Iterator[RunReport]:
        """Yield the run's reports, and log them for other programs if requested."""
        has_saved = state.progress.best_bits_per_byte is not None or not self.has_val
        self.saver.is_new = state.progress.step == 0 or not has_saved
        yield from self._restore_lost_model(state)
        self.names_phases = state.progress.closing_seconds > _LONG_CLOSING
        yield PhaseReport(phase="first step", saved=True)
        reports = self._train_with_rollbacks(state)
        record, step = self.prepared.record, state.progress.step
        if record.tensorboard and distributed.is_rank_zero():
            folder = run_state.folder(self.out) / "tensorboard"
            open_log: Callable[[], tracking.EventLog]
            open_log = partial(tensorboard.EventFile, folder, step)
            reports = tracking.write_events(reports, open_log, after_step=step)
        if record.log is not None and distributed.is_rank_zero():
            name = self.out.resolve().name
            open_log = partial(tracking.Tracker, record.log, record, name, step)
            reports = tracking.write_events(reports, open_log, after_step=step)
        try:
            yield from reports
        finally:
            self.saver.close()

    def _restore_lost_model(self, state: TrainState) -> Iterator[RunReport]:
        """Write the model of the best step again from its state, if files of it are gone."""
        record = self.prepared.record
        is_lost = lacks_model(self.out, has_adapter=record.adapter is not None)
        was_saved = self.has_val and state.progress.best_bits_per_byte is not None
        if was_saved and distributed.broadcast(is_lost):
            yield PhaseReport(phase="writing the model again", saved=True)
            roll_back(self.out, record, state, from_step=state.progress.best_step)
            if to_save := self._model_to_save(state):
                to_save[0](is_new=True)
            roll_back(self.out, record, state)

    def _train_with_rollbacks(self, state: TrainState) -> Iterator[RunReport]:
        """Train to the end; early stopping restores the best state, divergence the newest."""
        record = self.prepared.record
        config = record.plan.train
        while True:
            discarded = state.progress
            try:
                for reports, save in self._train(state):
                    yield from self._log_and_save(reports, save)
                if not discarded.restore_best:
                    return
                yield from self._log_and_save([], self.saver.finish)
                notes = roll_back(self.out, record, state, from_step=discarded.best_step)
                decay_from_best(state.progress, config)
                reason = "validation loss stopped improving"
            except DivergedError as error:
                if discarded.n_divergences == _MAX_DIVERGENCES:
                    self.log.add(DivergedReport(step=discarded.step, reason=error.message))
                    raise TrainingError(
                        f"{error.message}, after {_MAX_DIVERGENCES} rollbacks",
                        "start again with --overwrite and lower learning rates than "
                        f"{config.rates}",
                    ) from None
                yield from self._log_and_save([], self.saver.finish)
                notes = roll_back(self.out, record, state)
                state.progress.n_divergences = discarded.n_divergences + 1
                state.progress.learning_rate_scale = discarded.learning_rate_scale / 2
                reason = error.message
            if distributed.is_rank_zero():
                self.saver.roll_back(state.progress.step)
            state.progress.n_rollbacks += 1
            report = RollbackReport(
                step=state.progress.step,
                from_step=discarded.step,
                reason="; ".join([*notes, reason]),
                learning_rate_scale=state.progress.learning_rate_scale,
            )
            yield from self._log_and_save([report], partial(self._save_counters, state))

    def _log_and_save(self, reports: list[RunReport], save: Save | None) -> Iterator[RunReport]:
        """Log, save, then yield: a state never precedes its log, nor a report the data on disk
        unless the saver writes in the background."""
        for report in reports:
            if not isinstance(report, PhaseReport):
                self.log.add(report)
        for saving_report in save() if save else ():
            yield self.log.add(saving_report)
        yield from reports

    def _train(self, state: TrainState) -> Iterator[tuple[list[RunReport], Save | None]]:
        """Yield reports and the save to make after them, until the run ends or must roll back."""
        progress, config = state.progress, self.prepared.record.plan.train
        evaluates = self.has_val or self.answers is not None
        for report in train(state.model, self.dataset, config, state, answers=self.answers):
            if isinstance(report, DoneReport):
                yield [], partial(self._save_final, state, model=not self.has_val)
                final: list[RunReport] = []
                for final_report in self._final_reports(report, state):
                    if isinstance(final_report, PhaseReport):
                        yield [final_report], None
                    else:
                        final.append(final_report)
                self.saver.save_card = self._card(final)
                yield final, partial(self._save_final, state, model=False)
                return
            is_due = evaluation_is_due(progress, config)
            is_sound = progress.consecutive_skips == 0
            if isinstance(report, StepReport) and is_due and evaluates:
                yield [report, *self._phase("evaluating")], None  # save the state after it
                continue
            if is_due:
                yield self._phase("writing a sample, saving"), None
                yield [], self.saver.finish  # its copy of the model is freed before the next one
            save: Save | None = None
            if isinstance(report, EvalReport):
                save = partial(self._save, state, model=report.best)
            elif is_sound and is_due:
                save = partial(self._save, state, model=True)
            elif is_sound:
                save = partial(self._retry, state)
            yield [report, *(sample(self.prepared, state) if is_due else [])], save
            if distributed.any_rank(self.stopped()) and not progress.restore_best:
                yield [], self.saver.finish
                done = done_report(progress, self.dataset, finished=False)
                save = None
                if is_sound:
                    has_model = distributed.broadcast(is_model_directory(self.out))
                    model = not self.has_val or not has_model  # save an early model if none exists
                    save = partial(self._save_final, state, model=model)
                self.saver.save_card = self._card([done])
                yield [replace(done, out=str(self.out))], save
                return

    def _card(self, reports: list[RunReport]) -> Callable[[], None]:
        """Return how to write the model card with these results."""
        return partial(save_card, self.out, self.prepared.record, reports)

    def _phase(self, name: str) -> list[RunReport]:
        """Return the report of a phase between steps if such phases are long."""
        return [PhaseReport(phase=name, saved=True)] if self.names_phases else []

    def _save(self, state: TrainState, *, model: bool) -> Iterator[SavingReport]:
        """Save the state, and the weights if `model`; raise DivergedError if any is not finite."""
        if distributed.any_rank(not state.is_finite()):
            raise DivergedError(f"a weight became infinite or NaN at step {state.progress.step}")
        yield from self.saver.save(
            asdict(state.progress),
            state.own_arrays,
            state.n_bytes,
            *(self._model_to_save(state) if model else ()),
        )

    def _model_to_save(self, state: TrainState) -> tuple[SaveModel, int] | tuple[()]:
        """Return how to save the model or the adapter of the state, and the bytes of its arrays, on
        rank 0; nothing on the others, which must call this, too."""
        record, adapter = self.prepared.record, self.prepared.new_adapter
        weights = {} if adapter is not None else state.copy_weights()
        weights = scale_logits(weights, state.model.config, state.progress.logit_scale)
        if not distributed.is_rank_zero():
            return ()
        described = self.out, state.model.config, self.prepared.tokenizer
        if record.adapter is not None and adapter is not None:
            pairs = layers.pairs_of(state.model, adapter.layout, adapter.shapes)
            save = partial(
                model_with_adapter.save,
                *described,
                pairs,
                base=record.adapter.base,
                base_digest=record.adapter.base_digest,
                alpha=record.adapter.alpha,
                inherited=record.inherited,
            )
            return save, sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
        ngrams, inherited = self.prepared.ngrams, record.inherited
        save = partial(model_dir.save, *described, weights, ngrams=ngrams, inherited=inherited)
        return save, sum(array.nbytes for array in weights.values())

    def _retry(self, state: TrainState) -> Iterator[SavingReport]:
        """Save again if the last save failed a while ago."""
        if seconds := (yield from self.saver.finish_if_written()):
            state.progress.saving_seconds = seconds
        if distributed.any_rank(self.saver.retry_is_due):
            yield from self._save(state, model=False)

    def _save_final(self, state: TrainState, *, model: bool) -> Iterator[SavingReport]:
        """Save, and retry for a few seconds; raise TrainingError if that fails."""
        yield from self.saver.finish()  # its copy of the model is freed before the next one
        yield from self._save(state, model=model)
        yield from self.saver.finish()
        for seconds in _FINAL_RETRY_SECONDS:
            if distributed.any_rank(self.saver.failed):
                time.sleep(seconds)
                yield from self._save(state, model=False)
                yield from self.saver.finish()
        self.saver.raise_if_failed()

    def _save_counters(self, state: TrainState) -> Iterable[SavingReport]:
        """Save the counters after a rollback; if that fails, a resumed run rolls back again."""
        with suppress(OSError, TgenError):
            self.log.flush()
            if distributed.is_rank_zero():
                run_state.save_progress(self.out, asdict(state.progress))
        return ()

    def _final_reports(self, done: DoneReport, state: TrainState) -> Iterator[RunReport]:
        """Yield the memorization report of the best model, except of one trained on conversations,
        and the DoneReport; on rank 0 only."""
        if not distributed.is_rank_zero():
            return
        out, prepared, dataset = self.out, self.prepared, self.dataset
        with self._best_model(state) as model:
            plan = prepared.record.plan
            n_val, eval_tokens = len(dataset.val.ids), plan.train.eval_tokens
            if plan.evaluated_tokens is not None:  # the time is limited
                parts = state.progress.best_parts
                needed = tokens_for_error(parts, min(n_val, eval_tokens), _RELATIVE_ERROR)
                n_val = min(n_val, plan.evaluated_tokens, needed)
            if eval_tokens < n_val:  # only a part was
                yield PhaseReport(phase="evaluating more held-out text", saved=True)
                last = evaluate_alone(model, dataset, max_tokens=n_val)
                done = replace(done, best_bits_per_byte=last.bits_per_byte)
            if prepared.record.chat is None:
                yield PhaseReport(phase="measuring memorization", saved=True)
                yield measure_memorization(prepared, dataset, done, model)
            before, after, n_tokens = prepared.record.general_bits_per_byte, None, 0
            if before is not None:
                yield PhaseReport(phase="evaluating the general text", saved=True)
                after = general_bits_per_byte(model, prepared.tokenizer, prepared.general)
                n_tokens = len(prepared.tokenizer.encode_corpus(prepared.general)[0])
        yield replace(
            done,
            out=str(out),
            sample_prompt=prepared.record.sample_prompt,
            baselines=prepared.record.baselines,
            general_before=before,
            general_after=after,
            general_tokens=n_tokens,
            forecast=forecast_run(
                out,
                prepared.record,
                state.progress,
                n_tokens=len(prepared.train.ids),
                best=done.best_bits_per_byte,
            ),
        )

    @contextmanager
    def _best_model(self, state: TrainState) -> Iterator[Transformer]:
        """Yield the model that was saved; an adapter is loaded into the running model for a while,
        so that its base is not in memory twice."""
        prepared, adapter = self.prepared, self.prepared.new_adapter
        if adapter is None:
            bundle = model_with_adapter.load(self.out)
            model = Transformer.from_arrays(bundle.config, bundle.arrays)
            if prepared.parallel not in SHARDED:  # a GPU may be too small for the whole model
                model = model.to(prepared.device)
            yield model
            return
        newest = layers.pairs_of(state.model, adapter.layout, adapter.shapes)
        best = adapters.read(self.out, state.model.config)
        layers.load_pairs(state.model, adapter.layout, best.pairs)
        try:
            yield state.model.eval()
        finally:
            layers.load_pairs(state.model, adapter.layout, newest)
