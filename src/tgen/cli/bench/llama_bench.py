"""Throughput records in llama-bench's formats, field by field, so that its readers accept them."""

import csv
import io
import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tgen.config import STORED_BYTES
from tgen.reports.benchmark import Machine, PeakRates, ThroughputReport
from tgen.reports.inspection import ModelSummary
from tgen.version import __version__

CACHE_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
_TYPES = {dtype: name.upper() for dtype, name in CACHE_TYPES.items()} | {"int4": "Q4_1"}
_MIB, _GIB = 2**20, 2**30
_LAST_CSV_FIELD = "peak_memory_bytes"  # later fields are lists, or describe the machine
# Columns of the Markdown table and their widths; a negative width aligns to the left.
_WIDTHS = {"model": -30, "size": 10, "params": 10, "backend": -10, "threads": 7}
_OPTIONAL_WIDTHS = {"engine": -10, "batch": 7}
_LAST_WIDTHS = {"test": 15, "t/s": 20}
# Fields for which tgen has no options.
_CPU_FIELDS = {"cpu_mask": "0x0", "cpu_strict": False, "poll": 0}
_CONSTANT_FIELDS = {
    "n_cpu_moe": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": True,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "mmap",
    "lazy_mode": "none",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}


def format_record(
    report: ThroughputReport,
    summary: ModelSummary,
    machine: Machine,
    *,
    gpu: str,
    cache_dtype: str,
    peak: PeakRates | None,
    seed: int,
    peak_memory: int | None,
) -> dict[str, Any]:
    """Return one workload as a record: llama-bench's fields in its order, then tgen's own.

    `gpu` is the name of the GPU that computes, or ""; `cache_dtype` is that of keys and values.
    """
    n, first = summary.n_parameters, report.first_token
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
    nanoseconds = _nanoseconds(report.seconds.seconds)
    return {
        "build_commit": __version__,
        "build_number": 0,
        "cpu_info": machine.cpu,
        "gpu_info": gpu,
        "backends": ("MPS" if gpu == "mps" else "CUDA") if gpu else "CPU",
        "model_filename": summary.path,
        "model_type": f"{summary.family} {size} {_TYPES[report.dtype]}",
        "model_size": round(n * STORED_BYTES[report.dtype]),
        "model_n_params": n,
        "n_batch": summary.config["context_length"],
        "n_ubatch": summary.config["context_length"],
        "n_threads": report.threads,
        **_CPU_FIELDS,
        "type_k": CACHE_TYPES[cache_dtype],
        "type_v": CACHE_TYPES[cache_dtype],
        "n_gpu_layers": summary.config["n_layers"] if gpu else 0,
        **_CONSTANT_FIELDS,
        "n_prompt": report.n_prompt,
        "n_gen": report.n_gen,
        "n_depth": report.n_depth,
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(nanoseconds)),
        "stddev_ns": round(_stddev(nanoseconds)),
        "avg_ts": statistics.fmean(report.rates),
        "stddev_ts": _stddev(report.rates),
        "use_mmap": True,  # llama-bench's field before load_mode; its readers expect it
        # llama-bench does not have these:
        "test": report.label,
        "family": summary.family,
        "engine": report.engine,
        "dtype": report.dtype,
        "batch": report.batch,
        "seed": seed,
        "median_ts": report.median_rate,
        "p10_ts": report.n_tokens / report.seconds.p90,
        "p90_ts": report.n_tokens / report.seconds.p10,
        "first_token_ms": None if first is None else first.median * 1e3,
        "kv_bytes_per_token": report.cache_bytes_per_token,
        "peak_ts": report.peak_rate,
        "bound_by": report.bound_by,
        "peak_memory_bytes": peak_memory,
        "ci95_ts": [report.rate.low, report.rate.high] if report.rate.is_finite else [None, None],
        "bootstrap95_ts": [report.bootstrap_rate.low, report.bootstrap_rate.high],
        "peak_bytes_per_second": None if peak is None else peak.bytes_per_second,
        "peak_flops_per_second": None if peak is None else peak.flops_per_second,
        "n_cpus": machine.n_cpus,
        "load": machine.load,
        "versions": machine.versions,
        "warnings": report.warnings,
        "probe_ns": _nanoseconds(report.probe_seconds),
        "samples_ns": _nanoseconds(report.seconds.seconds),
        "samples_ts": report.rates,
    }


def _nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(s * 1e9) for s in seconds]


def to_json(records: Sequence[dict[str, Any]]) -> str:
    """Return a JSON list of objects."""
    lines = ",\n".join("  " + json.dumps(record, allow_nan=False) for record in records)
    return f"[\n{lines}\n]\n"


def to_jsonl(records: Sequence[dict[str, Any]]) -> str:
    """Return one JSON object per line."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)


def to_csv(records: Sequence[dict[str, Any]]) -> str:
    """Return a header line and one line per record, every value in quotes."""
    names = list(records[0])
    names = names[: names.index(_LAST_CSV_FIELD) + 1]
    out = io.StringIO()
    out.write(",".join(names) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([_csv_value(record[name]) for name in names] for record in records)
    return out.getvalue()


def to_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Return llama-bench's table, with engine and batch columns if they vary, and a build line."""
    optional = {
        name: width
        for name, width in _OPTIONAL_WIDTHS.items()
        if len({record[name] for record in records} | ({1} if name == "batch" else set())) > 1
    }
    widths = _WIDTHS | optional | _LAST_WIDTHS
    lines = [
        _line(widths, {name: name for name in widths}),
        "|" + "".join(f" {'-' * (abs(w) - 1)}{':' if w > 0 else '-'} |" for w in widths.values()),
        *(_line(widths, _cells(record)) for record in records),
    ]
    build = f"build: {records[0]['build_commit']} ({records[0]['build_number']})\n"
    return "\n".join([*lines, "", build])


def _line(widths: dict[str, int], cells: dict[str, str]) -> str:
    parts = [f"{cells[n]:<{-w}}" if w < 0 else f"{cells[n]:>{w}}" for n, w in widths.items()]
    return "| " + " | ".join(parts) + " |"


def _cells(record: dict[str, Any]) -> dict[str, str]:
    size, params = record["model_size"], record["model_n_params"]
    return {
        "model": record["model_type"],
        "size": f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB",
        "params": f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M",
        "backend": record["backends"],
        "threads": str(record["n_threads"]),
        "engine": record["engine"],
        "batch": str(record["batch"]),
        "test": record["test"],
        "t/s": f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}",
    }


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _csv_value(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return f"{value:f}" if isinstance(value, float) else value
