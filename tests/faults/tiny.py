"""A training run that is small enough to repeat thousands of times.

What is killed runs in a forked process; its parent has imported torch but has not computed with
it, since threads cannot be forked.
"""

import os
import re

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy: a process with threads cannot be forked
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import hashlib
import json
import secrets
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tgen import runs
from tgen.config.training import TrainConfig
from tgen.reports.training import (
    EvalReport,
    MemorizationReport,
    PhaseReport,
    PlanReport,
    RollbackReport,
    RunReport,
)
from tgen.runs import ResumeRequest, RunRequest, log, saved_state
from tgen.storage import files

SKIPPED = 77  # exit status of a script that cannot run on this machine
TEXT = b"The king said: what is this? 'Tis more.\n\nWhat is a crown?\n" * 12
seed = 0  # of all random choices; `count` sets it
TRAINED = ("StepReport", "EvalReport", "SampleReport", "RollbackReport")
_CLOCK = ("seconds", "tokens_per_second", "fraction_done", "other_cpus")


def count(doc: str, *, short: int, long: int) -> int:
    """Return the number of repetitions from the command line, and set `seed`.

    The seed is new in the long form, which prints it, and 0 otherwise.
    """
    global seed
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", help=f"{short:,} by default")
    parser.add_argument("--long", action="store_true", help=f"{long:,}")
    parser.add_argument("--seed", type=int, help="of the random choices")
    options = parser.parse_args()
    seed = options.seed or (secrets.randbelow(1 << 32) if options.long else 0)
    if seed:
        print(f"seed {seed}: ", end="", flush=True)
    return options.count or (long if options.long else short)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder with a corpus, in memory if possible; a kill loses no written bytes there."""
    memory, owner = Path("/dev/shm"), os.getpid()
    folder = Path(tempfile.mkdtemp(prefix="tgen-", dir=memory if memory.is_dir() else None))
    try:
        (folder / "corpus.txt").write_bytes(TEXT)
        yield folder
    finally:
        if os.getpid() == owner:  # forked processes must not remove it
            shutil.rmtree(folder, ignore_errors=True)


def import_everything(*, cheap: bool = True) -> None:
    """Import torch and, with `cheap`, replace slow parts that are not tested."""
    import torch

    from tgen.planning import side_work
    from tgen.runs import checkpoint_saver, forgetting, prepare, session, trainer

    assert session
    torch.set_num_threads(1)
    if cheap:
        side_work.SAMPLE_TOKENS = 2
        nothing = MemorizationReport(
            longest_run_bytes=0,
            natural_run_bytes=0,
            train_bits_per_byte=0.0,
            held_out_bits_per_byte=None,
            verdict="",
        )
        trainer.measure_memorization = lambda *_: nothing  # type: ignore[attr-defined]
        forgetting.TEXT_TOKENS = 4  # type: ignore[attr-defined]
        for name in ("xz_bits_per_byte", "ngram_bits_per_byte"):
            setattr(prepare, name, lambda *_: 1.0)
        prepare.measure_speed = lambda *_, **__: 1e9  # type: ignore[attr-defined]
        checkpoint_saver._MAX_RETRY_SECONDS = 0.0  # retry at every step
        trainer._FINAL_RETRY_SECONDS = (0.0, 0.0, 0.0)


def request(folder: Path, out: Path, *, steps: int = 8, **overrides: Any) -> RunRequest:
    """Request a run with an evaluation every second step."""
    shape = {"d_model": 8, "n_layers": 1, "n_heads": 2, "context_length": 8, "batch_size": 2}
    settings = shape | {"eval_every": 2, "eval_tokens": 64, "dropout": 0.1} | overrides
    return RunRequest(
        corpus=[str(folder / "corpus.txt")],
        out=out,
        tokenizer="char",
        family=settings.pop("family", "llama"),
        train=TrainConfig(steps=steps),
        overrides={name: str(value) for name, value in settings.items()},
        threads=1,
    )


def lora_request(folder: Path, out: Path, *, lora: int, **overrides: Any) -> RunRequest:
    """Request a LoRA run from the model in `folder / "base"`."""
    settings = {"eval_every": 2, "eval_tokens": 64, "batch_size": 2, "dropout": 0.1} | overrides
    return RunRequest(
        corpus=[str(folder / "corpus.txt")],
        out=out,
        start_from=folder / "base",
        train=TrainConfig(steps=8, lora=lora),
        overrides={name: str(value) for name, value in settings.items()},
        threads=1,
    )


def run_session(request: RunRequest, **values: Any) -> Generator[RunReport, None, None]:
    """Start the run, or resume it if it exists."""
    if saved_state.has_run(request.out):
        return runs.resume(ResumeRequest(out=request.out, threads=1), **values)
    return runs.start(request, **values)


class Result(NamedTuple):
    """Exit status and reported lines of a forked process."""

    status: int  # as in a shell: 128 + n after signal n
    lines: list[str]

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended the process."""
        return self.status == 128 + signal.SIGKILL


