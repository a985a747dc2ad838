"""`tgen bench --end-to-end` and `tgen bench --train`: run them and draw their tables."""

from dataclasses import fields

from rich.table import Table
from rich.text import Text

from tgen.benchmark.statistics import spread
from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.output import show_last_report
from tgen.config import EngineOptions
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.drawing.tables import table
from tgen.errors import UsageError
from tgen.reports.benchmark import EndToEndReport, Timing, TrainingStepReport
from tgen.reports.number_format import MIB

_BAR_WIDTH = 40  # columns for the total


def run_end_to_end(options: BenchOptions) -> None:
    """Time whole processes that generate a text, phase by phase."""
    from tgen.benchmark.backend import random_tokens
    from tgen.benchmark.end_to_end import measure_end_to_end
    from tgen.lora.model_with_adapter import load

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
    given = ["--model", str(options.path)]
    for one in fields(EngineOptions):
        value = getattr(options.engine_options, one.name)
        if value != one.default:
            given += [one.metadata["flags"][0], str(value)]
    prompt = bundle.tokenizer.decode(ids)
    reports = measure_end_to_end(given, prompt, n_gen=n_gen, trials=options.trials)
    show_last_report(options, "tgen.bench.end_to_end/3", reports, phase_table)


def _ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:,.1f} ±{(timing.p90 - timing.p10) / 2 * 1e3:,.1f}"


def phase_table(report: EndToEndReport) -> list[Table | Text]:
    """Return one row per phase, with a bar for its share of the total."""
    rows = table("phase", ">ms", ">% of total", "")
    total = report.total.median
    for name, phase in report.phases.items():
        bar = "█" * round(phase.median / total * _BAR_WIDTH)
        rows.add_row(name, _ms(phase), f"{phase.median / total:.0%}", bar)
    rows.add_row("total", _ms(report.total), "", "", style="bold")
    caption = (
        f"prompt tokens: {report.n_prompt}, generated: {report.n_gen}, "
        f"{report.tokens_per_second:,.0f} tokens/s overall; medians over processes: "
        f"{len(report.total.seconds)}"
    )
    if report.peak_memory_bytes is not None:
        caption += f"; peak RSS {report.peak_memory_bytes / MIB:,.0f} MiB"
    return [rows, Text(caption, style="dim")]


def run_train(options: BenchOptions) -> None:
    """Time training steps of a model of the same shape, on random tokens."""
    from tgen.benchmark.roofline import measure_peak_rates
    from tgen.benchmark.training_step import measure_training_step
    from tgen.lora.model_with_adapter import load
    from tgen.machine.cpus import default_threads
    from tgen.machine.device import choose_device
    from tgen.model.precision import computes_bfloat16

    config = load(options.path).config
    threads = options.only("threads", default_threads())
    batch = options.only("batches", ResolvedTrainConfig().batch_size)
    device = choose_device(options.device)
    precision: Precision = "bfloat16" if computes_bfloat16(device) else "float32"  # as in training
    flops = None
    if options.limits:
        peak = measure_peak_rates(0, device=device.type, threads=threads, dtype=precision)
        flops = peak.flops_per_second
    reports = measure_training_step(
        config,
        config=ResolvedTrainConfig(batch_size=batch, precision=precision, seed=options.seed),
        steps=1 if device.type == "cpu" else 10,
        trials=options.trials,
        device=device.type,
        threads=threads,
        peak_flops=flops,
    )
    show_last_report(options, "tgen.bench.train/2", reports, training_table)


def training_table(report: TrainingStepReport) -> list[Table | Text]:
    """Return the duration of a step and its utilization of the machine."""
    step = report.seconds
    rows = table("training step", ">")
    rows.add_row("tokens", f"{report.tokens_per_step:,}")
    rows.add_row("time", f"{step.median * 1e3:,.1f} ms ±{spread(step):.0%}")
    rows.add_row("tokens/s", f"{report.tokens_per_second:,.0f}")
    rows.add_row("compute per token", f"{report.flops_per_token / 1e6:,.1f} MFLOP")
    rows.add_row("compute rate", f"{report.flops_per_second / 1e9:,.1f} GFLOP/s")
    if report.utilization is not None and report.peak_flops is not None:
        rows.add_row("peak (matrix product)", f"{report.peak_flops / 1e9:,.1f} GFLOP/s")
        rows.add_row("% of peak", f"{report.utilization:.0%}")
    memory = report.device_memory_bytes or report.peak_memory_bytes
    if memory is not None:
        rows.add_row("peak memory", f"{memory / MIB:,.0f} MiB")
    caption = f"timed blocks: {len(step.seconds)}, steps: {report.steps}, on {report.device}, "
    caption += f"products in {report.precision}"
    return [rows, Text(caption, style="dim")]
