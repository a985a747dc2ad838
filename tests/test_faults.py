"""The short forms of tests/faults, each a process of its own: some fork before torch runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent / "faults"
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


class TestProcesses:  # two groups, for two processors
    @pytest.mark.parametrize("name", ["signals", "terminal", "starts"])
    def test_fault(self, name):
        short_form(name)


class TestStates:
    @pytest.mark.parametrize("name", ["kills", "syscalls", "power_loss", "disk", "resuming"])
    def test_fault(self, name):
        short_form(name)
