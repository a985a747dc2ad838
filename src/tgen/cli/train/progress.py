"""Progress of a training run on stderr: the plan, a progress bar or plain lines, the results."""

import json
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from tgen.cli import console, streams
from tgen.cli.rich_console import err, out
from tgen.cli.train.plan_table import plan_lines
from tgen.cli.train.result import print_result
from tgen.errors import TgenError
from tgen.machine.cpus import allowed_cpus
from tgen.reports.json_text import json_record
from tgen.reports.number_format import count, format_bytes, format_duration
from tgen.reports.training import (
    AnswersReport,
    DoneReport,
    EvalReport,
    EventsReport,
    MemorizationReport,
    PhaseReport,
    PlanReport,
    RollbackReport,
    RunReport,
    SampleReport,
    SavingReport,
    StepReport,
)

_LINE_SECONDS = 10.0  # between progress lines without a terminal
_LOADING = "loading PyTorch"
_PHASE_SECONDS = 2.0  # of a phase, until a line names it without a terminal
_SAMPLE_CHARACTERS = 160


class TrainingProgress:
    """Display of reports on stderr; with `json_lines`, each is also a line of JSON on stdout.

    With `plan_only` the plan is the result, and goes to stdout.
    """

    def __init__(self, *, json_lines: bool, plan_only: bool = False) -> None:
        self._json, self._plan_only = json_lines, plan_only
        self._stdout_error: TgenError | None = None
        self._validation = ""
        self._is_chat = False
        self._save_error = ""  # why the last state is not on disk
        self._last_line = self._phase_began = time.monotonic()
        self._phase: PhaseReport | None = PhaseReport(phase=_LOADING)  # None: training
        self._timer: threading.Timer | None = None  # of the phase's line without a terminal
        self._bar = Progress(
            BarColumn(bar_width=24),
            _LineColumn(self._line),
            console=err,
            transient=True,
            disable=console.quiet or not console.draws_progress(),
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        if not console.quiet and not console.draws_progress():
            self._start_timer(_LOADING)
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._stop_timer()
        self._bar.stop()
        if self._stdout_error and error is None:
            raise self._stdout_error

    def show(self, report: RunReport) -> None:
        """Show one report."""
        if self._json and not (self._plan_only and isinstance(report, PhaseReport)):
            self._write_json(report)
        elif self._plan_only and isinstance(report, PlanReport):
            self._bar.stop()  # erase the bar, on whose line the plan would begin
            console.show(*plan_lines(report, out))
        if console.quiet:
            return
        if isinstance(report, PhaseReport):
            self._show_phase(report)
            return
        self._stop_timer()
        match report:
            case PlanReport():
                self._show_plan(report)
            case StepReport():
                self._show_step(report)
            case EvalReport():
                self._show_evaluation(report)
            case SavingReport():
                self._show_saving(report)
            case DoneReport():
                print_result(report, chat=self._is_chat)
            case _:
                console.print_status(_status_line(report))

    def _show_plan(self, report: PlanReport) -> None:
        self._is_chat = report.rows is not None
        if self._json or not self._plan_only:
            err.print(*plan_lines(report, err), sep="\n")
        for line in report.notes:
            console.print_status(f"note: {line}")
        if report.resumed_at_step:
            console.print_status(f"resuming after step {report.resumed_at_step:,}")

    def _write_json(self, report: RunReport) -> None:
        line = json.dumps(json_record(report))
        try:
            console.write(line.encode() + b"\n")
        except streams.StdoutClosedError:
            self._json = False  # training continues without its reader
        except TgenError as error:
            self._json, self._stdout_error = False, error  # as it does without an output

    def _show_phase(self, report: PhaseReport) -> None:
        """Show the phase with its time left and, without a terminal, a line once it takes long."""
        is_new = self._phase is None or self._phase.phase != report.phase
        if is_new or report.seconds_left is not None:
            self._phase_began = time.monotonic()
        self._phase = report
        if is_new and not console.draws_progress():
            self._start_timer(report.phase)
        else:
            self._update(report.phase, report.fraction_done)

    def _start_timer(self, phase: str) -> None:
        """Print the name of a phase once it takes long."""
        self._stop_timer()
        self._timer = threading.Timer(_PHASE_SECONDS, self._print_line, [phase])
        self._timer.daemon = True
        self._timer.start()

    def _print_line(self, line: str) -> None:
        console.print_status(line)
        self._last_line = time.monotonic()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _line(self, description: str) -> str:
        """Return the line beside the bar; while it is redrawn, the times keep counting."""
        phase, seconds = self._phase, time.monotonic() - self._phase_began
        if phase is None:
            return description
        done = "" if phase.fraction_done is None else f": {phase.fraction_done:.0%}"
        if phase.seconds_left is not None:
            left = max(0.0, phase.seconds_left - seconds)
            return f"{phase.phase}{done} · {format_duration(left)} left"
        return (
            f"{phase.phase}{done} · {format_duration(seconds)}"
            if seconds >= 1
            else phase.phase + done
        )

    def _show_step(self, report: StepReport) -> None:
        loss = "skipped, not finite" if report.loss is None else f"loss {report.loss:.3f}"
        left = format_duration(report.seconds_left)
        line = (
            f"step {report.step:,} · {loss}{self._validation} · "
            f"{report.tokens_per_second:,.0f} tokens/s · {left} left"
        )
        if report.other_cpus is not None:
            line += f" · other processes use {report.other_cpus:.1f} of {len(allowed_cpus())} CPUs"
        self._phase = None
        self._update(line, report.fraction_done)

    def _update(self, line: str, fraction_done: float | None) -> None:
        """Show a line beside the progress bar or, without a terminal, every few seconds."""
        if console.draws_progress():
            self._bar.update(self._task, completed=fraction_done or 0.0, description=line)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._stop_timer()
            self._print_line(self._line(line))

    def _show_evaluation(self, report: EvalReport) -> None:
        self._validation = f" · validation {report.bits_per_byte:.3f} bits/byte"
        best = " (best so far)" if report.best else ""
        error = "" if report.standard_error is None else f" ±{report.standard_error:.3f}"
        console.print_status(
            f"step {report.step:,} · validation {report.bits_per_byte:.3f}{error} bits/byte{best}"
            f" · after {format_duration(report.seconds)}"
        )

    def _show_saving(self, report: SavingReport) -> None:
        line = f"warning: step {report.step:,} cannot be saved: {report.failed}"
        if not report.failed:
            console.print_status(f"saved step {report.step:,}")
        elif self._save_error == report.failed:
            console.print_status(line)
        else:
            needed, free = format_bytes(report.needed_bytes), format_bytes(report.free_bytes)
            console.print_status(f"{line} (needs {needed}, {free} free); retrying")
        self._save_error = report.failed


class _LineColumn(ProgressColumn):
    """The text beside the bar, which wraps between words."""

    def __init__(self, line: Callable[[str], str]) -> None:
        super().__init__(Column(no_wrap=False))
        self._line = line

    def render(self, task: Task) -> Text:
        """Return the text."""
        return Text(self._line(task.description))


def _status_line(
    report: AnswersReport | EventsReport | SampleReport | RollbackReport | MemorizationReport,
) -> str:
    match report:
        case EventsReport():
            return (
                f"warning: {report.name} stops at step {report.step:,}: {report.failed}; "
                "training continues"
            )
        case AnswersReport():
            of = count(report.n_answers, "answer")
            checked = f" ({report.n_checked:,} checked)" * (report.n_checked < report.n_answers)
            return f"step {report.step:,} · {report.n_exact:,} of {of} exact{checked}"
        case SampleReport():
            prompt, text = (one.decode(errors="replace") for one in (report.prompt, report.text))
            return f"  {_shorten(' '.join(f'{prompt}│{text}'.split()))}"
        case RollbackReport():
            scale = f" with {report.learning_rate_scale:g} times the learning rates"
            return (
                f"{report.reason}: continuing from the checkpoint of step {report.step:,}"
                f"{scale if report.learning_rate_scale < 1 else ''}"
            )
        case MemorizationReport():
            return report.verdict


def _shorten(line: str) -> str:
    """Return the start of a line, up to a word's end."""
    if len(line) <= _SAMPLE_CHARACTERS:
        return line
    start, _, _ = line[:_SAMPLE_CHARACTERS].rpartition(" ")
    return f"{start or line[:_SAMPLE_CHARACTERS]} …"
