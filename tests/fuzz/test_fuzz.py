"""The short form of the fuzzer, and that it finds what it looks for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and forks")
@pytest.mark.parametrize("script", [HERE, HERE / "planted.py"], ids=["short form", "planted"])
def test_fuzzer_finds_planted_problems_and_no_others(script):
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()
