"""The short forms of tests/faults, each a process of its own: some fork before torch runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
SKIPPED = 77


def short_form(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FAULTS / f"{name}.py")],
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        timeout=300,
        check=False,
    )
    said = result.stdout.decode()
    if result.returncode == SKIPPED:
        pytest.skip(said)
    assert result.returncode == 0, said + result.stderr.decode()


def test_starts():
    short_form("starts")


def test_kills():
    short_form("kills")


def test_syscalls():
    short_form("syscalls")


def test_power_loss():
    short_form("power_loss")


def test_disk():
    short_form("disk")


def test_resuming():
    short_form("resuming")


def test_signals():
    short_form("signals")


def test_terminal():
    short_form("terminal")
