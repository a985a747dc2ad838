"""Start, resume or plan a run; all ranks make the same calls."""

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen import corpus, distributed
from tgen.config.input_files import Reading
from tgen.config.training import Parallel
from tgen.corpus import Tokens
from tgen.errors import TgenError, TrainingError, UsageError
from tgen.machine.description import describe_cpu
from tgen.machine.device import Device, choose_device, set_threads
from tgen.planning.memory import check_memory
from tgen.reports.training import PhaseReport, PlanReport, RunReport
from tgen.runs import log as run_log
from tgen.runs import rank_checks, tensorboard, tracking
from tgen.runs import saved_state as run_state
from tgen.runs.base_model import dequantize_base, load_base
from tgen.runs.forecast import forecast_run, times_as_long
from tgen.runs.forgetting import measure_before
from tgen.runs.overrides import apply_overrides
from tgen.runs.prepare import PreparedRun, measure_baselines, plan_report, prepare
from tgen.runs.repeat import prepare_again
from tgen.runs.request import ResumeRequest, RunRequest
from tgen.runs.resuming import (
    check_corpus,
    check_fit,
    load_newest_state,
    load_progress,
    load_tokenizer,
    read_again,
    resume_notes,
    retokenize,
    tokenize_new_corpus,
)
from tgen.runs.run_record import RunRecord
from tgen.runs.text_sources import check_index_is_supported, index_training_text, training_documents
from tgen.runs.tokenizing import Phases, broadcast_prepared
from tgen.runs.trainer import Stopped, Trainer
from tgen.tokenizer import Tokenizer
from tgen.training.early_stopping import reset_best
from tgen.training.state import Progress


