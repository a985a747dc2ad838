"""`tgen bench --kv-cache`, `--train` and `--end-to-end`."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from tgen.cli import console
from tgen.cli.bench.options import BenchOptions
from tgen.config import ResolvedTrainConfig, StoredAs
from tgen.errors import UsageError
from tgen.reports.benchmark import LengthReport, TrialReport
from tgen.reports.to_json import json_value


def run_kv_cache(options: BenchOptions) -> None:
    """Time the last token of texts of each length, with and without the KV cache."""
    from tgen.benchmark.kv_cache import (
        VERDICT_TOKENS,
        default_lengths,
        fit_line,
        measure_lengths,
        sample_text,
        verify_cache,
    )
    from tgen.cli.bench.tables import kv_cache as tables
    from tgen.loaded_model import open_model

    model = open_model(
        options.path,
        device=options.device,
        threads=options.only("threads", None),
        dtype=options.only("dtypes", None),
    )
    engine = model.engine
    if engine.context_length < 2:
        raise UsageError(
            f"--kv-cache: the model's context must be at least 2 tokens "
            f"(got {engine.context_length})",
            "use another model",
        )
    lengths = sorted(set(options.lengths or default_lengths(engine.context_length)))
    n_tokens = min(max(lengths), engine.context_length)
    text = sample_text(engine, model.encode(b""), n_tokens, seed=options.seed)
    reports: list[LengthReport] = []
    with console.progress("measuring", quiet=options.quiet) as update:
        for report in measure_lengths(engine, text, lengths, trials=options.trials):
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
            else:
                reports.append(report)
        verdict = verify_cache(engine, text[: max(1, n_tokens // 4)], VERDICT_TOKENS)
    cached = fit_line(lengths, [report.cached for report in reports])
    uncached = fit_line(lengths, [report.uncached for report in reports])
    computed = model.bundle.config.cache_bytes_per_token
    if options.output == "json":
        fields = {
            "seed": options.seed,
            "cache_bytes_per_token": computed,
            "lengths": reports,
            "growth": {"cached": cached, "uncached": uncached},
            "verdict": verdict,
        }
        _write_json(options, "tgen.bench/3", fields)
        return
    console.show(
        f"last token of each text: median ± half the 10th-to-90th percentile range of "
        f"{options.trials} interleaved trials",
        tables.length_table(reports),
        *tables.length_plot(reports),
        *tables.fit_lines(reports, cached, uncached),
        tables.cache_line(reports, computed),
        tables.verdict_line(verdict),
        wrap=console.out.is_terminal,
    )


def run_train(options: BenchOptions) -> None:
    """Time training steps of a model of the same shape, on random tokens."""
    from tgen.benchmark.roofline import measure_peak_rates
    from tgen.benchmark.training_step import measure_training_step
    from tgen.checkpoint.model_dir import load
    from tgen.cli.bench.tables.train_and_end_to_end import training_table
    from tgen.model.cpu_count import cpu_count
    from tgen.model.device import choose_device

    config = load(options.path).config
    threads = options.only("threads", cpu_count())
    batch = options.only("batches", ResolvedTrainConfig().batch_size)
    device = choose_device(options.device).type
    flops = None
    if options.limits:
        dtype: StoredAs = "float32" if device == "cpu" else "bfloat16"  # as in training
        peak = measure_peak_rates(0, device=device, threads=threads, dtype=dtype)
        flops = peak.flops_per_second
    reports = measure_training_step(
        config,
        config=ResolvedTrainConfig(batch_size=batch, seed=options.seed),
        steps=1 if device == "cpu" else 10,
        trials=options.trials,
        device=device,
        threads=threads,
        peak_flops=flops,
    )
    _show_last(options, "tgen.bench.train/2", reports, training_table)


def run_end_to_end(options: BenchOptions) -> None:
    """Time whole processes that generate a text, phase by phase."""
    from tgen.benchmark.end_to_end import measure_end_to_end
    from tgen.benchmark.throughput import random_tokens
    from tgen.checkpoint.model_dir import load
    from tgen.cli.bench.tables.train_and_end_to_end import phase_table

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
        modules=["tgen.cli.app"],
    )
    _show_last(options, "tgen.bench.end_to_end/2", reports, phase_table)


def _show_last(
    options: BenchOptions, schema: str, reports: Iterable[Any], table: Callable[[Any], list[Any]]
) -> None:
    """Show progress for the trials, then write the report that follows them."""
    with console.progress("measuring", quiet=options.quiet) as update:
        for report in reports:
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
    if options.output == "json":
        _write_json(options, schema, json_value(report))
    else:
        console.show(*table(report), wrap=console.out.is_terminal)


def _write_json(options: BenchOptions, schema: str, fields: dict[str, Any]) -> None:
    record = {"schema": schema, "model": str(options.path), "trials": options.trials} | fields
    console.write(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
