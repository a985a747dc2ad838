"""`tgen bench --end-to-end`: run it and draw its table."""

from rich.table import Table
from rich.text import Text

from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.output import show_last_report
from tgen.cli.render.tables import table
from tgen.errors import UsageError
from tgen.reports.benchmark import EndToEndReport

_BAR_WIDTH = 40  # columns for the total
_MIB = 2**20


def run_end_to_end(options: BenchOptions) -> None:
    """Time whole processes that generate a text, phase by phase."""
    from tgen.benchmark.backend import random_tokens
    from tgen.benchmark.end_to_end import measure_end_to_end
    from tgen.lora.merging import load

    bundle = load(options.path)
    context = bundle.config.context_length
    n_prompt = options.only("prompts", min(16, max(context // 2, 1)))
    n_gen = options.only("gens", min(64, max(context - n_prompt, 1)))
    if n_prompt < 1 or n_gen < 1 or n_prompt + n_gen > context:
        raise UsageError(
            f"--end-to-end: -p and -n must be at least 1 and fit the context of {context} tokens "
            f"(got {n_prompt} and {n_gen})",
            "use a smaller -p or -n",
        )
    ids = random_tokens(bundle.config.vocab_size, n_prompt, seed=options.seed)
    reports = measure_end_to_end(
        options.path,
        bundle.tokenizer.decode(ids),
        n_gen=n_gen,
        trials=options.trials,
        device=options.device,
        threads=options.only("threads", None),
        dtype=options.only("dtypes", None),
        cache_dtype=options.cache_dtype,
        modules=["tgen.cli.app"],
    )
    show_last_report(options, "tgen.bench.end_to_end/2", reports, phase_table)


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
        f"prompt tokens: {report.n_prompt}, generated: {report.n_gen}, "
        f"{report.tokens_per_second:,.0f} tokens/s overall; medians over processes: "
        f"{len(report.total.seconds)}"
    )
    if report.peak_memory_bytes is not None:
        caption += f"; peak RSS {report.peak_memory_bytes / _MIB:,.0f} MiB"
    return [rows, Text(caption, style="dim")]
