"""Settings by `--set FIELD=VALUE`, parsed by the types of the fields, and settings that a resume
changes or may not change."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from tgen import distributed
from tgen.config import ModelConfig
from tgen.config.option import MAX_WHOLE, require
from tgen.config.training import ResolvedTrainConfig, TrainConfig, settings_without_effect
from tgen.errors import TrainingError, UsageError, suggest
from tgen.planning.budget import n_steps
from tgen.planning.plan import Plan, check_settings
from tgen.runs.chat_rows import check_no_bpe_dropout
from tgen.runs.request import ResumeRequest
from tgen.runs.run_record import RunRecord
from tgen.tokenizer import Tokenizer
from tgen.training.early_stopping import reset_end
from tgen.training.state import Progress

_HAVE_OPTIONS = {"family", "vocab_size", "minutes", "steps", "val_fraction", "seed", "compile"}
# The state or the data depends on them.
_FIXED = {"optimizer", "loss_on", "val_fraction", "compile", "bigram_start", "temperature_scaling"}
_FIXED |= {"lora", "lora_alpha", "lora_targets"}
_SETS_THE_END = {"steps", "minutes", "max_steps", "decay_fraction"}
# The row of the plan's table that a changed setting makes wrong.
_ROWS = {
    "steps": "steps",
    "minutes": "steps",
    "max_steps": "steps",
    "learning_rate": "learning rate",
    "embedding_learning_rate": "learning rate",
    "matrix_learning_rate": "learning rate",
    "warmup_steps": "learning rate",
    "decay_fraction": "learning rate",
    "dropout": "dropout",
    "bpe_dropout": "BPE-dropout",
    "eval_every": "evaluation",
}


def parse_overrides(overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the model and of the run, with values of their types.

    The user sets the batch size of one rank; the field is that of all ranks.
    """
    model_types, train_types = _settable(ModelConfig), _settable(TrainConfig)
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for name, text in overrides.items():
        if name in model_types:
            model[name] = _parse(name, text, model_types[name])
        elif name in train_types:
            train[name] = _parse(name, text, train_types[name])
        elif name in _HAVE_OPTIONS:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"--set {name}: this field has its own option", f"use {option}")
        elif name in {f.name for f in (*fields(ModelConfig), *fields(TrainConfig))}:
            raise UsageError(
                f"--set {name}: this field comes from model files only", "leave it out"
            )
        else:
            known = sorted(model_types | train_types)
            hint = suggest(name.lower(), known) or f"choose one of {', '.join(known)}"
            raise UsageError(f"--set {name}: unknown field", hint)
    if "batch_size" in train:
        train["batch_size"] *= distributed.ranks().world_size
    return model, train


def _settable(config: type) -> dict[str, Any]:
    """Return the types of fields that are one bool, number or word, without None; others are only
    read from model files."""
    kinds: dict[str, Any] = {}
    for one in fields(config):
        kind: Any = one.type
        if NoneType in get_args(kind):
            kind, _ = get_args(kind)
        if one.name not in _HAVE_OPTIONS and (
            kind in (bool, int, float) or get_origin(kind) is Literal
        ):
            kinds[one.name] = kind
    return kinds


def _parse(name: str, text: str, kind: Any) -> Any:
    """Parse text as a bool, a number or one of a Literal's values."""
    choices = get_args(kind)  # of a Literal
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind in (int, float):
            number = kind(text)
            require(kind is float or abs(number) <= MAX_WHOLE, name, number, "fewer than 19 digits")
            return number
        return choices[choices.index(text)]
    except (ValueError, KeyError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UsageError(
            f"--set {name}={text}: invalid value",
            f"set {name} to {expected.get(kind) or ' or '.join(choices)}",
        ) from None


def apply_overrides(
    record: RunRecord, request: ResumeRequest, progress: Progress, tokenizer: Tokenizer
) -> RunRecord:
    """Return the record with a note of each changed setting; reset a changed end in `progress`.

    Raise TrainingError with the first difference unless `request.override`, UsageError for a
    setting that cannot be changed or that a start would refuse.
    """
    model_settings, train_settings = parse_overrides(request.overrides)
    for name, value in model_settings.items():
        old = getattr(record.plan.model, name)
        if value != old:
            raise UsageError(
                f"{name}: cannot be changed (got {value}, this run has {old})",
                "start a new run with another --out: the shape of a model is fixed",
            )
    settings = {**request.settings, **train_settings}
    for name, other in (("minutes", "steps"), ("steps", "max_steps")):
        if settings.get(name) is not None:
            settings.setdefault(other, None)
    old_values = asdict(record.plan.train)
    changed = {name: value for name, value in settings.items() if old_values[name] != value}
    if not changed:
        return record
    if fixed := changed.keys() & _FIXED:
        name = min(fixed)
        raise UsageError(
            f"{name}: cannot be changed (got {changed[name]}, this run has {old_values[name]})",
            "start a new run with another --out",
        )
    if not request.override:
        name = next(iter(changed))
        message = f"{name} differs (got {changed[name]}, this run has {old_values[name]})"
        if name == "minutes" and old_values["steps"] is not None:
            message = f"this run was started with --steps {old_values['steps']}, not --minutes"
        elif name == "steps" and old_values["steps"] is None:
            message = f"this run was started with --minutes {old_values['minutes']:g}, not --steps"
        raise TrainingError(
            message, "remove the option, or add --override, which training/run.json records"
        )
    if (steps := changed.get("steps")) is not None and steps <= progress.step:
        raise UsageError(
            f"--steps {steps}: the run is already at step {progress.step:,}",
            f"set --steps above {progress.step}",
        )
    minutes = progress.seconds / 60
    if changed.get("minutes", math.inf) <= minutes:
        raise UsageError(
            f"--minutes {changed['minutes']:g}: the run has already taken {minutes:.2f} minutes",
            "set a larger number of minutes",
        )
    config = replace(record.plan.train, **changed)
    if record.chat is not None:
        check_no_bpe_dropout(config)
    check_settings(
        config,
        record.plan.model,
        steps=_planned_steps(config, record.plan)
        if changed.keys() & {*_SETS_THE_END, "warmup_steps"}
        else None,
        has_merges=bool((tokenizer.merge_pairs >= 0).any()),
        fine_tuning=record.start_from is not None,
    )
    end_changes = record.end_changes
    if changed.keys() & _SETS_THE_END:  # older states compare this counter with their own
        end_changes += 1
        reset_end(progress, end_changes)
    has_val = record.held_out_bytes > 0
    unused = settings_without_effect(changed, config, record.plan.model, has_val=has_val)
    notes = [
        f"from step {progress.step}: {name} {_value(old_values[name])} -> {_value(value)}"
        + (f", without effect: it needs {unused[name]}" if name in unused else "")
        for name, value in changed.items()
    ]
    wrong = {_ROWS.get(name) for name in changed}
    choices = [choice for choice in record.plan.choices if choice.name not in wrong]
    plan = replace(record.plan, train=config, choices=choices)
    return replace(
        record, plan=plan, end_changes=end_changes, overridden=[*record.overridden, *notes]
    )


def _value(value: object) -> object:
    return "unset" if value is None else value


def _planned_steps(config: ResolvedTrainConfig, plan: Plan) -> int | None:
    """Return the steps that a run will have, by the speed that its plan expects; None: unknown."""
    if config.steps is not None or not plan.tokens_per_second:
        return config.steps or config.max_steps
    steps_per_second = plan.tokens_per_second / (config.batch_size * plan.context_length)
    return min(n_steps(config, steps_per_second), config.max_steps or MAX_WHOLE)
