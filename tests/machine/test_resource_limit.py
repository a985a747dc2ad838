"""A child process that uses too much CPU time ends, and leaves nothing behind."""

import resource

import pytest

from tgen.machine.child import Child

PROGRAM = """
from tgen.machine.resource_limit import limit_cpu_time, set_limit
set_limit("RLIMIT_CORE", 1 << 30)
limit_cpu_time(0)
while True: pass
"""


def test_process_without_cpu_time_left_ends_and_writes_no_core_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("core files are limited")
    with pytest.raises(TimeoutError):
        Child("-c", PROGRAM).ask({}, 5)
    assert not list(tmp_path.iterdir())
