"""Every option of a run with every kind of value: it is refused in two lines, or it works.

    python tests/faults/settings.py [--long | COUNT]

Options are set by `--set`, by their flags and by keywords of `tgen.train`: at starts of new runs
and of fine-tuning, and at resumes with `--override` of runs of text, of chats and of LoRA. A
refusal is status 1 or 2 with a message and a hint, and leaves the run as it was, byte by byte;
otherwise the run can be resumed. Sampling and engine options are made from Python values. A crash,
another exception and gigabytes of memory are findings. The short form takes every n-th case.
"""

import io
import itertools
import json
import math
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import tgen
import tiny
from tgen.cli import app
from tgen.cli.options import flag_of
from tgen.cli.signals import StopSignal
from tgen.cli.train.command import TrainOptions
from tgen.config import EngineOptions, ModelConfig, SamplingConfig
from tgen.config.training import TrainConfig
from tgen.errors import TgenError
from tgen.runs import RunRequest

_SHORT = 50
_FORKED = 500  # cases per process
_MEMORY = 2 << 30  # bytes that a case may take
_TEXTS = ["x", "", "0", "-1", "1", "2", "0.2", "1.5", "1e-320", "1000000000", str(2**63 - 1)]
_TEXTS += [str(2**70), "1e300", "nan", "inf", "-inf", "é日", "true", "false", "None", "[1]"]
_VALUES = ["x", "", 0, -1, 1, 2, 0.2, 10**9, 2**63 - 1, 2**70, 2**1010, 10**400, 1e300, math.nan]
_VALUES += [math.inf, "é日", True, None, [1], [], {}, b"x", Path("x"), "\ud800"]
_SETTINGS = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 48, "batch_size": 4}
_TUNING = {"batch_size": 4, "eval_every": 5}
_NOT_OPTIONS = {"out", "corpus", "train", "overrides", "began", "overwrite"}

Call = Callable[[], tuple[int, str]]  # returns the exit status and what stderr has


@dataclass
class Case:
    """A call, its description, and the run that it starts or changes."""

    name: str
    run: str  # to copy; "": a new run
    call: Call


class Runs:
    """Small runs to start from, in the current directory."""

    def __init__(self) -> None:
        lines = "What is a crown? 'Tis naïve, 日本 and more: the king said so.\n\nWho is this?\n"
        Path("corpus.txt").write_text(lines * 60)
        questions = [f"Who is {i}?" for i in range(40)]
        rows = [{"prompt": question, "completion": f"It is {question}"} for question in questions]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        new = ["corpus.txt", "--tokenizer", "bpe", "--vocab-size", "300"]
        self.starts: dict[str, tuple[list[str], dict[str, Any]]] = {
            "text": (new, _SETTINGS),
            "chat": (["rows.jsonl", "--from", "text", "--chat", "--template", "plain"], _TUNING),
            "lora": (["corpus.txt", "--from", "text", "--lora", "2"], _TUNING),
        }
        for name, (words, settings) in self.starts.items():
            status, error = command(*words, *sets(settings), "--steps", "9", "--out", name)
            assert status == 0, error

    def cases(self) -> Iterator[Case]:
        """Yield all cases."""
        settings = {one.name: one for c in (ModelConfig, TrainConfig) for one in fields(c)}
        flags = {n: flag_of(TrainOptions, n) for n in [*_names(RunRequest), *_names(TrainConfig)]}
        for name, field in settings.items():
            for text in [*_TEXTS, *_words(field.type)]:
                for run, (words, others) in self.starts.items():
                    given = sets({**others, name: text})
                    yield Case(f"start {run} --set {name}={text}", "", start(*words, *given))
                    resumed = ["--resume", "--out", "copy", "--override", *sets({name: text})]
                    yield Case(f"resume {run} --set {name}={text}", run, caller(*resumed))
        for name, flag in flags.items():
            for text in [*_TEXTS, "1GB"] if flag else []:
                new = start("corpus.txt", *sets(_SETTINGS), flag, text, steps=name != "minutes")
                yield Case(f"start {flag} {text}", "", new)
                for run in self.starts:
                    resumed = ["--resume", "--out", "copy", "--override", flag, text]
                    yield Case(f"resume {run} {flag} {text}", run, caller(*resumed))
        for name in [*settings, *_names(RunRequest)]:
            for value in _VALUES:
                options = {"steps": 3} | ({} if name == "minutes" else _SETTINGS) | {name: value}
                shown = f"{name}={str(value)[:40]!r}"
                yield Case(
                    f"tgen.train({shown})", "", python("new", corpus="corpus.txt", **options)
                )
                for run in self.starts:
                    call = python("copy", resume=True, override=True, **{name: value})
                    yield Case(f"tgen.train(resume {run}, {shown})", run, call)
        for made in (SamplingConfig, EngineOptions):
            for name, value in itertools.product(_names(made), _VALUES):
                yield Case(
                    f"{made.__name__}({name}={str(value)[:40]!r})", "", making(made, name, value)
                )


