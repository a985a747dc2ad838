"""Training states: `training/state-<step>/` beside the model, each made complete by one rename.

training/run.json             the request, and the fingerprints of the corpus and the tokens
training/tokens.safetensors   the tokenized corpus, so that resuming needs no text
training/tokens-1.safetensors the tokens after the corpus was changed once
training/tokenizer.json
training/text.index           the training text with an index, if requested; never part of the model
training/state-00000250/      state.safetensors, manifest.json; with FSDP, each rank writes its rows
                              to a state-00001-of-00004.safetensors
training/damaged-state-...    a state that could not be read
training/log.jsonl            one line per report: see log.py
training/tensorboard/         the same numbers as TensorBoard events, if requested
training/LOCK
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import distributed
from tgen.checkpoint import safetensors_file
from tgen.checkpoint.safetensors_file import StoredTensor
from tgen.errors import ModelError, TgenError, TrainingError
from tgen.runs import manifest
from tgen.storage import files
from tgen.storage.disk_array import Array, blocks

TOKENS_FILE = "tokens.safetensors"
_ARRAYS_FILE = "state.safetensors"
LOCK = "LOCK"
_TENSORBOARD = "tensorboard"
_INDEX_FILE = "text.index"
_GENERAL_FILE = "general.txt"  # whose loss before and after fine-tuning is reported
_TOKENS_KEY = "tokens"  # in run.json: the size and SHA-256 of the token file
_SHARE = "choose an --out on a disk that all machines share"
_TOKENIZE_AGAIN = "pass the corpus with --resume to tokenize it again"
_STATE_NAME = re.compile(r"state-\d{8,}")
_DAMAGED_NAME = re.compile(r"damaged-state-\d{8,}(-\d+)?")
_TOKENS_NAME = re.compile(r"tokens(-\d+)?\.safetensors")


class SavedState(NamedTuple):
    """A training state that was read from disk."""

    progress: dict[str, Any]
    arrays: Mapping[str, StoredTensor]
    environment: dict[str, Any]  # the versions and the machine that computed it
    damaged: list[str]  # newer states that were renamed: the reason and the new name


def recovery_hint(out: Path) -> str:
    """Return a hint for a run that cannot be resumed; following it deletes nothing."""
    name = shlex.quote(str(out))
    return f"restore a backup, or fine-tune its weights: --from {name} with another --out"


def folder(out: Path) -> Path:
    """Return the directory with the training state of the run in `out`."""
    return out / "training"


def index_path(out: Path) -> Path:
    """Return where the index of a run's training text is stored."""
    return folder(out) / _INDEX_FILE


def has_run(out: Path) -> bool:
    """Return whether `out` has a training/run.json, damaged or not."""
    return (folder(out) / "run.json").exists()


def is_run(out: Path) -> bool:
    """Return whether tgen started a run in `out`. Other programs have a training/run.json, too."""
    try:
        return isinstance(load_record(out)[0].get("run_id"), str)
    except (TgenError, OSError):
        return False


def is_start(out: Path) -> bool:
    """Return whether a start that was killed before run.json left its lock and files of a run.
    Other programs have a `training` directory, too."""
    names = file_names(folder(out))
    if LOCK not in names or other_names(out):
        return False
    try:
        content = files.read(folder(out) / LOCK, limit=100)
    except TgenError:
        return False
    return content.isdigit() or (names == {LOCK} and not content)


