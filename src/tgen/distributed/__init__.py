"""Ranks: the processes that torchrun starts to do one piece of work together."""

from tgen.distributed.environment import Ranks, is_first, launched, ranks, share
from tgen.distributed.exchange import (
    agree,
    any_of,
    clock,
    everyones,
    from_first,
    gathered,
    summed,
    total,
    wait_for_all,
)
from tgen.distributed.joining import first_tells, joined

__all__ = [
    "Ranks",
    "agree",
    "any_of",
    "clock",
    "everyones",
    "first_tells",
    "from_first",
    "gathered",
    "is_first",
    "joined",
    "launched",
    "ranks",
    "share",
    "summed",
    "total",
    "wait_for_all",
]
