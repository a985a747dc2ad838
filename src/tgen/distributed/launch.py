"""How this process was launched: its rank and the number of ranks; torch is not imported."""

import os
import time
from typing import NamedTuple

from tgen.errors import RankError, UsageError

_REPORT_SECONDS = 1.0  # time for rank 0 to print an error before the ranks have joined
# Launchers that start processes which do not know of each other: their variables of the process's
# number and of the number of processes. A shell of salloc has SLURM_NTASKS, too.
_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}


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


def check_launcher() -> None:
    """Raise UsageError if srun or mpirun started several processes without torchrun; RankError on
    all but the first, which prints the error."""
    if launched():
        return
    for launcher, (number, count) in _LAUNCHERS.items():
        n = os.environ.get(count, "")
        if not n.isdigit() or int(n) <= 1:
            continue
        error = UsageError(
            f"{launcher} started {n} processes, which do not know of each other without torchrun",
            "start one torchrun per machine (docs/scaling.md), or unset "
            f"{count} if their runs are independent",
        )
        if os.environ.get(number, "0") != "0":
            time.sleep(_REPORT_SECONDS)  # mpirun kills all processes once one has exited
            raise RankError(error.message, error.hint, error.exit_status)
        raise error


def check_gpus(n_gpus: int) -> None:
    """Raise UsageError if this machine has fewer GPUs than ranks."""
    n_ranks = ranks().local_world_size
    if n_ranks > n_gpus:
        raise UsageError(
            f"{n_ranks} ranks on this machine need a GPU each (found {n_gpus})",
            "start fewer ranks, or add --device cpu",
        )


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


def rank_zero_reports() -> bool:
    """Return whether to print an error that all ranks have before they join, e.g. a wrong option.

    Other ranks wait for rank 0 to print, since torchrun kills all ranks once one has exited.
    """
    if not is_rank_zero():
        time.sleep(_REPORT_SECONDS)
    return is_rank_zero()
