"""The short forms of tests/faults, each in its own process, since some fork before torch runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
SKIPPED = 77
ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("COVERAGE")}


def run_short_form(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FAULTS / f"{name}.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        timeout=1500,
        check=False,
    )
    judge(result.returncode, result.stdout.decode())


def judge(status: int, output: str) -> None:
    if status == SKIPPED:
        pytest.skip(output)
    assert status == 0, output


@pytest.fixture(scope="module")
def warm_process():
    """A process that has imported torch, which takes seconds, and forks scripts."""
    with subprocess.Popen(
        [sys.executable, str(FAULTS / "warm.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_warm(warm_process, tmp_path):
    """Run the short form of a script that needs torch, forked from the process with torch."""

    def run(name: str) -> None:
        output = tmp_path / "output"
        warm_process.stdin.write(json.dumps({"name": name, "output": str(output)}) + "\n")
        warm_process.stdin.flush()
        status = int(warm_process.stdout.readline())
        judge(status, output.read_text())

    return run


def test_starts():
    run_short_form("starts")


def test_kills(run_warm):
    run_warm("kills")


def test_exports():
    run_short_form("exports")


def test_syscalls():
    run_short_form("syscalls")


def test_power_loss():
    run_short_form("power_loss")


def test_disk(run_warm):
    run_warm("disk")


def test_resuming(run_warm):
    run_warm("resuming")


def test_signals(run_warm):
    run_warm("signals")


def test_terminal(run_warm):
    run_warm("terminal")
