"""Throughput runs of `tgen bench`: plain, `--against` another engine, `--compare` with a file."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tgen.cli import console
from tgen.cli.bench import llama_bench
from tgen.cli.bench.options import ENGINES, BenchOptions
from tgen.cli.bench.output import Comparison, collect_context, write_report
from tgen.config import STORED_BYTES, CacheDtype, EngineOptions, StoredAs
from tgen.errors import TgenError, UsageError
from tgen.reports.benchmark import Difference, PrecisionReport, ThroughputReport
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.benchmark.sweep import Setup
    from tgen.benchmark.workload import Workload

_PROMPT, _GEN = 512, 128  # llama-bench's defaults
_MAX_SAVED_BYTES = 64 << 20


def run_throughput(options: BenchOptions) -> None:
    """Measure every workload on every setup."""
    context, setups = collect_context(options), _open_setups(options)
    results = _measure(options, setups, _choose_workloads(options, setups))
    has_field = options.output not in ("md", "csv") or options.save
    dtypes = [dtype for dtype in options.dtypes or [] if dtype != "float32" and has_field]
    precision = {dtype: _measure_precision(options, dtype) for dtype in dtypes}
    write_report(options, context, results, precision=precision)


def run_against(options: BenchOptions, name: str) -> None:
    """Compare with another engine on the same weights, interleaved."""
    from tgen.benchmark.other_engines import REMARKS, open_other_engine
    from tgen.benchmark.sweep import check_trial_count, compare_backends, max_logit_difference

    check_trial_count(options.trials)
    context, setups = collect_context(options), _open_setups(options)
    if len(setups) > 1:
        raise UsageError(
            f"--against: needs a single setup (got {len(setups)})",
            "use a single --engine, --dtype and --threads",
        )
    (setup,) = setups
    if name != "self" and setup.device != "cpu":
        raise UsageError(f"--against {name} runs on the CPU only", "add --device cpu")
    workloads = _choose_workloads(options, setups)
    difference = 0.0
    with ExitStack() as stack:
        other: Any = setup.backend
        if name != "self":
            other = open_other_engine(
                name,
                options.path,
                threads=setup.threads,
                dtype=setup.dtype,
                tokens=setup.backend.tokens,
            )
            stack.enter_context(closing(other))
            difference = max_logit_difference(setup.backend, other, workloads[0])
        progress = stack.enter_context(console.progress("measuring"))
        setup, results = compare_backends(
            setup, other, name, workloads, trials=options.trials, progress=progress
        )
    comparison = Comparison(
        differences=[difference for *_, difference in results],
        of="tgen",
        to=name,
        others=[report for _, report, _ in results],
        fields={"against": name, "max_logit_difference": difference},
        remark=f"largest logit difference: {difference:.1e}{REMARKS.get(name, '')}",
    )
    reports = [(setup, report) for report, _, _ in results]
    write_report(options, context, reports, comparison=comparison)


def saved_model(path: Path) -> str:
    """Return the path of the model of a saved run; raises UsageError if it does not exist."""
    model = _read_records(path)[0].get("model_filename")
    if not isinstance(model, str) or not os.path.exists(model):
        raise UsageError(
            f"--compare: the model of {path} does not exist (got {model!r})",
            "name a model with --model",
        )
    return model


def run_compare(options: BenchOptions, path: Path, max_slowdown: float | None) -> None:
    """Repeat the workloads of a saved run and compare.

    Raises UsageError if the saved run is of another machine or model, or lacks a workload, and
    TgenError if a workload is significantly slower by more than `max_slowdown`, a fraction.
    """
    from tgen.benchmark.comparison import check_comparable, compare_with_saved
    from tgen.benchmark.sweep import check_trial_count
    from tgen.benchmark.workload import Workload

    saved = _read_records(path)
    if max_slowdown is not None:
        for trials in [options.trials, *(len(record["samples_ns"]) for record in saved)]:
            check_trial_count(trials)
    options = replace(
        options,
        engines=options.engines or _saved_values(saved, "engine"),
        dtypes=options.dtypes or _saved_values(saved, "dtype"),
        threads=options.threads or _saved_values(saved, "n_threads"),
        cache_dtype=options.cache_dtype or _saved_cache_dtype(saved),
    )
    context, setups = collect_context(options), _open_setups(options)
    check_comparable(saved, context.identity(setups[0]))
    if options.names_tests:
        workloads = _choose_workloads(options, setups)
    else:
        names = ("n_prompt", "n_gen", "n_depth", "batch")
        repeated = (Workload(**{name: record[name] for name in names}) for record in saved)
        workloads = list(dict.fromkeys(repeated))
    before = [find_record(path, saved, *pair) for pair in product(setups, workloads)]
    results = _measure(options, setups, workloads)
    differences = [
        compare_with_saved(report, record)
        for (_, report), record in zip(results, before, strict=True)
    ]
    model, saved_as = context.summary.path, str(saved[0].get("model_filename"))
    comparison = Comparison(
        differences=differences,
        of="now",
        to=str(saved[0].get("test_time", "then"))[:20],
        fields={"before": saved},
        remark=f"models: {model} now, {saved_as} then" if model != saved_as else "",
    )
    write_report(options, context, results, comparison=comparison)
    if max_slowdown is not None:
        _check_slowdown(differences, max_slowdown)


def find_record(
    path: Path, saved: Sequence[dict[str, Any]], setup: "Setup", workload: "Workload"
) -> dict[str, Any]:
    """Return the last record of this setup and workload in the file `path`.

    Raises UsageError if there is none.
    """
    expected = asdict(workload) | {
        "engine": setup.engine,
        "dtype": setup.dtype,
        "type_k": llama_bench.CACHE_TYPES[setup.cache_dtype],
        "n_threads": setup.threads,
    }
    same = [one for one in saved if all(one.get(k) == value for k, value in expected.items())]
    if not same:
        raise UsageError(
            f"--compare: {path} has no {workload.label} with engine {setup.engine}, "
            f"{setup.dtype} weights, {setup.cache_dtype} KV cache, threads {setup.threads} "
            f"and batch {workload.batch}",
            "remove the options that name tests and setups, to repeat those of the file",
        )
    return same[-1]


def _check_slowdown(differences: Sequence[Difference], max_slowdown: float) -> None:
    """Raise TgenError if a workload is significantly slower by more than a fraction."""
    from tgen.benchmark.comparison import is_slower_by

    slower = [one for one in differences if is_slower_by(one, max_slowdown)]
    if slower:
        worst = min(slower, key=lambda one: one.ratio.estimate)
        raise TgenError(
            f"--fail-if-slower: {worst.label} runs at {worst.ratio.estimate:.3f} of its saved "
            f"speed, significantly below {1 - max_slowdown:.3f}",
            "find the change that slowed it down, or save a new reference with --save",
        )


def _open_setups(options: BenchOptions) -> list["Setup"]:
    from tgen.benchmark.sweep import open_setups

    with console.progress("measuring the machine's peak rates"):
        return open_setups(
            options.path,
            EngineOptions(device=options.device, cache_dtype=options.cache_dtype),
            kinds=options.engines or ["auto"],
            dtypes=options.dtypes or [None],
            threads=options.threads or [None],
            seed=options.seed,
            measure_peaks=options.limits,
        )


def _choose_workloads(options: BenchOptions, setups: Sequence["Setup"]) -> list["Workload"]:
    """Return the requested workloads, or llama-bench's defaults clipped to the context."""
    from tgen.benchmark.workload import Workload

    context = min(setup.context_length for setup in setups)
    workloads = []
    for depth, batch in product(options.depths or [0], options.batches or [1]):
        room = max(context - depth, 1)
        defaults = options.pairs is None
        prompts = [min(_PROMPT, room)] * defaults if options.prompts is None else options.prompts
        gens = [min(_GEN, room)] * defaults if options.gens is None else options.gens
        pairs = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n]
        pairs += options.pairs or []
        workloads += [Workload(n_prompt=p, n_gen=n, n_depth=depth, batch=batch) for p, n in pairs]
    if not workloads:
        raise UsageError("the benchmark has no tokens", "set -p or -n above 0")
    for workload in workloads:
        workload.check(context)
    return workloads


