"""A sweep: every combination of values, trained with several seeds, in one directory.

DIR/sweep.json           the combinations, their plans, and which of them each rung kept
DIR/<values>_seed=<n>/   a run, as `tgen train` writes it

The lock of a run says who trains it, so several processes, also on machines that share the
directory, each take the next free run. What a run has reached is in its own files, so a sweep that
was killed continues there.
"""

import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tgen import runs
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError, LockedError, ModelError, TrainingError, UsageError
from tgen.experiments.halving import best_cells, make_rungs, total_share
from tgen.reports.sweep import CellPlan, Rung, SweepPlanReport, SweepRunReport
from tgen.reports.training import PhaseReport, PlanReport, RunReport
from tgen.runs import ResumeRequest, RunRequest, saved_state
from tgen.runs import log as run_log
from tgen.runs.output_folder import lacks_model
from tgen.runs.overrides import parse_overrides
from tgen.storage import files, locks
from tgen.version import __version__

SweepReport = SweepPlanReport | SweepRunReport | RunReport
_RECORD = "sweep.json"
_WAIT_SECONDS = 2.0  # between looks at the runs of other processes
_DISK_BYTES = 40  # per parameter: three states with two moments, and the weights
_PLANNED_STEPS = 1000  # to choose a batch size that does not depend on the steps
# Chosen by the measured speed or the time, but the same for all seeds
_CHOSEN_ONCE = (
    "batch_size", "precision", "activation_checkpointing", "momentum", "dropout", "weight_decay",
    "consistency", "bpe_dropout", "bpe_dropout_in_decay", "eval_every", "eval_tokens",
)  # fmt: skip
# Fields of a request that may differ when a sweep continues
_FREE = ("out", "overwrite", "device", "threads", "command", "began", "log", "tensorboard")


