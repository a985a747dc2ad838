"""What a one-shot command costs from its spawning to its end, each phase apart.

    start       the system makes the process, Python starts, to the first line of our code
    import      our modules, and those that the caller's command needs as well
    load        the model directory is read, its tokenizer and its n-grams made ready
    engine      weights are put as the kernels want them, and the kernels themselves fetched
    prefill     the prompt becomes tokens and is read, to the first token of the text
    decode      the other tokens
    detokenise  ids become bytes
    exit        to where whoever waits for the process goes on

A child of the same interpreter and environment (`one_shot`) stamps time.monotonic_ns where a phase
ends, this process before the child is spawned and after it is gone. All processes of a machine
share that clock, on Linux and macOS to the nanosecond; on Windows it may be as coarse as 16 ms. A
phase begins where the one before ends, so nothing is left out and their sum is the total.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgen.benchmark.statistics import timing
from tgen.config import Draft, StoredAs
from tgen.errors import TgenError, UsageError
from tgen.reports import EndToEndReport, TrialReport

_CHILD = "tgen.benchmark.timed_child"


def measure(
    path: Path,
    prompt: bytes,
    *,
    n_gen: int,
    trials: int,
    device: str = "auto",
    threads: int | None = None,
    weights: StoredAs | None = None,
    draft: Draft = "auto",
    modules: Sequence[str] = (),
) -> Iterator[TrialReport | EndToEndReport]:
    """Continues `prompt` greedily by up to `n_gen` tokens, in a new process each time.

    One run before the trials fills disk caches, and compiles what is not compiled. `modules` are
    imported too: those of the command that is meant. The other options are `tgen generate`'s.
    Raises UsageError for no tokens or trials, and TgenError with what the process says if it fails.
    """
    for name, value in (("n_gen", n_gen), ("trials", trials)):
        if value < 1:
            raise UsageError(f"{name} is {value}", "it must be at least 1")
    request = json.dumps(
        {
            "path": str(path),
            "prompt": prompt.decode("latin-1"),
            "n_gen": n_gen,
            "device": device,
            "threads": threads,
            "weights": weights,
            "draft": draft,
            "modules": list(modules),
        }
    )
    runs: list[_Run] = []
    for trial in range(trials + 1):
        runs.append(_run(request.encode()))
        yield TrialReport(trial=trial, trials=trials)
    yield _report(runs[0], runs[1:])


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One process."""

    phases: dict[str, float]  # seconds
    total: float  # seconds
    n_prompt: int
    n_gen: int
    text: bytes
    peak_memory_bytes: int | None


def _run(request: bytes) -> _Run:
    # -P: what lies in the folder where the user works is no module of ours, as for `tgen`.
    command = [sys.executable, "-P", "-m", _CHILD]
    spawned = time.monotonic_ns()
    child = subprocess.run(command, input=request, capture_output=True, check=False)
    gone = time.monotonic_ns()
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        silent = f"the process that was timed ended with status {child.returncode}"
        raise TgenError(said[-1] if said else silent, "`tgen generate` may tell more")
    answer = json.loads(child.stdout)
    phases, before = {}, spawned
    for name, end in {**answer["ends"], "exit": gone}.items():
        phases[name] = (end - before) / 1e9
        before = end
    return _Run(
        phases=phases,
        total=(gone - spawned) / 1e9,
        n_prompt=answer["n_prompt"],
        n_gen=answer["n_gen"],
        text=answer["text"].encode("latin-1"),
        peak_memory_bytes=answer["peak_memory_bytes"],
    )


def _report(first: _Run, runs: list[_Run]) -> EndToEndReport:
    total = timing([run.total for run in runs])
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return EndToEndReport(
        phases={name: timing([run.phases[name] for run in runs]) for name in first.phases},
        total=total,
        first=first.phases,
        n_prompt=first.n_prompt,
        n_gen=first.n_gen,
        tokens_per_second=first.n_gen / total.median,
        peak_memory_bytes=max(peaks, default=None),
        text=first.text,
    )
