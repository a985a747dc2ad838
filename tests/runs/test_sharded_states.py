"""States of which each rank writes its rows; the ranks are threads that take turns."""

import errno
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import intercept_calls
from lockstep import current_rank, run_ranks
from support.runs import RUN_JSON
from tgen import distributed
from tgen.checkpoint import safetensors_file
from tgen.errors import ModelError, TrainingError
from tgen.reports.training import SavingReport
from tgen.runs import checkpoint_saver, manifest
from tgen.runs import log as run_log
from tgen.runs import saved_state as run_state
from tgen.storage import files

NEWEST = "training/state-00000002"
Arrays = dict[str, np.ndarray[Any, Any]]


def state_of(step: int) -> Arrays:
    random = np.random.default_rng(step)
    shapes = {"model/a": (7, 3), "exp_avg/a": (7, 3), "model/b": (2,), "step/a": ()}
    return {name: random.random(shape, np.float32) for name, shape in shapes.items()}


def rows_of(length: int, n: int, rank: int) -> slice:
    size = -(-length // n)
    return slice(rank * size, (rank + 1) * size)


def part(step: int, n: int, rank: int) -> Arrays:
    arrays = state_of(step)
    parts = {k: a[rows_of(len(a), n, rank)] for k, a in arrays.items() if a.ndim}
    return parts if rank else parts | {"step/a": arrays["step/a"]}


def save(out: Path, step: int, n: int) -> None:
    def save_part(rank: int) -> None:
        progress = {"step": step, "best_step": 0}
        run_state.save_state(out, progress, part(step, n, rank), run_id="1", environment={})

    run_ranks(n, save_part)


def load(out: Path) -> run_state.SavedState:
    saved = run_state.load_state(out, run_id="1")
    assert saved is not None
    return saved


def assert_is_state(saved: run_state.SavedState, step: int) -> None:
    assert saved.progress["step"] == step
    assert saved.arrays.keys() == state_of(step).keys()
    for name, array in state_of(step).items():
        assert saved.arrays[name].shape == array.shape
        assert np.array_equal(saved.arrays[name][...], array), name


@pytest.fixture
def out(tmp_path):
    """A run with the states of two steps, by four ranks each."""
    out = tmp_path / "out"
    (out / "training").mkdir(parents=True)
    (out / "training/run.json").write_text(RUN_JSON)
    for step in (1, 2):
        save(out, step, 4)
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_reads_its_rows_only(out, n, monkeypatch):
    n_read = []
    read = safetensors_file._read_into
    monkeypatch.setattr(
        safetensors_file, "_read_into", lambda a, *to: n_read.append(a.nbytes) or read(a, *to)
    )

    def read_rows(rank: int) -> Arrays:
        arrays = load(out).arrays
        return {k: a[rows_of(a.shape[0], n, rank)] for k, a in arrays.items() if a.shape}

    parts = run_ranks(n, read_rows)
    sharded = {name: array for name, array in state_of(2).items() if array.ndim}
    for name, array in sharded.items():
        assert np.array_equal(np.concatenate([rows[name] for rows in parts]), array)
    assert sum(n_read) == sum(array.nbytes for array in sharded.values())
    assert_is_state(load(out), 2)
    names = [f"state-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert sorted(os.listdir(out / NEWEST)) == ["manifest.json", *names]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("file", [1, 4])
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_missing_or_damaged_file_is_named_and_the_older_state_is_used(out, n, file, how):
    path = out / NEWEST / f"state-0000{file}-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if how == "damaged":
        path.write_bytes(content)
    for saved in run_ranks(n, lambda _: load(out)):
        assert_is_state(saved, 1)
        [note] = saved.damaged
        assert f"{path} {'is missing' if how == 'missing' else 'has changed'}" in note
        assert "renamed to damaged-state-00000002" in note


@pytest.mark.parametrize("how", ["one file less", "another row length"])
def test_files_that_do_not_fit_together_are_a_damaged_state(out, how):
    folder, last = out / NEWEST, "state-00004-of-00004.safetensors"
    values = manifest.read(folder)
    if how == "one file less":
        del values["files"][last]
    else:
        content = safetensors_file.serialize({"model/a": np.zeros((1, 4), np.float32)})
        (folder / last).write_bytes(content)
        values["files"] |= manifest.describe({last: content})
    entries = values.pop("files")
    (folder / manifest.NAME).write_bytes(manifest.seal(values, entries))
    saved = load(out)
    assert_is_state(saved, 1)
    assert "renamed to" in saved.damaged[0]


class Killed(BaseException):
    pass


def kill_rank(victim: int, at: int) -> Callable[..., Any]:
    """Return a hook that ends a rank at its call number `at`."""
    calls = []

    def hook(name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if current_rank() == victim:
            calls.append(name)
            if len(calls) == at:
                raise Killed
        return real(*arguments, **named)

    return hook


def test_rank_that_is_killed_at_any_call_leaves_the_old_state(out):
    at = 0
    while True:
        at += 1
        try:
            with intercept_calls(kill_rank(1, at)):
                save(out, 3, 2)
            break
        except (Killed, KeyError):
            assert_is_state(load(out), 2)
            assert not list((out / "training").glob(f"{files.TEMPORARY}*"))
    assert at > 4  # opened, wrote the header and tensors, and flushed them
    assert_is_state(load(out), 3)


def test_all_ranks_report_a_full_disk_of_one_and_save_later(out, monkeypatch):
    monkeypatch.setattr(checkpoint_saver, "_MAX_RETRY_SECONDS", 0.0)
    full = [True]

    def fails(name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if name == "write" and current_rank() == 1 and full:
            full.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **named)

    def train(rank: int) -> list[SavingReport]:
        log = run_log.RunLog(None if rank else out)
        saver = checkpoint_saver.CheckpointSaver(out, log, run_id="1", environment={}, keep=2)
        reports = []
        for step in (3, 4):
            progress = {"step": step, "best_step": 0}
            reports += saver.save(progress, partial(part, step, 2, rank), 200)
            assert saver.retry_is_due == (step == 3)
        return reports

    with intercept_calls(fails):
        for reports in run_ranks(2, train):
            told = [(report.step, report.failed, report.needed_bytes) for report in reports]
            assert told == [(3, "No space left on device", 200), (4, "", 0)]
    assert_is_state(load(out), 4)


def test_failed_save_frees_the_arrays_at_once(out, monkeypatch):
    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "sync", fail)
    arrays, progress = state_of(3), {"step": 3, "best_step": 0}
    array = weakref.ref(arrays["model/a"])
    gc.disable()
    try:
        with suppress(OSError):
            run_state.save_state(out, progress, arrays, run_id="1", environment={})
        del arrays
        assert array() is None
    finally:
        gc.enable()


def test_rank_with_another_folder_is_refused_and_no_state_renamed(out, tmp_path):
    def on_two(there: Path, action: Callable[[Path], object]) -> None:
        run_ranks(2, lambda rank: action(there if rank else out))

    def save_third(folder: Path) -> None:
        arrays, progress = part(3, 2, distributed.ranks().rank), {"step": 3, "best_step": 0}
        run_state.save_state(folder, progress, arrays, run_id="1", environment={})

    there = tmp_path / "there"
    before = sorted(os.listdir(out / "training"))
    for action in (save_third, load):
        with pytest.raises(TrainingError, match=f"rank 1 does not see the run in {there}") as error:
            on_two(there, action)
        assert "a disk that all machines share" in error.value.hint
    shutil.copytree(out, there)
    shutil.rmtree(there / NEWEST)  # a copy that was made before
    with pytest.raises(TrainingError, match="is missing, but not on rank 0"):
        on_two(there, load)
    (there / "training/run.json").write_text(json.dumps(json.loads(RUN_JSON) | {"run_id": "2"}))
    with pytest.raises(TrainingError, match="rank 1 does not see the run in"):
        on_two(there, load)
    assert sorted(os.listdir(out / "training")) == before


def test_files_of_two_dtypes_are_refused(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    for path, dtype in zip(paths, (np.float32, np.float64), strict=True):
        path.write_bytes(safetensors_file.serialize({"x": np.zeros(2, dtype)}))
    with pytest.raises(ModelError, match=r"b does not continue .*a"):
        safetensors_file.open_tensors(paths)
