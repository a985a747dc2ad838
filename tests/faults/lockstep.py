"""Ranks that are threads of this process and take turns, always in the same order."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest import mock

from tgen import distributed
from tgen.distributed import Ranks, collectives

T = TypeVar("T")
_own = threading.local()


def current_rank() -> int:
    """Return the rank that calls this."""
    return int(getattr(_own, "rank", 0))


def run_ranks(n: int, function: Callable[[int], T]) -> list[T]:
    """Return the results of `function(rank)`; each rank runs until it waits for the others.

    Rank 0 runs in this thread. Raise the first error of any rank.
    """
    turns = [threading.Semaphore(0) for _ in range(n)]
    sent: dict[int, dict[int, Any]] = defaultdict(dict)  # by number of the exchange
    running, results, errors = list(range(n)), {}, []

    def exchange(value: Any) -> list[Any]:
        sent[_own.n_exchanges][_own.rank] = value
        next_turn()
        turns[_own.rank].acquire()
        _own.n_exchanges += 1
        return [sent[_own.n_exchanges - 1][rank] for rank in range(n)]

    def next_turn() -> None:
        after = [rank for rank in running if rank > _own.rank]
        turns[(after or running or [0])[0]].release()

    def run(rank: int) -> None:
        _own.rank, _own.n_exchanges = rank, 0
        turns[rank].acquire()
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
        running.remove(rank)
        next_turn()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, n)]
    with ExitStack() as stack:
        for module in (distributed, collectives):
            stack.enter_context(mock.patch.object(module, "all_gather", exchange))
        for name, fake in {
            "broadcast": lambda value: exchange(value)[0],
            "ranks": lambda: Ranks(current_rank(), n, current_rank(), n),
            "is_rank_zero": lambda: current_rank() == 0,
        }.items():
            stack.enter_context(mock.patch.object(distributed, name, fake))
        for thread in threads:
            thread.start()
        turns[0].release()
        run(0)
        for thread in threads:
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}"):
                os.sched_yield()  # the system still ends it, and this process may fork next
    _own.rank = 0
    for error in errors:
        raise error
    return [results[rank] for rank in range(n)]
