"""Progress of a training run on stderr: the plan, a progress bar or plain lines, the results.

Below the plan's rows, its table has those of the estimate for many ranks.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from tgen.cli import console, streams
from tgen.cli.rich_console import err, out
from tgen.distributed import ranks
from tgen.errors import TgenError
from tgen.machine.cpus import allowed_cpus
from tgen.reports.json_text import json_record
from tgen.reports.number_format import count, format_bytes, format_duration, format_number
from tgen.reports.training import (
    AnswersReport,
    DoneReport,
    EvalReport,
    EventsReport,
    Forecast,
    MemorizationReport,
    PhaseReport,
    PlanReport,
    RankMemory,
    RollbackReport,
    RowsReport,
    RunReport,
    SampleReport,
    SavingReport,
    ScalingReport,
    StepReport,
)

_PARALLEL = {"ddp": "a replica on every rank", "fsdp": "sharded, gathered block by block"}

# Name, seconds, smallest number that is shown in this unit.
_UNITS = (("years", 365 * 86400, 3), ("days", 86400, 2), ("hours", 3600, 2), ("minutes", 60, 2))
_LINE_SECONDS = 10.0  # between progress lines without a terminal
_LOADING = "loading PyTorch"
_PHASE_SECONDS = 2.0  # of a phase, until a line names it without a terminal
_SAMPLE_CHARACTERS = 160
_PART_CHARACTERS = 400  # of the first row, from the start and the end of each part


def scaling_table(report: ScalingReport) -> list[tuple[str, str, str]]:
    """Return rows of name, value and explanation."""
    memory = report.device_memory
    devices = count(report.n_ranks, "GPU" if report.on_gpu else "CPU")
    each = (
        f"with {format_bytes(memory)} each" if memory else "set --device-memory to check what fits"
    )
    table = [
        ("ranks", devices, each),
        (
            "global batch",
            count(report.batch_size, "window"),
            f"{report.step_tokens:,} tokens per step",
        ),
        *(_memory(rank, report.sent_bytes[rank.parallel]) for rank in report.ranks),
        ("parallel", report.parallel, _PARALLEL[report.parallel]),
        (
            "training tokens",
            _count(report.tokens),
            f"{format_number(report.tokens_per_parameter)} per parameter; {report.steps:,} steps, "
            f"{format_number(report.epochs)} epochs",
        ),
        (
            "compute-optimal",
            _count(report.optimal_tokens),
            f"{report.optimal_tokens_per_parameter} per parameter (Chinchilla); "
            f"{report.optimal_steps:,} steps, {format_number(report.optimal_epochs)} epochs",
        ),
        (
            "speed",
            f"{format_number(report.tokens_per_second)} tokens/s",
            f"assuming ranks as fast as this machine, {report.efficiency:.0%} scaling efficiency; "
            f"{_in_words(report.seconds)}, compute-optimal {_in_words(report.optimal_seconds)}",
        ),
    ]
    if report.on_gpu:
        gflop = format_number(report.flops_per_token / 1e9)
        table.append(
            (
                "speed on GPUs",
                f"{format_number(report.gpu_tokens_per_second)} tokens/s",
                f"per 100 TFLOP/s of a GPU's peak, assuming {report.gpu_share:.0%} of it and "
                f"{gflop} GFLOP per token; {_in_words(report.gpu_seconds)}, compute-optimal "
                f"{_in_words(report.gpu_optimal_seconds)}",
            )
        )
    return table


def _memory(rank: RankMemory, sent: int) -> tuple[str, str, str]:
    parts = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "moments": rank.optimizer,
        "activations": rank.activations,
        "copies": rank.copies,
        "update": rank.update,
        "save in RAM": rank.saving,
    }
    sizes = " · ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        rank.parallel,
        f"{format_bytes(rank.total)} per rank",
        f"{sizes}; sends {format_bytes(sent)} per step",
    )


def _count(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:,.1f} G" if n >= 1e9 else f"{n / 1e6:,.1f} M"


def _in_words(seconds: float) -> str:
    for unit, length, least in _UNITS:
        if seconds >= least * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"


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
            console.show(*_plan_lines(report, out))
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
                _print_result(report, chat=self._is_chat)
            case _:
                console.print_status(_status_line(report))

    def _show_plan(self, report: PlanReport) -> None:
        self._is_chat = report.rows is not None
        if self._json or not self._plan_only:
            err.print(*_plan_lines(report, err), sep="\n")
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


def _plan_lines(plan: PlanReport, console: Console) -> list[Table | Text]:
    """Return the plan's table, and the first row as it will be learned."""
    lines: list[Table | Text] = [_plan_table(plan)]
    if plan.rows is not None:
        lines += [Text("first row:", style="bold"), _first_row(plan.rows, console)]
    return lines


