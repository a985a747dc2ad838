"""Cost of a one-shot `tgen generate`, from spawning the process to its exit, phase by phase.

    start       process creation and Python start-up, until our first line runs
    import      our modules, and those that the command needs as well
    load        read the model directory
    engine      load the kernels; convert the weights to their layout; prepare the vocabulary
    prefill     tokenize the prompt and process it, until the first token
    decode      the other tokens
    detokenize  tokens to whole characters
    exit        until the parent process continues

A child of the same interpreter and environment (`timed_child`) records time.monotonic_ns at the end
of each phase; this process records it before spawning the child and after its exit. All processes
of a machine share that clock: its resolution is nanoseconds on Linux and macOS, up to 16 ms on
Windows. A phase begins where the previous one ends, so the phases add up to the total.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgen.benchmark.statistics import timing
from tgen.config import CacheDtype, Draft, StoredAs
from tgen.errors import TgenError, UsageError
from tgen.reports.benchmark import EndToEndReport, TrialReport


def measure_end_to_end(
    path: Path,
    prompt: bytes,
    *,
    n_gen: int,
    trials: int,
    device: str = "auto",
    threads: int | None = None,
    dtype: StoredAs | None = None,
    cache_dtype: CacheDtype | None = None,
    draft: Draft = "auto",
    modules: Sequence[str] = (),
) -> Iterator[TrialReport | EndToEndReport]:
    """Generate up to `n_gen` tokens greedily after `prompt`, in a new process per trial.

    A run before the trials warms up disk caches and compiles kernels. `modules` are imported too:
    those of the measured command. The other options are those of `tgen generate`. Raises UsageError
    for no tokens or no trials, and TgenError with the child's message if the child fails.
    """
    for name, value in (("n_gen", n_gen), ("trials", trials)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1 (got {value})", f"raise {name}")
    request = json.dumps(
        {
            "path": str(path),
            "prompt": prompt.decode("latin-1"),
            "n_gen": n_gen,
            "device": device,
            "threads": threads,
            "dtype": dtype,
            "cache_dtype": cache_dtype,
            "draft": draft,
            "modules": list(modules),
        }
    )
    runs: list[_Run] = []
    for trial in range(trials + 1):
        runs.append(_run_child(request.encode()))
        yield TrialReport(trial=trial, trials=trials)
    yield _report(runs[0], runs[1:])


@dataclass(frozen=True, kw_only=True)
class _Run:
    phases: dict[str, float]  # seconds
    total: float  # seconds
    n_prompt: int
    n_gen: int
    text: bytes
    peak_memory_bytes: int | None


def _run_child(request: bytes) -> _Run:
    # -P: as for `tgen`, modules in the current directory are not importable.
    command = [sys.executable, "-P", "-m", "tgen.benchmark.timed_child"]
    spawned = time.monotonic_ns()
    child = subprocess.run(command, input=request, capture_output=True, check=False)
    exited = time.monotonic_ns()
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        raise TgenError(
            lines[-1] if lines else f"the measured process exited with {child.returncode}",
            "run `tgen generate` with the same options to see the error",
        )
    answer = json.loads(child.stdout)
    phases, previous = {}, spawned
    for name, end in {**answer["phase_ends"], "exit": exited}.items():
        phases[name] = (end - previous) / 1e9
        previous = end
    return _Run(
        phases=phases,
        total=(exited - spawned) / 1e9,
        n_prompt=answer["n_prompt"],
        n_gen=answer["n_gen"],
        text=answer["text"].encode("latin-1"),
        peak_memory_bytes=answer["peak_memory_bytes"],
    )


def _report(warmup: _Run, runs: list[_Run]) -> EndToEndReport:
    total = timing([run.total for run in runs])
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return EndToEndReport(
        phases={name: timing([run.phases[name] for run in runs]) for name in warmup.phases},
        total=total,
        warmup=warmup.phases,
        n_prompt=warmup.n_prompt,
        n_gen=warmup.n_gen,
        tokens_per_second=warmup.n_gen / total.median,
        peak_memory_bytes=max(peaks, default=None),
        text=warmup.text,
    )