def _names(options: type) -> list[str]:
    return [one.name for one in fields(options) if one.name not in _NOT_OPTIONS]


def _words(kind: Any) -> list[str]:
    """Return the values of a Literal."""
    return [one for part in (kind, *get_args(kind)) for one in get_args(part) if type(one) is str]


def sets(settings: dict[str, Any]) -> list[str]:
    """Return settings as words of a command."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def command(*words: str) -> tuple[int, str]:
    """Run `tgen train`; return its status and what it wrote to stderr."""
    stream = io.StringIO()
    with redirect_stderr(stream):
        status = app.run(["train", *words, "-q", "--device", "cpu"])
    return status, stream.getvalue()


def caller(*words: str) -> Call:
    """Return a call of the command."""
    return lambda: command(*words)


def start(*words: str, steps: bool = True) -> Call:
    """Return a call that starts a new run."""
    return caller("--out", "new", *words, *(["--steps", "3"] if steps else []))


def python(out: str, **options: Any) -> Call:
    """Return a call of `tgen.train`."""

    def call() -> tuple[int, str]:
        try:
            list(tgen.train(out=out, stopped=lambda: True, **options))
        except TgenError as error:
            return error.exit_status, f"error: {error.message}\nhint: {error.hint}\n"
        return 0, ""

    return call


def making(made: type, name: str, value: Any) -> Call:
    """Return a call that makes options."""

    def call() -> tuple[int, str]:
        try:
            made(**{name: value})
        except TgenError as error:
            return error.exit_status, f"error: {error.message}\nhint: {error.hint}\n"
        return 0, ""

    return call


def check(case: Case) -> str:
    """Run a case; return the problem with it, or ""."""
    for name in ("new", "copy"):
        shutil.rmtree(name, ignore_errors=True)
    if case.run:
        shutil.copytree(case.run, "copy")
    try:
        status, error = case.call()
    except Exception as failure:
        place = traceback.extract_tb(failure.__traceback__)[-1]
        return f"{type(failure).__name__}: {str(failure)[:200]} [{place.filename}:{place.lineno}]"
    lines = error.splitlines()
    if status:
        if status not in (1, 2) or "out of memory" in error:
            return f"status {status}: {error[:300]}"
        if len(lines) != 2 or not lines[1].strip().removeprefix("hint:").strip():
            return f"not a message and a hint: {lines[:5]}"
        if case.run and not _diverged(error) and contents("copy") != contents(case.run):
            return f"the run has changed: {lines}"
    if case.run or Path("new/training/run.json").exists():
        out = "copy" if case.run else "new"
        try:
            status, error = command("--resume", "--out", out)
        except Exception as failure:
            return f"cannot be resumed: {failure!r:.200}"
        if status and not _diverged(error):
            return f"cannot be resumed: {error[:300]}"
    return ""


def _diverged(error: str) -> bool:
    """Whether a run trained with what was asked for."""
    return "not finite" in error or "infinite or NaN" in error


def contents(name: str) -> dict[str, bytes]:
    """Return the bytes of a run's files by their paths."""
    return {str(p.relative_to(name)): p.read_bytes() for p in Path(name).rglob("*") if p.is_file()}


def main() -> int:
    """Run the cases."""
    count = tiny.count(__doc__, short=_SHORT, long=1 << 30)
    StopSignal.is_requested = lambda _: True  # type: ignore[method-assign, assignment]
    app._report_bug = _raise
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    problems: list[str] = []
    first, n_chosen, n_cases = 0, 1, 0
    tiny.import_everything()
    while first < n_chosen:  # what many runs leave in memory adds up
        result = tiny.run_forked(partial(_check_part, first, count, used))
        if result.status:
            print(f"the process of the cases from {first:,} on ended", file=sys.stderr)
            return 1
        numbers, *found = result.lines
        n_chosen, n_cases = map(int, numbers.split())
        problems += found
        first += _FORKED
    print(f"{n_chosen:,} of {n_cases:,} cases: {len(problems)} problems")
    return int(bool(problems))


def _check_part(first: int, count: int, used: int, report_line: Callable[[str], None]) -> None:
    """Check some of the cases; report how many are chosen, of how many, and the problems."""
    with tiny.scratch() as folder, chdir(folder):
        cases = [*Runs().cases()]
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
        step = max(1, len(cases) // count)
        chosen = cases[tiny.seed % step :: step]
        report_line(f"{len(chosen)} {len(cases)}")
        for case in chosen[first : first + _FORKED]:
            if problem := check(case):
                line = f"{case.name}: {problem}".replace("\n", " ")
                print(line, file=sys.stderr, flush=True)
                report_line(line)


def _raise(error: Exception, *, debug: bool) -> int:
    del debug
    raise error


if __name__ == "__main__":
    sys.exit(main())
