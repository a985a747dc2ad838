"""This process's rank from torchrun's environment variables, without importing torch."""

import os
from typing import NamedTuple

from tgen.errors import UsageError


class Ranks(NamedTuple):
    """Rank of this process and number of ranks, in total and on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def ranks() -> Ranks:
    """Return the ranks in torchrun's environment variables, or rank 0 of 1 without torchrun.

    Raise UsageError if the variables are inconsistent.
    """
    if not launched():
        return Ranks(0, 1, 0, 1)
    rank, world_size = _read_number("RANK", 0), _read_number("WORLD_SIZE", 1)
    local_rank = _read_number("LOCAL_RANK", rank)
    local_world_size = _read_number("LOCAL_WORLD_SIZE", world_size)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise UsageError(
            f"inconsistent RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_world_size}",
            "start the processes with torchrun",
        )
    return Ranks(rank, world_size, local_rank, local_world_size)


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Return whether this process prints and writes files."""
    return not launched() or os.environ["RANK"] == "0"


def share(n: int) -> range:
    """Return this rank's contiguous share of `n` items."""
    rank, n_ranks, *_ = ranks()
    return range(n * rank // n_ranks, n * (rank + 1) // n_ranks)


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={text!r} is not a number", "start the processes with torchrun"
        ) from None
