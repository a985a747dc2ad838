"""A tiny training run: its request, its resumption, and its files."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.models import TEXT
from tgen import runs
from tgen.config import ModelConfig
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


def dry_run(run_request: RunRequest) -> PlanReport:
    """Return the plan of a start, which writes no files."""
    *_, plan = runs.dry_run_reports(run_request)
    assert isinstance(plan, PlanReport)
    return plan


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


def simulate_run(
    out: Path,
    template: Path,
    losses: Sequence[float],
    *,
    state: str = "finished",
    run_id: str = "",
    corpus_sha256: str = "",
    every: int = 100,
    seconds: float = 0.1,
    best: float | None = None,
    **settings: Any,
) -> Path:
    """Write the record and the log of a run with these held-out losses in bits per byte.

    The record is that of the run in `template` with other `settings`; a step takes `seconds`.
    `best` is the loss on the whole held-out text, by default the lowest of `losses`.
    """
    record, _ = run_state.load_record(template)
    plan = record["plan"]
    for name, value in settings.items():
        if name == "family":
            shape = {"n_layers": 1, "d_model": 16, "n_heads": 2, "context_length": 16}
            vocab_size = plan["model"]["vocab_size"]
            plan["model"] = asdict(ModelConfig.of(value, vocab_size=vocab_size, **shape))
        else:
            plan["train" if name in plan["train"] else "model"][name] = value
    record["run_id"] = run_id or out.name
    record["corpus_sha256"] = corpus_sha256 or record["corpus_sha256"]
    batch = {"batch_size": plan["train"]["batch_size"], "context_length": plan["context_length"]}
    lines: list[dict[str, Any]] = [{"kind": "PlanReport", "resumed_at_step": 0} | batch]
    for i, bits in enumerate(losses, 1):
        point = {"step": i * every, "seconds": i * every * seconds, "loss": 2 * bits}
        pace = {"learning_rate": 0.001, "tokens_per_second": 1e3}
        lines.append({"kind": "StepReport"} | point | pace)
        lines.append({"kind": "EvalReport", "bits_per_byte": bits} | point)
    if state == "diverged":
        lines.append({"kind": "DivergedReport"})
    elif state != "unfinished":
        done = {
            "finished": state == "finished",
            "best_bits_per_byte": best or min(losses, default=None),
        }
        lines.append({"kind": "DoneReport"} | done)
    run_state.folder(out).mkdir(parents=True)
    run_state.save_record(out, record, {"bytes": 0, "sha256": ""})
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (run_state.folder(out) / "log.jsonl").write_text(log)
    return out