def file_names(directory: Path) -> set[str]:
    """The names in a directory, without temporary ones; none if it does not exist."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return {path.name for path in paths if not path.name.startswith(files.TEMPORARY)}


def other_names(out: Path) -> list[str]:
    """Return the names in the training directory of a run that belong to no run."""
    others = [name for name in file_names(folder(out)) if not is_name_of_run(name)]
    if not all(map(_is_event_file, file_names(folder(out) / _TENSORBOARD))):
        others.append(_TENSORBOARD)
    return sorted(others)


def is_name_of_run(name: str) -> bool:
    """Return whether a run has a file or a directory of this name in its training directory."""
    texts = (_GENERAL_FILE, _INDEX_FILE)
    names = (LOCK, "run.json", "tokenizer.json", "log.jsonl", *texts, _TENSORBOARD)
    patterns = (_STATE_NAME, _TOKENS_NAME, _DAMAGED_NAME)
    return name in names or any(pattern.fullmatch(name) for pattern in patterns)


def _is_event_file(name: str) -> bool:
    return name.startswith("events.out.tfevents.")


def create_run(
    out: Path,
    run: Mapping[str, Any],
    tokens: Mapping[str, Array],
    *,
    tokenizer: str,
    progress: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    environment: Mapping[str, Any],
    general: bytes = b"",
) -> dict[str, Any]:
    """Write a new run, replacing any old one; return its tokens entry. run.json is last, since it
    marks a complete run. All ranks must call this; all but rank 0 write their `arrays` only.

    An old model stays until the run saves a new one.
    """
    is_rank_zero = distributed.is_rank_zero()
    if is_rank_zero:
        remove_run(out)
        files.publish(folder(out) / "tokenizer.json", tokenizer.encode())
        if general:
            save_general(out, general)
    save_state(out, progress, arrays, run_id=run["run_id"], environment=environment)
    if not is_rank_zero:
        return {}
    tokens_entry = save_tokens(out, run, tokens)
    save_record(out, run, tokens_entry)
    return tokens_entry


def save_general(out: Path, text: bytes) -> None:
    """Write the text whose loss is reported before and after fine-tuning."""
    files.publish(folder(out) / _GENERAL_FILE, text)


def load_general(out: Path) -> bytes:
    """Return the text whose loss is reported before and after fine-tuning; empty: none."""
    path = folder(out) / _GENERAL_FILE
    return files.read(path) if path.exists() else b""


def save_record(out: Path, run: Mapping[str, Any], tokens_entry: Mapping[str, Any]) -> None:
    """Write run.json; `tokens_entry` is the result of `save_tokens`."""
    content = json.dumps({**run, _TOKENS_KEY: dict(tokens_entry)}, indent=2).encode()
    files.publish(folder(out) / "run.json", content)


def save_tokens(
    out: Path, run: Mapping[str, Any], tokens: Mapping[str, Array], *, name: str = TOKENS_FILE
) -> dict[str, Any]:
    """Write a run's tokens block by block; return the file's entry for run.json."""
    entry: dict[str, Any] = {} if name == TOKENS_FILE else {"name": name}
    files.publish(folder(out) / name, _token_blocks(run, tokens, entry))
    return entry


def describe_tokens(run: Mapping[str, Any], tokens: Mapping[str, Array]) -> dict[str, Any]:
    """Return the entry of `save_tokens` without writing a file."""
    entry: dict[str, Any] = {}
    for _ in _token_blocks(run, tokens, entry):
        pass
    return entry


def _token_blocks(
    run: Mapping[str, Any], tokens: Mapping[str, Array], entry: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the blocks of a file of tokens; then add its size and digest to `entry`."""
    digest, n_bytes = hashlib.sha256(), 0
    sources = {key: run[key] for key in ("corpus_sha256", "tokenizer_sha256")}
    for block in safetensors_file.serialize_vectors(tokens, {"format": "pt", **sources}):
        digest.update(block)
        n_bytes += len(block)
        yield block
    entry |= {"bytes": n_bytes, "sha256": digest.hexdigest()}


def drop_other_tokens(out: Path, tokens_entry: Mapping[str, Any]) -> None:
    """Remove token files that run.json does not describe."""
    for path in _token_files(out):
        if path.name != tokens_entry.get("name", TOKENS_FILE):
            files.remove(path)


