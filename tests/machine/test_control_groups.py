"""Limits of control groups: both versions, at every level of the hierarchy."""

from pathlib import Path

import pytest

from tgen.machine.control_groups import cpu_quota, free_memory

GIB = 1 << 30


def write(root: Path, contents: dict[str, str]) -> Path:
    """Write the files of a simulated system and return its root."""
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert free_memory(tmp_path) is None


def test_version_2_limits_are_read(tmp_path):
    folder = "sys/fs/cgroup/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            folder + "cpu.max": "150000 100000\n",
            folder + "memory.max": f"{2 * GIB}\n",
            folder + "memory.current": f"{GIB}\n",
            folder + "memory.stat": f"anon 1\ninactive_file {GIB // 4}\nactive_file {GIB // 8}\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert free_memory(root) == GIB + GIB // 4 + GIB // 8  # cached files can be dropped
    write(root, {folder + "cpu.max": "max 100000\n", folder + "memory.max": "max\n"})
    assert cpu_quota(root) is None
    assert free_memory(root) is None


def test_the_tightest_limit_of_all_levels_counts(tmp_path):
    folder = "sys/fs/cgroup/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch.slice/job 7:0\n",
            folder + "cgroup.procs": "",
            folder + "batch.slice/cpu.max": "200000 100000\n",
            folder + "batch.slice/memory.max": f"{3 * GIB}\n",
            folder + "batch.slice/memory.current": f"{2 * GIB}\n",
            folder + "batch.slice/job 7:0/cpu.max": "400000 100000\n",
            folder + "batch.slice/job 7:0/memory.max": f"{2 * GIB}\n",
            folder + "batch.slice/job 7:0/memory.current": "0\n",
        },
    )
    assert cpu_quota(root) == 2.0
    assert free_memory(root) == GIB


@pytest.mark.parametrize("path", ["/docker/12ab", "/", "/../other"])
def test_version_1_limits_are_read(tmp_path, path):
    """In a container the path is that of the host, but its own group is mounted at the top."""
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/", "sys/fs/cgroup/memory/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": f"9:name=systemd:{path}\n4:memory:{path}\n"
            f"3:cpu,cpuacct:{path}\n0::/\n",
            cpu + "cpu.cfs_quota_us": "50000\n",
            cpu + "cpu.cfs_period_us": "100000\n",
            memory + "memory.limit_in_bytes": f"{2 * GIB}\n",
            memory + "memory.usage_in_bytes": f"{GIB}\n",
            memory + "memory.stat": f"total_inactive_file {GIB // 2}\ntotal_active_file 0\n",
        },
    )
    assert cpu_quota(root) == 0.5
    assert free_memory(root) == GIB + GIB // 2
    write(root, {cpu + "cpu.cfs_quota_us": "-1\n"})
    assert cpu_quota(root) is None


def test_unreadable_limits_are_ignored(tmp_path):
    folder = "sys/fs/cgroup/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "nonsense\n0::/\n",
            folder + "cpu.max": "1 0\n",
            folder + "memory.max": "many\n",
            folder + "memory.current/is": "a folder\n",
        },
    )
    assert cpu_quota(root) is None
    assert free_memory(root) is None
