"""A tiny training run: its request, its resumption, and its files."""

import hashlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

from support.models import TEXT
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.reports.training import PhaseReport, PlanReport, RunReport
from tgen.runs import ResumeRequest, RunRequest
from tgen.runs import saved_state as run_state
from tgen.storage.disk_array import Array

RUN_JSON = '{"run_id": "1", "tokens": {"bytes": 0, "sha256": ""}}'  # enough to be one of tgen's

# Without the first and last reports of a session.
WITH_TIMES = ("LOCK", "log.jsonl", "manifest.json", "run.json", "README.md")
TRAINED = ("StepReport", "EvalReport", "SampleReport")


def request(folder: Path, name: str = "model", **values: Any) -> RunRequest:
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_bytes(TEXT)
    overrides = {
        "d_model": "16",
        "n_layers": "1",
        "n_heads": "2",
        "context_length": "16",
        "batch_size": "4",
        "eval_every": "5",
        "dropout": "0.1",
    }
    overrides |= values.pop("overrides", {})
    overrides = {name: value for name, value in overrides.items() if value is not None}
    defaults = {
        "corpus": [str(corpus)],
        "out": folder / name,
        "train": TrainConfig(steps=14),
        "overrides": overrides,
        "threads": 1,
    }
    return RunRequest(**defaults | values)


def plan_of(reports: Iterable[RunReport]) -> PlanReport:
    """Return the plan; no report after it is asked for."""
    return next(report for report in reports if isinstance(report, PlanReport))


def start_run(run_request: RunRequest) -> PlanReport:
    """Start a run, and stop it before the first step, when it is on disk; return its plan."""
    plans = []
    for report in runs.start(run_request):
        if isinstance(report, PlanReport):
            plans.append(report)
        if isinstance(report, PhaseReport) and report.saved:
            break
    (plan,) = plans
    return plan


def resume(
    out: Path, *, stopped: Callable[[], bool] = lambda: False, **values: Any
) -> Generator[RunReport, None, None]:
    return runs.resume(ResumeRequest(out=out, **values), stopped=stopped)


def contents(out: Path) -> dict[str, str]:
    """Return the hashes of a run's files, without those that contain times."""
    hashes = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in WITH_TIMES:
            hashes[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def load_run(out: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return a run's record and tokens."""
    record, tokens_entry = run_state.load_record(out)
    return record, run_state.load_tokens(out, tokens_entry)


def progress(out: Path) -> dict[str, object]:
    """Return the counters of the newest state, without times."""
    saved = run_state.load_state(out, run_id=load_run(out)[0]["run_id"])
    assert saved
    return {k: v for k, v in saved.progress.items() if "seconds" not in k}
