"""`tgen bench`'s other studies: the KV cache, a step of training, a whole process."""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.bench.options import BenchOptions
from tgen.config import StoredAs, TrainConfig
from tgen.errors import UsageError
from tgen.reports import LengthReport, TrialReport, json_value

if TYPE_CHECKING:
    from tgen.api import Model


def kv_cache(asked: BenchOptions) -> None:
    """The last token of texts of every length, with and without the cache."""
    from tgen.benchmark.kv_cache import (
        VERDICT_TOKENS,
        compare,
        default_lengths,
        growth,
        measure,
        own_text,
    )
    from tgen.cli.bench.tables.kv_cache import (
        cache_line,
        curve,
        growth_lines,
        length_table,
        verdict_line,
    )

    model = _load(asked)
    engine = model.engine
    if engine.context_length < 2:
        raise UsageError(
            f"the model's context is {engine.context_length} token", "a benchmark needs two"
        )
    lengths = sorted(set(asked.lengths or default_lengths(engine.context_length)))
    n_tokens = min(max(lengths), engine.context_length)
    text = own_text(engine, model.encode(b""), n_tokens, seed=asked.seed)
    reports: list[LengthReport] = []
    with console.progress("measuring in turns", quiet=asked.quiet) as update:
        for report in measure(engine, text, lengths, trials=asked.trials):
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
            else:
                reports.append(report)
        verdict = compare(engine, text[: max(1, n_tokens // 4)], VERDICT_TOKENS)
    cached = growth(lengths, [report.cached for report in reports])
    uncached = growth(lengths, [report.uncached for report in reports])
    formula = model.bundle.config.cache_bytes_per_token
    if asked.output == "json":
        record = {
            "schema": "tgen.bench/2",
            "model": str(asked.path),
            "trials": asked.trials,
            "seed": asked.seed,
            "cache_bytes_per_token": formula,
            "lengths": reports,
            "growth": {"cached": cached, "uncached": uncached},
            "verdict": verdict,
        }
        console.write(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
        return
    console.show(
        f"the last token of each text: median ± spread of {asked.trials} trials in turns",
        length_table(reports),
        *curve(reports),
        *growth_lines(reports, cached, uncached),
        cache_line(reports, formula),
        verdict_line(verdict),
        wrap=console.out.is_terminal,
    )


def train(asked: BenchOptions) -> None:
    """Steps of training of the model's shape, on random tokens."""
    from tgen.benchmark.peak_rates import measure_limits
    from tgen.benchmark.training_step import measure
    from tgen.checkpoint.model_dir import load
    from tgen.cli.bench.tables.train_and_phases import training_view
    from tgen.model.cpu_count import cpu_count
    from tgen.model.device import choose_device

    config = load(asked.path).config
    threads = asked.only("threads", cpu_count())
    batch = asked.only("batches", TrainConfig().batch_size)
    device = choose_device(asked.device).type
    flops = None
    if asked.limits:
        kind: StoredAs = "float32" if device == "cpu" else "bfloat16"  # as training computes
        flops = measure_limits(0, device=device, threads=threads, stored=kind).flops
    reports = measure(
        config,
        config=TrainConfig(batch_size=batch, seed=asked.seed),
        steps=1 if device == "cpu" else 10,
        trials=asked.trials,
        device=device,
        threads=threads,
        peak_flops=flops,
    )
    _show(asked, "tgen.bench.train/1", _last(reports, asked), training_view)


def end_to_end(asked: BenchOptions) -> None:
    """A whole process that writes a text, phase by phase."""
    from tgen.benchmark.end_to_end import measure
    from tgen.benchmark.throughput import random_tokens
    from tgen.checkpoint.model_dir import load
    from tgen.cli.bench.tables.train_and_phases import phases_view

    bundle = load(asked.path)
    context = bundle.config.context_length
    n_prompt = asked.only("prompts", min(16, max(context // 2, 1)))
    n_gen = asked.only("gens", min(64, max(context - n_prompt, 1)))
    if n_prompt < 1 or n_gen < 1 or n_prompt + n_gen > context:
        raise UsageError(
            f"a prompt of {n_prompt} and {n_gen} tokens written do not fit",
            f"at least one each, and {context} in all",
        )
    ids = random_tokens(bundle.config.vocab_size, n_prompt, seed=asked.seed)
    reports = measure(
        asked.path,
        bundle.tokenizer.decode(ids),
        n_gen=n_gen,
        trials=asked.trials,
        device=asked.device,
        threads=asked.only("threads", None),
        weights=asked.only("weights", None),
        modules=["tgen.cli.app"],
    )
    _show(asked, "tgen.bench.end_to_end/1", _last(reports, asked), phases_view)


def _last(reports: Iterable[Any], asked: BenchOptions) -> Any:
    """Follows the trials, to the report behind them."""
    with console.progress("measuring", quiet=asked.quiet) as update:
        for report in reports:
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
    return report


def _show(asked: BenchOptions, schema: str, report: Any, view: Callable[[Any], list[Any]]) -> None:
    if asked.output == "json":
        record = {"schema": schema, "model": str(asked.path), "trials": asked.trials}
        record |= json_value(report)
        console.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    else:
        console.show(*view(report), wrap=console.out.is_terminal)


def _load(asked: BenchOptions) -> "Model":
    """The model, in the one way that a study looks at."""
    from tgen.api import load

    threads, weights = asked.only("threads", None), asked.only("weights", None)
    return load(asked.path, device=asked.device, threads=threads, weights=weights)
