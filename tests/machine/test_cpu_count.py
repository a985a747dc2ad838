"""The number of CPUs and threads: affinity, container quota, SMT, batch systems."""

import os

import pytest

from tgen.machine.cpus import cpu_count, default_threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that simulates a machine of `n` CPUs in cores of `per_core`."""
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def simulate(n, per_core=1, quota="max", file="core_cpus_list"):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(n)), raising=False)
        for cpu in range(n):
            siblings = sorted(i for i in range(n) if i % (n // per_core) == cpu % (n // per_core))
            path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/{file}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(map(str, siblings)) + "\n")
        for name, text in {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/cpu.max": f"{quota} 100000",
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return simulate


def test_container_with_one_cpu_gets_one_thread(machine):
    root = machine(64, quota="100000")
    assert cpu_count(root=root) == default_threads(root=root) == 1


@pytest.mark.parametrize(("quota", "n"), [("250000", 2), ("50000", 1), ("max", 8)])
def test_quota_is_rounded_down_to_whole_cpus(machine, quota, n):
    root = machine(8, quota=quota)
    assert cpu_count(root=root) == default_threads(root=root) == n


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_one_thread_per_physical_core_by_default(machine, file):
    root = machine(16, per_core=2, file=file)
    assert cpu_count(root=root) == 16
    assert default_threads(root=root) == 8
    assert default_threads(shared_by=4, root=root) == 2
    assert default_threads(shared_by=100, root=root) == 1


@pytest.mark.usefixtures("machine")
def test_unknown_cores_count_as_one_each(tmp_path):
    assert default_threads(root=tmp_path / "none") == cpu_count(root=tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "n"),
    [("3", 3), ("12", 12), ("9" * 5000, 16), ("4,2", 4), ("0", 8), ("-1", 8), ("x", 8), ("", 8)],
)
def test_threads_of_a_batch_system_are_the_default(machine, monkeypatch, text, n):
    root = machine(16, per_core=2)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads(root=root) == n


def test_cpus_of_a_slurm_task_are_shared_by_its_ranks(machine, monkeypatch):
    root = machine(16, per_core=2)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert default_threads(root=root) == 4
    assert default_threads(shared_by=2, root=root) == 2
    assert cpu_count(root=root) == 16


def test_thread_limit_that_torchrun_sets_is_ignored(machine, monkeypatch):
    root = machine(8)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert default_threads(shared_by=2, root=root) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert default_threads(shared_by=2, root=root) == 2


def test_affinity_counts(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system has no affinity")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1})
    assert cpu_count() == default_threads() == 1
