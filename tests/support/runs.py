"""A tiny training run: request, resume, and what it leaves on disk."""

import hashlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from support.models import TEXT
from tgen import runs
from tgen.config import TrainConfig
from tgen.reports.training import RunReport
from tgen.runs import ResumeRequest, RunRequest
from tgen.runs.storage import state as run_state

TRAINED = (
    "StepReport",
    "EvalReport",
    "SampleReport",
)  # without the first and last reports of a session


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


def resume(
    out: Path, *, stopped: Callable[[], bool] = lambda: False, **values: Any
) -> Generator[RunReport, None, None]:
    return runs.resume(ResumeRequest(out=out, **values), stopped=stopped)


def contents(out: Path) -> dict[str, str]:
    """Return the hashes of a run's files, without those that contain times."""
    hashes = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in ("LOCK", "log.jsonl", "manifest.json", "run.json"):
            hashes[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def progress(out: Path) -> dict[str, object]:
    saved = run_state.load_state(out, run_id=run_state.load_run(out)[0]["run_id"])
    assert saved
    return {k: v for k, v in saved.progress.items() if "seconds" not in k}
