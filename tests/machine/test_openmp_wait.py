"""Torch's threads on a busy machine: only their waiting changes, never a result."""

import subprocess
import sys
import threading

import pytest
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.machine.openmp_wait import BusyMachine
from tgen.training.machine_speed import RandomRun


def sleeping(machine):
    """The threads of one machine: other tests may have started the watch of the real one."""
    return [pool._thread for pool in machine._pools if pool._thread.is_alive()]


@pytest.mark.parametrize(
    ("threads", "n_cpus", "others", "busy"),
    [
        (2, 2, 0.2, False),
        (2, 2, 0.9, True),
        (2, 2, None, False),  # unknown
        (1, 2, 0.9, False),  # a CPU is free for each thread
        (1, 2, 2.0, True),
        (4, 8, 4.1, False),
        (4, 8, 5.0, True),
    ],
)
def test_machine_is_busy_if_others_need_the_cpus_of_the_threads(threads, n_cpus, others, busy):
    machine = BusyMachine(threads, n_cpus)
    machine.update(others)
    try:
        assert machine.other_cpus == (others if busy else None)
        assert len(sleeping(machine)) == (machine.n_pools if busy else 0)
    finally:
        machine.release()


@pytest.mark.parametrize(
    ("threads", "n_cpus"), [(2, 2), (2, 3), (3, 8), (4, 8), (8, 8), (32, 64), (64, 64)]
)
def test_sleeping_threads_make_the_threads_just_more_than_the_cpus(threads, n_cpus):
    n_pools = BusyMachine(threads, n_cpus).n_pools
    more = [threads + n * (threads - 1) for n in (n_pools - 1, n_pools)]
    assert more[0] <= n_cpus < more[1]


def test_sleeping_threads_end_when_the_machine_is_idle_again():
    machine = BusyMachine(2, 2)
    for _ in range(3):
        machine.update(1.0)
        machine.update(1.0)
        [thread] = sleeping(machine)
        machine.update(0.0)
        assert not thread.is_alive()
        assert not sleeping(machine)


def test_limit_of_threads_ends_nothing(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    machine = BusyMachine(2, 4)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        machine.update(3.0)
        assert machine.other_cpus == 3.0
        assert not sleeping(machine)
    machine.update(3.0)
    assert len(sleeping(machine)) == machine.n_pools == 3
    machine.release()


def test_training_on_a_busy_machine_gives_the_same_bits():
    config = ModelConfig.of(
        "qwen3", n_layers=2, d_model=64, n_heads=2, d_ff=128, context_length=64, vocab_size=512
    )

    def weights(*, change_at=()):
        machine = BusyMachine(2, 2)
        run = RandomRun(config, ResolvedTrainConfig(batch_size=8), torch.device("cpu"))
        for step in range(6):
            if step in change_at:
                machine.update(0.0 if machine.other_cpus else 1.0)
            run.advance(1)
        machine.release()
        return {name: array.tobytes() for name, array in run.state.own_arrays().items()}

    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert weights() == weights(change_at=(1, 3, 4))
    finally:
        torch.set_num_threads(n_threads)


def test_program_ends_while_the_watcher_starts_and_ends_threads():
    code = """
import itertools, threading
from tgen.machine import openmp_wait

loads, changes = itertools.cycle([9.0, 0.0]), threading.Semaphore(0)
class Changing:
    def others(self):
        changes.release()
        return next(loads)
openmp_wait.CpuLoad, openmp_wait._SECONDS = Changing, 0
openmp_wait.allowed_cpus = lambda: {0, 1}
openmp_wait.watch_load(2)
for _ in range(20):
    changes.acquire()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=900)
    assert (result.returncode, result.stderr) == (0, b"")
