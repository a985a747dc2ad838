"""A run's state beside its model: `training/state-<step>/`, each complete by one rename.

training/run.json             what was asked for, and the fingerprints of the corpus and the tokens
training/tokens.safetensors   the tokenised corpus, so that resuming needs no text
training/tokens-1.safetensors after the corpus was changed once
training/tokenizer.json
training/state-00000250/      state.safetensors, manifest.json
training/damaged-state-...    what could not be read any more
training/log.jsonl            a line for each report: see run_log.py
training/tensorboard/         the same numbers as TensorBoard's events, where they were asked for
training/LOCK
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.errors import ModelError, TrainingError
from tgen.runs.storage import manifest
from tgen.storage import files
from tgen.storage.disk_array import Array

_ARRAYS = "state.safetensors"
_TOKENS = "tokens"  # in run.json: their file's size and SHA-256
_NAME = re.compile(r"state-\d{8,}")
TOKENS_FILE = "tokens.safetensors"
_TOKENS_NAME = re.compile(r"tokens(-\d+)?\.safetensors")


class SavedState(NamedTuple):
    """A state as it was read."""

    progress: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    made_by: dict[str, Any]  # the versions and the machine that computed it
    set_aside: list[str]  # newer ones that could not be read: where they are now, and why


def recovery_hint(out: Path) -> str:
    """What to do about a run that cannot go on; nothing that takes away what there is of it."""
    return f"put a copy back, or go on from its weights: --from {out} with another --out"


def folder(out: Path) -> Path:
    """Where a run in `out` keeps its state."""
    return out / "training"


def begin(
    out: Path,
    run: Mapping[str, Any],
    tokens: Mapping[str, Array],
    *,
    tokenizer: str,
    progress: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    made_by: Mapping[str, Any],
) -> None:
    """Puts a new run in the place of an old one; run.json last, since it says that a run is there.

    An old model stays until there is a new one.
    """
    remove(out)
    files.publish(folder(out) / "tokenizer.json", tokenizer.encode())
    save_state(out, progress, arrays, run=run["run_id"], made_by=made_by)
    save_record(out, run, save_tokens(out, run, tokens))


def save_record(out: Path, run: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Writes run.json alone; its tokens are as `save_tokens` described them."""
    content = json.dumps({**run, _TOKENS: dict(described)}, indent=2).encode()
    files.publish(folder(out) / "run.json", content)


def tokens_file(change: int) -> str:
    """Where tokens are after that many changes of the corpus: not in the place of the last ones."""
    return f"tokens-{change}.safetensors"


def save_tokens(
    out: Path, run: Mapping[str, Any], tokens: Mapping[str, Array], *, name: str = TOKENS_FILE
) -> dict[str, Any]:
    """Writes the tokens of a run, in a stream; their file's name, if it is not the usual one, its
    size and SHA-256."""
    digest, n_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes]:
        nonlocal n_bytes
        made_from = {key: run[key] for key in ("corpus_sha256", "tokenizer_sha256")}
        for block in safetensors_file.stream(tokens, {"format": "pt", **made_from}):
            digest.update(block)
            n_bytes += len(block)
            yield block

    files.publish_stream(folder(out) / name, counted())
    described = {"bytes": n_bytes, "sha256": digest.hexdigest()}
    return described if name == TOKENS_FILE else {"name": name, **described}


def drop_other_tokens(out: Path, described: Mapping[str, Any]) -> None:
    """Removes tokens that run.json does not, or no longer, describe."""
    for path in _tokens_files(out):
        if path.name != described.get("name", TOKENS_FILE):
            files.remove(path)


