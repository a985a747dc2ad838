"""The load of other processes, from simulated files of /proc."""

import os
import time

import pytest

from tgen.machine import cpus as module
from tgen.machine.cpus import CpuLoad, used_seconds

pytestmark = pytest.mark.skipif(not hasattr(os, "sysconf"), reason="needs sysconf")

STAT = b"""cpu  1000 0 0 9000 0 0 0 0 0 0
cpu0 400 10 20 5000 77 3 4 5 66 6
cpu1 100 0 0 5000 0 0 0 0 0 0
cpu11 900 0 0 100 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(module, "allowed_cpus", lambda: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)


def test_used_time_is_that_of_the_allowed_cpus_without_idle_and_guest_time():
    assert used_seconds(STAT, {0, 1}) == (400 + 10 + 20 + 3 + 4 + 5 + 100) / 100
    assert used_seconds(STAT, {0, 7}) == 4.42  # CPU 7 is off


def test_load_of_others_excludes_this_process(tmp_path, monkeypatch):
    clock, own = [10.0], [3.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: own[0])
    path = tmp_path / "proc/stat"
    path.parent.mkdir()
    path.write_bytes(b"cpu0 100 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    load = CpuLoad(root=tmp_path)
    clock[0], own[0] = 12.0, 4.5
    path.write_bytes(b"cpu0 250 0 0 0 0 0 0 0\ncpu1 190 0 0 0 0 0 0 0\n")  # 3.4 s more
    assert load.others() == pytest.approx((3.4 - 1.5) / 2)
    assert load.others() is None  # no time has passed


@pytest.mark.parametrize("content", [None, b"", b"cpu0 1 2\n", b"cpux 1 2 3 4 5 6 7 8\n"])
def test_missing_or_damaged_file_means_unknown_or_no_load(tmp_path, content):
    if content is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_bytes(content)
    assert not CpuLoad(root=tmp_path).others()
