"""Runs compared: tables for a terminal, Markdown and LaTeX, curves, and rows of a CSV."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from tgen.drawing.curve_plot import Curve, CurvePlot
from tgen.drawing.tables import table
from tgen.drawing.terminal_text import one_line
from tgen.reports.comparison import (
    ComparisonReport,
    GroupSummary,
    MeanInterval,
    RunSummary,
    Scale,
    TextScore,
)
from tgen.reports.number_format import count, format_amount, format_duration

SCALES: dict[Scale, str] = {"step": "step", "token": "token", "time": "time", "flop": "FLOP"}
_UNITS: dict[Scale, list[tuple[float, str]]] = {  # the last one that is below the largest value
    "step": [(1, "step")],
    "token": [
        *((1, "tokens"), (1e3, "thousand tokens")),
        *((1e6, "million tokens"), (1e9, "billion tokens")),
    ],
    "time": [(1, "seconds"), (60, "minutes"), (3600, "hours")],
    "flop": [(1, "FLOP"), *((1e3**i, f"{prefix}FLOP") for i, prefix in enumerate("MGTPE", 2))],
}
_COSTS = (">steps", ">tokens", ">time", ">parameters", ">FLOP")
_TEXT = ">held-out text"
_MAX_VALUES = 6  # of a setting in the table of differences
_MIN_NAME = 20  # characters of a line of a name
_NAMED_RUNS = 4  # up to so many, their names follow the values
_LATEX = {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "`": r"\`{}",
    "±": r"$\pm$", "–": r"\textendash{}", "·": r"$\cdot$",
} | {c: f"\\{c}" for c in "{}$&#%_"}  # fmt: skip
_LAST_LATIN = "\u017f"  # of the characters that LaTeX typesets without another font


@dataclass(frozen=True)
class TextTable:
    """A table as printable text; `>` before the name of a column right-aligns it."""

    title: str
    rows: list[dict[str, str]]  # at least one; by column, the same ones in each
    keys: Sequence[str] = ()  # columns that identify a row

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.rows[0])

    def fitting(self, width: int) -> "list[TextTable]":
        """Return the table or, if it is wider than `width` characters, one without and one with the
        costs. Long names of runs break after `_` or `/` if they can."""
        if self._width <= width or not {*_COSTS} <= {*self.names}:
            return [self._with_lines(width)]
        others = [name for name in self.names if name not in _COSTS]
        costs = [name for name in self.names if name in (*self.keys, *_COSTS)]
        parts = [
            TextTable(title, [{name: row[name] for name in names} for row in self.rows])
            for title, names in ((self.title, others), ("", costs))
        ]
        return [part._with_lines(width) for part in parts]

    @property
    def _width(self) -> int:
        columns = zip(self.names, *(row.values() for row in self.rows), strict=True)
        widths = [max(len(cell.removeprefix(">")) for cell in column) + 2 for column in columns]
        return sum(widths) - 2

    def _with_lines(self, width: int) -> "TextTable":
        excess = self._width - width
        if excess <= 0 or "run" not in self.names:
            return self
        room = max(_MIN_NAME, max(len(row["run"]) for row in self.rows) - excess)
        line = re.compile(rf".{{1,{room}}}$|.{{0,{room - 1}}}[_/]|.{{1,{room}}}")
        rows = [row | {"run": "\n".join(line.findall(row["run"]))} for row in self.rows]
        return replace(self, rows=rows)


def comparison_tables(report: ComparisonReport) -> list[TextTable]:
    """Return the tables of the groups, the runs, and the settings that differ."""
    spread = [{"setting": n, "values": _spread(report.runs, n)} for n in report.differing]
    tables = [_groups(report), _runs(report), TextTable("settings that differ", spread)]
    return [one for one in tables if one.rows]


def comparison_notes(report: ComparisonReport) -> Iterator[str]:
    """Yield what the columns mean."""
    yield "best, final: bits per byte of the held-out text; lower is better"
    if report.by:
        yield "±: 95% confidence interval of the mean over the runs of a group (Student's t)"
        if alone := [_label(group) for group in report.groups if len(group.runs) == 1]:
            yield f"no interval, a single run: {', '.join(alone)}"
    if any(run.text is not None for run in report.runs):
        yield (
            "text: bits per byte of the text; difference to the best run with its standard error; "
            "p: paired permutation test, for one difference alone"
        )


def _runs(report: ComparisonReport) -> TextTable:
    texts = _number_texts(report)
    has_state = any(run.state != "finished" for run in report.runs)
    has_text = any(run.text is not None for run in report.runs)
    rows = [
        {"run": one_line(run.name)}
        | {name: _value(run.settings.get(name)) for name in report.columns}
        | ({"state": run.state} if has_state else {})
        | texts[run.held_out]
        | {">best": _bits(run.best), ">final": _bits(run.final)}
        | (_score(run.text) if has_text else {})
        | _costs(run)
        for run in report.runs
    ]
    return TextTable("runs", rows, ["run"])


def _groups(report: ComparisonReport) -> TextTable:
    texts = _number_texts(report)
    has_text = any(group.text is not None for group in report.groups)
    rows = [
        {name: _value(value) for name, value in group.values.items()}
        | texts[group.held_out]
        | {">runs": str(len(group.runs)), ">best": _mean(group.best), ">final": _mean(group.final)}
        | ({">text": _mean(group.text)} if has_text else {})
        | _costs(group)
        for group in report.groups
    ]
    return TextTable(f"means by {' and '.join(report.by)}", rows, [*report.by, _TEXT])


def _number_texts(report: ComparisonReport) -> dict[str, dict[str, str]]:
    """Return a cell per held-out text with its number; none if there is a single text."""
    texts = list(dict.fromkeys(run.held_out for run in report.runs))
    return {text: {_TEXT: str(i)} if len(texts) > 1 else {} for i, text in enumerate(texts, 1)}


def _costs(one: RunSummary | GroupSummary) -> dict[str, str]:
    time, flop = format_duration(one.seconds), f"{one.flop:.2g}"
    tokens, parameters = format_amount(one.tokens), format_amount(one.n_parameters)
    cells = f"{one.steps:,.0f}", tokens, time, parameters, flop
    return dict(zip(_COSTS, cells, strict=True))


def _score(text: TextScore | None) -> dict[str, str]:
    bits, size, shown_p = "–", "–", "–"
    if text is not None:
        bits, size = _bits(text.score.bits_per_byte), "best"
    if text is not None and text.difference is not None:
        error, p = text.difference.standard_error, text.difference.p_value
        size = f"{text.difference.bits_per_byte:+.4f}"
        size += "" if error is None else f" ± {error:.4f}"
        shown_p = "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return {">text": bits, ">difference": size, ">p": shown_p}


def _bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(interval: MeanInterval | None) -> str:
    if interval is None:
        return "–"
    width = f"{interval.half_width:.3f}" if interval.is_finite else "–"
    return f"{interval.mean:.3f} ± {width}"


def _value(value: Any) -> str:
    """Return the value of a setting, as `--set` takes it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    return one_line(value) if isinstance(value, str) else json.dumps(value)


