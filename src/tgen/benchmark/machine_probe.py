"""Work that never changes, done in turns with the trials: how fast the machine is meanwhile.

Every thread adds up numbers of its own with NumPy, and the time is that of the last one: as a pass
of an engine it waits for all of them, so that it notices when something else has a processor.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES = 4 << 20  # a thread's
_TIMES = 3


class MachineProbe:
    """For as many threads as the engine has."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._numbers = [np.ones(_BYTES // 4, np.float32) for _ in range(threads)]

    def seconds(self) -> float:
        """The best of some: it lies between trials, whose threads may still look for work."""
        with ThreadPoolExecutor(self._threads) as pool:
            taken = []
            for _ in range(_TIMES):
                begin = time.perf_counter()
                list(pool.map(np.add.reduce, self._numbers))
                taken.append(time.perf_counter() - begin)
        return min(taken)
