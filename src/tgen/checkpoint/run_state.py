"""A run's state beside its model: `training/state-<step>/`, each complete by one rename.

training/run.json             what was asked for, and the corpus's fingerprint
training/tokens.safetensors   the tokenised corpus, so that resuming needs no text
training/tokenizer.json
training/state-00000250/      state.safetensors, progress.json
training/log.jsonl            a line for each report: see run_log.py
training/tensorboard/         the same numbers as TensorBoard's events, where they were asked for
training/LOCK
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen import files
from tgen.checkpoint import tensors
from tgen.errors import TrainingError

_KEEP = 2


def folder(out: Path) -> Path:
    """Where a run in `out` keeps its state."""
    return out / "training"


def save_run(out: Path, run: Mapping[str, Any], tokens: Mapping[str, NDArray[Any]]) -> None:
    """Writes what never changes in a run; run.json last, since it says that a run is there."""
    files.publish(folder(out) / "tokens.safetensors", tensors.serialise(tokens))
    files.publish(folder(out) / "run.json", json.dumps(run, indent=2).encode())


def load_run(out: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `save_run` wrote; raises TrainingError if there is none."""
    path = folder(out) / "run.json"
    if not path.exists():
        raise TrainingError(f"there is no run in {out} to resume", "train without --resume first")
    return _json(path), _read(folder(out) / "tokens.safetensors")


def save_state(out: Path, progress: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Adds the state of progress["step"]; keeps it, the one before it and the best."""
    target = _state(out, progress["step"])
    if not target.exists():  # a resumed run comes past the same steps with the same numbers
        files.publish_folder(
            target,
            {
                "state.safetensors": tensors.serialise(arrays),
                "progress.json": json.dumps(progress, indent=2).encode(),
            },
        )
    for old in _states(out)[:-_KEEP]:
        if old != _state(out, progress["best_step"]):
            files.remove(old)


def load_state(out: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """The newest state, or None if the run has not saved one yet."""
    states = _states(out)
    if not states:
        return None
    return _json(states[-1] / "progress.json"), _read(states[-1] / "state.safetensors")


def save_progress(out: Path, progress: Mapping[str, Any]) -> None:
    """Puts other counters into the state of progress["step"], if there is one."""
    target = _state(out, progress["step"])
    if target.exists():
        files.publish(target / "progress.json", json.dumps(progress, indent=2).encode())


def drop_states_after(out: Path, step: int) -> None:
    """Makes the state of `step` the newest."""
    for state in reversed(_states(out)):
        if state > _state(out, step):
            files.remove(state)


def remove(out: Path) -> None:
    """Removes an old run's files, run.json first, and nothing else."""
    for name in ("run.json", "tokens.safetensors", "tokenizer.json", "log.jsonl", "tensorboard"):
        files.remove(folder(out) / name)
    for state in _states(out):
        files.remove(state)
    files.remove_leftovers(folder(out))


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(files.read(path))
        return value
    except ValueError:
        raise TrainingError(f"{path} is damaged", "start a new run with --overwrite") from None


def _state(out: Path, step: int) -> Path:
    return folder(out) / f"state-{step:08d}"


def _states(out: Path) -> list[Path]:
    return sorted(folder(out).glob("state-*"))


def _read(path: Path) -> dict[str, NDArray[Any]]:
    return tensors.read(path, tensors.read_header(path))
