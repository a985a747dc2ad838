"""Ranks: the processes that torchrun starts for one task."""

from tgen.distributed.collectives import (
    all_gather,
    all_reduce_sum,
    any_rank,
    assert_same,
    barrier,
    broadcast,
    clock,
    gather,
    total,
)
from tgen.distributed.process_group import (
    Ranks,
    check_launcher,
    has_mark,
    is_rank_zero,
    join_process_group,
    launched,
    rank_zero_reports,
    ranks,
    set_mark,
    share,
    short_timeout,
)

__all__ = [
    "Ranks",
    "all_gather",
    "all_reduce_sum",
    "any_rank",
    "assert_same",
    "barrier",
    "broadcast",
    "check_launcher",
    "clock",
    "gather",
    "has_mark",
    "is_rank_zero",
    "join_process_group",
    "launched",
    "rank_zero_reports",
    "ranks",
    "set_mark",
    "share",
    "short_timeout",
    "total",
]
