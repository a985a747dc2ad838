"""The views and options of `tgen inspect`, and which can be combined: checked without torch."""

import os
import sys
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from tgen.cli.options import (
    Reader,
    adapter_option,
    check_output_file,
    flag_of,
    json_option,
    model_option,
    nested,
    prompt_file_option,
    prompt_option,
    quiet_option,
)
from tgen.config import SamplingConfig
from tgen.config.engine import Device, device_option
from tgen.config.option import option
from tgen.drawing import Cells, Scale
from tgen.errors import UsageError

_SELECTION, _SAMPLING, _DRAWING, _FILES = "Selection", "Sampling", "Drawing", "Files"
PANELS = (_SELECTION, _SAMPLING, _DRAWING, _FILES, "Output")
# The samplers and penalties that can change the probabilities of a prompt's next token.
_SAMPLING_FIELDS = {"temperature", "top_k", "top_p"} | {
    one.name
    for one in fields(SamplingConfig)
    if one.metadata.get("panel") in ("Penalties", "Other samplers")
    and one.name not in ("penalize_prompt", "dry_breakers")
}


class View(StrEnum):
    """Values of `--view`."""

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


VIEWS_WITHOUT_TEXT = {View.positions, View.model, View.training}
MATRIX_VIEWS = (View.attention, View.rollout, View.positions)
_VIEWS_WITHOUT_CSV = (View.model, View.training, View.verify)
_QUERY_VIEWS = {View.attention, View.rollout, View.tokens, View.predict, View.lens, View.why}
_VIEWS_BY_FIELD = {
    "layer": {View.attention, View.heads, View.rollout},
    "head": {View.attention, View.heads},
    "top": {View.attention, View.rollout, View.predict, View.lens, View.why},
    "cells": set(MATRIX_VIEWS),
    "scale": set(MATRIX_VIEWS),
    "query": _QUERY_VIEWS,
    "keys": {*MATRIX_VIEWS, View.why},
    "hide_first": {View.attention, View.rollout},
    "target": {View.why},
    "ablate": {View.heads},
    "measure": {View.attention},
}
_TABLE_FIELDS = ("query", "keys", "hide_first", "cells", "top")  # no effect on whole matrices
_PICTURES = ("--svg", "--png", "--vega")


def _select(help_text: str, flag: str, metavar: str | None = None, **details: Any) -> Any:
    if metavar:
        details["metavar"] = metavar
    return option(None, help_text, flag, panel=_SELECTION, **details)


