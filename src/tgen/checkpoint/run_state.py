"""A run's state beside its model: `training/state-<step>/`, each complete by one rename.

training/run.json             what was asked for, and the corpus's fingerprint
training/tokens.safetensors   the tokenised corpus, so that resuming needs no text
training/tokenizer.json
training/state-00000250/      state.safetensors, manifest.json
training/damaged-state-...    what could not be read any more
training/log.jsonl            a line for each report: see run_log.py
training/tensorboard/         the same numbers as TensorBoard's events, where they were asked for
training/LOCK
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tgen import files
from tgen.checkpoint import manifest, tensors
from tgen.errors import TgenError, TrainingError

_KEEP = 2
_ARRAYS = "state.safetensors"
_NAME = re.compile(r"state-\d{8}")


class Saved(NamedTuple):
    """A state as it was read."""

    progress: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    made_by: dict[str, Any]  # the versions and the machine that computed it
    set_aside: list[str]  # newer ones that could not be read: where they are now, and why


def folder(out: Path) -> Path:
    """Where a run in `out` keeps its state."""
    return out / "training"


def save_run(out: Path, run: Mapping[str, Any], tokens: Mapping[str, NDArray[Any]]) -> None:
    """Writes what never changes in a run; run.json last, since it says that a run is there."""
    files.publish(folder(out) / "tokens.safetensors", tensors.serialise(tokens))
    save_record(out, run)


def save_record(out: Path, run: Mapping[str, Any]) -> None:
    """Writes run.json alone."""
    files.publish(folder(out) / "run.json", json.dumps(run, indent=2).encode())


def load_run(out: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `save_run` wrote."""
    return _json(folder(out) / "run.json"), _read(folder(out) / "tokens.safetensors")


def save_state(
    out: Path,
    progress: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    *,
    run: str,
    made_by: Mapping[str, Any],
) -> None:
    """Adds the state of progress["step"]; keeps it, the one before it and the best."""
    target = _state(out, progress["step"])
    if not target.exists():  # a resumed run comes past the same steps with the same numbers
        contents: dict[str, files.Content] = {_ARRAYS: tensors.in_parts(arrays)}
        values = {"run": run, "progress": dict(progress), "made_by": dict(made_by)}
        contents[manifest.NAME] = manifest.seal(values, manifest.describe(contents))
        files.publish_folder(target, contents)
    for old in _states(out)[:-_KEEP]:
        if old != _state(out, progress["best_step"]):
            files.remove(old)


def load_state(out: Path, *, run: str) -> Saved | None:
    """The newest state that is whole, or None if the run has not saved one yet.

    Those that are damaged, or of another run, get another name. Raises TrainingError if none is
    left.
    """
    set_aside: list[str] = []
    for state in reversed(_states(out)):
        try:
            found = manifest.read(state)
            if found["run"] != run:
                raise TrainingError(f"{state} is of another run")
            arrays = _read(state / _ARRAYS)
        except TgenError as error:
            aside = _free_name(state)
            files.move(state, aside)
            set_aside.append(f"{error.message}: set aside as {aside.name}")
            continue
        return Saved(found["progress"], arrays, found["made_by"], set_aside)
    if set_aside:
        raise TrainingError(
            f"no state of the run in {out} can be read: {'; '.join(set_aside[:5])}",
            "nothing was deleted: put a copy back, or start anew with --overwrite",
        )
    return None


def save_progress(out: Path, progress: Mapping[str, Any]) -> None:
    """Puts other counters into the state of progress["step"], if there is one."""
    target = _state(out, progress["step"])
    if target.exists():
        found = manifest.read(target)
        described = found.pop("files")
        del found["format"]
        content = manifest.seal(found | {"progress": dict(progress)}, described)
        files.publish(target / manifest.NAME, content)


def drop_states_after(out: Path, step: int) -> None:
    """Makes the state of `step` the newest."""
    for state in reversed(_states(out)):
        if state > _state(out, step):
            files.remove(state)


def remove(out: Path) -> None:
    """Removes an old run's files, run.json first, and nothing else."""
    for name in ("run.json", "tokens.safetensors", "tokenizer.json", "log.jsonl", "tensorboard"):
        files.remove(folder(out) / name)
    for state in [*_states(out), *folder(out).glob("damaged-state-*")]:
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
    return sorted(path for path in folder(out).glob("state-*") if _NAME.fullmatch(path.name))


def _free_name(state: Path) -> Path:
    """Where a damaged state is moved to: no such name is taken."""
    wanted = [state.with_name(f"damaged-{state.name}{f'-{i}' * (i > 1)}") for i in range(1, 1000)]
    return next(path for path in wanted if not path.exists())


def _read(path: Path) -> dict[str, NDArray[Any]]:
    return tensors.read(path, tensors.read_header(path))
