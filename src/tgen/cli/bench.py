"""`tgen bench`: how fast the model is, and what the KV cache buys."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tgen.cli import console
from tgen.cli.options import DeviceOption, JsonOption, ModelOption, QuietOption, ThreadsOption
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.reports import LengthReport, TrialReport


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
) -> None:
    """Measure prefill and decoding on this machine.

    With --kv-cache each is measured with and without the cache, in turns, and the two texts are
    compared token by token.
    """
    from tgen.api import find_model, load
    from tgen.benchmark.kv_cache import compare, default_lengths, measure
    from tgen.cli.views.benchmark import length_table, verdict_line

    path = find_model(model)
    loaded = load(path, device=device, threads=threads)
    console.note(f"{path}", quiet=quiet)
    context = loaded.engine.context_length
    if context < 2:
        raise UsageError(f"the model's context is {context} token", "a benchmark needs two")
    sampling = SamplingConfig(temperature=1.0, top_k=0, seed=seed)
    text = [token.id for token in loaded.tokens(b"", max_new_tokens=context, sampling=sampling)]
    text = (text * context)[:context]  # the model's own words; it may have ended early
    reports: list[LengthReport] = []
    with console.progress("measuring", quiet=quiet) as update:
        for report in measure(
            loaded.engine,
            text,
            sorted(set(length or default_lengths(context))),
            trials=trials,
            uncached=kv_cache,
        ):
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
            else:
                reports.append(report)
    verdict = compare(loaded.engine, text[: max(1, context // 4)], context) if kv_cache else None
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
        }
        console.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        return
    console.show(length_table(reports, trials=trials), f"cache: {formula:,} bytes a token")
    if verdict:
        console.show(verdict_line(verdict))
