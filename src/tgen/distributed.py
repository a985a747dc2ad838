"""Ranks: the processes that torchrun starts to do one piece of work together.

What goes wrong on any of them is told once, on rank 0, and ends them all. Whoever fails leaves its
error with the store that all can reach, then hangs up; who waits for it finds the line dead, and
the error in the store. torchrun ends all as soon as one has ended, so a rank that failed waits
until it was told.
"""

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tgen.errors import RankError, TgenError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

_TOLD_WITHIN = 20.0  # seconds; after that rank 0 is taken to be busy or gone
_TELLING = 1.0  # seconds that rank 0 is given to tell what is wrong before ranks have joined
_FAILED, _TOLD = "tgen failed", "tgen told"  # keys of the store
_PATIENCE = timedelta(days=1)  # rank 0 prepares and saves alone; who has ended is seen at once
# In what torch says of a peer that is gone.
_LINE_DEAD = ("Connection closed", "reset by peer", "Broken pipe", "remote process exited")


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


def is_first() -> bool:
    """Whether this process is the one that shows and writes."""
    return not launched() or os.environ["RANK"] == "0"


def first_tells() -> bool:
    """Whether this process tells what is wrong on all ranks alike before they join, such as an
    unknown option; another gives it the time: torchrun ends all once one has ended."""
    if not is_first():
        time.sleep(_TELLING)
    return is_first()


@contextmanager
def joined(
    tell: Callable[[str, str], None] | None = None, *, join_seconds: float = 300.0
) -> Iterator[Ranks]:
    """All ranks as torch's default process group, over gloo and, where there is CUDA, NCCL too.

    An error on any rank ends the block on all, with a RankError that has that rank's message,
    hint and exit status; `tell(message, hint)` is called once before, on rank 0. Only what is no
    TgenError, a bug or Ctrl-C, is raised as it is where it happened. Where torchrun's port is taken
    or ranks do not come within `join_seconds`, TgenError.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it tells of every dead line
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    mine = ranks()
    store = _store(mine, join_seconds)
    dist.init_process_group(
        _backend(),
        store=PrefixStore("group", store),
        rank=mine.rank,
        world_size=mine.world_size,
        timeout=_PATIENCE,
    )
    try:
        yield mine
    except Exception as error:
        raise _settled(error, mine, store, tell) from error
    finally:
        with suppress(Exception):  # a dead line
            dist.destroy_process_group()


def _backend() -> str:
    """What carries tensors: what ranks decide by lies beside the processor, on GPUs too."""
    import torch

    gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def agree(what: str, value: str) -> None:
    """Raises TgenError on all ranks where `value` is not the same on all."""
    named, values = zip(*everyones((what, value)), strict=True)
    other = next((rank for rank, given in enumerate(values) if given != values[0]), None)
    if other is not None:
        raise TgenError(
            f"{named[0]} differs: {values[0]} on rank 0, {values[other]} on rank {other}",
            "give all ranks the same",
        )


def everyones(value: Any) -> list[Any]:
    """The value that each rank gave, by rank, on all ranks; a process that is alone has its own."""
    if (n := ranks().world_size) == 1:
        return [value]
    import torch.distributed as dist

    values = [None] * n
    dist.all_gather_object(values, value)
    return values


def gathered(value: Any) -> list[Any] | None:
    """As `everyones`, on rank 0 alone; None on the others."""
    mine = ranks()
    if mine.world_size == 1:
        return [value]
    import torch.distributed as dist

    values = None if mine.rank else [None] * mine.world_size
    dist.gather_object(value, values)
    return values


def from_first(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    if ranks().world_size == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def share(n: int) -> range:
    """Which of `n` things are this rank's: about as many for each, in order."""
    rank, n_ranks, *_ = ranks()
    return range(n * rank // n_ranks, n * (rank + 1) // n_ranks)


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

    return int(summed(torch.tensor(number)).item())


def any_of(flag: bool) -> bool:
    """Whether it is so on any rank, on all ranks."""
    return total(int(flag)) > 0


def summed(tensor: "Tensor") -> "Tensor":
    """The sum of all ranks' tensors, in the place of this one."""
    if ranks().world_size > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor


def wait_for_all() -> None:
    """Returns once all ranks have come here."""
    everyones(None)  # as a barrier, on whatever device torch would wait


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}", "start it with torchrun") from None


def _store(mine: Ranks, seconds: float) -> "Store":
    """What all ranks write to and read from, once all have come."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
    except dist.DistStoreError:  # it is on rank 0, which waits for them
        raise _missing("one", mine, seconds) from None
    except (dist.DistError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise TgenError(
                f"the port of {where} is taken", "give torchrun another --master-port"
            ) from None
        raise TgenError(
            f"rank {mine.rank} does not reach rank 0 at {where}", "check torchrun's --master-addr"
        ) from None
    store.set(f"here {mine.rank}", "")
    for rank in range(mine.world_size):
        try:
            store.wait([f"here {rank}"], timedelta(seconds=seconds))
        except dist.DistError:
            raise _missing(f"rank {rank}", mine, seconds) from None
    return store


def _missing(who: str, mine: Ranks, seconds: float) -> TgenError:
    message = f"{who} of {mine.world_size} ranks has not come within {seconds:g} s"
    return TgenError(message, "start torchrun on every machine")


def _settled(
    error: Exception, mine: Ranks, store: "Store", tell: Callable[[str, str], None] | None
) -> Exception:
    """What is to be raised here, after the one error that counts has been told."""
    import torch.distributed as dist

    own = _described(error, mine.rank)
    first, is_told = own, False
    try:
        first = json.loads(store.compare_set(_FAILED, "", json.dumps(own)))
        if not mine.rank and tell and not own["bug"]:
            tell(first["message"], first["hint"])
            is_told = True
        with suppress(Exception):  # whoever waits for this rank need wait no longer
            traceback.clear_frames(error.__traceback__)  # what they hold keeps the line open
            gc.collect()
            dist.destroy_process_group()
        if mine.rank:
            is_told = first["rank"] != mine.rank
            store.wait([_TOLD], timedelta(seconds=_TOLD_WITHIN))
            is_told = True
    except dist.DistNetworkError:  # the store was on rank 0: it has ended, after it told `first`
        is_told = first is not own
    except dist.DistStoreError:  # rank 0 does not listen
        pass
    if own["bug"] and first == own:
        if not own["status"]:  # nothing to be told
            store.set(_TOLD, "")
        return error  # its traceback is here
    if tell and not is_told:
        tell(first["message"], first["hint"])
    if not mine.rank:
        with suppress(dist.DistError):
            store.set(_TOLD, "")
    return RankError(first["message"], first["hint"], first["status"])


def _described(error: Exception, rank: int) -> dict[str, Any]:
    """An error as others are to tell it; `bug` where it was not expected."""
    text, hint, status, bug = str(error), "", 1, False
    if isinstance(error, TgenError):
        text, hint, status = error.message, error.hint, error.exit_status
    elif isinstance(error, RuntimeError) and any(words in text for words in _LINE_DEAD):
        text, hint = "a rank has ended without a word", "see what torchrun says of it"
    elif is_out_of_memory(error):
        text, hint = f"rank {rank}: there is not enough memory", "give each rank less to do"
    elif not isinstance(error, OSError):
        text, bug = f"rank {rank}: {type(error).__name__}: {text}"[:300], True
        status = getattr(error, "exit_status", 70)
    return {"rank": rank, "message": text, "hint": hint, "status": status, "bug": bug}
