"""Training and generation on a fake GPU: the CPU's results, and no step that waits for the GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.command import clean_environment


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the problems of each case, for all families and precisions."""
    guard = build_guard(tmp_path_factory.mktemp("guard"))
    result = subprocess.run(
        [sys.executable, "-m", "fake_cuda.cases", guard],
        capture_output=True,
        env=clean_environment(PYTHONPATH=os.pathsep.join(sys.path), CUDA_VISIBLE_DEVICES=""),
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


def build_guard(folder: Path) -> Path:
    """Compile guard.cpp to a library."""
    compiler = shutil.which("c++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C++ compiler")
    headers, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    source, guard = Path(__file__).with_name("guard.cpp"), folder / "guard.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", source, "-o", guard, f"-I{headers}"]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return guard


@pytest.mark.parametrize("case", ["planted", "train", "lora", "decode"])
def test_a_fake_gpu_finds_no_problems(problems, case):
    assert problems[case] == []