def _spread(runs: Sequence[RunSummary], name: str) -> str:
    """Return the values of a setting, each with its runs or their number."""
    all_values = [run.settings.get(name) for run in runs]
    numbers = [one for one in all_values if isinstance(one, int | float)]
    ordered = sorted(numbers) if len(numbers) == len(runs) else all_values
    values: dict[str, list[str]] = {_value(one): [] for one in ordered}
    for run in runs:
        values[_value(run.settings.get(name))].append(one_line(run.name))
    if len(values) > _MAX_VALUES:
        if ordered is not all_values:
            return f"{_value(ordered[0])} to {_value(ordered[-1])}, {len(values)} values"
        return f"{len(values)} values"
    named = len(runs) <= _NAMED_RUNS
    return " · ".join(
        f"{value} ({', '.join(names) if named else count(len(names), 'run')})"
        for value, names in values.items()
    )


def _label(group: GroupSummary) -> str:
    return ", ".join(map(_value, group.values.values()))


def comparison_plot(report: ComparisonReport, scale: Scale) -> CurvePlot:
    """Return the curves of the runs, or of the groups if there are any."""
    texts = _number_texts(report)

    def label(text: str, held_out: str) -> str:
        return ", held-out text ".join([text, *texts[held_out].values()])

    title, curves = "held-out loss", []
    if report.by:
        title += f" by {' and '.join(report.by)}: mean and 95% interval"
        for i, group in enumerate(report.groups):
            name = label(f"{_label(group)} ({count(len(group.runs), 'run')})", group.held_out)
            x, intervals = group.curves[scale].x, group.curves[scale].intervals
            ends = [(one.low, one.high) for one in intervals if one.is_finite]
            low, high = zip(*ends, strict=True) if ends else ((), ())
            y = [one.mean for one in intervals]
            curves.append(Curve(label=name, color=i, x=x, y=y, low=low, high=high))
    else:
        for run, color in zip(report.runs, report.configurations, strict=True):
            name, x = label(run.name, run.held_out), getattr(run.curve, scale)
            curves.append(Curve(label=name, color=color, x=x, y=run.curve.bits_per_byte))
    curves = [curve for curve in curves if curve.x]
    end = max((curve.x[-1] for curve in curves), default=0)
    unit, name = next(
        (one for one in reversed(_UNITS[scale]) if one[0] * 2 <= end), _UNITS[scale][0]
    )
    return CurvePlot(
        title=title,
        x_name=name,
        y_name="bits/byte",
        curves=[replace(curve, x=[x / unit for x in curve.x]) for curve in curves],
    )