def run_forked(
    action: Callable[[Callable[[str], None]], None],
    *,
    meanwhile: Callable[[int], None] = lambda _: None,
) -> Result:
    """Run `action` in a forked process; its argument reports a line to this process.

    This process calls `meanwhile` with the pid.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    read_end, write_end = os.pipe()
    write = os.write
    if (pid := os.fork()) == 0:
        status = 1
        try:
            action(lambda line: write(write_end, f"{line}\n".encode()) and None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write_end)
    meanwhile(pid)
    with open(read_end, encoding="utf-8") as file:
        lines = file.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Result(code if code >= 0 else 128 - code, lines)


def run_here(action: Callable[[Callable[[str], None]], None]) -> Result:
    """Run `action` in this process, where nothing is imported or computed for the first time."""
    lines: list[str] = []
    try:
        action(lines.append)
    except Exception:
        traceback.print_exc()
        return Result(1, lines)
    return Result(0, lines)


def is_start(report: RunReport) -> bool:
    """Whether a new or resumed run is on disk and begins to train."""
    return isinstance(report, PhaseReport) and report.phase == "first step"


def promise_of(report: RunReport) -> str | None:
    """Return the promise of a report: a step, and "state", or "best" for the weights too."""
    if isinstance(report, PlanReport) and report.resumed_at_step:
        return f"{report.resumed_at_step} state"
    if is_start(report):
        return "0 state"
    if isinstance(report, EvalReport):
        return f"{report.step} {'best' if report.best else 'state'}"
    if isinstance(report, RollbackReport):
        return f"{report.step} state"
    return None


def load_newest_state(out: Path) -> saved_state.SavedState | None:
    """Return the newest state of a run whose record and tokens can be loaded."""
    record, tokens_entry = saved_state.load_record(out)
    saved_state.load_tokens(out, tokens_entry)
    return saved_state.load_state(out, run_id=record["run_id"])


def fingerprint(out: Path) -> dict[str, str]:
    """Return the hashes of model, newest state and log of a finished run, without times."""
    saved = load_newest_state(out)
    assert saved
    assert not saved.damaged, saved.damaged
    hashes = {path.name: digest(path) for path in out.iterdir() if path.is_file()}
    hashes = {name: one for name, one in hashes.items() if not name.startswith(files.TEMPORARY)}
    if "README.md" in hashes:
        hashes["README.md"] = _card(out)
    for name, array in saved.arrays.items():
        hashes[f"state {name}"] = hashlib.sha256(array[...].tobytes()).hexdigest()
    hashes["progress"] = json.dumps(_without_times(saved.progress))
    records = [record for record in log.read(out) if record["kind"] in TRAINED]
    return hashes | {f"log {i}": json.dumps(_without_times(r)) for i, r in enumerate(records)}


def _card(out: Path) -> str:
    """Return a run's model card without the name of its folder and without its digest."""
    text = (out / "README.md").read_text("utf-8")
    *lines, _ = re.sub(rf"(?m)(^# |-o ){re.escape(out.name)}\b", r"\1OUT", text).splitlines()
    return "\n".join(lines)


def list_differences(actual: dict[str, str], expected: dict[str, str]) -> list[str]:
    """List the differences between two fingerprints."""
    return [
        f"{name}: {actual.get(name)} is not {expected.get(name)}"
        for name in sorted(actual.keys() | expected.keys())
        if actual.get(name) != expected.get(name)
    ]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(out: Path) -> list[str]:
    """List the temporary files that were not removed."""
    return [str(path) for path in out.rglob(f"{files.TEMPORARY}*")]


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not any(part in k for part in _CLOCK)}
