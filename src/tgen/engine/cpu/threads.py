"""The threads that share a pass: one set a process, for all engines.

Between two tokens they look for the next pass; when there is none for a while they sleep.
"""

import os
import threading

import numpy as np
from numpy.typing import NDArray

from tgen.engine.cpu.compiled import compiled
from tgen.engine.cpu.forward import JOB_SIZE, N_THREADS, PHASES_A_LAYER, WORDS_AT, forward
from tgen.engine.cpu.lanes import int_at
from tgen.engine.cpu.sharing import WORDS, begin, breathe, give_way, load_word, store_word

MAX_LAYERS = 1000

_PHASES = MAX_LAYERS * PHASES_A_LAYER + 1
_EAGER, _PATIENT = 20_000, 40_000  # looks for a pass: without and with giving way


@compiled("void(int64, int64, int64, int64, int64)")
def _run(ours: int, job: int, newest: int, words: int, n_phases: int) -> None:
    """A pass with the job `ours`, copied to where helpers look. One call: nothing interrupts it."""
    number = load_word(newest) + 1
    begin(words, n_phases, number)  # nobody's: who is late finds nothing while the job changes
    for i in range(JOB_SIZE):
        store_word(job + i * 8, int_at(ours, i))
    begin(words, n_phases, number + 1)
    store_word(newest, number + 1)
    forward(job, number + 1, 0)


@compiled("int64(int64, int64, int64, int64)")
def _serve(job: int, newest: int, seen: int, thread: int) -> int:
    """Takes part in every pass that comes; the last one's number, once none comes for a while."""
    idle = 0
    while idle < _PATIENT:
        number = load_word(newest)
        idle += 1
        if number != seen:
            seen = number
            if thread < int_at(job, N_THREADS):
                forward(job, number, thread)
                idle = 0
        elif idle > _EAGER:
            give_way()
        else:
            breathe()
    return seen


class Threads:
    """The caller and helpers beside it. What late helpers still look at stays where it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job = np.zeros(JOB_SIZE, np.int64)
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
            while len(self._wake) < n_threads - 1 and self._start():
                pass
            self._phases = max(self._phases, n_layers * PHASES_A_LAYER + 1)
            self._passes += 1
            for i in range(min(n_threads - 1, len(self._wake))):
                if self._asleep[i]:
                    self._wake[i].release()
            job[WORDS_AT] = self._words
            places = self._job.ctypes.data, self._newest, self._words
            _run(job.ctypes.data, *places, self._phases)

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
        seen = 0
        while True:
            passes = self._passes
            seen = _serve(self._job.ctypes.data, self._newest, seen, i + 1)
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
