"""A step of training, and a whole process, in tables."""

from rich.table import Table
from rich.text import Text

from tgen.cli.render.tables import table
from tgen.reports import EndToEndReport, TrainingStepReport

_BAR = 40  # columns of the whole
_MIB = 2**20


def training_view(report: TrainingStepReport) -> list[Table | Text]:
    """What a step takes, and how much of the machine's arithmetic it uses."""
    step = report.seconds
    rows = table("a step of training", ">")
    rows.add_row("tokens", f"{report.tokens_per_step:,}")
    rows.add_row("time", f"{step.median * 1e3:,.1f} ms ±{step.spread:.0%}")
    rows.add_row("tokens a second", f"{report.tokens_per_second:,.0f}")
    rows.add_row("operations a token", f"{report.flops_per_token / 1e6:,.1f} MFLOP")
    rows.add_row("operations a second", f"{report.flops_per_second / 1e9:,.1f} GFLOP/s")
    if report.utilisation is not None and report.peak_flops is not None:
        rows.add_row("a matrix product alone", f"{report.peak_flops / 1e9:,.1f} GFLOP/s")
        rows.add_row("utilisation", f"{report.utilisation:.0%}")
    memory = report.device_memory_bytes or report.peak_memory_bytes
    if memory is not None:
        rows.add_row("memory at most", f"{memory / _MIB:,.0f} MiB")
    said = f"{len(step.seconds)} blocks, {report.steps} steps in all, on {report.device}"
    return [rows, Text(said, style="dim")]


def phases_view(report: EndToEndReport) -> list[Table | Text]:
    """A row a phase, with a bar of its share."""
    rows = table("phase", ">ms", ">of all", "")
    total = report.total.median
    for name, found in report.phases.items():
        spread = (found.high - found.low) / 2
        bar = "█" * round(found.median / total * _BAR)
        ms = f"{found.median * 1e3:,.1f} ±{spread * 1e3:,.1f}"
        rows.add_row(name, ms, f"{found.median / total:.0%}", bar)
    spread = (report.total.high - report.total.low) / 2
    rows.add_row("all", f"{total * 1e3:,.1f} ±{spread * 1e3:,.1f}", "", "", style="bold")
    said = (
        f"a prompt of {report.n_prompt} tokens and {report.n_gen} written: "
        f"{report.tokens_per_second:,.0f} tokens a second in all; medians of "
        f"{len(report.total.seconds)} processes"
    )
    if report.peak_memory_bytes is not None:
        said += f", {report.peak_memory_bytes / _MIB:,.0f} MiB of memory at most"
    return [rows, Text(said, style="dim")]
