"""`tgen bench`'s throughput: tests are made, measured, shown, kept and compared."""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.bench.options import ENGINES, BenchOptions
from tgen.cli.bench.output import Comparison, collect_context, show
from tgen.cli.bench.tables.throughput import difference_table
from tgen.config import STORED_BYTES, StoredAs
from tgen.errors import TgenError, UsageError
from tgen.reports import PrecisionReport, ThroughputReport
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.benchmark.sweep import Setup
    from tgen.benchmark.throughput import Workload

_PROMPT, _GEN = 512, 128  # llama-bench's
_OLD_LIMIT = 64 << 20  # bytes of an earlier run's file


def throughput(asked: BenchOptions) -> None:
    """Measures every test of every setup."""
    known, setups = collect_context(asked), _open(asked)
    found = _measure(asked, setups, _tests(asked, setups))
    shown = asked.output not in ("md", "csv") or asked.save  # where there is room for it
    narrow = [held for held in asked.weights or [] if held != "float32" and shown]
    costs = {held: _precision(asked, held) for held in narrow}
    show(asked, known, found, costs=costs)


def _precision(asked: BenchOptions, held: StoredAs) -> PrecisionReport | None:
    """What weights held so cost, where they are stored in more bits."""
    from tgen.api import load
    from tgen.benchmark.precision import compare_weights

    model, exact = (load(asked.path, device=asked.device, weights=of) for of in (held, None))
    return compare_weights(
        model.engine,
        exact.engine,
        exact.encode(b""),
        decode=exact.tokenizer.decode,
        seed=asked.seed,
    )


def against(asked: BenchOptions, name: str) -> None:
    """The same weights by another engine, in turns with ours."""
    from tgen.benchmark.other_engines import REMARKS
    from tgen.benchmark.sweep import check_trials, compare_arms, largest_difference

    check_trials(asked.trials)
    known, setups = collect_context(asked), _open(asked)
    if len(setups) > 1:
        raise UsageError("--against compares one setup", "give one engine, type and thread count")
    (setup,) = setups
    if name != "self" and setup.device != "cpu":
        raise UsageError(f"--against {name} is of processors", "add --device cpu")
    tests = _tests(asked, setups)
    apart = 0.0
    with ExitStack() as stack:
        peer: Any = setup.arm
        if name != "self":
            peer = stack.enter_context(closing(_peer(asked, setup, name)))
            apart = largest_difference(setup.arm, peer, tests[0])
        progress = stack.enter_context(console.progress("measuring in turns", quiet=asked.quiet))
        setup, found = compare_arms(
            setup, peer, name, tests, trials=asked.trials, progress=progress
        )
    differences = [difference for *_, difference in found]
    compared = Comparison(
        differences=differences,
        table=difference_table(differences, of="ours", to=name),
        theirs=[report for _, report, _ in found],
        more={"peer": name, "largest_logit_difference": apart},
        remark=f"logits are {apart:.1e} apart at most{REMARKS.get(name, '')}",
    )
    show(asked, known, [(setup, report) for report, _, _ in found], compared)


def compare(asked: BenchOptions, path: Path, share: float | None) -> None:
    """The tests of an earlier run again, and what has changed since.

    Raises UsageError for a run of another machine or model, or without a test that is asked for,
    and TgenError if a test is sure to be slower by more than `share`.
    """
    from tgen.benchmark.comparison import check_comparable, counterpart, is_slower_by, since

    old = _read_rows(path)
    asked = _setups_as_before(asked, old)
    known, setups = collect_context(asked), _open(asked)
    check_comparable(old, known.of(setups[0]))
    tests = _tests(asked, setups) if asked.names_tests else _tests_of(old)
    before = []
    for setup, test in product(setups, tests):
        row = counterpart(
            old, test, engine=setup.engine, stored=setup.stored, threads=setup.threads
        )
        if row is None:
            raise UsageError(
                f"{path} has no {test.label} with {setup.engine}, {setup.stored} weights, "
                f"{setup.threads} threads and {test.batch} rows",
                "without -p, -n and the like the tests of the file are run",
            )
        before.append(row)
    found = _measure(asked, setups, tests)
    differences = [since(report, row) for (_, report), row in zip(found, before, strict=True)]
    then = console.printable(str(old[0].get("test_time", "then")))[:20]
    table = difference_table(differences, of="now", to=then)
    show(asked, known, found, Comparison(differences, table, more={"before": old}))
    slower = [d for d in differences if share is not None and is_slower_by(d, share)]
    if slower:
        worst = min(slower, key=lambda d: d.ratio.middle)
        raise TgenError(
            f"{worst.label} runs at {worst.ratio.middle:.3f} of its speed then",
            f"it is sure to be below {1 - (share or 0):.3f}",
        )


