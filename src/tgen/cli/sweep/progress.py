"""Progress of a sweep on stderr: the plan, a table of the combinations, the end of each run."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from tgen.cli import console
from tgen.cli.rich_console import err
from tgen.drawing.tables import table
from tgen.experiments.sweep import SweepReport
from tgen.reports.json_text import json_record
from tgen.reports.number_format import count, format_bytes, format_duration
from tgen.reports.sweep import SweepPlanReport, SweepRunReport
from tgen.reports.training import DoneReport, PhaseReport, StepReport


class SweepProgress:
    """The plan and the progress of a sweep on stderr: a table that is redrawn, or plain lines.

    With `json_lines`, each report is also a line of JSON on stdout. With `plan_only` alone, the
    plan goes there.
    """

    def __init__(self, *, json_lines: bool, plan_only: bool) -> None:
        self._json, self._plan_only = json_lines, plan_only
        self._plan: SweepPlanReport | None = None
        self._losses: dict[tuple[int, int], float | None] = {}  # by cell and seed
        self._run: SweepRunReport | None = None
        self._line = ""
        self._live: AbstractContextManager[object] = nullcontext()
        self.failures: set[str] = set()
        if console.draws_progress() and not console.quiet:
            self._live = Live(
                get_renderable=self._table, console=err, transient=True, refresh_per_second=4
            )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, report: SweepReport) -> None:
        """Show a report."""
        if self._json:
            console.write(json.dumps(json_record(report)).encode() + b"\n")
        match report:
            case SweepPlanReport():
                self._plan = report
                self._show_plan(report)
            case SweepRunReport():
                self._show_run(report)
            case PhaseReport():
                self._line = report.phase
            case StepReport():
                loss = "" if report.loss is None else f" · loss {report.loss:.3f}"
                left = format_duration(report.seconds_left)
                self._line = f"step {report.step:,}{loss} · {left} left"
            case DoneReport():
                self._line = "done"

    def _show_run(self, report: SweepRunReport) -> None:
        self._run, self._line = report, ""
        self.failures.discard(report.name)
        if report.state == "training":
            return
        loss = report.bits_per_byte
        if report.state == "failed":
            self.failures.add(report.name)
            result = f"failed: {report.reason}"
        else:
            self._losses[report.cell, report.seed] = loss
            result = "done" if loss is None else f"{loss:.3f} bits/byte"
        left = f"{count(report.n_left, 'run')} left, about {format_duration(report.seconds_left)}"
        console.print_status(f"{report.name}: {result} · {left}")

    def _show_plan(self, plan: SweepPlanReport) -> None:
        lines = [_cells_table(plan), *_plan_lines(plan)]
        if self._plan_only and not self._json:
            console.show(*lines)
        elif not console.quiet:
            err.print(*lines, sep="\n")

    def _table(self) -> Table:
        """Return the table of combinations, and the line of the current run below it."""
        grid, run = Table.grid(), self._run
        if self._plan is not None and run is not None:
            grid.add_row(_cells_table(self._plan, self._losses))
        name = f"{run.name} · " if run else ""
        left = f" · sweep: about {format_duration(run.seconds_left)} left" if run else ""
        grid.add_row(Text(f"{name}{self._line}{left}"))
        return grid


def _cells_table(
    plan: SweepPlanReport, losses: Mapping[tuple[int, int], float | None] | None = None
) -> Table:
    """Return a table of the combinations, with the means of their `losses` by cell and seed."""
    shows_done = losses is None and any(plan.n_done)
    results = ["runs", "bits/byte"] if losses is not None else ["time per run"]
    rows = table(*plan.cells[0].values, "model", *results, *["runs done"] * shows_done)
    for number, cell in enumerate(plan.cells):
        model = f"{cell.family}, {cell.n_parameters / 1e6:.2f} M parameters"
        rest = [f"{cell.minutes:g} min" if cell.minutes else count(cell.steps or 0, "step")]
        if shows_done:
            rest.append(f"{plan.n_done[number]} of {len(plan.seeds)}")
        if losses is not None:
            ended = [loss for (one, _), loss in losses.items() if one == number]
            known = [loss for loss in ended if loss is not None]
            mean = f"{fmean(known):.3f}" if known else ""
            rest = [f"{len(ended)} of {len(plan.seeds)}", mean]
        rows.add_row(*map(Text, (*cell.values.values(), model, *rest)))
    return rows


def _plan_lines(plan: SweepPlanReport) -> Iterator[str]:
    """Yield the lines below the table of a plan."""
    n_cells, n_seeds = len(plan.cells), len(plan.seeds)
    yield (
        f"{count(n_cells, 'combination')} × {count(n_seeds, 'seed')} = "
        f"{count(n_cells * n_seeds, 'run')}, about {format_duration(plan.seconds)} of training, "
        f"about {format_bytes(plan.disk_bytes)} on disk"
    )
    if len(plan.rungs) > 1:
        parts = [f"{rung.n_cells} for {rung.share:.3g}" for rung in plan.rungs]
        yield f"halving, combinations for a part of the time per run: {', '.join(parts)}"
    yield f"output {plan.out}; Ctrl-C saves and stops, the same command continues"
