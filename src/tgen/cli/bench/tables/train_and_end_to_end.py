"""Tables of `tgen bench --train` and `tgen bench --end-to-end`."""

from rich.table import Table
from rich.text import Text

from tgen.cli.render.tables import table
from tgen.reports.benchmark import EndToEndReport, TrainingStepReport

_BAR_WIDTH = 40  # columns for the total
_MIB = 2**20


def training_table(report: TrainingStepReport) -> list[Table | Text]:
    """Return the duration of a step and its utilization of the machine."""
    step = report.seconds
    rows = table("training step", ">")
    rows.add_row("tokens", f"{report.tokens_per_step:,}")
    rows.add_row("time", f"{step.median * 1e3:,.1f} ms ±{step.spread:.0%}")
    rows.add_row("tokens/s", f"{report.tokens_per_second:,.0f}")
    rows.add_row("compute per token", f"{report.flops_per_token / 1e6:,.1f} MFLOP")
    rows.add_row("compute rate", f"{report.flops_per_second / 1e9:,.1f} GFLOP/s")
    if report.utilization is not None and report.peak_flops is not None:
        rows.add_row("peak (matrix product)", f"{report.peak_flops / 1e9:,.1f} GFLOP/s")
        rows.add_row("% of peak", f"{report.utilization:.0%}")
    memory = report.device_memory_bytes or report.peak_memory_bytes
    if memory is not None:
        rows.add_row("peak memory", f"{memory / _MIB:,.0f} MiB")
    caption = f"{len(step.seconds)} blocks, {report.steps} steps in total, on {report.device}"
    return [rows, Text(caption, style="dim")]


def phase_table(report: EndToEndReport) -> list[Table | Text]:
    """Return one row per phase, with a bar for its share of the total."""
    rows = table("phase", ">ms", ">% of total", "")
    total = report.total.median
    for name, phase in report.phases.items():
        bar = "█" * round(phase.median / total * _BAR_WIDTH)
        ms = f"{phase.median * 1e3:,.1f} ±{(phase.p90 - phase.p10) / 2 * 1e3:,.1f}"
        rows.add_row(name, ms, f"{phase.median / total:.0%}", bar)
    spread = (report.total.p90 - report.total.p10) / 2
    rows.add_row("total", f"{total * 1e3:,.1f} ±{spread * 1e3:,.1f}", "", "", style="bold")
    caption = (
        f"prompt of {report.n_prompt} tokens, {report.n_gen} generated: "
        f"{report.tokens_per_second:,.0f} tokens/s overall; medians of "
        f"{len(report.total.seconds)} processes"
    )
    if report.peak_memory_bytes is not None:
        caption += f"; peak RSS {report.peak_memory_bytes / _MIB:,.0f} MiB"
    return [rows, Text(caption, style="dim")]