def _file(help_text: str, flag: str) -> Any:
    return option(None, help_text, flag, panel=_FILES, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `tgen inspect`. Raises UsageError for values that cannot be combined."""

    prompt: str | None = prompt_option("Text to inspect; '-' reads stdin.")
    prompt_file: Path | None = prompt_file_option()
    model: list[str] = model_option(default_factory=list)
    adapter: str | None = adapter_option()
    view: list[View] = option(
        help_text="View to show (see above); repeatable.",
        flags="--view",
        default_factory=list,
        metavar="VIEW",
        shown_default="attention",
    )
    device: Device = device_option()
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
        "Number of candidates, contributions or keys to list.",
        "--top",
        shown_default="depends on the view",
        low=1,
    )
    target: str | None = _select(
        "Token or word that --view why explains.",
        "--target",
        "TEXT",
        shown_default="the most likely token",
    )
    measure: Literal["attention", "value"] = option(
        "attention",
        "Quantity: attention weights, or each key's share of the head's output (value).",
        "--measure",
        panel=_SELECTION,
    )
    ablate: Literal["zero", "mean"] | None = _select(
        "Ablation in --view heads: loss increase with each head's output set to zero or its mean.",
        "--ablate",
    )
    tail: bool = option(
        False, "Keep only the end of a text longer than the context.", "--tail", panel=_SELECTION
    )
    sampling: dict[str, Any] = nested(
        SamplingConfig, only=_SAMPLING_FIELDS, panel=_SAMPLING, samplers=Reader(str, str)
    )
    cells: Cells = option(
        "auto",
        "Cell style: percentages (num), colored blocks or lists of top keys; auto picks by width.",
        "--cells",
        panel=_DRAWING,
    )
    scale: Scale = option("sqrt", "Color scale.", "--scale", panel=_DRAWING)
    hide_first: bool = option(
        False,
        "Hide the first key and print its share.",
        "--hide-first",
        panel=_DRAWING,
        excludes="keys",
        hint="pass --keys 1: instead of both",
    )
    width: int | None = option(
        None,
        "Output width in columns.",
        "--width",
        panel=_DRAWING,
        shown_default="the terminal's",
        low=20,
        high=10_000,
    )
    csv: Path | None = _file("Write the view's numbers as CSV.", "--csv")
    html: Path | None = _file("Write an interactive page of all heads.", "--html")
    svg: Path | None = _file("Write the matrix as SVG.", "--svg")
    png: Path | None = _file("Write the matrix as PNG (needs Pillow).", "--png")
    vega: Path | None = _file("Write the matrix as a Vega-Lite specification.", "--vega")
    json: bool = json_option()
    quiet: bool = quiet_option()

    def __post_init__(self) -> None:
        SamplingConfig(**self.sampling)  # raises UsageError before a model is loaded
        self._check_views()
        self._check_files()
        self._check_unused()

    @property
    def views(self) -> list[View]:
        """The views to show."""
        return self.view or [View.attention]

    @property
    def files(self) -> dict[str, Path]:
        """The files to write, by flag."""
        names = ("csv", "vega", "html", "svg", "png")
        return {f"--{name}": path for name in names if (path := getattr(self, name)) is not None}

    @property
    def target_bytes(self) -> bytes | None:
        """The token of --target."""
        return None if self.target is None else os.fsencode(self.target)

    @property
    def prompt_flag(self) -> str:
        """The option that gives the prompt; "" without one."""
        if self.prompt_file is not None:
            return "--prompt-file"
        return "" if self.prompt is None else "--prompt"

    @property
    def needs_text(self) -> bool:
        """Whether a prompt is read."""
        given = self.html is not None or self.prompt_flag
        return bool(given) or bool(set(self.views) - VIEWS_WITHOUT_TEXT)

    @property
    def shows_text(self) -> bool:
        """Whether a prompt changes the output."""
        return self.json or self.html is not None or bool(set(self.views) - VIEWS_WITHOUT_TEXT)

    @property
    def only_training(self) -> bool:
        """Whether only the training log is shown, so that no model is loaded."""
        return self.views == [View.training] and not self.files

    def _check_views(self) -> None:
        views, files = self.views, self.files
        if self.view and set(files) == {"--html"}:
            raise UsageError("--view cannot be combined with --html alone", "remove --view")
        if len(set(views)) < len(views):
            raise UsageError("--view: a view is given twice", "name each view once")
        if len(self.model) > 2 or (len(self.model) == 2 and views != [View.heads]):
            raise UsageError(
                f"--model: given {len(self.model)} times",
                "pass one model, or two with --view heads to compare them",
            )
        if len(self.model) == 2 and self.adapter:
            raise UsageError(
                "--adapter cannot be combined with two models", "name its directory with --model"
            )
        if len(self.model) == 2 and files:
            raise UsageError(
                f"{next(iter(files))} cannot be combined with two models", "remove one --model"
            )
        if files and self.json:
            raise UsageError(f"--json cannot be combined with {next(iter(files))}", "remove one")
        if len(views) > 1 and (single_view := set(files) - {"--html"}):
            raise UsageError(
                f"{min(single_view)}: writes one view (got {len(views)})", "pass one --view"
            )
        for name in files:
            if name == "--csv" and views[0] in _VIEWS_WITHOUT_CSV:
                raise UsageError(f"--csv: not available for --view {views[0]}", "use --json")
            if name in _PICTURES and views[0] not in MATRIX_VIEWS:
                raise UsageError(
                    f"{name}: not available for --view {views[0]}",
                    f"use it with --view {', '.join(MATRIX_VIEWS)}",
                )
        if self.only_training and (flag := self.prompt_flag):
            raise UsageError(
                f"{flag} cannot be combined with --view training alone", f"remove {flag}"
            )

    def _check_files(self) -> None:
        files = self.files
        for name, path in files.items():
            if str(path) != "-":
                check_output_file(name, path)
        targets = {path if str(path) == "-" else path.resolve() for path in files.values()}
        if len(targets) < len(files):
            raise UsageError(
                f"{' and '.join(files)}: same output file",
                "name a different file for each; only one can go to stdout",
            )
        if str(self.png) == "-" and sys.stdout is not None and sys.stdout.isatty():
            raise UsageError("--png: cannot write a picture to the terminal", "name a file")

    def _check_unused(self) -> None:
        """Raise UsageError for an option without effect."""
        views = set(self.views) | ({View.heads, View.attention} if self.html else set())
        flags = {name: flag_of(InspectOptions, name) for name in _VIEWS_BY_FIELD}
        given = {
            one.name
            for one in fields(self)
            if one.name in _VIEWS_BY_FIELD and getattr(self, one.name) != one.default
        }
        for name in sorted(given):
            if not views & _VIEWS_BY_FIELD[name]:
                names = ", ".join(sorted(_VIEWS_BY_FIELD[name]))
                raise UsageError(
                    f"{flags[name]}: no effect on this view", f"use it with --view {names}"
                )
        if self.sampling and View.predict not in views:
            flag = flag_of(SamplingConfig, next(iter(self.sampling)))
            raise UsageError(f"{flag}: no effect on this view", "use it with --view predict")
        whole = "--json" if self.json else next(iter(self.files), None)
        if whole and views & set(MATRIX_VIEWS):
            listing = _VIEWS_BY_FIELD["top"] - set(MATRIX_VIEWS)
            for name in _TABLE_FIELDS:
                if name in given and not (name == "top" and views & listing):
                    raise UsageError(
                        f"{flags[name]} cannot be combined with {whole}, which writes all tokens",
                        f"remove {flags[name]} or {whole}",
                    )
