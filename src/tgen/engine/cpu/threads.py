"""The threads that share a pass: one set a process, for all engines.

Between two tokens they look for the next pass; when there is none for a while they sleep.
"""

import os
import threading

import numpy as np
from numpy.typing import NDArray

from tgen.engine.cpu.compiled import compiled
from tgen.engine.cpu.forward import JOB_SIZE, PHASES_A_LAYER, WORDS_AT, forward
from tgen.engine.cpu.sharing import WORDS, begin, breathe, give_way, load_word, store_word

_MAX_PHASES = 1 << 13
_EAGER, _PATIENT = 20_000, 40_000  # looks for a pass: without and with giving way


@compiled("void(int64, int64, int64, int64)")
def _publish(newest: int, words: int, n_phases: int, number: int) -> None:
    begin(words, n_phases, number)
    store_word(newest, number)


@compiled("int64(int64, int64, int64, int64)")
def _serve(job: int, newest: int, seen: int, thread: int) -> int:
    """Takes part in every pass that comes; the last one's number, once none comes for a while."""
    idle = 0
    while idle < _PATIENT:
        number = load_word(newest)
        if number != seen:
            forward(job, number, thread)
            seen, idle = number, 0
        else:
            idle += 1
            if idle > _EAGER:
                give_way()
            else:
                breathe()
    return seen


class Threads:
    """The caller and helpers beside it. What late helpers still look at stays where it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job = np.zeros(JOB_SIZE, np.int64)
        self._memory = np.zeros((_MAX_PHASES + 1) * WORDS + 8, np.int64)
        first = -(-self._memory.ctypes.data // 64) * 64  # where a cache line begins
        self._newest, self._words = first, first + 8 * WORDS
        self._number = 0
        self._wake: list[threading.Semaphore] = []
        self._asleep: list[bool] = []

    def run(self, job: NDArray[np.int64], n_layers: int, n_threads: int) -> None:
        """One pass through `n_layers` by this thread and `n_threads` - 1 others."""
        with self._lock:
            while len(self._wake) < n_threads - 1:
                self._start()
            self._job[:] = job
            self._job[WORDS_AT] = self._words
            self._number += 1
            _publish(self._newest, self._words, n_layers * PHASES_A_LAYER + 1, self._number)
            for i in range(n_threads - 1):
                if self._asleep[i]:
                    self._asleep[i] = False
                    self._wake[i].release()
            forward(self._job.ctypes.data, self._number, 0)

    def _start(self) -> None:
        self._wake.append(threading.Semaphore(0))
        self._asleep.append(False)
        i = len(self._wake) - 1
        threading.Thread(target=self._work, args=(i,), name=f"tgen-{i + 1}", daemon=True).start()

    def _work(self, i: int) -> None:
        seen = 0
        while True:
            seen = _serve(self._job.ctypes.data, self._newest, seen, i + 1)
            self._asleep[i] = True
            if seen == self._number:  # else a pass began meanwhile: it may have missed our sleep
                self._wake[i].acquire()
            self._asleep[i] = False


_threads: dict[int, Threads] = {}


def threads() -> Threads:
    """This process's: a fork has none of its parent's."""
    return _threads.setdefault(os.getpid(), Threads())
