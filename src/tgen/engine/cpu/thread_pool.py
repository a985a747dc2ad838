"""The thread pool that computes passes: one per process, shared by all engines.

Between two tokens the helpers poll for the next pass; after a while without one they sleep.
"""

import os
import threading
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tgen.engine.cpu.job_layout import (
    CONTINUE,
    FIRST_PHASES,
    JOB_SIZE,
    LAST_PHASES,
    PHASES_PER_LAYER,
    QUEUE_PTR,
    QUEUE_WORDS,
    RUN,
    SERVE,
    allocate_aligned,
)
from tgen.engine.cpu.kernel_cache import enter_function

MAX_LAYERS = 1000


def _count_phases(n_layers: int) -> int:
    return FIRST_PHASES + n_layers * PHASES_PER_LAYER + LAST_PHASES


class ThreadPool:
    """The calling thread and its helpers. Memory that late helpers may read is never freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job = np.zeros(JOB_SIZE, np.int64)
        self._memory = allocate_aligned((_count_phases(MAX_LAYERS) + 1, QUEUE_WORDS), np.int64)
        self._newest, self._queue = self._memory[0].ctypes.data, self._memory[1].ctypes.data
        self._n_phases = 0  # of the deepest model so far: a late helper may be in any phase
        self._n_passes = 0
        self._wake: list[threading.Semaphore] = []
        self._asleep: list[bool] = []

    def run(
        self,
        job: NDArray[np.int64],
        n_layers: int,
        n_threads: int,
        *,
        request: int = 0,
        n_tokens: int = 0,
    ) -> int:
        """Run one pass on this thread and up to `n_threads` - 1 helpers.

        With the address of a `request`, see `RowSampler`, continue a text by up to `n_tokens`;
        return their number.
        """
        with self._lock:
            enter = enter_function()  # before helpers start, which would load them at the same time
            while len(self._wake) < n_threads - 1 and self._start_helper():
                pass
            self._n_phases = max(self._n_phases, _count_phases(n_layers))
            self._n_passes += 1
            for i in range(min(n_threads - 1, len(self._wake))):
                if self._asleep[i]:
                    self._wake[i].release()
            job[QUEUE_PTR] = self._queue
            shared = self._job.ctypes.data, self._newest, job.ctypes.data, self._queue
            task = CONTINUE if request else RUN
            return enter(task, *shared, self._n_phases, request, n_tokens)

    def _start_helper(self) -> bool:
        i = len(self._wake)
        helper = threading.Thread(target=self._help, args=(i,), name=f"tgen-{i + 1}", daemon=True)
        self._wake.append(threading.Semaphore(0))
        self._asleep.append(False)
        try:
            helper.start()
        except RuntimeError:  # the system's limit of threads: continue with fewer
            del self._wake[i], self._asleep[i]
            return False
        return True

    def _help(self, i: int) -> None:
        seen, enter = 0, enter_function()
        while True:
            n_passes = self._n_passes
            seen = enter(SERVE, self._job.ctypes.data, self._newest, 0, 0, 0, seen, i + 1)
            self._asleep[i] = True
            if self._n_passes == n_passes:  # else a pass may have begun just before `_asleep`
                self._wake[i].acquire()
            self._asleep[i] = False


@cache
def thread_pool() -> ThreadPool:
    """The thread pool of this process."""
    return ThreadPool()


thread_pool()  # the only one, whatever threads call this function
if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=thread_pool.cache_clear)
