"""The summary of a run, from its record and its log; the weights are not read."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tgen.config import ModelConfig
from tgen.errors import TrainingError, UsageError
from tgen.planning.costs import flops_per_token, n_parameters
from tgen.reports.comparison import LossCurve, RunState, RunSummary
from tgen.reports.training import DivergedReport, PlanReport
from tgen.runs import log, saved_state
from tgen.runs.curves import training_curves
from tgen.runs.run_record import RunRecord

# Chosen by the measured speed: they differ between runs that are meant to be equal.
CHOSEN_BY_SPEED = ("warmup_steps", "eval_every", "eval_tokens")
_SHAPE = ("vocab_size", "context_length", "n_layers", "d_model", "n_heads")


def summarize_run(path: Path, name: str) -> RunSummary:
    """Return the summary of the run in a directory.

    Raises TgenError if its record or log is missing or damaged, or has no step.
    """
    if not saved_state.has_run(path):
        raise TrainingError("no training/run.json")
    record = RunRecord.from_dict(saved_state.load_record(path)[0])
    records = log.read(path)
    curves = training_curves(records)
    _check_order(curves.evaluation_steps, curves.evaluation_seconds)
    plan = record.plan
    model = replace(plan.model, context_length=plan.context_length)
    per_token = plan.train.passes * flops_per_token(model, frozen=record.adapter is not None)
    state, best = _state(records), curves.best_bits_per_byte
    final = curves.evaluation_bits[-1] if curves.evaluation_bits else None
    if state == "finished":  # the whole held-out text, of which evaluations may use a part
        whole = log.last_done(records).get("best_bits_per_byte")
        if isinstance(whole, float):
            best, final = whole, whole if final == best else final
    return RunSummary(
        name=name,
        path=str(path),
        run_id=record.run_id,
        state=state,
        settings=_settings(record),
        implied=_implied(plan.model),
        held_out=f"{record.corpus_sha256}, {plan.train.val_fraction}, {record.held_out_bytes}",
        changed_corpus=record.corpus_changes > 0,
        n_parameters=n_parameters(plan.model),
        steps=curves.steps[-1],
        tokens=curves.tokens or 0,
        seconds=curves.seconds[-1],
        flop=float(per_token * (curves.tokens or 0)),
        best=best,
        final=final,
        curve=LossCurve(
            step=curves.evaluation_steps,
            token=curves.evaluation_tokens,
            time=curves.evaluation_seconds,
            flop=[float(per_token * n) for n in curves.evaluation_tokens],
            bits_per_byte=curves.evaluation_bits,
        ),
    )


def _check_order(steps: Sequence[int], seconds: Sequence[float]) -> None:
    """Raise TrainingError unless steps ascend from 0 and time does not go back."""
    rising = all(a < b for a, b in pairwise([-1, *steps]))
    if not rising or not all(a <= b for a, b in pairwise([0.0, *seconds])):
        raise TrainingError("training log: the evaluations are not in order")


def _state(records: list[dict[str, Any]]) -> RunState:
    """Return whether the last session ended or diverged, and whether the run ended."""
    if records[-1]["kind"] == DivergedReport.__name__:
        return "diverged"
    sessions = [i for i, one in enumerate(records) if one["kind"] == PlanReport.__name__]
    done = log.last_done(records[sessions[-1] :] if sessions else records)
    if not done:
        return "unfinished"
    return "finished" if done.get("finished") is True else "stopped"


def _settings(record: RunRecord) -> dict[str, Any]:
    """Return all settings by name, those that tell runs apart best first."""
    plan = record.plan
    train, model = asdict(plan.train), asdict(plan.model)
    if train["steps"] is not None:
        train["minutes"] = None  # without effect
    if plan.train.lora is None:
        del train["lora_alpha"], train["lora_targets"]
    last = {name: train.pop(name) for name in ("seed", *CHOSEN_BY_SPEED)}
    settings = {
        "family": model.pop("family"),
        "size": plan.size,
        "corpus": ", ".join(Path(name).name for name in record.corpus),
        "corpus_sha256": record.corpus_sha256[:12],
        "start_from": None if record.start_from is None else Path(record.start_from).name,
        "tokenizer": record.tokenizer.value,
    }
    is_whole = plan.context_length == plan.model.context_length
    rest = {"window": None if is_whole else plan.context_length}
    machine = {"device": record.device, "threads": record.threads}
    return settings | train | model | rest | machine | last


def _implied(model: ModelConfig) -> list[str]:
    """Return the fields of a model that follow from its family and shape."""
    try:
        default = ModelConfig.of(model.family, **{name: getattr(model, name) for name in _SHAPE})
    except UsageError:  # this shape needs a head_dim
        return []
    names = [one.name for one in fields(model) if one.name not in (*_SHAPE, "family")]
    return [name for name in names if getattr(default, name) == getattr(model, name)]
