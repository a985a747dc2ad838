"""Freed memory stays with the process, so that a step does not fault its pages in again."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from tgen.machine.memory import retain_freed_memory

def count_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [torch.ones(1 << 21) for _ in range(5)]  # 40 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

count_page_faults()
before = count_page_faults()
retain_freed_memory()
count_page_faults()
print(before, count_page_faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    command = [sys.executable, "-c", CODE]
    # A fixed threshold, since glibc raises its own to the size of freed blocks.
    tunables = "glibc.malloc.mmap_threshold=131072"
    environment = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": tunables}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < before / 10
