"""Throughput as llama-bench writes it, field for field, so that its readers read ours."""

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tgen import __version__
from tgen.config import STORED_BYTES
from tgen.reports import Limits, Machine, ModelSummary, ThroughputReport

FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
    "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask",
    "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu",
    "no_kv_offload", "flash_attn", "devices", "tensor_split", "tensor_buft_overrides", "load_mode",
    "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip
# Ours behind theirs; use_mmap is what llama-bench had before load_mode, and readers ask for.
_MORE = (
    "use_mmap", "test", "family", "engine", "weights", "batch", "seed", "median_ts", "p10_ts",
    "p90_ts", "first_token_ms", "kv_bytes_per_token", "limit_ts", "bound_by", "peak_memory_bytes",
)  # fmt: skip
_FACTS = (
    "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params",
)  # fmt: skip
_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
_MIB, _GIB = 2**20, 2**30
# Columns of the table, and how wide they are there; below 0: to the left.
_WIDTHS = {"model": -30, "size": 10, "params": 10, "backend": -10, "threads": 7}
_SWEPT = {"engine": -10, "batch": 7}
_LAST = {"test": 15, "t/s": 20}


def facts(summary: ModelSummary, machine: Machine, stored: str, gpu: str) -> dict[str, Any]:
    """The model and the machine; `gpu` is the name of the one that computes, if one does."""
    n = summary.n_parameters
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
    return {
        "cpu_info": machine.cpu,
        "gpu_info": gpu,
        "backends": ("MPS" if gpu == "mps" else "CUDA") if gpu else "CPU",
        "model_filename": summary.path,
        "model_type": f"{summary.family} {size} {_TYPES[stored]}",
        "model_size": round(n * STORED_BYTES[stored]),
        "model_n_params": n,
        "family": summary.family,
        "processors": machine.processors,
    }


def row(
    report: ThroughputReport,
    summary: ModelSummary,
    machine: Machine,
    *,
    facts: Mapping[str, Any],
    limits: Limits | None,
    seed: int,
    peak_memory: int | None,
) -> dict[str, Any]:
    """One test as a record, `facts` among it. Its fields are llama-bench's, in its order, then
    ours."""
    rates, nanoseconds = report.rates, [round(s * 1e9) for s in report.seconds.seconds]
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    first = report.first_token
    record: dict[str, Any] = {
        "build_commit": __version__,
        "build_number": 0,
        **{name: facts[name] for name in _FACTS},
        "n_batch": summary.fields["context_length"],
        "n_ubatch": summary.fields["context_length"],
        "n_threads": report.threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 0,
        "type_k": "f32",
        "type_v": "f32",
        "n_gpu_layers": summary.fields["n_layers"] if facts["gpu_info"] else 0,
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
        "n_prompt": report.n_prompt,
        "n_gen": report.n_gen,
        "n_depth": report.n_depth,
        "test_time": moment,
        "avg_ns": round(statistics.fmean(nanoseconds)),
        "stddev_ns": round(_deviation(nanoseconds)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": _deviation(rates),
        "use_mmap": True,
        "test": report.label,
        "family": facts["family"],
        "engine": report.engine,
        "weights": report.stored,
        "batch": report.batch,
        "seed": seed,
        "median_ts": report.median_rate,
        "p10_ts": report.n_tokens / report.seconds.high,
        "p90_ts": report.n_tokens / report.seconds.low,
        "first_token_ms": None if first is None else first.median * 1e3,
        "kv_bytes_per_token": report.cache_bytes_per_token,
        "limit_ts": report.limit,
        "bound_by": report.bound_by,
        "peak_memory_bytes": peak_memory,
        "ci95_ts": [report.rate.low, report.rate.high] if report.rate.is_known else [None, None],
        "bootstrap95_ts": [report.bootstrapped.low, report.bootstrapped.high],
        "read_bytes_per_second": None if limits is None else limits.bytes_per_second,
        "flops": None if limits is None else limits.flops,
        "processors": machine.processors,
        "load": machine.load,
        "versions": machine.versions,
        "doubts": report.doubts,
        "yardstick_ns": [round(s * 1e9) for s in report.yards],
        "samples_ns": nanoseconds,
        "samples_ts": rates,
    }
    return record


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """A list of objects."""
    lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]\n"


def as_jsonl(rows: Sequence[dict[str, Any]]) -> str:
    """An object a line."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """A header, and every value in quotes."""
    out = io.StringIO()
    names = (*FIELDS, *_MORE)
    out.write(",".join(names) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([_plain(row[name]) for name in names] for row in rows)
    return out.getvalue()


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Its table, with columns for what was swept, and the line that says of which build."""
    swept = {
        name: width
        for name, width in _SWEPT.items()
        if len({row[name] for row in rows} | ({1} if name == "batch" else set())) > 1
    }
    widths = _WIDTHS | swept | _LAST
    lines = [
        _line(widths, {name: name for name in widths}),
        "|" + "".join(f" {'-' * (abs(w) - 1)}{':' if w > 0 else '-'} |" for w in widths.values()),
        *(_line(widths, _cells(row)) for row in rows),
    ]
    return "\n".join(
        [*lines, "", f"build: {rows[0]['build_commit']} ({rows[0]['build_number']})\n"]
    )


def _line(widths: dict[str, int], cells: dict[str, str]) -> str:
    parts = [f"{cells[n]:<{-w}}" if w < 0 else f"{cells[n]:>{w}}" for n, w in widths.items()]
    return "| " + " | ".join(parts) + " |"


def _cells(row: dict[str, Any]) -> dict[str, str]:
    size, params = row["model_size"], row["model_n_params"]
    return {
        "model": row["model_type"],
        "size": f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB",
        "params": f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.2f} M",
        "backend": row["backends"],
        "threads": str(row["n_threads"]),
        "engine": row["engine"],
        "batch": str(row["batch"]),
        "test": row["test"],
        "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _plain(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return f"{value:f}" if isinstance(value, float) else value