def start(request: RunRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.start`; the caller holds the lock."""
    started_at = time.monotonic() if request.began is None else request.began
    if request.tensorboard:
        tensorboard.require()
    if request.log is not None:
        tracking.require(request.log)
    if request.index:
        check_index_is_supported()
    out, is_rank_zero = request.out, distributed.is_rank_zero()
    make = prepare if request.from_run is None else prepare_again
    prepared = yield from make(request, folder=run_state.folder(out))
    # The tokens of other ranks are empty so far.
    plan = distributed.broadcast(plan_report(out, prepared) if is_rank_zero else None)
    yield plan
    with run_log.RunLog(out if is_rank_zero else None) as log:
        prepared = yield from measure_baselines(prepared)
        index = None
        if prepared.index_text is not None:
            index = yield from index_training_text(prepared.record, prepared.index_text)
            prepared = replace(prepared, index_text=None)
        yield PhaseReport(phase="making the model")
        record = prepared.record
        if record.adapter is not None and prepared.weights is not None:
            adapter, weights = dequantize_base(record.adapter, prepared.weights)
            record = replace(record, adapter=adapter)
            prepared = replace(prepared, weights=weights)
            del weights
        record = replace(record, environment=prepared.environment() | describe_cpu())
        state = prepared.new_state()
        yield PhaseReport(phase="saving the first checkpoint")
        if record.start_from is not None:
            record = _check_start(record, state.hash_weights())
        prepared = replace(prepared, record=record)
        if is_rank_zero:
            distributed.set_mark(record.run_id)  # before run.json, which marks a complete run
        tokens_entry = run_state.create_run(
            out,
            prepared.record.to_dict(),
            corpus.token_arrays(prepared.train, prepared.val),
            tokenizer=prepared.tokenizer.json,
            progress=asdict(state.progress),
            arrays=state.own_arrays(),
            environment=prepared.environment(),
            general=prepared.general,
        )
        if is_rank_zero and index is not None:
            index.save(run_state.index_path(out))
        del index
        train, val = _load_tokens(out, prepared.record.run_id)
        # The state contains the weights.
        prepared = replace(prepared, train=train, val=val, weights=None, pairs=None)
        log.add(plan)
        prepared = yield from measure_before(out, prepared, state, tokens_entry)
        if is_rank_zero:
            _ = prepared.ngrams  # count them now, as part of the setup time
        state.progress.seconds = distributed.broadcast(time.monotonic() - started_at)
        state.progress.setup_seconds = state.progress.seconds
        if is_rank_zero:
            run_state.save_progress(out, asdict(state.progress))
        yield from Trainer(out, prepared, log, stopped).run(state)


def _check_start(record: RunRecord, digest: str) -> RunRecord:
    """Return the record with the digest of the weights that fine-tuning starts from; raise
    TrainingError if a run that is repeated started from others."""
    if record.start_sha256 not in ("", digest):
        raise TrainingError(
            f"the model {record.adapter_from or record.start_from} has changed since the run "
            "started from it",
            "restore the model, or fine-tune the new one: --from instead of --from-run",
        )
    return replace(record, start_sha256=digest)


def dry_run(request: RunRequest) -> Iterator[PhaseReport | PlanReport]:
    """See `runs.dry_run_reports`."""
    make = prepare if request.from_run is None else prepare_again
    prepared = yield from make(request, folder=None)
    yield plan_report(request.out, prepared)


def resume(request: ResumeRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.resume`; the caller holds the lock."""
    out, is_rank_zero = request.out, distributed.is_rank_zero()
    values, tokens_entry = run_state.load_record(out)
    old_record = record = RunRecord.from_dict(values)
    device = choose_device(record.device if request.device == "auto" else request.device)
    rank_checks.check_same_software(device)
    set_threads(request.threads or (None if distributed.launched() else record.threads))
    if record.tensorboard:
        tensorboard.require()
    if record.log is not None:
        tracking.require(record.log)
    memory = rank_checks.min_rank_memory(device)
    text, reading = None, record.reading
    rank_checks.check_same_corpus(request.corpus)
    if request.corpus and is_rank_zero:
        if request.reading:
            reading = replace(reading or Reading(), **request.reading)
        text = yield from read_again(record, request.corpus, reading)
        if not request.override:
            check_corpus(
                out,
                record,
                text,
                "resume without naming the corpus, add --override to train on the new one, or "
                f"fine-tune: --from {shlex.quote(str(out))} with another --out",
            )
    tokenizer = load_tokenizer(out, record)
    with run_log.RunLog(out if is_rank_zero else None) as log:
        yield PhaseReport(phase="loading the checkpoint")
        saved = load_newest_state(out, record)
        progress = load_progress(saved, record)
        finished = replace(progress)
        record = apply_overrides(record, request, progress, tokenizer)
        if is_rank_zero:
            check_fit(out, record, saved)
        record, weights, parallel = yield from _load_base(record, device, memory, request)
        # Only now: what is refused leaves the directory as it is.
        record, tokens_entry = yield from _check_data(
            request, text, reading, record, tokens_entry, tokenizer, progress
        )
        if is_rank_zero:
            run_state.remove_leftovers(out)
        train, val = _load_tokens(out, record.run_id, tokens_entry)
        if (train.row_lengths is None) != (record.chat is None):
            raise TrainingError(
                f"the tokens in {out} do not fit training/run.json", run_state.recovery_hint(out)
            )
        general = run_state.load_general(out)
        prepared = PreparedRun(
            record, tokenizer, train, val, device, weights, general=general, parallel=parallel
        )
        state = prepared.new_state(restored=True)
        prepared = replace(prepared, weights=None)
        del weights
        state.restore(saved.arrays, progress)
        if is_rank_zero:
            if record is not old_record:
                run_state.save_record(out, record.to_dict(), tokens_entry)
            run_state.drop_other_tokens(out, tokens_entry)
        log.trim(progress.step, n_rollbacks=progress.n_rollbacks)
        plan = plan_report(out, prepared, step=progress.step)
        times = times_as_long(old_record, record)
        if times is not None and is_rank_zero:
            forecast = forecast_run(out, old_record, finished, n_tokens=len(train.ids), times=times)
            plan = replace(plan, forecast=forecast)
        notes = resume_notes(saved, record, progress, prepared.environment())
        yield log.add(replace(plan, notes=[*plan.notes, *notes]))
        started_at = distributed.clock()
        prepared = yield from measure_before(out, prepared, state, tokens_entry)
        if progress.step == 0:
            progress.seconds += distributed.clock() - started_at
            progress.setup_seconds = progress.seconds
        yield from Trainer(out, prepared, log, stopped).run(state)


def _check_data(
    request: ResumeRequest,
    text: corpus.Corpus | None,
    reading: Reading | None,
    record: RunRecord,
    tokens_entry: Mapping[str, Any],
    tokenizer: Tokenizer,
    progress: Progress,
) -> Phases[tuple[RunRecord, Mapping[str, Any]]]:
    """Return the record and the tokens entry of the corpus to train on, which may be `text`, read
    by `reading`.

    Rank 0 checks the tokens; it replaces damaged ones if the user names the corpus.
    """
    out = request.out
    if distributed.is_rank_zero():
        if text is not None and text.sha256 != record.corpus_sha256:
            record = replace(record, reading=reading, detected_encodings=text.detected_encodings)
            record, tokens_entry = yield from tokenize_new_corpus(
                out, text, request.corpus, record, tokenizer, progress
            )
            if record.index:
                documents = training_documents(text, record)
                index = yield from index_training_text(record, documents)
                index.save(run_state.index_path(out))
        try:
            run_state.load_tokens(out, tokens_entry, vocab_size=record.plan.model.vocab_size)
        except TgenError:
            if text is None:
                raise
            yield from retokenize(out, text, record, tokenizer, tokens_entry)
    record, tokens_entry = broadcast_prepared((record, tokens_entry))
    reset_best(progress, record.corpus_changes)
    return record, tokens_entry


def _load_base(
    record: RunRecord, device: Device, memory: int | None, request: ResumeRequest
) -> Phases[tuple[RunRecord, Mapping[str, NDArray[Any]] | None, Parallel | None]]:
    """Return the base model of a LoRA run, the record with its path, and how ranks share the model,
    which must fit into their memory."""
    weights = frozen = None
    if record.adapter is None and request.start_from is not None:
        raise UsageError(
            "--from: the states of this run have all weights, so it needs no other model",
            "remove --from, or start a new run with another --out",
        )
    if record.adapter is not None:
        yield PhaseReport(phase="loading the model")
        adapter, weights = load_base(record.adapter, request.start_from)
        if adapter != record.adapter:
            record = replace(record, adapter=adapter, start_from=adapter.base_path)
        assert record.adapter is not None
        frozen = record.adapter.frozen_model(record.plan.model, weights)
    parallel = rank_checks.resolve_parallel(
        record.plan, device, memory, request.parallel, frozen=frozen
    )
    if parallel is None and device.type == "cpu":
        needs = record.plan.model, record.plan.train, record.plan.context_length
        check_memory(*needs, memory, frozen=frozen)
    return record, weights, parallel


def _load_tokens(
    out: Path, run_id: str, tokens_entry: Mapping[str, Any] | None = None
) -> tuple[Tokens, Tokens]:
    """Wait until rank 0 has written or checked the tokens, and return them.

    Raise TrainingError on a rank that does not see this run.
    """
    distributed.barrier()
    run_state.check_is_shared(out, run_id)
    entry = tokens_entry or run_state.load_record(out)[1]
    arrays = run_state.load_tokens(out, entry, check_digest=False)
    return corpus.tokens_of(arrays)
