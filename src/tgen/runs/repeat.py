"""A run repeated from the record of another: the same text, tokens, settings and steps.

A run with --minutes ends by the clock, so the repetition takes the steps that it took, and decays
the learning rate as it did. On the same machine, its weights are the same bits.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen import corpus, distributed
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError, TrainingError
from tgen.lora import adapter as adapters
from tgen.lora import model_with_adapter
from tgen.lora.matrices import Pair
from tgen.machine.device import Device, choose_device, n_threads, set_threads
from tgen.reports.training import PhaseReport
from tgen.runs import rank_checks
from tgen.runs import saved_state as run_state
from tgen.runs.base_model import load_base
from tgen.runs.prepare import PreparedRun, broadcast_run, new_run_id
from tgen.runs.request import RunRequest
from tgen.runs.resuming import (
    check_corpus,
    environment_diff,
    load_progress,
    load_tokenizer,
    read_again,
    tokenize_again,
)
from tgen.runs.run_record import RunRecord, recorded_corpus
from tgen.runs.text_sources import training_documents
from tgen.runs.tokenizing import Phases
from tgen.training.state import Progress


def prepare_again(request: RunRequest, *, folder: Path | None) -> Phases[PreparedRun]:
    """Prepare the run of `request.from_run` once more, as `prepare` does a new one.

    Raise TrainingError if it has not ended, if its settings were changed on the way, or if the
    corpus or the base model has changed.
    """
    source = request.from_run
    assert source is not None
    old, tokens_entry, progress, environment = _read_run(source)
    ends, steps = progress.ends_to_repeat, old.plan.train.steps
    if steps is None:
        steps = last = progress.total_steps or 0
        ends = progress.end_history or [[last, last, last]]  # it had learned all answers
    device = choose_device(old.device if request.device == "auto" else request.device)
    rank_checks.check_same_software(device)
    memory = rank_checks.min_rank_memory(device)
    set_threads(request.threads or (None if distributed.launched() else old.threads))
    weights, pairs = yield from _load_base(old)
    record, paths = _record(request, old, device, steps), request.corpus or old.corpus
    rank_checks.check_same_corpus(paths)
    if not distributed.is_rank_zero():
        return broadcast_run(None, device, weights, pairs)
    command = f"tgen train CORPUS --from-run {shlex.quote(str(source))}"
    hint = f"restore it, or name an unchanged copy: {command}"
    try:
        text = yield from read_again(old, paths, old.reading)
    except CorpusError as error:
        if request.corpus or all(Path(path).exists() for path in paths):
            raise
        raise CorpusError(error.message, hint) from None  # the user has not named the file now
    check_corpus(source, old, text, hint)
    tokenizer = load_tokenizer(source, old)
    again = yield from tokenize_again(text, old, tokenizer, folder=folder)
    tokens = corpus.token_arrays(again.train, again.val)
    if run_state.describe_tokens(old.to_dict(), tokens) != tokens_entry:
        raise TrainingError(
            f"the corpus does not produce the tokens of the run in {source}",
            "check the version of the tokenizers library in training/run.json",
        )
    frozen = None
    if old.adapter is not None and weights is not None:
        frozen = old.adapter.frozen_model(old.plan.model, weights)
    plan = replace(record.plan, notes=[*record.plan.notes, *again.notes])
    record = replace(record, plan=plan)
    prepared = PreparedRun(
        record,
        tokenizer,
        again.train,
        again.val,
        device,
        weights,
        pairs,
        run_state.load_general(source),
        rank_checks.resolve_parallel(record.plan, device, memory, request.parallel, frozen=frozen),
        index_text=training_documents(text, record) if request.index else None,
        ends=ends,
    )
    if difference := environment_diff(environment, prepared.environment()):
        record.plan.notes.append(f"the weights may differ from those in {source}: {difference}")
    return broadcast_run(prepared, device, weights, pairs)


def _read_run(
    source: Path,
) -> tuple[RunRecord, Mapping[str, Any], Progress, Mapping[str, Any]]:
    """Return a run's record, tokens entry, counters and environment."""
    if not run_state.is_run(source):
        raise TrainingError(
            f"--from-run: {source} contains no run", "name a directory that tgen train has written"
        )
    values, tokens_entry = run_state.load_record(source)
    record = RunRecord.from_dict(values)
    if record.overridden:
        raise TrainingError(
            f"the run in {source} cannot be repeated: its settings were changed "
            f"{record.overridden[0]}",
            "start a new run with the options that you want",
        )
    saved = run_state.newest_counters(source, run_id=record.run_id)
    progress = load_progress(saved, record) if saved else None
    if not saved or not progress or progress.total_steps is None:
        raise TrainingError(
            f"the run in {source} has not ended: its number of steps is unknown",
            f"resume it first: tgen train --resume --out {shlex.quote(str(source))}",
        )
    if "end_history" not in saved.progress:
        raise TrainingError(
            f"the run in {source} cannot be repeated: it is of tgen {saved.environment['tgen']}, "
            "which did not record when the learning rate decays",
            "start a new run with the options that you want",
        )
    return record, tokens_entry, progress, saved.environment


def _record(request: RunRequest, old: RunRecord, device: Device, steps: int) -> RunRecord:
    """Return the record of a run that repeats another for a number of steps."""
    train = replace(old.plan.train, steps=steps, minutes=TrainConfig.minutes, max_steps=None)
    choices = [choice for choice in old.plan.choices if choice.name != "steps"]
    return replace(
        old,
        run_id=new_run_id(),
        corpus=recorded_corpus(request.corpus or old.corpus),
        plan=replace(old.plan, train=train, choices=choices, notes=[]),
        device=device.type,
        threads=n_threads() * distributed.ranks().local_world_size,
        tensorboard=request.tensorboard,
        log=request.log,
        index=request.index,
        command=request.command,
    )


def _load_base(
    record: RunRecord,
) -> Phases[tuple[Mapping[str, NDArray[Any]] | None, Mapping[str, Pair] | None]]:
    """Return the weights that the run started from, and the adapter that it continued."""
    if record.start_from is None:
        return None, None
    yield PhaseReport(phase="loading the model")
    if record.adapter is None:
        if not Path(record.start_from).exists():
            raise TrainingError(
                f"the model {record.start_from} that the run started from is missing",
                "restore it, or start from where it is now: --from instead of --from-run",
            )
        return model_with_adapter.load(Path(record.start_from)).arrays, None
    _, weights = load_base(record.adapter)
    pairs = None
    if record.adapter_from is not None:
        path = adapters.find_adapter(record.adapter_from)
        pairs = adapters.read(path, record.plan.model).pairs
    return weights, pairs
