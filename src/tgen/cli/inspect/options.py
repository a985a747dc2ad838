"""The views and options of `tgen inspect`, and which can be combined: checked without torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tgen.cli.options import (
    Reader,
    adapter_option,
    flag_of,
    json_option,
    model_option,
    nested,
    prompt_file_option,
    prompt_option,
    quiet_option,
)
from tgen.cli.output_options import check_output_files, file_option, output_files
from tgen.config import SamplingConfig
from tgen.config.engine import Device, device_option
from tgen.config.option import option
from tgen.drawing.view_options import (
    DRAWING,
    MATRIX_VIEWS,
    SAMPLING,
    SAMPLING_FIELDS,
    SELECTION,
    VIEWS_BY_FIELD,
    VIEWS_WITHOUT_TEXT,
    View,
    ViewOptions,
)
from tgen.errors import UsageError

_VIEWS_WITHOUT_CSV = (View.model, View.verify)
_TABLE_FIELDS = ("query", "keys", "hide_first", "cells", "top")  # no effect on whole matrices
_LIVE_FIELDS = {"live", "prompt", "prompt_file", "model", "adapter", "device", "quiet"}
WITHOUT_VIEW = {"--html", "--activations"}  # files of a text
_PICTURES = ("--svg", "--png", "--vega")
_CURVE_FILES = {"--csv", "--svg", "--png"}  # of the training curves


def _drawn_views(flag: str) -> list[View]:
    """Return the views that a flag writes as a picture."""
    return [*MATRIX_VIEWS, *[View.training] * (flag in _CURVE_FILES)]


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ViewOptions):
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
    live: bool = option(
        False,
        "Open the live page of tgen serve in a browser, with the prompt if one is given.",
        "--live",
    )
    device: Device = device_option()
    tail: bool = option(
        False, "Keep only the end of a text longer than the context.", "--tail", panel=SELECTION
    )
    sampling: dict[str, Any] = nested(
        SamplingConfig, only=SAMPLING_FIELDS, panel=SAMPLING, samplers=Reader(str, str)
    )
    width: int | None = option(
        None,
        "Output width in columns.",
        "--width",
        panel=DRAWING,
        shown_default="the terminal's",
        low=20,
        high=10_000,
    )
    csv: Path | None = file_option("Write the view's numbers as CSV.", "--csv")
    html: Path | None = file_option("Write an interactive page of all heads.", "--html")
    svg: Path | None = file_option("Write the matrix or the curves as SVG.", "--svg")
    png: Path | None = file_option("Write the matrix or the curves as PNG (needs Pillow).", "--png")
    vega: Path | None = file_option("Write the matrix as a Vega-Lite specification.", "--vega")
    activations: Path | None = file_option(
        "Write activations of --layer and --parts as safetensors.", "--activations"
    )
    json: bool = json_option()
    quiet: bool = quiet_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live:
            self._check_live()
        self._check_views()
        check_output_files(self.files)
        self._check_unused()

    @property
    def views(self) -> list[View]:
        """The views to show."""
        implied = View.patch if self.patch is not None else View.attention
        return self.view or [View.ablation if self.group is not None else implied]

    @property
    def files(self) -> dict[str, Path]:
        """The files to write, by flag."""
        return output_files(self)

    @property
    def prompt_flag(self) -> str:
        """The option that gives the prompt; "" without one."""
        if self.prompt_file is not None:
            return "--prompt-file"
        return "" if self.prompt is None else "--prompt"

    @property
    def needs_text(self) -> bool:
        """Whether a prompt is read."""
        return bool(self.prompt_flag) or self._is_of_text

    @property
    def shows_text(self) -> bool:
        """Whether a prompt changes the output."""
        return self.json or self._is_of_text

    @property
    def only_training(self) -> bool:
        """Whether only the training log is shown, so that no model is loaded."""
        return self.views == [View.training] and set(self.files) <= _CURVE_FILES

    @property
    def only_sources(self) -> bool:
        """Whether only the training text is searched, so that no model is loaded."""
        return self.views == [View.sources] and set(self.files) <= {"--csv"}

    @property
    def _is_of_text(self) -> bool:
        return bool(WITHOUT_VIEW & set(self.files) or set(self.views) - VIEWS_WITHOUT_TEXT)

    @property
    def _has_no_view(self) -> bool:
        """Whether all files are of the text, so that no view is shown."""
        return bool(self.files) and set(self.files) <= WITHOUT_VIEW

    def _check_live(self) -> None:
        """Raise UsageError for an option that the live page does not use."""
        for one in fields(self):
            default = one.default_factory() if callable(one.default_factory) else one.default
            if one.name not in _LIVE_FIELDS and getattr(self, one.name) != default:
                flag = (
                    "a sampling option" if one.name == "sampling" else flag_of(type(self), one.name)
                )
                raise UsageError(f"{flag} cannot be combined with --live", f"remove {flag}")

    def _check_views(self) -> None:
        views, files = self.views, self.files
        if self.view and self._has_no_view:
            names = " and ".join(files)
            raise UsageError(f"--view: no effect on {names}", "remove --view")
        if len(set(views)) < len(views):
            raise UsageError("--view: a view is given twice", "name each view once")
        if len(self.model) > 2 or (len(self.model) == 2 and views != [View.heads]):
            hint = "pass one model, or two with --view heads to compare them"
            if View.training in views:
                hint = "pass one model; `tgen compare` draws the curves of several runs"
            raise UsageError(f"--model: given {len(self.model)} times", hint)
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
        if len(views) > 1 and (single_view := set(files) - WITHOUT_VIEW):
            raise UsageError(
                f"{min(single_view)}: writes one view (got {len(views)})", "pass one --view"
            )
        for name in files:
            if name == "--csv" and views[0] in _VIEWS_WITHOUT_CSV:
                raise UsageError(f"--csv: not available for --view {views[0]}", "use --json")
            if name in _PICTURES and views[0] not in _drawn_views(name):
                raise UsageError(
                    f"{name}: not available for --view {views[0]}",
                    f"use it with --view {', '.join(_drawn_views(name))}",
                )
        if self.only_training and (flag := self.prompt_flag):
            raise UsageError(f"{flag}: no effect on --view training", f"remove {flag}")

    def _check_unused(self) -> None:
        views = set() if self._has_no_view else set(self.views)
        views |= {View.heads, View.attention} if self.html else set()
        in_files = ("layer", "parts") if self.activations else ()
        self.check_used(views, on_page=self.html is not None, in_files=in_files)
        whole = "--json" if self.json else next(iter(self.files), None)
        if whole and views & set(MATRIX_VIEWS):
            effects = {"top": VIEWS_BY_FIELD["top"] - set(MATRIX_VIEWS), "query": {View.patch}}
            for name in _TABLE_FIELDS:
                if name in self.given and not views & effects.get(name, set()):
                    flag = flag_of(InspectOptions, name)
                    raise UsageError(
                        f"{flag} cannot be combined with {whole}, which writes all tokens",
                        f"remove {flag} or {whole}",
                    )