def _measure(
    options: BenchOptions, setups: Sequence["Setup"], workloads: Sequence["Workload"]
) -> list[tuple["Setup", ThroughputReport]]:
    from tgen.benchmark.sweep import sweep

    with console.progress("measuring") as progress:
        return sweep(setups, workloads, trials=options.trials, progress=progress)


def _measure_precision(options: BenchOptions, dtype: StoredAs) -> PrecisionReport | None:
    """Return the cost of `dtype`, or None if the weights are stored in no more bits."""
    from tgen.benchmark.sweep import compare_precision
    from tgen.loaded_model import open_model

    model, reference = (
        open_model(options.path, EngineOptions(device=options.device, dtype=one))
        for one in (dtype, None)
    )
    return compare_precision(
        model.engine,
        reference.engine,
        reference.encode(b""),
        decode=reference.tokenizer.decode,
        seed=options.seed,
    )


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Read a saved run; raises UsageError for any other file."""
    try:
        records = json.loads(files.read(path, limit=_MAX_SAVED_BYTES))
    except (ValueError, RecursionError):
        records = None
    if not records or not isinstance(records, list) or not all(map(_is_record, records)):
        raise UsageError(
            f"--compare: {path} is not a saved benchmark", "make one with --save or -o json"
        )
    return records


def _is_record(record: Any) -> bool:
    """Return whether the fields that a comparison reads are valid."""
    if not isinstance(record, dict):
        return False
    counts = [record.get(name) for name in ("n_prompt", "n_gen", "n_depth")]
    samples = record.get("samples_ns"), record.get("probe_ns", [1])
    return (
        all(isinstance(n, int) and n >= 0 for n in counts)
        and isinstance(record.get("batch"), int)
        and isinstance(record.get("n_threads"), int)
        and record.get("engine") in ENGINES
        and record.get("dtype") in STORED_BYTES
        and all(isinstance(times, list) and bool(times) for times in samples)
        and all(isinstance(ns, int) and ns > 0 for times in samples for ns in times or [])
    )


def _saved_cache_dtype(records: Sequence[dict[str, Any]]) -> CacheDtype | None:
    """Return the dtype of all KV caches; None if they differ, as the defaults do."""
    types = _saved_values(records, "type_k")
    known = {llama_bench.CACHE_TYPES[dtype]: dtype for dtype in get_args(CacheDtype)}
    return known.get(types[0]) if len(types) == 1 else None


def _saved_values(records: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(record.get(name) for record in records))
