"""A training run small enough to be repeated thousands of times, each time in a process that is
forked from one that has imported torch and has not computed with it yet."""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy: a process with threads cannot be forked
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tgen import runs
from tgen.config import TrainConfig
from tgen.reports import EvalReport, PlanReport, RollbackReport, RunReport
from tgen.runs import ResumeRequest, RunRequest
from tgen.runs.storage import log, state
from tgen.storage import files

SKIPPED = 77  # the exit status of a script that cannot show anything here
TEXT = b"The king said: what is this? 'Tis more.\n\nWhat is a crown?\n" * 12
TRAINED = ("StepReport", "EvalReport", "SampleReport", "RollbackReport")
_CLOCK = ("seconds", "tokens_per_second", "fraction_done")


def count(doc: str, *, short: int, long: int) -> int:
    """How much the script is to do, from its command line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", help=f"{short:,} unless told otherwise")
    parser.add_argument("--long", action="store_true", help=f"{long:,}")
    options = parser.parse_args()
    return options.count or (long if options.long else short)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory: a killed process loses nothing of what it wrote, on a disk or here."""
    memory, owner = Path("/dev/shm"), os.getpid()
    folder = Path(tempfile.mkdtemp(prefix="tgen-", dir=memory if memory.is_dir() else None))
    try:
        (folder / "corpus.txt").write_bytes(TEXT)
        yield folder
    finally:
        if os.getpid() == owner:  # a forked one leaves it alone
            shutil.rmtree(folder, ignore_errors=True)


def get_ready(*, cheap: bool = True) -> None:
    """Imports torch, and makes what is beside the point cheap."""
    import torch

    from tgen.runs import checkpoint_saver, final_report, prepare, session, trainer

    assert session
    torch.set_num_threads(1)
    if cheap:
        final_report._SAMPLE_TOKENS = final_report._MEMORIZATION_SAMPLES = (
            final_report._MEMORIZATION_TOKENS
        ) = 2
        prepare._baselines = lambda *_: {}
        prepare.measure_speed = lambda *_, **__: 1e9
        checkpoint_saver._MAX_RETRY_SECONDS = 0.0  # tries again at every step
        trainer._FINAL_RETRY_SECONDS = (0.0, 0.0, 0.0)


def request(folder: Path, out: Path, *, steps: int = 8, **overrides: Any) -> RunRequest:
    """A run with an evaluation at every second step."""
    shape = {"d_model": 8, "n_layers": 1, "n_heads": 2, "context_length": 8, "batch_size": 2}
    given = shape | {"eval_every": 2, "eval_tokens": 64, "dropout": 0.1} | overrides
    return RunRequest(
        corpus=[str(folder / "corpus.txt")],
        out=out,
        tokenizer="char",
        family=given.pop("family", "llama"),
        train=TrainConfig(steps=steps),
        overrides={name: str(value) for name, value in given.items()},
        threads=1,
    )


def sitting(wanted: RunRequest, **values: Any) -> Iterator[RunReport]:
    """Begins the run or, where it has begun, goes on with it."""
    if (state.folder(wanted.out) / "run.json").exists():
        return runs.resume(ResumeRequest(out=wanted.out, threads=1), **values)
    return runs.start(wanted, **values)


class Ended(NamedTuple):
    """A forked process that has come to its end."""

    status: int  # as a shell has it: 128 + n after signal n
    said: list[str]

    @property
    def killed(self) -> bool:
        """Whether it was killed; anything else but success is an error of the test."""
        return self.status == 128 + signal.SIGKILL


def forked(
    action: Callable[[Callable[[str], None]], None],
    *,
    meanwhile: Callable[[int], None] = lambda _: None,
) -> Ended:
    """Does `action` in a process of its own; what it is given says lines to this one, which does
    `meanwhile` with its pid."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    here, there = os.pipe()
    write = os.write
    if (pid := os.fork()) == 0:
        status = 1
        try:
            action(lambda line: write(there, f"{line}\n".encode()) and None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(there)
    meanwhile(pid)
    with open(here, encoding="utf-8") as lines:
        said = lines.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(code if code >= 0 else 128 - code, said)


def said_of(report: RunReport) -> str | None:
    """What is on disk from now on: a step's state, and whether the best weights are its."""
    if isinstance(report, PlanReport):
        return f"{report.resumed_at_step} state"
    if isinstance(report, EvalReport):
        return f"{report.step} {'best' if report.best else 'state'}"
    if isinstance(report, RollbackReport):
        return f"{report.step} state"
    return None


def kept(out: Path) -> dict[str, str]:
    """Hashes of what a finished run leaves, but for the time of day: model, newest state, log."""
    saved = state.load_state(out, run_id=state.load_run(out)[0]["run_id"])
    assert saved
    assert not saved.damaged, saved.damaged
    found = {path.name: digest(path) for path in out.iterdir() if path.is_file()}
    found = {name: sha256 for name, sha256 in found.items() if not name.startswith(files.TEMPORARY)}
    for name, array in saved.arrays.items():
        found[f"state {name}"] = hashlib.sha256(array.tobytes()).hexdigest()
    found["progress"] = json.dumps(_timeless(saved.progress))
    records = [record for record in log.read(out) if record["kind"] in TRAINED]
    return found | {f"log {i}": json.dumps(_timeless(r)) for i, r in enumerate(records)}


def differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Where two runs are not the same."""
    return [
        f"{name}: {found.get(name)} is not {wanted.get(name)}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(out: Path) -> list[str]:
    """Temporary files that nobody has removed."""
    return [str(path) for path in out.rglob(f"{files.TEMPORARY}*")]


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not any(part in k for part in _CLOCK)}