def _first_row(rows: RowsReport, console: Console) -> Text:
    """Return the row's text, tokens that are not in the loss dim or, without styles, target tokens
    in {+ +} as wdiff marks insertions."""
    styled = console.color_system is not None
    text = Text()
    for part in rows.first_row:
        shown = part.text
        if len(shown) > 2 * _PART_CHARACTERS:
            shown = f"{shown[:_PART_CHARACTERS]} ... {shown[-_PART_CHARACTERS:]}"
        if part.in_loss and not styled:
            shown = f"{{+{shown}+}}"
        text.append(shown, style=None if part.in_loss else "dim")
    return text


def _plan_table(plan: PlanReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    budget = count(plan.steps, "step") if plan.steps else f"{plan.minutes:g} min"
    shape = " · ".join(f"{name} {value}" for name, value in plan.shape.items())
    held_out = f"{plan.held_out_tokens:,} held out" if plan.held_out_tokens else "none held out"
    for name, value, why in [
        ("corpus", f"{plan.corpus_bytes:,} bytes", f"{plan.train_tokens:,} tokens, {held_out}"),
        *(_rows_lines(plan.rows) if plan.rows else ()),
        ("model", f"{plan.family}, {plan.n_parameters / 1e6:.2f} M parameters", shape),
        ("vocabulary", f"{plan.vocab_size:,} tokens", ""),
        *((choice.name, choice.value, choice.why) for choice in plan.choices),
        *([("forecast", _expected_loss(plan.forecast), "at the end")] if plan.forecast else ()),
        ("time", budget, f"on {_hardware(plan)} · seed {plan.seed}"),
        ("output", plan.out, "Ctrl-C saves and stops"),
        *(scaling_table(plan.scaling) if plan.scaling else ()),
    ]:
        table.add_row(name, Text(value), Text(why))
    return table


def _rows_lines(rows: RowsReport) -> list[tuple[str, str, str]]:
    held_out = f"{rows.held_out_rows:,} held out" if rows.held_out_rows else "none held out"
    targets = count(rows.target_tokens, "target token")
    return [("rows", f"{rows.rows:,}", f"{held_out}; {targets}, answers end with {rows.end_token}")]


def _print_result(report: DoneReport, *, chat: bool) -> None:
    steps = count(report.step, "step")
    work = f"{steps}, {report.tokens:,} tokens in {format_duration(report.seconds)}"
    if not report.finished:
        out = shlex.quote(report.out)
        console.print_status(f"stopped and saved: {work}")
        command = f"resume with: {_command()} train --resume --out {out}"
        console.print_status(command, is_command=True)
        return
    early = " (early stopping)" if report.stopped_early else ""
    early = " (every answer is learned)" if report.learned else early
    best = report.best_bits_per_byte
    at_best = f" at step {report.best_step:,}"
    quality = "" if best is None else f" · best validation {best:.3f} bits/byte{at_best}"
    console.print_status(f"done: {work}{early}{quality}")
    if report.baselines:
        baselines = " · ".join(f"{name} {bits:.3f}" for name, bits in report.baselines.items())
        console.print_status(f"baselines on the same held-out text, bits/byte: {baselines}")
        if best is not None and min(report.baselines.values()) < best:
            longer = "" if report.stopped_early else " or for longer"
            console.print_status(f"a baseline is better than the model: train on more text{longer}")
    if report.general_before is not None and report.general_after is not None:
        before, after = report.general_before, report.general_after
        console.print_status(
            f"general text: {before:.3f} bits/byte before, {after:.3f} after fine-tuning, on "
            f"{count(report.general_tokens, 'token')}"
        )
    if (forecast := report.forecast) is not None:  # of twice the steps or minutes
        more, end = count(forecast.steps - report.step, "step"), f"--steps {forecast.steps}"
        if forecast.minutes is not None:
            half, end = forecast.minutes / 2, f"--minutes {forecast.minutes:g}"
            more = f"{half:g} minute{'s' * (half != 1)}"
        loss = _expected_loss(forecast)
        console.print_status(f"forecast: another {more} would give about {loss}")
        command = f"{_command()} train --resume --override {end} --out {shlex.quote(report.out)}"
        console.print_status(f"continue with: {command}", is_command=True)
    console.print_try_generate(
        report.out, prompt=report.sample_prompt, chat=chat, exact=report.learned
    )


def _expected_loss(forecast: Forecast) -> str:
    return f"{forecast.bits_per_byte:.3f} ±{forecast.error:.3f} bits/byte"


def _hardware(plan: PlanReport) -> str:
    threads = f"{plan.device} with {count(plan.threads, 'thread')}"
    ranks = count(plan.ranks, "rank")
    return f"{ranks} ({plan.parallel}), {threads} each" if plan.parallel else threads


def _command() -> str:
    """Return the command that started this process."""
    this = ranks()
    if this.world_size == 1:
        return "tgen"
    n_nodes = this.world_size // this.local_world_size
    nodes = f" --nnodes {n_nodes} ..." if n_nodes > 1 else ""
    return f"torchrun{nodes} --nproc-per-node {this.local_world_size} -m tgen"
