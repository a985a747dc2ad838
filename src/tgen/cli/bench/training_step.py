"""`tgen bench --train`: run it and draw its table."""

from rich.table import Table
from rich.text import Text

from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.output import show_last_report
from tgen.cli.render.tables import table
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.reports.benchmark import TrainingStepReport

_MIB = 2**20


def run_train(options: BenchOptions) -> None:
    """Time training steps of a model of the same shape, on random tokens."""
    from tgen.benchmark.roofline import measure_peak_rates
    from tgen.benchmark.training_step import measure_training_step
    from tgen.lora.merging import load
    from tgen.model.cpu_count import default_threads
    from tgen.model.device import choose_device
    from tgen.model.product_precision import computes_bfloat16

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
    caption = f"timed blocks: {len(step.seconds)}, steps: {report.steps}, on {report.device}, "
    caption += f"products in {report.precision}"
    return [rows, Text(caption, style="dim")]
