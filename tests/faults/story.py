"""All that a run does to the disk, in short and without torch, and what must be there after each
part of it: two runs, one over the other, with saves, a better model, a way back, a log."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import model_dir
from tgen.checkpoint.hf import tensor_names
from tgen.config import ModelConfig
from tgen.errors import TgenError
from tgen.reports import RollbackReport
from tgen.runs.checkpoint_saver import CheckpointSaver, ModelWeights
from tgen.runs.storage import log as run_log
from tgen.runs.storage import state
from tgen.storage import files, locks
from tgen.tokenizer import Tokenizer, train_char

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Said:
    """What the user has been told is on disk."""

    run: str = ""  # none yet
    step: int = 0  # of the newest state
    notes: int = 0  # of its progress, which is put in again
    weights: int = 0  # a number: see `_weights`
    lines: int = 0  # of the log


def tell(out: Path, say: Callable[[Said], None]) -> None:
    """Does it all in the directory `out`, and says how far it has come."""
    with locks.lock(state.folder(out) / "LOCK"):
        said = _begin(out, "a", Said(), say)
        with run_log.RunLog(out) as log:
            saver = CheckpointSaver(out, log, run_id="a", environment={}, keep=2)
            for step, weights in ((5, 1), (10, 2), (15, 0), (20, 3)):
                said = _save(saver, replace(said, step=step, notes=0), weights, say)
            say(said := replace(said, step=10, lines=2))  # from now on no more is promised
            saver.roll_back(10)
            log.add(_report(10))
            log.flush()
            state.save_progress(out, _progress("a", 10, 1))
            say(said := replace(said, notes=1, lines=3))
            said = _save(saver, replace(said, step=15, notes=0), 0, say)
        say(said := replace(said, run="", step=0, lines=0))
        said = _begin(out, "b", said, say)
        with run_log.RunLog(out) as log:
            saver = CheckpointSaver(out, log, run_id="b", environment={}, keep=2)
            _save(saver, replace(said, step=5), 4, say)  # of another shape


def check(out: Path, said: Said) -> str:
    """What is wrong with what is on disk, though `said` was said; nothing: all is well."""
    try:
        return _run_problem(out, said) or _model_problem(out, said)
    except TgenError as error:
        return f"{error.message} though {said}"


def _begin(out: Path, run: str, said: Said, say: Callable[[Said], None]) -> Said:
    made_from = {"corpus_sha256": run, "tokenizer_sha256": run}
    state.create_run(
        out,
        {"run_id": run, **made_from},
        _tokens(run),
        tokenizer=_tokenizer(run).json,
        progress=_progress(run, 0, 0),
        arrays=_arrays(run, 0),
        environment={},
    )
    say(said := replace(said, run=run))
    return said


def _save(saver: CheckpointSaver, said: Said, weights: int, say: Callable[[Said], None]) -> Said:
    run, step = said.run, said.step
    saver.log.add(_report(step))
    model = ModelWeights(_config(weights), _tokenizer(run), _weights(weights)) if weights else None
    failures = list(saver.save(_progress(run, step, 0), _arrays(run, step), model))
    assert not failures, failures
    say(said := replace(said, weights=weights or said.weights, lines=said.lines + 1))
    return said


def _run_problem(out: Path, said: Said) -> str:
    folder = state.folder(out)
    if not said.run and not (folder / "run.json").exists():
        return ""  # it has not begun
    run = str(state.load_record(out)[0]["run_id"])
    if not said.run and run == "a" and said.weights:
        return ""  # it was to be replaced
    tokens = state.load_run(out)[1]
    if said.run and run != said.run:
        return f"run {run} though {said}"
    if said.run or (folder / "tokenizer.json").exists():
        text = files.read(folder / "tokenizer.json").decode()
        if text not in (_tokenizer("a").json, _tokenizer("b").json):
            return f"a damaged tokenizer though {said}"
        if said.run and text != _tokenizer(run).json:
            return f"another run's tokenizer though {said}"
    if not np.array_equal(tokens["train"][:], _tokens(run)["train"]):
        return f"other tokens though {said}"
    if not said.run:
        return ""
    saved = state.load_state(out, run_id=run)
    if saved is None:
        return f"no state though {said}"
    step, notes = saved.progress["step"], saved.progress["notes"]
    if (step, notes) < (said.step, said.notes):
        return f"state {step} with notes {notes} though {said}"
    if not _same(saved.arrays, _arrays(run, step)):
        return f"state {step} has other numbers though {said}"
    if said.lines:
        run_log.RunLog(out).trim(step)  # as a run that goes on does
        if len(run_log.read(out)) < said.lines:
            return f"a log of {len(run_log.read(out))} lines though {said}"
    return ""


def _model_problem(out: Path, said: Said) -> str:
    if not said.weights and not (out / "config.json").exists():
        return ""
    try:
        found = model_dir.load(out)
    except TgenError:
        if said.weights == 3 and not (out / "config.json").exists():
            return ""  # a model of another kind is being put in its place
        raise
    for number in range(said.weights or 1, 5):
        if found.config == _config(number) and _same(found.arrays, _weights(number)):
            rest = model_dir.build_metadata_files(
                _config(number), _tokenizer("b" if number == 4 else "a")
            )
            mixed = [name for name in rest if files.read(out / name) != rest[name]]
            return f"another model's {', '.join(mixed)} though {said}" if mixed else ""
    return f"weights that never were, or older ones, though {said}"


def _report(step: int) -> RollbackReport:
    return RollbackReport(step=step, from_step=step, reason="r" * 40, learning_rate_scale=1.0)


def _progress(run: str, step: int, notes: int) -> dict[str, Any]:
    return {"step": step, "best_step": min(step, 10), "notes": notes, "run": run}


@cache
def _arrays(run: str, step: int) -> Arrays:
    draws = np.random.default_rng([ord(run), step + 1])
    return {"model/a": draws.random((20, 20), np.float32), "exp_avg/a": draws.random(64)}


@cache
def _tokens(run: str) -> Arrays:
    return {"train": np.random.default_rng(ord(run)).integers(0, 99, 500).astype(np.uint16)}


@cache
def _config(number: int) -> ModelConfig:
    shape = {"n_layers": 1, "d_model": 16 if number == 4 else 8, "n_heads": 2, "context_length": 8}
    vocab_size = _tokenizer("b" if number == 4 else "a").vocab_size
    return ModelConfig.of("llama", vocab_size=vocab_size, **shape)


@cache
def _weights(number: int) -> Arrays:
    draws = np.random.default_rng(number)
    shapes = [
        (name, shape)
        for row in tensor_names.tensor_mappings(_config(number))
        for name, shape in zip(row.theirs, row.shapes, strict=True)
    ]
    theirs = {name: draws.random(shape, np.float32) for name, shape in shapes}
    return tensor_names.from_hf_arrays(_config(number), theirs)


@cache
def _tokenizer(run: str) -> Tokenizer:
    if run == "a":
        return train_char([b"the text of run a"])
    return Tokenizer(train_char([b"another: of b"]).json, end_ids=[1])  # so that all files differ


def _same(found: Arrays, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in wanted
    )
