"""The user's field=value pairs, turned into the fields of the model and of the run."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tgen import distributed
from tgen.config import ModelConfig, TrainConfig
from tgen.errors import UsageError

# These have options of their own, or come by reading.
_NOT_SET = {
    "family",
    "vocab_size",
    "rope_scaling",
    "minutes",
    "steps",
    "val_fraction",
    "seed",
    "compile",
}


def parse_overrides(overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits field=value pairs into the model's and the run's, values turned into their types.

    A batch is given as that of one rank, and becomes that of all.
    """
    kinds = {f.name: f.type for f in fields(ModelConfig) if f.name not in _NOT_SET}
    train_kinds = {f.name: f.type for f in fields(TrainConfig) if f.name not in _NOT_SET}
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for name, text in overrides.items():
        if name in kinds:
            model[name] = _value(name, text, kinds[name])
        elif name in train_kinds:
            train[name] = _value(name, text, train_kinds[name])
        elif name in _NOT_SET - {"rope_scaling"}:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"--set {name} has an option of its own", f"use {option}")
        else:
            raise UsageError(
                f"--set {name}: there is no such field",
                f"the fields are {', '.join(sorted(kinds | train_kinds))}",
            )
    if "batch_size" in train:
        train["batch_size"] *= distributed.ranks().world_size
    return model, train


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind in (int, int | None):
            return int(text)
        if kind is float:
            return float(text)
        if text in kind.__args__:  # a Literal
            return text
        raise ValueError
    except (ValueError, KeyError):
        plain = {bool: "true or false", int: "a whole number", float: "a number"}
        wanted = plain.get(kind) or (
            "a whole number" if kind == int | None else " or ".join(kind.__args__)
        )
        raise UsageError(
            f"--set {name}={text}: the value does not fit", f"{name} takes {wanted}"
        ) from None
