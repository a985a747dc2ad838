"""`tgen bench`: how fast the model is, and what the KV cache buys."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tgen.cli import console
from tgen.cli.loading import load_model
from tgen.cli.options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    QuietOption,
    ThreadsOption,
    WeightsOption,
)
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.reports import LengthReport, PrecisionReport, TrialReport

if TYPE_CHECKING:
    from tgen.api import Model


def bench(
    kv_cache: Annotated[
        bool,
        typer.Option(
            "--kv-cache", help="Also without the cache, and whether the text is the same."
        ),
    ] = False,
    model: ModelOption = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            "-l",
            show_default="16 and its doublings up to the context",
            help="Tokens before the decoded one; repeatable.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", "-r", min=1, help="Rounds; medians are shown.")
    ] = 10,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the text that is timed.")
    ] = SamplingConfig().seed,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    weights: WeightsOption = None,
) -> None:
    """Measure prefill and decoding on this machine.

    With --kv-cache each is measured with and without the cache, in turns, and the two texts are
    compared token by token.
    """
    from tgen.benchmark.kv_cache import (
        VERDICT_TOKENS,
        compare,
        default_lengths,
        measure,
        own_text,
    )
    from tgen.cli.views.benchmark import length_table, precision_line, verdict_line

    path, loaded = load_model(model, device=device, threads=threads, weights=weights, quiet=quiet)
    console.note(f"{path}", quiet=quiet)
    engine = loaded.engine
    if engine.context_length < 2:
        raise UsageError(
            f"the model's context is {engine.context_length} token", "a benchmark needs two"
        )
    lengths = sorted(set(length or default_lengths(engine.context_length)))
    n_tokens = min(max(lengths) + 1, engine.context_length)
    text = own_text(engine, loaded.encode(b""), n_tokens, seed=seed)
    reports: list[LengthReport] = []
    with console.progress("measuring", quiet=quiet) as update:
        for report in measure(engine, text, lengths, trials=trials, uncached=kv_cache):
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
            else:
                reports.append(report)
        prompt = text[: max(1, n_tokens // 4)]
        verdict = compare(engine, prompt, VERDICT_TOKENS) if kv_cache else None
    precision = _precision(path, loaded, device, threads, seed=seed) if weights else None
    formula = loaded.bundle.config.cache_bytes_per_token
    if json_output:
        record = {
            "schema": "tgen.bench/1",
            "model": str(path),
            "trials": trials,
            "seed": seed,
            "cache_bytes_per_token": formula,
            "lengths": [asdict(report) for report in reports],
            "verdict": asdict(verdict) if verdict else None,
            "precision": asdict(precision) if precision else None,
        }
        console.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        return
    console.show(
        f"the next token after each length: median ± spread of {trials} interleaved trials",
        length_table(reports),
        f"cache: {formula:,} bytes a token",
    )
    if verdict:
        console.show(verdict_line(verdict))
    if precision:
        console.show(precision_line(precision))


def _precision(
    path: Path, model: "Model", device: str, threads: int | None, *, seed: int
) -> PrecisionReport | None:
    """What `--weights` costs, where it holds them in fewer bits than they are stored in."""
    from tgen.api import load
    from tgen.benchmark.precision import compare_weights

    if model.engine.stored == "float32":
        return None
    exact = load(path, device=device, threads=threads)
    start, decode = exact.encode(b""), exact.tokenizer.decode
    return compare_weights(model.engine, exact.engine, start, decode=decode, seed=seed)