def _wait() -> None:
    time.sleep(_WAIT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Request to train every cell with every seed; `cells` are its values and its run."""

    out: Path
    cells: list[tuple[dict[str, str], RunRequest]]
    seeds: list[int]
    flop: float | None = None  # of each run, instead of its minutes or steps
    halving: bool = False


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The content of sweep.json."""

    request: dict[str, Any]  # what a command must repeat to continue the sweep
    cells: list[CellPlan]
    corpus_sha256: str
    kept: list[list[int]] = field(default_factory=list)  # cells after each rung that has ended


def sweep(
    request: SweepRequest,
    *,
    stopped: Callable[[], bool] = lambda: False,
    wait: Callable[[], None] = _wait,
) -> Generator[SweepReport, None, None]:
    """Plan a sweep or continue it, and train its runs until `stopped()` is true after a step.

    `wait` is called before another look at runs that other processes train. Raise UsageError for
    invalid or equal combinations before the first run.
    """
    yield from _Sweep(request, stopped, wait).run()


def dry_run(request: SweepRequest) -> Generator[PhaseReport | SweepPlanReport, None, None]:
    """Yield the phases of planning, and the plan, without writing files."""
    check_cells(request)
    planned = _Sweep(request, lambda: False, _wait)
    planned.record = _open(request) or (yield from _plan(request))
    yield planned.plan_report()


def check_cells(request: SweepRequest) -> None:
    """Raise UsageError for invalid settings, and for two combinations that are the same."""
    known: list[tuple[Any, str]] = []
    for values, run in request.cells:
        words = _words(values)
        parsed = replace(run, overrides={}), parse_overrides(run.overrides)
        for other, other_words in known:
            if other == parsed:
                raise UsageError(
                    f"two combinations are the same: {other_words} and {words}",
                    "remove one of the values",
                )
        known.append((parsed, words))


def _words(values: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def run_names(request: SweepRequest) -> list[list[str]]:
    """Return the names of the directories of each cell's runs."""
    cells = []
    for values, _ in request.cells:
        words = [f"{name}={Path(value).name}" for name, value in values.items()]
        cells.append(re.sub(r"[^\w.+=-]+", "-", "_".join(words))[:100])
    if len(set(cells)) < len(cells):
        cells = [f"{number}_{name}" for number, name in enumerate(cells, 1)]
    return [[f"{name}_seed={seed}".lstrip("_") for seed in request.seeds] for name in cells]


def training_order(cells: Sequence[int], n_seeds: int) -> list[tuple[int, int]]:
    """Return cells and indexes of seeds: seed by seed, each from another cell on, so that a machine
    that becomes slower slows all cells alike."""
    n = len(cells)
    return [(cells[(i + seed) % n], seed) for seed in range(n_seeds) for i in range(n)]


class _Sweep:
    """A sweep in this process."""

    def __init__(
        self, request: SweepRequest, stopped: Callable[[], bool], wait: Callable[[], None]
    ) -> None:
        self.request, self.stopped, self.wait = request, stopped, wait
        self.names = run_names(request)
        self.rungs = make_rungs(len(request.cells), halving=request.halving)
        self.record: _Record
        self.failures: dict[str, str] = {}

    def run(self) -> Iterator[SweepReport]:
        """Yield the reports of the sweep and of its runs."""
        check_cells(self.request)
        self.record = yield from self._open()
        yield self.plan_report()
        cells = list(range(len(self.request.cells)))
        for number, _ in enumerate(self.rungs):
            if len(self.record.kept) > number:  # nothing of this rung is left to do
                cells = self.record.kept[number]
                continue
            yield from self._train_rung(number, cells)
            if self.stopped():
                return
            if number + 1 < len(self.rungs):
                cells = self._keep(number, cells)

    def plan_report(self) -> SweepPlanReport:
        """Return the plan, with the runs that have ended."""
        cells, rungs, n_seeds = self.record.cells, self.rungs, len(self.request.seeds)
        seconds = sum(cell.seconds for cell in cells) / len(cells)
        parameters = sum(cell.n_parameters for cell in cells)
        return SweepPlanReport(
            out=str(self.request.out),
            cells=cells,
            seeds=self.request.seeds,
            rungs=rungs,
            n_done=[*map(self._n_done, range(len(cells)))],
            seconds=seconds * total_share(rungs) * n_seeds,
            disk_bytes=_DISK_BYTES * parameters * n_seeds,
        )

    def _n_done(self, cell: int) -> int:
        """Return how many runs of a cell have ended for the current rung; all of them if an earlier
        one dropped it."""
        kept, n_done = self.record.kept, 0
        if kept and cell not in kept[-1]:
            return len(self.request.seeds)
        for seed, _ in enumerate(self.request.seeds):
            with suppress(LockedError, ModelError, TrainingError):  # the run reports it
                n_done += self._is_done(cell, seed, len(kept))
        return n_done

    def _open(self) -> Generator[PhaseReport, None, _Record]:
        """Return the record in the directory, or plan the sweep and write it; of several processes
        that plan, the first one counts."""
        out = self.request.out
        if (record := _open(self.request)) is not None:
            return record
        record = yield from _plan(self.request)
        while not (out / _RECORD).exists():
            try:
                with locks.lock(out / saved_state.LOCK):
                    if not (out / _RECORD).exists():
                        self._save(record)
            except LockedError:
                self.wait()
        opened = _open(self.request)
        assert opened is not None
        return opened

    def _save(self, record: _Record) -> None:
        values = {"tgen": __version__, **asdict(record)}
        files.publish(self.request.out / _RECORD, json.dumps(values, indent=2).encode())

    def _train_rung(self, rung: int, cells: Sequence[int]) -> Iterator[SweepReport]:
        """Train the runs of a rung, and wait for those that other processes train."""
        left = training_order(cells, len(self.request.seeds))
        while left:
            busy: list[tuple[int, int]] = []
            for position, (cell, seed) in enumerate(left):
                n_left = len(left) - position + len(busy)
                try:
                    if not self._is_done(cell, seed, rung):
                        yield self._report(cell, seed, rung, "training", n_left=n_left)
                        yield from self._train(cell, seed, rung)
                        if self.stopped():
                            return
                    yield self._report(cell, seed, rung, "done", n_left=n_left - 1)
                except LockedError:
                    busy.append((cell, seed))
                except (TrainingError, ModelError) as error:
                    self.failures[self.names[cell][seed]] = reason = error.message
                    yield self._report(cell, seed, rung, "failed", reason=reason, n_left=n_left - 1)
                if self.stopped():
                    return
            left = busy
            if left:
                yield PhaseReport(phase=f"waiting for other processes: {len(left)} runs")
                self.wait()
            if self.stopped():
                return

    def _report(self, cell: int, seed: int, rung: int, state: Any, **more: Any) -> SweepRunReport:
        name, before = self.names[cell][seed], self.rungs[rung - 1].share if rung else 0.0
        later = total_share(self.rungs) - total_share(self.rungs[: rung + 1])
        runs_left = more["n_left"] * (self.rungs[rung].share - before)
        runs_left += later * len(self.request.seeds)
        return SweepRunReport(
            name=name,
            cell=cell,
            seed=self.request.seeds[seed],
            rung=rung,
            state=state,
            bits_per_byte=_best_loss(self.request.out / name) if state == "done" else None,
            seconds_left=runs_left * self.record.cells[cell].seconds,
            **more,
        )

    def _is_done(self, cell: int, seed: int, rung: int) -> bool:
        """Whether a run has ended with the time of this rung, or another process has begun the
        next one with it."""
        out = self.request.out / self.names[cell][seed]
        if not saved_state.has_run(out):
            return False
        values, _ = saved_state.load_record(out)
        if lacks_model(out, has_adapter=values["adapter"] is not None):
            return False
        name, wanted = _budget(self.record.cells[cell], self.rungs[rung])
        budget = values["plan"]["train"][name]
        if budget != wanted:
            return bool(budget > wanted)
        saved = saved_state.newest_counters(out, run_id=values["run_id"])
        if saved is None or saved.progress["step"] != saved.progress["total_steps"]:
            return False
        lines = run_log.read(out)
        is_end = saved.progress["end_changes"] == values["end_changes"]
        return is_end and bool(lines) and lines[-1].get("finished") is True

    def _train(self, cell: int, seed: int, rung: int) -> Iterator[RunReport]:
        """Start a run, or resume it with the time of this rung."""
        request, plan = self.request.cells[cell][1], self.record.cells[cell]
        out = self.request.out / self.names[cell][seed]
        name, wanted = _budget(plan, self.rungs[rung])
        if saved_state.has_run(out):
            old = saved_state.load_record(out)[0]["plan"]["train"][name]
            is_longer = old < wanted  # and never shorter: another process may have continued
            resumed = ResumeRequest(
                out=out,
                settings={name: wanted} if is_longer else {},
                override=is_longer,
                device=request.device,
                threads=request.threads,
            )
            yield from runs.resume(resumed, stopped=self.stopped)
            return
        values = plan.settings | {name: wanted, "seed": self.request.seeds[seed]}
        size: Any = plan.size
        started = replace(request, out=out, size=size, train=replace(request.train, **values))
        try:
            with closing(runs.start(started, stopped=self.stopped)) as reports:
                for report in reports:
                    if isinstance(report, PlanReport):
                        self._check_corpus(report)
                    yield report
        except UsageError:
            if saved_state.has_run(out):  # another process has just started it
                raise LockedError(f"{out} is in use") from None
            raise

    def _check_corpus(self, plan: PlanReport) -> None:
        if plan.corpus_sha256 != self.record.corpus_sha256:
            raise CorpusError(
                f"the corpus has changed since the sweep in {self.request.out} started",
                "restore it, or start a new sweep with another --out",
            )

    def _keep(self, rung: int, cells: Sequence[int]) -> list[int]:
        """Return the best cells of a rung, which is recorded before any of them continues."""
        self.record = _load(self.request.out)
        if len(self.record.kept) == rung:
            losses = {
                cell: [
                    None if name in self.failures else _best_loss(self.request.out / name)
                    for name in self.names[cell]
                ]
                for cell in cells
            }
            best = best_cells(losses, self.rungs[rung + 1].n_cells)
            self.record = replace(self.record, kept=[*self.record.kept, best])
            self._save(self.record)
        return self.record.kept[rung]


def _open(request: SweepRequest) -> _Record | None:
    """Return the record of the sweep in the directory; None if a new one can start there."""
    out = request.out
    names = saved_state.file_names(out)  # once: another process may start the sweep meanwhile
    if _RECORD not in names:
        if problem := files.output_problem(out / _RECORD):
            raise UsageError(f"--out {out}: {problem}", "choose another directory")
        if others := names - {saved_state.LOCK}:
            raise UsageError(
                f"--out {out} contains other files: {', '.join(sorted(others)[:5])}",
                "choose a directory that does not exist yet",
            )
        return None
    record = _load(out)
    for name, value in _identity(request).items():
        old = record.request.get(name)
        if old != value:
            parts = ", ".join(sorted({*_changed(old, value, name)} - {name}))
            raise UsageError(
                f"--out {out} has a sweep with other {name}" + f" ({parts})" * bool(parts),
                "repeat the command that started it, or choose another --out",
            )
    return record


def _changed(old: Any, new: Any, name: str) -> Iterator[str]:
    """Yield the names of the fields that differ in two JSON values, which have this name."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _changed(old.get(key), new.get(key), key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from _changed(one, other, name)
    elif old != new:
        yield name


def _load(out: Path) -> _Record:
    path = out / _RECORD
    try:
        values = json.loads(files.read(path))
        cells = [CellPlan(**cell) for cell in values["cells"]]
        known = {one.name: values[one.name] for one in fields(_Record)}
        return _Record(**known | {"cells": cells})
    except (ValueError, KeyError, TypeError):
        raise TrainingError(f"{path} is damaged", "choose another --out") from None


def _best_loss(out: Path) -> float | None:
    """Return the held-out bits per byte at the end of a run."""
    loss: float | None = run_log.last_done(run_log.read(out)).get("best_bits_per_byte")
    return loss


def _identity(request: SweepRequest) -> dict[str, Any]:
    """Return what must be the same for a sweep to continue, as JSON values."""
    requests = [asdict(run) for _, run in request.cells]
    identity = {
        "combinations": [values for values, _ in request.cells],
        "seeds": request.seeds,
        "halving": request.halving,
        "flop": request.flop,
        "settings": [{k: v for k, v in one.items() if k not in _FREE} for one in requests],
    }
    values: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return values


def _plan(request: SweepRequest) -> Generator[PhaseReport, None, _Record]:
    """Plan all cells; raise the errors of a start."""
    cells: list[CellPlan] = []
    digests = set()
    for number, (values, run) in enumerate(request.cells, 1):
        phase = f"planning {number} of {len(request.cells)}" * (len(request.cells) > 1)
        model = _values_of_model(values)
        like = next((cell for cell in cells if _values_of_model(cell.values) == model), None)
        if like:  # the same size, and what follows from the measured speed
            size: Any = like.size or run.size
            run = replace(run, size=size, train=replace(run.train, **like.settings))
        elif cells:
            precision = cells[0].settings["precision"]
            run = replace(run, train=replace(run.train, precision=precision))
        try:
            cell, digest = yield from _plan_cell(request, values, run, phase)
        except (CorpusError, UsageError) as error:
            if values:
                error.message += f" (combination {_words(values)})"
                error.args = (error.message,)
            raise
        cells.append(replace(cell, settings=like.settings) if like else cell)
        digests.add(digest)
    if len(digests) > 1:
        raise CorpusError("the corpus changed while the sweep was planned", "start again")
    return _Record(request=_identity(request), cells=cells, corpus_sha256=digests.pop())


def _values_of_model(values: dict[str, str]) -> dict[str, str]:
    """Return the values on which size and speed depend: not those of hyperparameters."""
    of_speed = {"optimizer", "lora"}
    names = {one.name for one in fields(TrainConfig)} - of_speed
    return {name: value for name, value in values.items() if name not in names}


def _plan_cell(
    request: SweepRequest, values: dict[str, str], run: RunRequest, phase: str
) -> Generator[PhaseReport, None, tuple[CellPlan, str]]:
    """Return the plan of a cell for its first rung, with the size for the whole time; and the
    digest of the corpus."""
    rungs = make_rungs(len(request.cells), halving=request.halving)
    run, train = replace(run, out=request.out / "run"), run.train
    if request.flop is not None:
        train = replace(train, steps=_PLANNED_STEPS)
    report = yield from _dry_run(replace(run, train=train), phase)
    if request.halving and not report.held_out_tokens:
        raise UsageError(
            "--halving needs held-out text to compare runs on", "set --val-fraction above 0"
        )
    step_tokens = report.batch_size * report.context_length
    steps = train.steps
    if request.flop is not None:
        steps = max(1, round(request.flop / (report.flops_per_token * step_tokens)))
    given = (run.parameters, run.start_from, run.adapter)
    size: Any = report.size if given == (None, None, None) else None
    cell = CellPlan(
        values=values,
        family=report.family,
        size=size,
        n_parameters=report.n_parameters,
        minutes=None if steps else train.minutes,
        steps=steps,
        seconds=60 * train.minutes,
        settings={},
    )
    if steps != train.steps or len(rungs) > 1:
        train = replace(train, **dict([_budget(cell, rungs[0])]))
        report = yield from _dry_run(replace(run, size=size, train=train), phase)
        step_tokens = report.batch_size * report.context_length
    unused = {"momentum"} if report.settings["optimizer"] != "muon" else set()
    unused |= set() if report.held_out_tokens else {"eval_tokens"}
    settings = {
        name: report.settings[name]
        for name in _CHOSEN_ONCE
        if name not in unused and (name == "precision" or getattr(run.train, name) is None)
    }
    if steps:
        cell = replace(cell, seconds=steps * step_tokens / (report.tokens_per_second or 1.0))
    return replace(cell, settings=settings), report.corpus_sha256


def _dry_run(run: RunRequest, prefix: str) -> Generator[PhaseReport, None, PlanReport]:
    """Return the plan of a run; name the cell in its phases."""
    for report in runs.dry_run_reports(run):
        if isinstance(report, PlanReport):
            plan = report
        else:
            yield replace(report, phase=": ".join(filter(None, [prefix, report.phase])))
    return plan


def _budget(cell: CellPlan, rung: Rung) -> tuple[str, Any]:
    """Return the setting and the value of the minutes or steps of a run up to the end of a rung."""
    if cell.steps is not None:
        return "steps", max(1, round(rung.share * cell.steps))
    assert cell.minutes is not None
    return "minutes", rung.share * cell.minutes
