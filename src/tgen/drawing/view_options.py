"""The views of `tgen inspect` and `Model.inspect`, and their options: checked without torch."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

from tgen.config import SamplingConfig
from tgen.config.index_ranges import PARTS, PATCHED_PARTS
from tgen.config.option import option
from tgen.drawing import Cells, Scale
from tgen.errors import UsageError

SELECTION, SAMPLING, DRAWING = "Selection", "Sampling", "Drawing"  # panels of the help


class View(StrEnum):
    """Values of `--view`."""

    attention = "attention"
    heads = "heads"
    tokens = "tokens"
    predict = "predict"
    lens = "lens"
    why = "why"
    ablation = "ablation"
    patch = "patch"
    positions = "positions"
    rollout = "rollout"
    sources = "sources"
    model = "model"
    training = "training"
    verify = "verify"


VIEWS_WITHOUT_TEXT = {View.positions, View.model, View.training}
MATRIX_VIEWS = (View.attention, View.rollout, View.positions, View.patch)
_QUERY_VIEWS = {
    View.attention,
    View.rollout,
    View.tokens,
    View.predict,
    View.lens,
    View.why,
    View.patch,
}
VIEWS_BY_FIELD = {
    "layer": {View.attention, View.heads, View.rollout},
    "head": {View.attention, View.heads},
    "top": {
        *(View.attention, View.rollout, View.predict, View.lens, View.why, View.sources),
        *(View.ablation, View.patch),
    },
    "cells": set(MATRIX_VIEWS),
    "scale": {*MATRIX_VIEWS} - {View.patch},
    "query": _QUERY_VIEWS,
    "keys": {*MATRIX_VIEWS, View.why},
    "hide_first": {View.attention, View.rollout},
    "target": {View.why, View.patch},
    "contrast": {View.patch},
    "patch": {View.patch},
    "parts": {View.patch},
    "group": {View.ablation},
    "ablate": {View.heads, View.ablation},
    "measure": {View.attention},
    "sampling": {View.predict},
}
# The samplers and penalties that can change the probabilities of a prompt's next token.
SAMPLING_FIELDS = {"temperature", "top_k", "top_p"} | {
    one.name
    for one in fields(SamplingConfig)
    if one.metadata.get("panel") in ("Penalties", "Other samplers")
    and one.name not in ("penalize_prompt", "dry_breakers")
}
SLIDERS = ("temperature", "top_k", "top_p", "min_p")  # sampling options of the page of all heads


def _select(help_text: str, flag: str, metavar: str | None = None, **details: Any) -> Any:
    if metavar:
        details["metavar"] = metavar
    return option(None, help_text, flag, panel=SELECTION, **details)


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """The options of views. Raises UsageError for sampling options that cannot be used."""

    layer: str | None = _select("Layers: 0,2-4, -1 for the last, or all.", "--layer", "LAYERS")
    head: str | None = _select(
        "Heads: 0,2-4, -1, all, or mean; of the last layer unless --layer is given.",
        "--head",
        "HEADS",
        shown_default="the most focused head",
    )
    query: str | None = _select("Query positions (rows): 57, -1, or 40:64.", "--query", "POSITIONS")
    keys: str | None = _select("Key positions (columns): 57, -1, or 40:64.", "--keys", "POSITIONS")
    top: int | None = _select(
        "Number of candidates, contributions, keys or passages to list.",
        "--top",
        shown_default="depends on the view",
        low=1,
    )
    target: str | None = _select(
        "Token or word that --view why explains; token whose logit --view patch compares.",
        "--target",
        "TEXT",
        shown_default="the most likely token",
    )
    measure: Literal["attention", "value"] = option(
        "attention",
        "Quantity: attention weights, or each key's share of the head's output (value).",
        "--measure",
        panel=SELECTION,
    )
    ablate: Literal["zero", "mean"] | None = _select(
        "Replacement of outputs in --view ablation and, if given, of each head in --view heads: "
        "zero, or the mean over the text.",
        "--ablate",
        shown_default="zero in --view ablation",
    )
    group: str | None = _select(
        "Groups to ablate: layers (2), heads (2.0-3), 2.attention or 2.feed_forward; + joins the "
        "members of a group, commas separate groups.",
        "--group",
        "GROUPS",
        shown_default="attention and feed-forward of each layer",
    )
    patch: str | None = _select(
        "Other prompt for --view patch; activations of --prompt replace its own.",
        "--patch",
        "TEXT",
    )
    contrast: str | None = _select(
        "Token of --view patch whose logit is subtracted from that of --target.",
        "--contrast",
        "TEXT",
        shown_default="the most likely token after --patch",
    )
    parts: str | None = _select(
        f"Parts for --view patch ({', '.join(PATCHED_PARTS)}) and --activations (also "
        f"{', '.join(PARTS[len(PATCHED_PARTS) :])}), or all.",
        "--parts",
        "PARTS",
        shown_default=PARTS[0],
    )
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingConfig
    cells: Cells = option(
        "auto",
        "Cell style: percentages (num), colored blocks or lists of top keys; auto picks by width.",
        "--cells",
        panel=DRAWING,
    )
    scale: Scale = option("sqrt", "Color scale.", "--scale", panel=DRAWING)
    hide_first: bool = option(
        False,
        "Hide the first key and print its share.",
        "--hide-first",
        panel=DRAWING,
        excludes="keys",
        hint="pass --keys 1: instead of both",
    )

    def __post_init__(self) -> None:
        SamplingConfig(**self.sampling)

    @property
    def given(self) -> list[str]:
        """The fields of views with other values than the default."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        defaults = {one.name: one.default for one in fields(ViewOptions)} | {"sampling": {}}
        return [name for name in sorted(VIEWS_BY_FIELD) if values[name] != defaults[name]]

    def check_used(
        self, views: Collection[View], *, on_page: bool = False, in_files: Collection[str] = ()
    ) -> None:
        """Raise UsageError for an option without effect on these views, the page of all heads or
        files; those of `in_files` have one."""
        for name in self.given:
            if name in in_files:
                continue
            if name == "sampling" and on_page and set(self.sampling) <= set(SLIDERS):
                continue
            if not VIEWS_BY_FIELD[name] & set(views):
                names = ", ".join(sorted(VIEWS_BY_FIELD[name]))
                owner, one = (
                    (SamplingConfig, next(iter(self.sampling)))
                    if name == "sampling"
                    else (ViewOptions, name)
                )
                flag = owner.__dataclass_fields__[one].metadata["flags"][0]
                raise UsageError(f"{flag}: no effect on this view", f"use it with --view {names}")
