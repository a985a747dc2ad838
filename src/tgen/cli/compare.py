"""`tgen compare`: runs side by side, as tables and curves."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.json_output import json_line
from tgen.cli.options import engine_options, json_option, make_command, quiet_option
from tgen.cli.output_options import (
    check_output_files,
    csv_text,
    file_option,
    output_files,
    write_contents,
)
from tgen.config import DEFAULT_ENGINE, EngineOptions
from tgen.config.input_files import Reading
from tgen.config.option import option
from tgen.errors import UsageError
from tgen.reports.comparison import ComparisonReport, Scale

if TYPE_CHECKING:
    from tgen.experiments.comparison import Score

_SCHEMA = "tgen.compare/1"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of `tgen compare`."""

    runs: list[str] = option(
        default_factory=list,
        help_text="Directories of runs, directories with several runs, or glob patterns.",
        argument=True,
        metavar="RUN",
    )
    by: list[str] = option(
        default_factory=list,
        help_text="Setting whose values make groups of runs, for example family; repeatable.",
        flags="--by",
        metavar="FIELD",
    )
    x: Scale = option("step", "Horizontal axis of the curves.", "--x")
    text: list[str] = option(
        default_factory=list,
        help_text="Text to score with the models of all runs, as tgen score does; repeatable.",
        flags="--text",
        metavar="FILE",
    )
    csv: Path | None = file_option("Write the curves as CSV.", "--csv")
    svg: Path | None = file_option("Write the curves as SVG.", "--svg")
    png: Path | None = file_option("Write the curves as PNG (needs Pillow).", "--png")
    html: Path | None = file_option("Write a page with the curves and tables.", "--html")
    markdown: Path | None = file_option("Write the tables in Markdown; - for stdout.", "--markdown")
    latex: Path | None = file_option("Write the tables for LaTeX; - for stdout.", "--latex")
    json: bool = json_option()
    quiet: bool = quiet_option()
    engine: EngineOptions = engine_options()

    def __post_init__(self) -> None:
        if not self.runs:
            raise UsageError("no run to compare", "name directories that `tgen train` wrote")
        if self.by and not self.fields:
            raise UsageError("--by: a setting is missing", "use, for example, --by family")
        if self.json and self.files:
            raise UsageError(f"--json cannot be combined with {min(self.files)}", "remove one")
        if self.engine != DEFAULT_ENGINE and not self.text:
            raise UsageError(
                "--device, --threads, --dtype and --cache-dtype cannot be used without --text",
                "add --text FILE, or remove them: otherwise no model is loaded",
            )
        check_output_files(self.files)

    @property
    def files(self) -> dict[str, Path]:
        """The files to write, by flag."""
        return output_files(self)

    @property
    def fields(self) -> list[str]:
        """The settings of --by; a comma separates several."""
        names = [name.strip() for text in self.by for name in text.split(",")]
        return list(dict.fromkeys(name.replace("-", "_") for name in names if name))


def compare(options: CompareOptions) -> None:
    """Compare training runs: settings, losses, curves.

    The tables have the settings that differ, the best and the last held-out loss in bits per byte,
    the steps, tokens, time, parameters and FLOP. The best run comes first. Losses on different
    held-out texts cannot be compared: tgen then prints a warning. --text scores all models on one
    text, with a paired test against the best.

    --by makes groups: their means have 95% confidence intervals over the runs, for example over
    seeds (Student's t). Runs that have not finished are not in the means.

    No run is changed. The file name - stands for stdout, in place of the tables and curves.
    docs/lab.md shows a study.
    """
    from tgen.experiments.comparison import compare_runs

    score = _scorer(options) if options.text else None
    report = compare_runs(options.runs, by=options.fields, score=score)
    print_comparison(report, options.x, options.files, json=options.json)


def _scorer(options: CompareOptions) -> "Score":
    """Return a function that scores the models of runs on the text."""
    from tgen.cli.model_loading import load_model
    from tgen.cli.score import read_texts
    from tgen.experiments.run_scores import score_runs

    corpus = read_texts(options.text, Reading())
    open_model = partial(load_model, options=options.engine)

    def score(runs: Any, warn: Any) -> Any:
        with console.progress("scoring") as bar:
            scores = score_runs(runs, warn, corpus=corpus, open_model=open_model, progress=bar)
        corpus.close()  # raises CorpusError if a file has changed
        return scores

    return score


def print_comparison(
    report: ComparisonReport,
    scale: Scale = "step",
    files: dict[str, Path] | None = None,
    *,
    json: bool = False,
) -> None:
    """Print the tables, the curves and the warnings, and write the files by flag."""
    from tgen.drawing.comparison import (
        comparison_notes,
        comparison_plot,
        comparison_tables,
        terminal_table,
    )
    from tgen.reports.json_text import json_value

    files = files or {}
    contents = {flag: _content(flag, report, scale) for flag in files}  # before anything is printed
    if json:
        console.write(json_line({"schema": _SCHEMA} | json_value(report)))
    elif "-" not in map(str, files.values()):
        from tgen.cli.rich_console import curve_width, out
        from tgen.drawing.curve_plot import draw_curves

        lines: list[object] = []
        width = curve_width()
        for cells in comparison_tables(report):
            parts = cells.fitting(width) if out.is_terminal else [cells]
            lines += [line for part in parts for line in (terminal_table(part), "")]
        lines += draw_curves(comparison_plot(report, scale), width=width)
        console.show(*lines, wrap=out.is_terminal)
        for note in comparison_notes(report):
            console.print_status(note)
    write_contents(contents, files)
    for warning in report.warnings:
        console.print_status(f"warning: {warning}")


def _content(flag: str, report: ComparisonReport, scale: Scale) -> bytes:
    from tgen.drawing import comparison, curve_files
    from tgen.drawing.page.comparison_page import comparison_page

    if flag == "--csv":
        return csv_text(comparison.comparison_rows(report, scale)).encode()
    if flag == "--html":
        return comparison_page(report, scale).encode()
    if flag == "--markdown":
        return comparison.markdown(report).encode()
    if flag == "--latex":
        return comparison.latex(report).encode()
    plot = comparison.comparison_plot(report, scale)
    if not plot.curves:
        raise UsageError(f"{flag}: no run has a held-out loss to draw", f"remove {flag}")
    return curve_files.png(plot) if flag == "--png" else curve_files.svg(plot).encode()


command = make_command(compare, CompareOptions)
