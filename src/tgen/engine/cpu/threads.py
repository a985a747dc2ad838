"""The threads that share a pass: one set a process, for all engines.

Between two tokens they look for the next pass; when there is none for a while they sleep.
"""

import os
import threading

import numpy as np
from numpy.typing import NDArray

from tgen.engine.cpu.job_layout import JOB_SIZE, PHASES_A_LAYER, WORDS, WORDS_AT
from tgen.engine.cpu.kernel_cache import kernels

MAX_LAYERS = 1000

_PHASES = MAX_LAYERS * PHASES_A_LAYER + 1


class Threads:
    """The caller and helpers beside it. What late helpers still look at stays where it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job = np.zeros(JOB_SIZE, np.int64)
        self._place = self._job.ctypes.data
        self._memory = np.zeros((_PHASES + 1) * WORDS + 8, np.int64)
        first = -(-self._memory.ctypes.data // 64) * 64  # where a cache line begins
        self._newest, self._words = first, first + 8 * WORDS
        self._phases = 0  # of the deepest model so far: a late helper may stand in any
        self._passes = 0
        self._wake: list[threading.Semaphore] = []
        self._asleep: list[bool] = []

    def run(self, job: NDArray[np.int64], n_layers: int, n_threads: int) -> None:
        """One pass through `n_layers` by this thread and up to `n_threads` - 1 others."""
        with self._lock:
            enter = kernels()  # before helpers begin: nobody else loads them at the same time
            while len(self._wake) < n_threads - 1 and self._start():
                pass
            self._phases = max(self._phases, n_layers * PHASES_A_LAYER + 1)
            self._passes += 1
            for i in range(min(n_threads - 1, len(self._wake))):
                if self._asleep[i]:
                    self._wake[i].release()
            job[WORDS_AT] = self._words
            ours = job.ctypes.data
            enter(self._place, self._newest, ours, self._words, self._phases, 0, 0)

    def _start(self) -> bool:
        i = len(self._wake)
        helper = threading.Thread(target=self._work, args=(i,), name=f"tgen-{i + 1}", daemon=True)
        self._wake.append(threading.Semaphore(0))
        self._asleep.append(False)
        try:
            helper.start()
        except RuntimeError:  # the system has no more: fewer will do
            del self._wake[i], self._asleep[i]
            return False
        return True

    def _work(self, i: int) -> None:
        seen, enter = 0, kernels()
        while True:
            passes = self._passes
            seen = enter(self._place, self._newest, 0, 0, 0, seen, i + 1)
            self._asleep[i] = True
            if self._passes == passes:  # else look again: one may have begun before we slept
                self._wake[i].acquire()
            self._asleep[i] = False


_threads = Threads()


def _forget() -> None:
    global _threads
    _threads = Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a fork has none of its parent's threads


def threads() -> Threads:
    """This process's."""
    return _threads
