"""Cost of a one-shot `tgen generate`, from spawning the process to its exit, phase by phase.

    start    process creation and Python start-up, until our first line runs
    import   our modules; the options and the prompt
    load     read the model, or map its cached weights; load the kernels
    prefill  tokenize the prompt and process it, until the first token
    decode   the other tokens; write the text
    exit     until the parent process continues

With the environment variable TGEN_PHASES, the command writes time.monotonic_ns at the end of each
phase (`tgen.cli.phase_times`); this process records it before spawning the command and after its
exit. All processes of a machine share that clock: its resolution is nanoseconds on Linux and macOS,
up to 16 ms on Windows. A phase begins where the previous one ends, so the phases add up to the
total.
"""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tgen.benchmark.statistics import timing
from tgen.errors import TgenError
from tgen.reports.benchmark import EndToEndReport, TrialReport


def measure_end_to_end(
    options: Sequence[str], prompt: bytes, *, n_gen: int, trials: int
) -> Iterator[TrialReport | EndToEndReport]:
    """Generate up to `n_gen` tokens greedily after `prompt`, in a new process per trial.

    A run before the trials warms up disk caches, compiles kernels and stores packed weights.
    `options` are others of `tgen generate`. Raises TgenError with the command's message if it
    fails.
    """
    # -P: as for `tgen`, modules in the current directory are not importable.
    command = [sys.executable, "-P", "-m", "tgen", "generate", *options, "--prompt", "-", "--json"]
    command += ["--quiet", "--temperature", "0", "--max-new-tokens", str(n_gen)]
    runs: list[_Run] = []
    for trial in range(trials + 1):
        runs.append(_run(command, prompt))
        yield TrialReport(trial=trial, trials=trials)
    warmup, *timed = runs
    total, answer = timing([run.total for run in timed]), warmup.answer
    n_generated, text = len(answer["tokens"]), answer["text"].encode()
    yield EndToEndReport(
        phases={name: timing([run.phases[name] for run in timed]) for name in warmup.phases},
        total=total,
        warmup=warmup.phases,
        n_prompt=answer["prompt_tokens"],
        n_gen=n_generated,
        tokens_per_second=n_generated / total.median,
        peak_memory_bytes=max(run.peak_memory_bytes for run in timed) or None,
        text=base64.b64decode(answer["bytes"]) if "bytes" in answer else text,
    )


class _Run(NamedTuple):
    phases: dict[str, float]  # seconds
    total: float  # seconds
    peak_memory_bytes: int  # 0: unknown
    answer: dict[str, Any]  # the output of --json


def _run(command: Sequence[str], prompt: bytes) -> _Run:
    environment = os.environ | {"TGEN_PHASES": "1"}
    spawned = time.monotonic_ns()
    child = subprocess.run(command, input=prompt, capture_output=True, check=False, env=environment)
    exited = time.monotonic_ns()
    lines = child.stderr.decode(errors="replace").splitlines()
    if child.returncode != 0:
        errors = [line for line in lines if line.startswith("error: ")]
        raise TgenError(
            errors[0].removeprefix("error: ")
            if errors
            else f"the measured process exited with {child.returncode}",
            "run `tgen generate` with the same options to see the error",
        )
    phases, previous, peak = {}, spawned, 0
    for line in [*lines, f"phase exit {exited} 0"]:
        if line.startswith("phase "):
            _, name, end, memory = line.split()
            phases[name] = (int(end) - previous) / 1e9
            previous, peak = int(end), max(peak, int(memory))
    return _Run(phases, (exited - spawned) / 1e9, peak, json.loads(child.stdout))
