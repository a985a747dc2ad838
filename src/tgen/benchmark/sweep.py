"""Every combination of engine, weights and threads that was asked for, opened and measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from tgen.benchmark.comparison import against
from tgen.benchmark.machine_probe import MachineProbe
from tgen.benchmark.other_engines import Peer
from tgen.benchmark.report import throughput_report
from tgen.benchmark.roofline import PassCost, work_of
from tgen.benchmark.throughput import (
    Backend,
    EngineBackend,
    Trial,
    Workload,
    measure,
    random_tokens,
)
from tgen.checkpoint.model_dir import load
from tgen.config import StoredAs
from tgen.engine import EngineKind, open_engine
from tgen.errors import UsageError
from tgen.model.cpu_count import cpu_count
from tgen.reports import Difference, Limits, ThroughputReport

_LIMIT_SECONDS = 1.0  # of reading, and of multiplying
_LEAST_TRIALS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model made ready in one way."""

    engine: str
    stored: StoredAs
    threads: int
    device: str  # cpu, cuda or mps
    context_length: int
    arm: EngineBackend
    work: PassCost
    limits: Limits | None


def open_setups(
    path: Path,
    *,
    kinds: Sequence[EngineKind] = ("auto",),
    weights: Sequence[StoredAs | None] = (None,),
    threads: Sequence[int | None] = (None,),
    device: str = "auto",
    seed: int,
    limited: bool = True,
) -> list[Setup]:
    """A setup for each combination. Raises UsageError for one that cannot be had."""
    setups = []
    for n in threads:
        if n is not None and not 1 <= n <= cpu_count():
            raise UsageError(f"--threads is {n}", f"this machine has {cpu_count()} processors")
    for kind, held, n in product(kinds, weights, threads):
        bundle = load(path)
        arrays = dict(bundle.arrays)  # those of the bundle go over to the engine
        engine = open_engine(bundle, device=device, threads=n, weights=held, kind=kind)
        place = "cpu" if engine.name == "kernels" else _torch_device(engine)
        narrow = engine.name == "torch" and engine.stored == "bfloat16"
        n_threads = n or cpu_count()
        tokens = random_tokens(bundle.config.vocab_size, engine.context_length, seed=seed)
        setups.append(
            Setup(
                engine=engine.name,
                stored=engine.stored,
                threads=n_threads,
                device=place,
                context_length=engine.context_length,
                arm=EngineBackend(engine, tokens, threads=n_threads),
                work=work_of(bundle.config, arrays, engine.stored, narrow_cache=narrow),
                limits=None,
            )
        )
    return with_limits(setups) if limited else setups


def with_limits(setups: Sequence[Setup]) -> list[Setup]:
    """With the machine's limits measured, or measured again: the better ones are kept, since
    something else may have run."""
    from tgen.benchmark.peak_rates import measure_limits  # torch is loaded only for this

    measured: dict[tuple[object, ...], Limits] = {}
    found = []
    for setup in setups:
        key = (setup.work.weight_bytes, setup.threads, setup.device, setup.stored)
        if key not in measured:
            measured[key] = measure_limits(
                setup.work.weight_bytes,
                device=setup.device,
                threads=setup.threads,
                stored=setup.stored,
                seconds=_LIMIT_SECONDS,
            )
        now, before = measured[key], setup.limits or measured[key]
        best = replace(
            now,
            bytes_per_second=max(now.bytes_per_second, before.bytes_per_second),
            flops=max(now.flops, before.flops),
        )
        found.append(replace(setup, limits=best))
    return found


def sweep(
    setups: Sequence[Setup],
    tests: Sequence[Workload],
    *,
    trials: int,
    progress: Callable[[float], None] = lambda _: None,
) -> list[tuple[Setup, ThroughputReport]]:
    """Every test of every setup, in turns."""
    pairs = [(i, test) for i in range(len(setups)) for test in tests]
    rounds: list[list[Trial]] = []
    yardstick, yards = MachineProbe(max(setup.threads for setup in setups)), []
    for found in measure([(setups[i].arm, test) for i, test in pairs], trials=trials):
        rounds.append(found)
        yards.append(yardstick.seconds())
        progress(len(rounds) / trials)
    again = with_limits(setups) if setups[0].limits else setups
    columns = zip(*rounds, strict=True)
    return [
        (again[i], _report(again[i], test, column, yards))
        for (i, test), column in zip(pairs, columns, strict=True)
    ]


def compare_arms(
    setup: Setup,
    peer: Backend,
    name: str,
    tests: Sequence[Workload],
    *,
    trials: int,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[Setup, list[tuple[ThroughputReport, ThroughputReport, Difference]]]:
    """Every test by both: ours, theirs, and ours again, in each round; and `setup` with the limits
    that ours are held against."""
    check_trials(trials)
    for test in tests:  # what cannot be had is said before anything is measured
        peer.prepare(test)
    pairs = []
    for number, test in enumerate(tests):
        rounds: list[list[Trial]] = []
        arms = [(setup.arm, test), (peer, test), (setup.arm, test)]
        for trial in measure(arms, trials=trials):
            rounds.append(trial)
            progress((number + len(rounds) / trials) / len(tests))
        pairs.append(tuple(zip(*rounds, strict=True)))
    (setup,) = with_limits([setup]) if setup.limits else [setup]
    return setup, [
        (
            _report(setup, test, ours),
            throughput_report(
                test, theirs, engine=name, stored=setup.stored, threads=setup.threads, least=None
            ),
            against(test.label, *([t.seconds for t in column] for column in (ours, theirs, again))),
        )
        for test, (ours, theirs, again) in zip(tests, pairs, strict=True)
    ]


def check_trials(trials: int) -> None:
    """Raises UsageError for fewer than 8: of them no interval at 99 % can be made."""
    if trials < _LEAST_TRIALS:
        raise UsageError(f"-r is {trials}", f"to compare takes -r {_LEAST_TRIALS} at least")


def _report(
    setup: Setup, test: Workload, trials: Sequence[Trial], yards: Sequence[float] = ()
) -> ThroughputReport:
    least = None if setup.limits is None else setup.work.least(test, setup.limits)
    return throughput_report(
        test,
        trials,
        engine=setup.engine,
        stored=setup.stored,
        threads=setup.threads,
        least=least,
        yards=yards,
    )


def largest_difference(arm: EngineBackend, peer: Peer, test: Workload) -> float:
    """Of a peer's logits from ours, after a test's prompt, or its first token."""
    for one in (arm, peer):
        one.prepare(test)
        one.prompt(test) if test.n_prompt else one.step()
    return float(np.abs(arm.logits() - peer.logits()).max())


def _torch_device(engine: object) -> str:
    return str(getattr(engine, "device", "cpu")).partition(":")[0]


def gpu_of(setup: Setup) -> str:
    """The name of the GPU that computes; "" if none does."""
    if setup.device == "cpu":
        return ""
    from tgen.model.device import gpu_name

    return gpu_name(setup.device)