def load_run(out: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """What `begin` wrote of a run and its tokens; errors as those two."""
    run, described = load_record(out)
    return run, load_tokens(out, described)


def load_record(out: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What run.json says of the run and of its tokens; raises TrainingError if it is damaged."""
    run = _json(folder(out) / "run.json")
    described = run.pop(_TOKENS, {})  # runs of earlier versions do not say
    name = described.get("name", TOKENS_FILE)
    if described and (
        set(described) - {"name"} != {"bytes", "sha256"} or not _TOKENS_NAME.fullmatch(str(name))
    ):
        raise TrainingError(f"{folder(out) / 'run.json'} is damaged", recovery_hint(out))
    return run, described


def load_tokens(out: Path, described: Mapping[str, Any], *, check: bool = True) -> dict[str, Array]:
    """The tokens that run.json describes; what is long stays on the disk.

    Raises TrainingError if they are others: damaged, or made from another text or tokenizer.
    Without `check` only their size is looked at.
    """
    path = folder(out) / described.get("name", TOKENS_FILE)
    if described:
        size = path.stat().st_size if path.exists() else 0
        is_ours = size == described["bytes"]
        if not is_ours or (check and files.sha256(path).hex() != described["sha256"]):
            state = "are damaged, or of another run" if path.exists() else "are missing"
            raise TrainingError(
                f"the tokens in {path} {state}",
                "name the corpus beside --resume: they are made anew",
            )
    return safetensors_file.read_vectors(path)


def save_state(
    out: Path,
    progress: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    *,
    run: str,
    made_by: Mapping[str, Any],
    keep: int = 2,
) -> None:
    """Adds the state of progress["step"]; keeps the `keep` newest, and the best one or, where that
    could not be saved, the first that came after it and knows of it."""
    target = _state(out, progress["step"])
    if not target.exists():  # a resumed run comes past the same steps with the same numbers
        contents: dict[str, files.Content] = {_ARRAYS: safetensors_file.in_parts(arrays)}
        values = {"run": run, "progress": dict(progress), "made_by": dict(made_by)}
        contents[manifest.NAME] = manifest.seal(values, manifest.describe(contents))
        files.publish_folder(target, contents)
    states = _states(out)
    since_best = [state for state in states if _step(state) >= progress["best_step"]]
    for old in states[:-keep]:
        if old not in since_best[:1]:
            files.remove(old)


def load_state(out: Path, *, run: str, from_step: int | None = None) -> SavedState | None:
    """The newest state that is whole or, with `from_step`, the first from there on; None if there
    is none.

    Those that are damaged, or of another run, get another name. Raises TrainingError if no other
    is left, and if one cannot be read as it is: by this version, or now.
    """
    set_aside: list[str] = []
    states = _states(out)
    if from_step is None:
        chosen = states[::-1]
    else:
        chosen = [state for state in states if _step(state) >= from_step]
    for state in chosen:
        try:
            found = manifest.read(state)
            if found["run"] != run:
                raise ModelError(f"{state} is of another run")
            arrays = _read(state / _ARRAYS)
        except ModelError as error:
            aside = _free_name(state)
            files.move(state, aside)
            set_aside.append(f"{error.message}: set aside as {aside.name}")
            continue
        return SavedState(found["progress"], arrays, found["made_by"], set_aside)
    if set_aside and len(set_aside) == len(states):
        raise TrainingError(
            f"no state of the run in {out} can be read: {'; '.join(set_aside[:5])}",
            recovery_hint(out),
        )
    return None


def damaged_states(out: Path) -> list[str]:
    """The names of those that were set aside."""
    return sorted(path.name for path in folder(out).glob("damaged-state-*"))


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
        if _step(state) > step:
            files.remove(state)


def remove(out: Path) -> None:
    """Removes an old run's files, run.json first, and nothing else."""
    for name in ("run.json", "tokenizer.json", "log.jsonl", "tensorboard"):
        files.remove(folder(out) / name)
    for path in [*_tokens_files(out), *_states(out), *folder(out).glob("damaged-state-*")]:
        files.remove(path)
    remove_leftovers(out)


def remove_leftovers(out: Path) -> None:
    """Removes what an interrupted save left."""
    for place in (out, folder(out), *_states(out)):
        files.remove_leftovers(place)


def _tokens_files(out: Path) -> list[Path]:
    return [path for path in folder(out).glob("tokens*") if _TOKENS_NAME.fullmatch(path.name)]


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(files.read(path))
        return value
    except ValueError:
        raise TrainingError(f"{path} is damaged", recovery_hint(path.parent.parent)) from None


def _state(out: Path, step: int) -> Path:
    return folder(out) / f"state-{step:08d}"


def _states(out: Path) -> list[Path]:
    found = (path for path in folder(out).glob("state-*") if _NAME.fullmatch(path.name))
    return sorted(found, key=_step)


def _step(state: Path) -> int:
    return int(state.name.removeprefix("state-"))


def _free_name(state: Path) -> Path:
    """Where a damaged state is moved to: no such name is taken."""
    wanted = [state.with_name(f"damaged-{state.name}{f'-{i}' * (i > 1)}") for i in range(1, 1000)]
    return next(path for path in wanted if not path.exists())


def _read(path: Path) -> dict[str, NDArray[Any]]:
    return safetensors_file.read(path, safetensors_file.read_header(path))
