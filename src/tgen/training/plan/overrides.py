"""Parsing of the user's field=value settings into fields of ModelConfig and TrainConfig."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args

from tgen import distributed
from tgen.config import ModelConfig
from tgen.config.option import suggest
from tgen.config.training import OLD_FIELD_NAMES, TrainConfig
from tgen.errors import UsageError

_HAVE_OPTIONS = {"family", "vocab_size", "minutes", "steps", "val_fraction", "seed", "compile"}
_NOT_SET = _HAVE_OPTIONS | {"rope_scaling"}  # read from model files only


def parse_overrides(overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the model and of the run, with values of their types.

    The user sets the batch size of one rank; the field is that of all ranks.
    """
    model_types = {f.name: f.type for f in fields(ModelConfig) if f.name not in _NOT_SET}
    train_types = {f.name: f.type for f in fields(TrainConfig) if f.name not in _NOT_SET}
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for key, text in overrides.items():
        name = OLD_FIELD_NAMES.get(key, key)
        if name != key and name in overrides:
            raise UsageError(f"--set {key}: old name of {name}, which is also set", f"remove {key}")
        if name in model_types:
            model[name] = _parse(name, text, model_types[name])
        elif name in train_types:
            train[name] = _parse(name, text, train_types[name])
        elif name in _HAVE_OPTIONS:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"--set {name}: this field has its own option", f"use {option}")
        else:
            known = sorted(model_types | train_types)
            hint = suggest(name, known) or f"choose one of {', '.join(known)}"
            raise UsageError(f"--set {name}: unknown field", hint)
    if "batch_size" in train:
        train["batch_size"] *= distributed.ranks().world_size
    return model, train


def _parse(name: str, text: str, field_type: Any) -> Any:
    """Parse text as a bool, a number or one of a Literal's values."""
    kind = field_type
    if NoneType in get_args(kind):
        kind, _ = get_args(kind)
    choices = get_args(kind)  # of a Literal
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind in (int, float):
            return kind(text)
        return choices[choices.index(text)]
    except (ValueError, KeyError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UsageError(
            f"--set {name}={text}: invalid value",
            f"set {name} to {expected.get(kind) or ' or '.join(choices)}",
        ) from None
