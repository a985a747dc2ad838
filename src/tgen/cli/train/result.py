"""The lines at the end of a training run: what it has reached, and the commands that follow."""

import shlex

from tgen.cli import console
from tgen.cli.train.plan_table import expected_loss
from tgen.distributed import ranks
from tgen.reports.number_format import count, format_duration
from tgen.reports.training import DoneReport


def print_result(report: DoneReport, *, chat: bool) -> None:
    """Print the lines to stderr; `chat` says whether the model is one for chats."""
    steps = count(report.step, "step")
    work = f"{steps}, {count(report.tokens, 'token')} in {format_duration(report.seconds)}"
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
        loss = expected_loss(forecast)
        console.print_status(f"forecast: another {more} would give about {loss}")
        command = f"{_command()} train --resume --override {end} --out {shlex.quote(report.out)}"
        console.print_status(f"continue with: {command}", is_command=True)
    console.print_try_generate(
        report.out, prompt=report.sample_prompt, chat=chat, exact=report.learned
    )


def _command() -> str:
    """Return the command that started this process."""
    this = ranks()
    if this.world_size == 1:
        return "tgen"
    n_nodes = this.world_size // this.local_world_size
    nodes = f" --nnodes {n_nodes} ..." if n_nodes > 1 else ""
    return f"torchrun{nodes} --nproc-per-node {this.local_world_size} -m tgen"
