"""Measure every combination of engine, weight dtype and thread count, and what fewer bits cost.

The cost of storing the weights in fewer bits is measured in bits per byte of text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from tgen.benchmark.backend import Backend, EngineBackend, random_tokens
from tgen.benchmark.comparison import compare_paired
from tgen.benchmark.roofline import PassCost, measure_peak_rates, pass_cost
from tgen.benchmark.trials import MachineProbe, Trial, run_trials, throughput_report
from tgen.benchmark.workload import Workload
from tgen.config import (
    DEFAULT_ENGINE,
    STORED_BYTES,
    EngineKind,
    EngineOptions,
    SamplingConfig,
    StoredAs,
)
from tgen.engine.base import Engine
from tgen.engine.open_engine import open_engine
from tgen.errors import UsageError
from tgen.generation.logprobs import block_nll, predictions
from tgen.generation.loop import generate
from tgen.lora.model_with_adapter import load
from tgen.machine.cpus import cpu_count, default_threads
from tgen.reports.benchmark import Difference, PeakRates, PrecisionReport, ThroughputReport

_TEXTS, _TOKENS = 8, 256
_PEAK_SECONDS = 1.0  # for reading, and for multiplying
_MIN_TRIALS = 8  # fewer have no 99% confidence interval


def compare_precision(
    engine: Engine,
    reference: Engine,
    start: Sequence[int],
    *,
    decode: Callable[[Sequence[int]], bytes],
    seed: int,
) -> PrecisionReport | None:
    """Score texts with two engines of one model.

    `reference` samples the texts after `start` at temperature 1. Returns None unless `engine`
    stores its weights in fewer bits than `reference`.
    """
    if STORED_BYTES[engine.dtype] >= STORED_BYTES[reference.dtype]:
        return None
    n = min(_TOKENS, reference.context_length) - len(start)
    texts = [list(start) for _ in range(_TEXTS)]
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n, seed=seed)
    for token in generate(reference, texts, sampling=sampling):
        texts[token.sequence].append(token.id)
    n_bytes = sum(len(decode(text[len(start) :])) for text in texts)
    nats, max_difference = [0.0, 0.0], 0.0
    for text in texts:
        blocks = (predictions(one, text, len(start)) for one in (engine, reference))
        for (logits, targets), (reference_logits, _) in zip(*blocks, strict=True):
            nats[0] += block_nll(logits, targets)
            nats[1] += block_nll(reference_logits, targets)
            difference = float(np.abs(logits - reference_logits).max())
            max_difference = max(max_difference, difference)
    bits, reference_bits = (value / math.log(2) / max(1, n_bytes) for value in nats)
    return PrecisionReport(
        dtype=engine.dtype,
        reference_dtype=reference.dtype,
        tokens=n * len(texts),
        bits_per_byte=bits,
        reference_bits_per_byte=reference_bits,
        max_logit_difference=max_difference,
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A loaded model: one engine, weight dtype and thread count."""

    engine: str
    dtype: StoredAs
    cache_dtype: str  # of keys and values
    threads: int
    device: str  # cpu, cuda or mps
    context_length: int
    backend: EngineBackend
    cost: PassCost
    peak: PeakRates | None  # None if not measured

    @property
    def gpu(self) -> str:
        """Name of the GPU that computes; "" on the CPU."""
        if self.device == "cpu":
            return ""
        from tgen.machine.device import gpu_name

        return gpu_name(self.device)


def open_setups(
    path: Path,
    options: EngineOptions = DEFAULT_ENGINE,
    *,
    kinds: Sequence[EngineKind] = ("auto",),
    dtypes: Sequence[StoredAs | None] = (None,),
    threads: Sequence[int | None] = (None,),
    seed: int,
    measure_peaks: bool = True,
) -> list[Setup]:
    """Return one setup per combination. Raises UsageError for an unavailable one."""
    setups = []
    for n in threads:
        if n is not None and not 1 <= n <= cpu_count():
            raise UsageError(
                f"--threads: must be between 1 and {cpu_count()}, the number of CPUs (got {n})",
                "remove --threads to use all cores",
            )
    for kind, dtype, n in product(kinds, dtypes, threads):
        bundle = load(path)
        shapes = {name: array.shape for name, array in bundle.arrays.items()}
        engine = open_engine(bundle, replace(options, kind=kind, dtype=dtype, threads=n))
        n_threads = n or default_threads()
        tokens = random_tokens(bundle.config.vocab_size, engine.context_length, seed=seed)
        setups.append(
            Setup(
                engine=engine.name,
                dtype=engine.dtype,
                cache_dtype=engine.cache_dtype,
                threads=n_threads,
                device=str(getattr(engine, "device", "cpu")).partition(":")[0],
                context_length=engine.context_length,
                backend=EngineBackend(engine, tokens, threads=n_threads),
                cost=pass_cost(bundle.config, shapes, engine.dtype, cache_dtype=engine.cache_dtype),
                peak=None,
            )
        )
    return _with_peak_rates(setups) if measure_peaks else setups