def _open(asked: BenchOptions) -> list["Setup"]:
    from tgen.benchmark.sweep import open_setups

    with console.progress("the machine's limits", quiet=asked.quiet):
        return open_setups(
            asked.path,
            kinds=asked.engines or ["auto"],
            weights=asked.weights or [None],
            threads=asked.threads or [None],
            device=asked.device,
            seed=asked.seed,
            limited=asked.limits,
        )


def _tests(asked: BenchOptions, setups: Sequence["Setup"]) -> list["Workload"]:
    """Those that were asked for; else llama-bench's, as far as the context goes."""
    from tgen.benchmark.throughput import Workload

    context = min(setup.context_length for setup in setups)
    found = []
    for depth, batch in product(asked.depths or [0], asked.batches or [1]):
        room = max(context - depth, 1)
        usual = asked.pairs is None
        prompts = asked.prompts if asked.prompts is not None else [min(_PROMPT, room)] * usual
        gens = asked.gens if asked.gens is not None else [min(_GEN, room)] * usual
        kinds = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n]
        kinds += asked.pairs or []
        found += [Workload(n_prompt=p, n_gen=n, n_depth=depth, batch=batch) for p, n in kinds]
    if not found:
        raise UsageError("a test of no tokens was asked for", "give -p or -n above 0")
    for test in found:
        test.check(context)
    return found


def _measure(
    asked: BenchOptions, setups: Sequence["Setup"], tests: Sequence["Workload"]
) -> list[tuple["Setup", ThroughputReport]]:
    from tgen.benchmark.sweep import sweep

    with console.progress("measuring in turns", quiet=asked.quiet) as progress:
        return sweep(setups, tests, trials=asked.trials, progress=progress)


def _peer(asked: BenchOptions, setup: "Setup", name: str) -> Any:
    from tgen.benchmark.other_engines import open_peer
    from tgen.benchmark.throughput import random_tokens
    from tgen.checkpoint.model_dir import load

    bundle = load(asked.path)
    config = bundle.config
    tokens = random_tokens(config.vocab_size, config.context_length, seed=asked.seed)
    return open_peer(name, bundle, threads=setup.threads, stored=setup.stored, tokens=tokens)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """An earlier run's; raises UsageError if the file is none."""
    try:
        rows = json.loads(files.read(path, limit=_OLD_LIMIT))
        kept = rows if isinstance(rows, list) and all(map(_is_row, rows)) else []
    except (ValueError, RecursionError):
        kept = []
    if not kept:
        raise UsageError(
            f"{path} holds no figures of tgen bench", "make it with --save, or with -o json"
        )
    return kept


def _is_row(row: Any) -> bool:
    """Whether it has what is compared, as it was written."""
    if not isinstance(row, dict):
        return False
    counts = [row.get(name) for name in ("n_prompt", "n_gen", "n_depth")]
    samples = row.get("samples_ns"), row.get("yardstick_ns", [1])
    return (
        all(isinstance(n, int) and n >= 0 for n in counts)
        and isinstance(row.get("batch"), int)
        and isinstance(row.get("n_threads"), int)
        and row.get("engine") in ENGINES
        and row.get("weights") in STORED_BYTES
        and all(isinstance(of, list) and bool(of) for of in samples)
        and all(isinstance(ns, int) and ns > 0 for of in samples for ns in of or [])
    )


def _tests_of(old: Sequence[dict[str, Any]]) -> list["Workload"]:
    """Those of an earlier run."""
    from tgen.benchmark.throughput import Workload

    names = ("n_prompt", "n_gen", "n_depth", "batch")
    return [Workload(**dict(zip(names, of, strict=True))) for of in _unique(old, *names)]


def _setups_as_before(asked: BenchOptions, old: Sequence[dict[str, Any]]) -> BenchOptions:
    """The setups of an earlier run, but for what is asked for."""
    return replace(
        asked,
        engines=asked.engines or [one for (one,) in _unique(old, "engine")],
        weights=asked.weights or [one for (one,) in _unique(old, "weights")],
        threads=asked.threads or [one for (one,) in _unique(old, "n_threads")],
    )


def _unique(rows: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
