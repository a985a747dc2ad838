"""How a run begins, and how it is gone on with: all ranks alike, but that the first writes."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tgen import corpus, distributed
from tgen.errors import TgenError, TrainingError
from tgen.model.device import choose_device, set_threads
from tgen.reports import PlanReport, RunReport
from tgen.runs import rank_sync
from tgen.runs.checkpoint_saver import environment, environment_diff
from tgen.runs.load_state import counters, newest, restored
from tgen.runs.prepare import plan_report, prepare
from tgen.runs.prepared import PreparedRun
from tgen.runs.request import ResumeRequest, RunRequest
from tgen.runs.resume_overrides import apply_overrides, record_corpus_change
from tgen.runs.retokenize import retokenize, with_corpus
from tgen.runs.run_record import RunRecord
from tgen.runs.storage import log as run_log
from tgen.runs.storage import state as run_state
from tgen.runs.trainer import Stopped, Trainer
from tgen.storage import files
from tgen.storage.disk_array import Array
from tgen.tokenizer import Tokenizer
from tgen.training.report import tensorboard


def start(request: RunRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.start`; the lock is held."""
    began = time.monotonic() if request.began is None else request.began
    if request.tensorboard:
        tensorboard.require()
    out, first = request.out, distributed.is_rank_zero()
    prepared = yield from prepare(request, folder=run_state.folder(out))
    with run_log.RunLog(out if first else None) as log:
        state = prepared.new_state()
        arrays = state.to_arrays()
        if first:
            run_state.begin(
                out,
                prepared.record.to_dict(),
                prepared.tokens,
                tokenizer=prepared.tokenizer.json,
                progress=asdict(state.progress),
                arrays=arrays,
                made_by=environment(prepared),
            )
        del arrays
        tokens = _tokens(out, prepared.record.run_id)
        prepared = replace(prepared, tokens=tokens, weights=None)  # the state has them
        if first:
            _ = prepared.ngrams  # counted now, on the run's clock
        state.progress.seconds = distributed.broadcast(time.monotonic() - began)
        state.progress.setup_seconds = state.progress.seconds
        if first:
            run_state.save_progress(out, asdict(state.progress))
        yield log.add(plan_report(out, prepared))
        yield from Trainer(out, prepared, log, stopped).recorded(state)


def dry_run(request: RunRequest) -> PlanReport:
    """See `runs.dry_run`."""
    steps = prepare(request, folder=None, with_baselines=False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prepared: PreparedRun = end.value
            break
    return plan_report(request.out, prepared)


def resume(request: ResumeRequest, *, stopped: Stopped = lambda: False) -> Iterator[RunReport]:
    """See `runs.resume`; the lock is held."""
    out, first = request.out, distributed.is_rank_zero()
    kept, described = run_state.load_record(out)
    record = RunRecord.from_dict(kept)
    chosen = choose_device(record.device if request.device == "auto" else request.device)
    rank_sync.check_alike(chosen)
    set_threads(request.threads or (None if distributed.launched() else record.threads))
    if record.tensorboard:
        tensorboard.require()
    memory = rank_sync.least_memory(chosen)
    text = corpus.read(request.corpus) if request.corpus else None
    distributed.assert_same("the corpus", "" if text is None else text.sha256)
    is_other = text is not None and text.sha256 != record.corpus_sha256
    if text is not None and is_other and not request.override:
        raise TrainingError(
            f"the corpus has changed since the run in {out} began: it has {text.n_bytes:,} bytes, "
            f"and had {record.corpus_bytes:,}",
            "resume without naming it, or add --override: training/run.json will tell; or learn "
            f"the new one: --from {out} with another --out",
        )
    tokenizer, began = _tokenizer(out, record), record
    if first:
        if text is not None and is_other:
            steps = with_corpus(out, text, request.corpus, record, tokenizer)
            record, described = yield from steps
        try:
            run_state.load_tokens(out, described)
        except TgenError:
            if text is None or not record.read_bytes:
                raise
            yield from retokenize(out, text, record, tokenizer, described)
    record, described = distributed.broadcast((record, described))
    with run_log.RunLog(out if first else None) as log:
        if first:
            run_state.remove_leftovers(out)
        saved = newest(out, record)
        progress = counters(saved, record)
        changed = apply_overrides(record, request, progress)
        if is_other:
            changed = record_corpus_change(changed, began, progress)
        parallel = rank_sync.choose(changed.plan, chosen, memory, request.parallel)
        tokens = _tokens(out, record.run_id, described)
        prepared = PreparedRun(changed, tokenizer, tokens, chosen, parallel=parallel)
        state = restored(prepared, saved, progress)
        notes = [*saved.set_aside, *changed.overridden]
        if progress.step == progress.total_steps:
            notes.append(f"it has ended at step {progress.step:,}: --override --steps goes on")
        if differs := environment_diff(saved.made_by, environment(prepared)):
            notes.append(f"not to the last bit as without a break: {differs}")
        if first:
            if changed is not began:
                run_state.save_record(out, changed.to_dict(), described)
            run_state.drop_other_tokens(out, described)
        log.trim(progress.step, ways_back=progress.ways_back)
        plan = plan_report(out, prepared, step=progress.step)
        yield log.add(replace(plan, notes=[*plan.notes, *notes]))
        yield from Trainer(out, prepared, log, stopped).recorded(state)


def _tokenizer(out: Path, record: RunRecord) -> Tokenizer:
    path = run_state.folder(out) / "tokenizer.json"
    text = files.read(path)
    if record.tokenizer_sha256 not in ("", hashlib.sha256(text).hexdigest()):
        raise TrainingError(
            f"{path} has changed since the run began", f"put it back: {out} may have a copy"
        )
    return Tokenizer(text.decode(), ends=[] if record.end_of_text is None else [record.end_of_text])


def _tokens(
    out: Path, run_id: str, described: Mapping[str, Any] | None = None
) -> Mapping[str, Array]:
    """The tokens that rank 0 has put there, or found to be as described; once it has.

    Raises TrainingError on a rank that sees another run there, or none.
    """
    distributed.barrier()
    begun = (run_state.folder(out) / "run.json").exists()
    kept, noted = run_state.load_record(out) if begun else ({}, {})
    if kept.get("run_id") != run_id:
        raise TrainingError(
            f"rank {distributed.ranks().rank} does not see the run in {out}",
            "choose an --out that all machines see, on a disk that they share",
        )
    return run_state.load_tokens(out, described or noted, check=False)
