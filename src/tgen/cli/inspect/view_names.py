"""The views of `tgen inspect`, and what they need. Nothing here loads torch."""

from enum import StrEnum


class View(StrEnum):
    """What can be shown."""

    attention = "attention"
    heads = "heads"
    tokens = "tokens"
    predict = "predict"
    lens = "lens"
    why = "why"
    positions = "positions"
    rollout = "rollout"
    model = "model"
    training = "training"
    verify = "verify"


TEXTLESS = {View.positions, View.model, View.training}
MATRICES = (View.attention, View.rollout, View.positions)  # that pictures can be drawn of
# The views that an option is for.
USED_BY = {
    "--layer": {View.attention, View.heads, View.rollout},
    "--head": {View.attention, View.heads},
    "--top": {View.attention, View.rollout, View.predict, View.lens, View.why},
    "--cells": set(MATRICES),
    "--scale": set(MATRICES),
    "--query": {View.attention, View.rollout, View.tokens, View.predict, View.lens, View.why},
    "--keys": set(MATRICES),
    "--hide-first": {View.attention, View.rollout},
    "--target": {View.why},
    "--ablate": {View.heads},
    "--measure": {View.attention},
}
NO_TABLE = (View.model, View.training, View.verify)  # that are no rows of numbers
