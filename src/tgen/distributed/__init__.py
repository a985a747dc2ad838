"""Ranks: the processes that torchrun starts for one task."""

from tgen.distributed.collectives import (
    all_gather,
    all_reduce_sum,
    any_rank,
    assert_same,
    barrier,
    broadcast,
    call_together,
    clock,
    gather,
    in_group,
    scatter,
    total,
)
from tgen.distributed.launch import (
    Ranks,
    check_gpus,
    check_launcher,
    is_rank_zero,
    launched,
    rank_zero_reports,
    ranks,
    share,
)
from tgen.distributed.process_group import (
    has_mark,
    join_process_group,
    new_group,
    set_mark,
    short_timeout,
    shorten_timeout,
)
