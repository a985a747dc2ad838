"""Collective operations: all ranks must call them in the same order.

In a single process, they return its own value.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tgen.distributed.launch import ranks
from tgen.errors import TgenError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import ProcessGroup

T = TypeVar("T")
_own = threading.local()  # `group` of this thread


@contextmanager
def in_group(group: "ProcessGroup | None") -> Iterator[None]:
    """Let objects that this thread exchanges use a group of their own, so that another thread can
    exchange others at the same time; None: the default group."""
    _own.group = group
    try:
        yield
    finally:
        del _own.group


def _group() -> "ProcessGroup | None":
    return getattr(_own, "group", None)


def assert_same(name: str, value: str) -> None:
    """Raise TgenError on all ranks if `value` is not the same on all of them."""
    names, values = zip(*all_gather((name, value)), strict=True)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise TgenError(
                f"{names[0]} differs: {values[0]} on rank 0, {other} on rank {rank}",
                "use the same on all ranks",
            )


def call_together(function: Callable[[], T]) -> T:
    """Return `function()` on every rank; if it raises OSError or TgenError on any rank, raise the
    first of these errors on all."""
    result, error = None, None
    try:
        result = function()
    except (OSError, TgenError) as raised:
        error = raised
    error = next(filter(None, all_gather(error)), None)
    try:
        if error is not None:
            raise error
    finally:
        del error  # else the cycle with its traceback keeps the arrays of `function` in memory
    return cast(T, result)


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on all ranks."""
    if (n := ranks().world_size) == 1:
        return [value]
    import torch.distributed as dist

    values = [None] * n
    dist.all_gather_object(values, value, group=_group())
    return values


def gather(value: Any) -> list[Any] | None:
    """Return the values of all ranks, by rank, on rank 0; None on the others."""
    rank, n, *_ = ranks()
    if n == 1:
        return [value]
    import torch.distributed as dist

    values = None if rank else [None] * n
    dist.gather_object(value, values, group=_group())
    return values


def scatter(values: list[Any]) -> Any:
    """Return, on each rank, the value that rank 0 has for it; those of the others are ignored."""
    if ranks().world_size == 1:
        return values[0]
    import torch.distributed as dist

    own = [None]
    dist.scatter_object_list(own, values, group=_group())
    return own[0]


def broadcast(value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    if ranks().world_size == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, group=_group())
    return values[0]


def clock() -> float:
    """Return rank 0's clock in seconds, so that decisions based on time agree on all ranks."""
    now = time.perf_counter()
    if ranks().world_size == 1:
        return now
    import torch

    seconds = torch.tensor(now, dtype=torch.float64)
    torch.distributed.broadcast(seconds, 0)
    return seconds.item()


def total(number: int) -> int:
    """Return the sum over all ranks."""
    if ranks().world_size == 1:
        return number
    import torch

    return int(all_reduce_sum(torch.tensor(number)).item())


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank."""
    return total(int(flag)) > 0


def all_reduce_sum(tensor: "Tensor") -> "Tensor":
    """Replace `tensor` by the sum over all ranks, and return it."""
    if ranks().world_size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until all ranks have called this."""
    all_gather(None)  # torch.distributed.barrier may need a GPU
