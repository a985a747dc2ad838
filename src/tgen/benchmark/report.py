"""Trials of a test -> its report."""

from collections.abc import Sequence

from tgen.benchmark.statistics import bootstrap, doubts, hodges_lehmann, timing
from tgen.benchmark.throughput import Trial, Workload
from tgen.reports import ThroughputReport

_TOO_FAST = "it is above the limit that was measured: something else was running then"


def throughput_report(
    test: Workload,
    trials: Sequence[Trial],
    *,
    engine: str,
    stored: str,
    threads: int,
    least: tuple[float, str] | None,
    yards: Sequence[float] = (),
) -> ThroughputReport:
    """`least`: the seconds that the machine's limits allow at least, and what bounds them; `yards`:
    those that a yardstick took meanwhile."""
    seconds = [trial.seconds for trial in trials]
    n_tokens = test.batch * (test.n_prompt + test.n_gen)
    held = trials[-1].cache_bytes
    return ThroughputReport(
        label=test.label,
        engine=engine,
        stored=stored,
        threads=threads,
        batch=test.batch,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        seconds=timing(seconds),
        rate=hodges_lehmann([n_tokens / one for one in seconds]),
        bootstrapped=bootstrap([n_tokens / one for one in seconds]),
        first_token=timing([t.prompt / 1e9 for t in trials]) if test.n_prompt else None,
        cache_bytes_per_token=None if held is None else held / (test.batch * test.n_tokens),
        limit=None if least is None else n_tokens / least[0],
        bound_by="" if least is None else least[1],
        yards=list(yards),
        doubts=[*doubts(seconds), *([_TOO_FAST] if least and min(seconds) < least[0] else [])],
    )