def load_record(out: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the record in run.json and its tokens entry; raise TrainingError if damaged."""
    path = folder(out) / "run.json"
    try:
        run: dict[str, Any] = json.loads(files.read(path))
        tokens_entry = run.pop(_TOKENS_KEY)
        name = str(tokens_entry.get("name", TOKENS_FILE))
        is_entry = set(tokens_entry) - {"name"} == {"bytes", "sha256"}
        is_valid = is_entry and _TOKENS_NAME.fullmatch(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = None
    if not is_valid:
        raise TrainingError(f"{path} is damaged", recovery_hint(out))
    return run, tokens_entry


def load_tokens(
    out: Path,
    tokens_entry: Mapping[str, Any],
    *,
    check_digest: bool = True,
    vocab_size: int | None = None,
) -> dict[str, Array]:
    """Return the tokens that run.json describes; long arrays stay on disk.

    Raise TrainingError if the file is missing, damaged, of another corpus or tokenizer, or, with
    `vocab_size`, has ids beyond it.
    """
    path = folder(out) / tokens_entry.get("name", TOKENS_FILE)
    size = path.stat().st_size if path.exists() else 0
    matches = size == tokens_entry["bytes"]
    if not matches or (check_digest and files.sha256(path).hex() != tokens_entry["sha256"]):
        problem = "is damaged or belongs to another run" if path.exists() else "is missing"
        raise TrainingError(f"{path} {problem}", _TOKENIZE_AGAIN)
    tokens = safetensors_file.read_vectors(path)
    if not _are_tokens(tokens, vocab_size):
        raise TrainingError(f"{path} is damaged", _TOKENIZE_AGAIN)
    return tokens


def _are_tokens(arrays: Mapping[str, Array], vocab_size: int | None) -> bool:
    """Whether these are the arrays of `corpus.token_arrays`."""
    sides = [(name, f"{name}_loss_mask", f"{name}_lengths") for name in ("train", "val")]
    if not {"train", "val"} <= arrays.keys() <= {*sides[0], *sides[1]}:
        return False
    if ("train_lengths" in arrays) != ("val_lengths" in arrays):
        return False
    for ids, mask, lengths in (map(arrays.get, names) for names in sides):
        if ids is None or ids.dtype not in (np.uint16, np.uint32):
            return False
        if mask is not None and (mask.dtype != np.bool_ or len(mask) != len(ids)):
            return False
        if lengths is not None and not _are_lengths(lengths, ids, mask):
            return False
        if vocab_size and any(block.max(initial=0) >= vocab_size for block in blocks(ids)):
            return False
    return len(arrays["train"]) > 1


def _are_lengths(lengths: Array, ids: Array, mask: Array | None) -> bool:
    """Whether `lengths` cut the tokens, which have a loss mask, into rows."""
    if mask is None or lengths.dtype != np.int64:
        return False
    values = lengths[:]
    return bool((values > 0).all() and (values <= len(ids)).all() and values.sum() == len(ids))


def save_state(
    out: Path,
    progress: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    *,
    run_id: str,
    environment: Mapping[str, Any],
    keep: int = 2,
) -> None:
    """Save the state of step progress["step"] and remove old states. All ranks must call this; each
    writes its `arrays`, which may be none.

    Keep the `keep` newest states and the best one or, if that was not saved, the first one after.
    """
    path, is_rank_zero = _state_path(out, progress["step"]), distributed.is_rank_zero()
    values = {"run": run_id, "progress": dict(progress), "made_by": dict(environment)}
    with ExitStack() as stack:

        def begin_state() -> str:
            if path.exists():  # a resumed run repeats steps with identical results
                return ""
            files.make_folder(path.parent)
            temporary = stack.enter_context(files.replacing(path))
            temporary.mkdir()
            return temporary.name

        name = distributed.call_together(begin_state if is_rank_zero else lambda: "")
        if name := distributed.broadcast(name):
            entries = _write_arrays(path.with_name(name), arrays)
            if is_rank_zero:
                content = manifest.seal(values, entries)
                files.write_new(path.with_name(name) / manifest.NAME, content)
    if is_rank_zero:
        drop_old_states(out, keep, best_step=progress["best_step"])


def _write_arrays(temporary: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Write and flush each rank's arrays, which other machines cannot flush; return the entries of
    all files for the manifest."""
    writers = [rank for rank, has_any in enumerate(distributed.all_gather(bool(arrays))) if has_any]
    rank = distributed.ranks().rank

    def write() -> dict[str, dict[str, Any]]:
        if not arrays:
            return {}
        if not temporary.is_dir():
            raise _not_shared_error(temporary.parents[1])
        name = _arrays_files(len(writers))[writers.index(rank)]
        content = safetensors_file.serialize_in_parts(arrays)
        files.write_new(temporary / name, content)
        files.sync(temporary / name)
        return manifest.describe({name: content})

    entries = distributed.all_gather(distributed.call_together(write))
    return {name: entry for part in entries for name, entry in part.items()}


def _arrays_files(n: int) -> list[str]:
    """Return the names of a state's `n` files of arrays."""
    if n == 1:
        return [_ARRAYS_FILE]
    return [f"state-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def drop_old_states(out: Path, keep: int, *, best_step: int) -> None:
    """Remove all but the `keep` newest states and the first one from `best_step` on."""
    states = _states(out)
    since_best = [state for state in states if _step(state) >= best_step]
    for old in states[:-keep]:
        if old not in since_best[:1]:
            files.remove(old)


def load_state(out: Path, *, run_id: str, from_step: int | None = None) -> SavedState | None:
    """Return the newest intact state or, with `from_step`, the first one from that step on. All
    ranks must call this; each checks some of the files.

    Rename damaged states and states of other runs. Return None if no state exists. Raise
    TrainingError if all are damaged, if one was written by another version or cannot currently be
    read, or if a rank does not see the run.
    """
    damaged: list[str] = []
    rank, n_ranks, *_ = distributed.ranks()
    if n_ranks > 1:
        check_is_shared(out, distributed.broadcast(run_id))
    names = distributed.broadcast([path.name for path in _states(out)] if rank == 0 else None)
    states = [folder(out) / name for name in names]
    if from_step is None:
        candidates = states[::-1]
    else:
        candidates = [state for state in states if _step(state) >= from_step]
    for path in candidates:
        try:
            check = partial(_check_state, path, run_id, slice(rank, None, n_ranks))
            values, paths = distributed.call_together(check)
            arrays = distributed.call_together(partial(safetensors_file.open_tensors, paths))
        except ModelError as error:
            note = _set_aside(path, run_id, error) if rank == 0 else ""
            damaged.append(distributed.broadcast(note))
            continue
        return SavedState(values["progress"], arrays, values["made_by"], damaged)
    if damaged and len(damaged) == len(states):
        raise TrainingError(
            f"no training state in {out} can be read: {'; '.join(damaged[:5])}",
            recovery_hint(out),
        )
    return None


def _check_state(
    path: Path, run_id: str, share: slice = slice(None)
) -> tuple[dict[str, Any], list[Path]]:
    """Return the manifest of a state and the paths of its arrays, after checking a share of them;
    raise errors as `manifest.read`."""
    values = manifest.parse(path)
    entries, names = values["files"], _arrays_files(len(values["files"]))
    is_state = all(isinstance(values.get(key), dict) for key in ("progress", "made_by"))
    if not is_state or sorted(entries) != names:
        raise ModelError(f"{path / manifest.NAME} is damaged")
    if values.get("run") != run_id:
        raise ModelError(f"{path} belongs to another run")
    manifest.check(path, {name: entries[name] for name in names[share]})
    return values, [path / name for name in names]


def _set_aside(path: Path, run_id: str, error: ModelError) -> str:
    """Rename a damaged state and return a note, on rank 0; raise TrainingError if rank 0 finds no
    damage: another rank sees other files."""
    if distributed.ranks().world_size > 1:
        with suppress(ModelError):
            safetensors_file.open_tensors(_check_state(path, run_id)[1])
            raise TrainingError(f"{error.message}, but not on rank 0", _SHARE)
    new_path = _damaged_path(path)
    files.rename(path, new_path)
    return f"{error.message}: renamed to {new_path.name}"


def check_is_shared(out: Path, run_id: str) -> None:
    """Raise TrainingError on a rank that does not see the run with this ID in `out`."""
    if not has_run(out) or load_record(out)[0].get("run_id") != run_id:
        raise _not_shared_error(out)


def _not_shared_error(out: Path) -> TrainingError:
    return TrainingError(f"rank {distributed.ranks().rank} does not see the run in {out}", _SHARE)


def newest_counters(out: Path, *, run_id: str) -> SavedState | None:
    """Return the newest intact state without its arrays, and leave damaged ones as they are."""
    for path in reversed(_states(out)):
        with suppress(ModelError, KeyError):
            values = manifest.read(path)
            if values["run"] == run_id:
                return SavedState(values["progress"], {}, values["made_by"], [])
    return None


def damaged_states(out: Path) -> list[str]:
    """Return the new names of damaged states that `load_state` renamed."""
    return sorted(filter(_DAMAGED_NAME.fullmatch, file_names(folder(out))))


def save_progress(out: Path, progress: Mapping[str, Any]) -> None:
    """Replace the counters in the state of step progress["step"], if it exists."""
    path = _state_path(out, progress["step"])
    if path.exists():
        values = manifest.parse(path)
        entries = values.pop("files")
        del values["format"]
        content = manifest.seal(values | {"progress": dict(progress)}, entries)
        files.publish(path / manifest.NAME, content)


def drop_states_after(out: Path, step: int) -> None:
    """Remove the states of later steps, the newest first."""
    for path in reversed(_states(out)):
        if _step(path) > step:
            files.remove(path)


def remove_run(out: Path) -> None:
    """Remove the files of a run, run.json first, and nothing else; the lock stays."""
    files.remove(folder(out) / "run.json")
    names = set(filter(is_name_of_run, file_names(folder(out)))) - {LOCK}
    if _TENSORBOARD in other_names(out):
        names.remove(_TENSORBOARD)
        events = filter(_is_event_file, file_names(folder(out) / _TENSORBOARD))
        names |= {f"{_TENSORBOARD}/{event}" for event in events}
    for name in sorted(names):
        files.remove(folder(out) / name)
    remove_leftovers(out)


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of an interrupted save."""
    for path in (out, folder(out), *_states(out)):
        files.remove_leftovers(path)


def _token_files(out: Path) -> list[Path]:
    return [path for path in folder(out).glob("tokens*") if _TOKENS_NAME.fullmatch(path.name)]


def _state_path(out: Path, step: int) -> Path:
    return folder(out) / f"state-{step:08d}"


def _states(out: Path) -> list[Path]:
    paths = (path for path in folder(out).glob("state-*") if _STATE_NAME.fullmatch(path.name))
    return sorted(paths, key=_step)


def _step(state: Path) -> int:
    return int(state.name.removeprefix("state-"))


def _damaged_path(state: Path) -> Path:
    """Return an unused name for a damaged state."""
    names = (f"damaged-{state.name}{f'-{i}' * (i > 1)}" for i in range(1, 1000))
    return next(path for name in names if not (path := state.with_name(name)).exists())
