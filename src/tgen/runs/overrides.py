"""Settings of the model and the run by `--set FIELD=VALUE`, parsed by the types of the fields."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from tgen import distributed
from tgen.config import ModelConfig
from tgen.config.option import MAX_WHOLE, require, suggest
from tgen.config.training import TrainConfig
from tgen.errors import UsageError

_HAVE_OPTIONS = {"family", "vocab_size", "minutes", "steps", "val_fraction", "seed", "compile"}


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
            hint = suggest(name, known) or f"choose one of {', '.join(known)}"
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
