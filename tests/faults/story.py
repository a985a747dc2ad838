"""A short run without torch that makes every kind of disk change, and checks after each step.

A second run overwrites the first; both save states, better models and a log, and one rolls back.
The first one has two ranks, each of which saves its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import run_ranks
from tgen.checkpoint import model_dir
from tgen.checkpoint.hf import tensor_names
from tgen.config import ModelConfig
from tgen.errors import TgenError
from tgen.lora import model_with_adapter
from tgen.reports.training import RollbackReport, SavingReport
from tgen.runs import log as run_log
from tgen.runs import saved_state
from tgen.runs.checkpoint_saver import CheckpointSaver, SaveModel
from tgen.storage import files, locks
from tgen.tokenizer import Tokenizer, train_char

Arrays = dict[str, NDArray[Any]]
_N_RANKS = {"a": 2, "b": 1}
_loaded: dict[frozenset[tuple[str, bytes]], model_dir.ModelBundle | TgenError] = {}


@dataclass(frozen=True)
class Promise:
    """Content of the disk that was promised to the user."""

    run: str = ""  # id; empty: none yet
    step: int = 0  # of the newest state
    notes: int = 0  # number of times its counters were replaced
    weights: int = 0  # number of the model: see `_weights`
    lines: int = 0  # of the log


def play(out: Path, promise: Callable[[Promise], None]) -> None:
    """Play the run in `out`; call `promise` after each step."""
    with locks.lock(saved_state.folder(out) / "LOCK"):
        promised = _begin(out, "a", Promise(), promise)
        with run_log.RunLog(out) as log:
            saver = CheckpointSaver(out, log, run_id="a", environment={}, keep=2)
            for step, weights in ((5, 1), (10, 2), (15, 0), (20, 3)):
                promised = _save(saver, replace(promised, step=step, notes=0), weights, promise)
            # From now on, only this is promised.
            promise(promised := replace(promised, step=10, lines=2))
            saver.roll_back(10)
            log.add(_report(10))
            log.flush()
            saved_state.save_progress(out, _progress("a", 10, 1))
            promise(promised := replace(promised, notes=1, lines=3))
            promised = _save(saver, replace(promised, step=15, notes=0), 0, promise)
        promise(promised := replace(promised, run="", step=0, lines=0))
        promised = _begin(out, "b", promised, promise)
        with run_log.RunLog(out) as log:
            saver = CheckpointSaver(out, log, run_id="b", environment={}, keep=2)
            _save(saver, replace(promised, step=5), 4, promise)  # another shape


def load_model(path: Path) -> model_dir.ModelBundle:
    """Load a model; the same files are read once. Raises TgenError."""
    files_of = path.iterdir() if path.is_dir() else [path]
    content = frozenset((p.name, p.read_bytes() if p.is_file() else b"") for p in files_of)
    if content not in _loaded:
        try:
            _loaded[content] = model_with_adapter.load(path)
        except TgenError as error:
            _loaded[content] = error
    if isinstance(result := _loaded[content], TgenError):
        raise result
    return result


def check(out: Path, promised: Promise) -> str:
    """Return how the disk breaks `promised`; empty: no problem."""
    try:
        return _run_problem(out, promised) or _model_problem(out, promised)
    except TgenError as error:
        return f"{error.message} after {promised}"


def _begin(out: Path, run: str, promised: Promise, promise: Callable[[Promise], None]) -> Promise:
    made_from = {"corpus_sha256": run, "tokenizer_sha256": run}
    run_ranks(
        _N_RANKS[run],
        lambda rank: saved_state.create_run(
            out,
            {"run_id": run, **made_from},
            _tokens(run),
            tokenizer=_tokenizer(run).json,
            progress=_progress(run, 0, 0),
            arrays=_part(run, 0, rank),
            environment={},
        ),
    )
    promise(promised := replace(promised, run=run))
    return promised


def _save(
    saver: CheckpointSaver, promised: Promise, weights: int, promise: Callable[[Promise], None]
) -> Promise:
    run, step = promised.run, promised.step
    saver.log.add(_report(step))
    model: SaveModel | None = None
    if weights:
        described = saver.out, _config(weights), _tokenizer(run)
        model = partial(model_dir.save, *described, _weights(weights))

    def save(rank: int) -> list[SavingReport]:
        own = saver
        if rank:
            own = CheckpointSaver(
                saver.out, run_log.RunLog(None), run_id=run, environment={}, keep=2
            )
        arrays = partial(_part, run, step, rank)
        return list(own.save(_progress(run, step, 0), arrays, 0, None if rank else model))

    failures = run_ranks(_N_RANKS[run], save)
    assert not any(failures), failures
    promise(
        promised := replace(promised, weights=weights or promised.weights, lines=promised.lines + 1)
    )
    return promised


def _run_problem(out: Path, promised: Promise) -> str:
    folder = saved_state.folder(out)
    if not promised.run and not (folder / "run.json").exists():
        return ""  # the run has not started
    record, tokens_entry = saved_state.load_record(out)
    run = str(record["run_id"])
    if not promised.run and run == "a" and promised.weights:
        return ""  # the run was being replaced
    tokens = saved_state.load_tokens(out, tokens_entry)
    if promised.run and run != promised.run:
        return f"run {run} after {promised}"
    if promised.run or (folder / "tokenizer.json").exists():
        text = files.read(folder / "tokenizer.json").decode()
        if text not in (_tokenizer("a").json, _tokenizer("b").json):
            return f"a damaged tokenizer after {promised}"
        if promised.run and text != _tokenizer(run).json:
            return f"another run's tokenizer after {promised}"
    if not np.array_equal(tokens["train"][:], _tokens(run)["train"]):
        return f"other tokens after {promised}"
    if not promised.run:
        return ""
    saved = saved_state.load_state(out, run_id=run)
    if saved is None:
        return f"no state after {promised}"
    step, notes = saved.progress["step"], saved.progress["notes"]
    if (step, notes) < (promised.step, promised.notes):
        return f"state {step} with notes {notes} after {promised}"
    if not _same(saved.arrays, _arrays(run, step)):
        return f"state {step} has other numbers after {promised}"
    if promised.lines:
        run_log.RunLog(out).trim(step)  # as a resumed run does
        if len(run_log.read(out)) < promised.lines:
            return f"a log of {len(run_log.read(out))} lines after {promised}"
    return ""


def _model_problem(out: Path, promised: Promise) -> str:
    if not promised.weights and not (out / "config.json").exists():
        return ""
    try:
        bundle = load_model(out)
    except TgenError:
        if promised.weights == 3 and not (out / "config.json").exists():
            return ""  # the model is being replaced by one of another shape
        raise
    for number in range(promised.weights or 1, 5):
        if bundle.config == _config(number) and _same(bundle.arrays, _weights(number)):
            rest = _metadata(number)
            mixed = [name for name in rest if files.read(out / name) != rest[name]]
            return f"another model's {', '.join(mixed)} after {promised}" if mixed else ""
    return f"unknown or older weights after {promised}"


def _report(step: int) -> RollbackReport:
    return RollbackReport(step=step, from_step=step, reason="r" * 40, learning_rate_scale=1.0)


def _progress(run: str, step: int, notes: int) -> dict[str, Any]:
    return {"step": step, "best_step": min(step, 10), "notes": notes, "run": run}


@cache
def _arrays(run: str, step: int) -> Arrays:
    rng = np.random.default_rng([ord(run), step + 1])
    arrays: Arrays = {"model/a": rng.random((20, 20), np.float32), "exp_avg/a": rng.random(64)}
    return arrays | {"step/a": np.array(step, np.float32)}


def _part(run: str, step: int, rank: int) -> Arrays:
    """Return the rows of a rank, and on rank 0 all of what has none."""
    n = _N_RANKS[run]
    arrays = _arrays(run, step).items()
    rows = {
        name: array[len(array) * rank // n : len(array) * (rank + 1) // n]
        for name, array in arrays
        if array.ndim
    }
    return rows | {name: array for name, array in arrays if not array.ndim and not rank}


@cache
def _tokens(run: str) -> Arrays:
    ids = np.random.default_rng(ord(run)).integers(0, 99, 510).astype(np.uint16)
    return {"train": ids[:500], "val": ids[500:]}


@cache
def _config(number: int) -> ModelConfig:
    shape = {"n_layers": 1, "d_model": 16 if number == 4 else 8, "n_heads": 2, "context_length": 8}
    vocab_size = _tokenizer("b" if number == 4 else "a").vocab_size
    return ModelConfig.of("llama", vocab_size=vocab_size, **shape)


@cache
def _metadata(number: int) -> dict[str, bytes]:
    tokenizer = _tokenizer("b" if number == 4 else "a")
    return model_dir.build_metadata_files(_config(number), tokenizer)


@cache
def _weights(number: int) -> Arrays:
    rng = np.random.default_rng(number)
    shapes = [
        (name, shape)
        for row in tensor_names.tensor_mappings(_config(number))
        for name, shape in zip(row.theirs, row.shapes, strict=True)
    ]
    theirs = {name: rng.random(shape, np.float32) for name, shape in shapes}
    return tensor_names.from_hf_arrays(_config(number), theirs)


@cache
def _tokenizer(run: str) -> Tokenizer:
    if run == "a":
        return train_char([b"the text of run a"])
    return Tokenizer(train_char([b"another: of b"]).json, end_ids=[1])  # all files differ


def _same(bundle: Arrays, expected: Any) -> bool:
    return bundle.keys() == expected.keys() and all(
        np.array_equal(bundle[name][...], expected[name]) for name in expected
    )
