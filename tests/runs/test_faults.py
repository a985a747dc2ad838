"""The short forms of tests/faults, each in its own process, since some fork before torch runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
SKIPPED = 77


def run_short_form(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FAULTS / f"{name}.py")],
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        timeout=300,
        check=False,
    )
    output = result.stdout.decode()
    if result.returncode == SKIPPED:
        pytest.skip(output)
    assert result.returncode == 0, output + result.stderr.decode()


def test_starts():
    run_short_form("starts")


def test_kills():
    run_short_form("kills")


def test_exports():
    run_short_form("exports")


def test_syscalls():
    run_short_form("syscalls")


def test_power_loss():
    run_short_form("power_loss")


def test_disk():
    run_short_form("disk")


def test_resuming():
    run_short_form("resuming")


def test_signals():
    run_short_form("signals")


def test_terminal():
    run_short_form("terminal")
