"""A run as it goes: the plan as a table, a bar on a terminal, plain lines elsewhere."""

import json
import shlex
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tgen.cli import console
from tgen.cli.train.scaling_table import scaling_table
from tgen.distributed import ranks
from tgen.errors import TgenError
from tgen.reports import (
    DoneReport,
    EvalReport,
    EventsReport,
    MemorizationReport,
    PlanReport,
    PreparingReport,
    RollbackReport,
    RunReport,
    SampleReport,
    SavingReport,
    StepReport,
    json_record,
)

_PLAIN_EVERY = 10.0  # seconds between lines where there is no terminal


class TrainingProgress:
    """Draws reports on stderr; with `json_lines` also writes each as a line to stdout."""

    def __init__(self, *, quiet: bool, json_lines: bool) -> None:
        self._quiet, self._json = quiet, json_lines
        self._lost: TgenError | None = None
        self._bits = ""
        self._unsaved = ""  # why the last state is not on the disk
        self._said = time.monotonic()
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = Progress(
            *columns,
            console=console.err,
            transient=True,
            disable=quiet or not console.err.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._lost and error is None:
            raise self._lost

    def show(self, report: RunReport) -> None:
        """Draws one report."""
        if self._json:
            self._write(report)
        if self._quiet:
            return
        if isinstance(report, PreparingReport):
            left = f"{_duration(report.seconds_left)} left"
            self._line(f"tokenising: {report.fraction_done:.0%} · {left}", report.fraction_done)
        elif isinstance(report, PlanReport):
            self._plan(report)
        elif isinstance(report, StepReport):
            self._step(report)
        elif isinstance(report, EvalReport):
            self._evaluation(report)
        elif isinstance(report, SampleReport):
            self._sample(report)
        elif isinstance(report, RollbackReport):
            rates = f", learning rates {report.rate_scale:g} times the plan's"
            console.print_status(
                f"{report.reason}: back to step {report.step:,}"
                f"{rates if report.rate_scale < 1 else ''}"
            )
        elif isinstance(report, SavingReport):
            self._saving(report)
        elif isinstance(report, EventsReport):
            console.print_status(
                f"warning: TensorBoard's events end at step {report.step:,}: {report.failed}. "
                "Training goes on"
            )
        elif isinstance(report, MemorizationReport):
            console.print_status(report.verdict)
        else:
            self._done(report)

    def _write(self, report: RunReport) -> None:
        line = json.dumps(json_record(report))
        try:
            console.write(line.encode() + b"\n")
        except console.StdoutClosedError:
            self._json = False  # the run goes on without its reader
        except TgenError as error:
            self._json, self._lost = False, error  # and without a place to write to

    def _plan(self, plan: PlanReport) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_column(style="dim", overflow="fold")
        budget = _counted(plan.steps, "step") if plan.steps else f"{plan.minutes:g} min"
        shape = " · ".join(f"{name} {value}" for name, value in plan.shape.items())
        held_out = f"{plan.held_out_tokens:,} held out" if plan.held_out_tokens else "none held out"
        rows = [
            ("corpus", f"{plan.corpus_bytes:,} bytes", f"{plan.train_tokens:,} tokens, {held_out}"),
            ("model", f"{plan.family}, {plan.n_parameters / 1e6:.2f} M parameters", shape),
            ("vocabulary", f"{plan.vocab_size:,} tokens", ""),
            *((choice.name, choice.value, choice.why) for choice in plan.choices),
            ("time", budget, f"on {_where(plan)} · seed {plan.seed}"),
            ("writes", plan.out, "Ctrl-C saves and stops"),
            *(scaling_table(plan.scaling) if plan.scaling else ()),
        ]
        for name, value, why in rows:
            table.add_row(name, Text(value), Text(why))
        console.err.print(table)
        for line in plan.notes:
            console.print_status(f"note: {line}")
        if plan.resumed_at_step:
            console.print_status(f"resuming after step {plan.resumed_at_step:,}")

    def _step(self, report: StepReport) -> None:
        loss = "skipped, not finite" if report.loss is None else f"loss {report.loss:.3f}"
        line = (
            f"step {report.step:,} · {loss}{self._bits} · "
            f"{report.tokens_per_second:,.0f} tokens/s · {_duration(report.seconds_left)} left"
        )
        self._line(line, report.fraction_done)

    def _line(self, line: str, fraction_done: float) -> None:
        """On a terminal beside the bar, elsewhere now and then."""
        if console.err.is_terminal:
            self._bar.update(self._task, completed=fraction_done, description=line)
        elif time.monotonic() - self._said >= _PLAIN_EVERY:
            console.print_status(line)
            self._said = time.monotonic()

    def _evaluation(self, report: EvalReport) -> None:
        self._bits = f" · validation {report.bits_per_byte:.3f} bits/byte"
        best = " (best so far)" if report.best else ""
        error = "" if report.standard_error is None else f" ±{report.standard_error:.3f}"
        console.print_status(
            f"step {report.step:,} · validation {report.bits_per_byte:.3f}{error} bits/byte{best}"
            f" · after {_duration(report.seconds)}"
        )

    def _saving(self, report: SavingReport) -> None:
        line = f"warning: step {report.step:,} cannot be saved: {report.failed}"
        if not report.failed:
            console.print_status(f"step {report.step:,} is saved now")
        elif self._unsaved == report.failed:
            console.print_status(line)
        else:
            needed, free = _megabytes(report.needed_bytes), _megabytes(report.free_bytes)
            console.print_status(f"{line}; it needs {needed}, {free} are free. It is tried again")
        self._unsaved = report.failed

    def _sample(self, report: SampleReport) -> None:
        prompt = report.prompt.decode(errors="replace")
        text = report.text.decode(errors="replace")
        line = " ".join(console.printable(prompt + "│" + text).split())
        console.print_status(f"  {line[:160]}")

    def _done(self, report: DoneReport) -> None:
        steps = _counted(report.step, "step")
        took = f"{steps}, {report.tokens:,} tokens in {_duration(report.seconds)}"
        if report.finished:
            best = report.best_bits_per_byte
            quality = (
                f" · best validation {best:.3f} bits/byte at step {report.best_step:,}"
                if best is not None
                else ""
            )
            console.print_status(f"done: {took}{quality}")
            if report.baselines:
                others = " · ".join(f"{name} {bits:.3f}" for name, bits in report.baselines.items())
                console.print_status(f"on the same held-out bytes, bits/byte: {others}")
                if best is not None and min(report.baselines.values()) < best:
                    console.print_status(
                        "that is better than the model: more text or more minutes help"
                    )
            console.print_status(
                f'try: tgen generate --model {shlex.quote(report.out)} --prompt "What is"'
            )
        else:
            console.print_status(f"stopped and saved: {took}")
            console.print_status(
                f"go on with: {_again()} train --resume --out {shlex.quote(report.out)}"
            )


def _where(plan: PlanReport) -> str:
    threads = f"{plan.device} with {_counted(plan.threads, 'thread')}"
    ranks = _counted(plan.ranks, "rank")
    return f"{ranks} ({plan.parallel}), {threads} each" if plan.parallel else threads


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _again() -> str:
    """What this process was started with."""
    here = ranks()
    if here.world_size == 1:
        return "tgen"
    nodes = here.world_size // here.local_world_size
    several = f" --nnodes {nodes} ..." if nodes > 1 else ""
    return f"torchrun{several} --nproc-per-node {here.local_world_size} -m tgen"
