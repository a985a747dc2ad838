"""What ranks tell each other, in step: every rank calls these alike."""

import time
from typing import TYPE_CHECKING, Any

from tgen.distributed.environment import ranks
from tgen.errors import TgenError

if TYPE_CHECKING:
    from torch import Tensor


def assert_same(what: str, value: str) -> None:
    """Raises TgenError on all ranks where `value` is not the same on all."""
    named, values = zip(*all_gather((what, value)), strict=True)
    other = next((rank for rank, given in enumerate(values) if given != values[0]), None)
    if other is not None:
        raise TgenError(
            f"{named[0]} differs: {values[0]} on rank 0, {values[other]} on rank {other}",
            "give all ranks the same",
        )


def all_gather(value: Any) -> list[Any]:
    """The value that each rank gave, by rank, on all ranks; a process that is alone has its own."""
    if (n := ranks().world_size) == 1:
        return [value]
    import torch.distributed as dist

    values = [None] * n
    dist.all_gather_object(values, value)
    return values


def gather(value: Any) -> list[Any] | None:
    """As `all_gather`, on rank 0 alone; None on the others."""
    mine = ranks()
    if mine.world_size == 1:
        return [value]
    import torch.distributed as dist

    values = None if mine.rank else [None] * mine.world_size
    dist.gather_object(value, values)
    return values


def broadcast(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    if ranks().world_size == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def clock() -> float:
    """Seconds, from an unknown beginning, by rank 0's clock: ranks that decide by it agree."""
    now = time.perf_counter()
    if ranks().world_size == 1:
        return now
    import torch

    seconds = torch.tensor(now, dtype=torch.float64)
    torch.distributed.broadcast(seconds, 0)
    return seconds.item()


def total(number: int) -> int:
    """The sum of what all ranks give, on all ranks."""
    if ranks().world_size == 1:
        return number
    import torch

    return int(all_reduce_sum(torch.tensor(number)).item())


def any_rank(flag: bool) -> bool:
    """Whether it is so on any rank, on all ranks."""
    return total(int(flag)) > 0


def all_reduce_sum(tensor: "Tensor") -> "Tensor":
    """The sum of all ranks' tensors, in the place of this one."""
    if ranks().world_size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Returns once all ranks have come here."""
    all_gather(None)  # as a barrier, on whatever device torch would wait
