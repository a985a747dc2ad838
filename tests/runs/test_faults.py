"""The short forms of tests/faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
SKIPPED = 77
SCRIPT = """
import faulthandler, runpy, signal, sys
faulthandler.cancel_dump_traceback_later()  # a process with its thread cannot be forked
signal.alarm(1500)  # if it hangs
sys.path.insert(0, {folder!r})
sys.argv = [{path!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def judge(status: int, output: str) -> None:
    if status == SKIPPED:
        pytest.skip(output)
    assert status == 0, output


@pytest.mark.parametrize("name", ["starts", "exports", "syscalls", "power_loss"])
def test_short_form_finds_no_problem(name):
    """Without torch, as `starts` demands; a small process also forks faster."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("COVERAGE")}
    result = subprocess.run(
        [sys.executable, str(FAULTS / f"{name}.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        timeout=1500,
        check=False,
    )
    judge(result.returncode, result.stdout.decode())


@pytest.mark.parametrize("name", ["kills", "disk", "resuming", "settings", "signals", "terminal"])
def test_short_form_of_training_finds_no_problem(on_ranks, name):
    path = str(FAULTS / f"{name}.py")
    [run] = on_ranks(code=SCRIPT.format(folder=str(FAULTS), path=path), n=1)
    judge(run.status, f"{run.out.decode()}{run.err}")
