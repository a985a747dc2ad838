"""Which of how many processes this is, as torchrun's variables say; without torch."""

import os
from typing import NamedTuple

from tgen.errors import UsageError


class Ranks(NamedTuple):
    """Which of how many processes this is, of all and of those on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def ranks() -> Ranks:
    """What torchrun says of this process, without torch; alone, rank 0 of 1.

    Raises UsageError where its variables make no sense.
    """
    if not launched():
        return Ranks(0, 1, 0, 1)
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    found = Ranks(
        rank, world_size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size)
    )
    if not (0 <= rank < world_size and 0 <= found.local_rank < found.local_world_size):
        here = f"LOCAL_RANK {found.local_rank} of {found.local_world_size}"
        raise UsageError(f"RANK is {rank} of {world_size}, {here}", "start it with torchrun")
    return found


def launched() -> bool:
    """Whether torchrun, or what sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Whether this process is the one that shows and writes."""
    return not launched() or os.environ["RANK"] == "0"


def share(n: int) -> range:
    """Which of `n` things are this rank's: about as many for each, in order."""
    rank, n_ranks, *_ = ranks()
    return range(n * rank // n_ranks, n * (rank + 1) // n_ranks)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}", "start it with torchrun") from None