def _with_peak_rates(setups: Sequence[Setup]) -> list[Setup]:
    """Measure the peak rates, or measure them again: the better rates count."""
    measured: dict[tuple[object, ...], PeakRates] = {}
    result = []
    for setup in setups:
        key = (setup.cost.weight_bytes, setup.threads, setup.device, setup.dtype)
        if key not in measured:
            measured[key] = measure_peak_rates(
                setup.cost.weight_bytes,
                device=setup.device,
                threads=setup.threads,
                dtype=setup.dtype,
                seconds=_PEAK_SECONDS,
            )
        now, before = measured[key], setup.peak or measured[key]
        best = replace(
            now,
            bytes_per_second=max(now.bytes_per_second, before.bytes_per_second),
            flops_per_second=max(now.flops_per_second, before.flops_per_second),
        )
        result.append(replace(setup, peak=best))
    return result


def sweep(
    setups: Sequence[Setup],
    workloads: Sequence[Workload],
    *,
    trials: int,
    progress: Callable[[float], None] = lambda _: None,
) -> list[tuple[Setup, ThroughputReport]]:
    """Run every workload on every setup, interleaved."""
    pairs = [(i, workload) for i in range(len(setups)) for workload in workloads]
    rounds: list[list[Trial]] = []
    probe, probe_seconds = MachineProbe(max(setup.threads for setup in setups)), []
    for one_round in run_trials(
        [(setups[i].backend, workload) for i, workload in pairs], trials=trials
    ):
        rounds.append(one_round)
        probe_seconds.append(probe.measure_seconds())
        progress(len(rounds) / trials)
    if setups[0].peak:
        setups = _with_peak_rates(setups)
    return [
        (setups[i], _report(setups[i], workload, column, probe_seconds))
        for (i, workload), column in zip(pairs, zip(*rounds, strict=True), strict=True)
    ]


def compare_backends(
    setup: Setup,
    other: Backend,
    name: str,
    workloads: Sequence[Workload],
    *,
    trials: int,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[Setup, list[tuple[ThroughputReport, ThroughputReport, Difference]]]:
    """Run every workload on both: ours, the other, and ours again in each round.

    Returns `setup` with the peak rates used, and one (ours, other, difference) per workload.
    """
    check_trial_count(trials)
    for workload in workloads:  # fails before anything is measured
        other.prepare(workload)
    columns = []
    for number, workload in enumerate(workloads):
        rounds: list[list[Trial]] = []
        backends = [(setup.backend, workload), (other, workload), (setup.backend, workload)]
        for one_round in run_trials(backends, trials=trials):
            rounds.append(one_round)
            progress((number + len(rounds) / trials) / len(workloads))
        columns.append(tuple(zip(*rounds, strict=True)))
    if setup.peak:
        (setup,) = _with_peak_rates([setup])
    results = []
    for workload, (ours, theirs, again) in zip(workloads, columns, strict=True):
        report = throughput_report(
            workload, theirs, engine=name, dtype=setup.dtype, threads=setup.threads, bound=None
        )
        seconds = ([trial.seconds for trial in column] for column in (ours, theirs, again))
        results.append(
            (_report(setup, workload, ours), report, compare_paired(workload.label, *seconds))
        )
    return setup, results


def check_trial_count(trials: int) -> None:
    """Raise UsageError for fewer trials than a 99% confidence interval needs."""
    if trials < _MIN_TRIALS:
        raise UsageError(
            f"--trials: a comparison needs at least {_MIN_TRIALS} (got {trials})",
            f"use -r {_MIN_TRIALS} or more",
        )


def _report(
    setup: Setup, workload: Workload, trials: Sequence[Trial], probe_seconds: Sequence[float] = ()
) -> ThroughputReport:
    return throughput_report(
        workload,
        trials,
        engine=setup.engine,
        dtype=setup.dtype,
        threads=setup.threads,
        bound=None if setup.peak is None else setup.cost.min_seconds(workload, setup.peak),
        probe_seconds=probe_seconds,
    )


def max_logit_difference(ours: Backend, other: Backend, workload: Workload) -> float:
    """Compare the logits after a workload's prompt, or after its first token without one."""
    for backend in (ours, other):
        backend.prepare(workload)
        backend.extend(workload.n_prompt or 1)
    return float(np.abs(ours.logits() - other.logits()).max())