def terminal_table(cells: TextTable) -> Table:
    """Return a table for a terminal."""
    drawn = table(*cells.names, title=cells.title)
    for row in cells.rows:
        drawn.add_row(*map(Text, row.values()))
    return drawn


def markdown(report: ComparisonReport) -> str:
    """Return the tables in Markdown."""
    parts = []
    for cells in comparison_tables(report):
        rule = ["---:" if name.startswith(">") else "---" for name in cells.names]
        header, *lines = [f"| {' | '.join(map(_markdown_text, row))} |" for row in _lines(cells)]
        parts.append(f"**{_markdown_text(cells.title)}**")
        parts.append("\n".join([header, f"| {' | '.join(rule)} |", *lines]))
    parts += [_markdown_text(line) for line in comparison_remarks(report)]
    return "\n\n".join(parts) + "\n"


def _lines(cells: TextTable) -> list[list[str]]:
    header = [name.removeprefix(">") for name in cells.names]
    return [header, *(list(row.values()) for row in cells.rows)]


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]|&~#$])", r"\\\1", text)


def latex(report: ComparisonReport) -> str:
    """Return the tables for LaTeX with the package booktabs."""
    parts = [r"% needs \usepackage{booktabs}"]
    for cells in comparison_tables(report):
        columns = "".join("r" if name.startswith(">") else "l" for name in cells.names)
        header, *lines = [" & ".join(map(_latex_text, row)) + r" \\" for row in _lines(cells)]
        begin = [f"% {_latex_text(cells.title)}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        end = [r"\bottomrule", r"\end{tabular}"]
        parts.append("\n".join([*begin, header, r"\midrule", *lines, *end]))
    parts += [f"% {line}" for line in comparison_remarks(report)]
    return "\n\n".join(parts) + "\n"


def _latex_text(text: str) -> str:
    """Escape all that LaTeX would interpret; letters without a font become code points."""
    escaped = "".join(
        _LATEX.get(c, c) if c <= _LAST_LATIN or c in _LATEX else f"U+{ord(c):04X}" for c in text
    )
    return re.sub("-(?=-)", "-{}", escaped)  # no dash of two hyphens


def comparison_remarks(report: ComparisonReport) -> list[str]:
    """Return the notes and warnings, for a file."""
    return [*comparison_notes(report), *(one_line(f"warning: {line}") for line in report.warnings)]


def comparison_rows(report: ComparisonReport, scale: Scale) -> Iterator[Iterable[object]]:
    """Yield the header and the rows of a CSV: every evaluation of every run with the settings that
    differ or, with groups, the points of their mean curves."""
    if not report.by:
        yield "run", *report.differing, "step", "tokens", "seconds", "flop", "bits_per_byte"
        for run in report.runs:
            values = [_value(run.settings.get(name)) for name in report.differing]
            for point in zip(*vars(run.curve).values(), strict=True):
                yield one_line(run.name), *values, *point
        return
    yield *report.by, "runs", scale, "mean", "low", "high"
    for group in report.groups:
        for x, one in zip(*vars(group.curves[scale]).values(), strict=True):
            ends = (one.low, one.high) if one.is_finite else (None, None)
            yield *map(_value, group.values.values()), one.n, x, one.mean, *ends
