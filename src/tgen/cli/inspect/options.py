"""The views and options of `tgen inspect`, and which can be combined: checked without torch."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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

_FILES = "Files"
PANELS = (SELECTION, SAMPLING, DRAWING, _FILES, "Output")
_VIEWS_WITHOUT_CSV = (View.model, View.training, View.verify)
_TABLE_FIELDS = ("query", "keys", "hide_first", "cells", "top")  # no effect on whole matrices
_LIVE_FIELDS = {"live", "prompt", "prompt_file", "model", "adapter", "device", "quiet"}
_PICTURES = ("--svg", "--png", "--vega")


def _file(help_text: str, flag: str) -> Any:
    return option(None, help_text, flag, panel=_FILES, metavar="FILE")


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
    csv: Path | None = _file("Write the view's numbers as CSV.", "--csv")
    html: Path | None = _file("Write an interactive page of all heads.", "--html")
    svg: Path | None = _file("Write the matrix as SVG.", "--svg")
    png: Path | None = _file("Write the matrix as PNG (needs Pillow).", "--png")
    vega: Path | None = _file("Write the matrix as a Vega-Lite specification.", "--vega")
    json: bool = json_option()
    quiet: bool = quiet_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live:
            self._check_live()
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

    @property
    def only_sources(self) -> bool:
        """Whether only the training text is searched, so that no model is loaded."""
        return self.views == [View.sources] and set(self.files) <= {"--csv"}

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
        self.check_used(views, on_page=self.html is not None)
        whole = "--json" if self.json else next(iter(self.files), None)
        if whole and views & set(MATRIX_VIEWS):
            listing = VIEWS_BY_FIELD["top"] - set(MATRIX_VIEWS)
            for name in _TABLE_FIELDS:
                if name in self.given and not (name == "top" and views & listing):
                    flag = flag_of(InspectOptions, name)
                    raise UsageError(
                        f"{flag} cannot be combined with {whole}, which writes all tokens",
                        f"remove {flag} or {whole}",
                    )
