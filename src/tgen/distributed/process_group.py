"""How ranks come together, and how all of them end.

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
from typing import TYPE_CHECKING, Any

from tgen.distributed.environment import Ranks, is_rank_zero, ranks
from tgen.errors import RankError, TgenError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_TOLD_WITHIN = 20.0  # seconds; after that rank 0 is taken to be busy or gone
_TELLING = 1.0  # seconds that rank 0 is given to tell what is wrong before ranks have joined
_LOOK_AGAIN = 0.1  # seconds until ranks that have not come are looked for again
_TRY = timedelta(seconds=2)  # to reach rank 0; inside torch no signal is seen
_NOTED_AFTER = 10.0  # seconds that a rank is waited for
_FAILED, _TOLD = "tgen failed", "tgen told"  # keys of the store
_PATIENCE = timedelta(days=1)  # rank 0 prepares and saves alone; who has ended is seen at once
# In what torch says of a peer that is gone.
_LINE_DEAD = ("Connection closed", "reset by peer", "Broken pipe", "remote process exited")


def rank_zero_reports() -> bool:
    """Whether this process tells what is wrong on all ranks alike before they join, such as an
    unknown option; another gives it the time: torchrun ends all once one has ended."""
    if not is_rank_zero():
        time.sleep(_TELLING)
    return is_rank_zero()


@contextmanager
def join_process_group(
    tell: Callable[[str, str], None] | None = None,
    note: Callable[[str], None] | None = None,
    *,
    join_seconds: float = 300.0,
) -> Iterator[Ranks]:
    """All ranks as torch's default process group, over gloo and, where there is CUDA, NCCL too.

    An error on any rank ends the block on all, with a RankError that has that rank's message,
    hint and exit status; `tell(message, hint)` is called once before, on rank 0. Only what is no
    TgenError, a bug or Ctrl-C, is raised as it is where it happened. Where torchrun's port is taken
    or ranks do not come within `join_seconds`, TgenError; rank 0's `note` says for whom it
    waits. Raises UsageError where it is not said where rank 0 is.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or it tells of every dead line
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    mine = ranks()
    store = _store(mine, join_seconds)
    _meet(mine, store, join_seconds, note)
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


def _store(mine: Ranks, seconds: float) -> "Store":
    """What all ranks write to and read from: torchrun has it or, without torchrun, rank 0."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdigit()):
        raise UsageError(f"MASTER_ADDR is {host!r}, MASTER_PORT {port!r}", "start it with torchrun")
    has_it = not mine.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = time.monotonic()
    while True:
        try:
            store = TCPStore(
                host, int(port), is_master=has_it, timeout=_TRY, wait_for_workers=False
            )
        except (dist.DistError, ValueError) as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                raise TgenError(
                    f"the port of {host}:{port} is taken", "give torchrun another --master-port"
                ) from None
            if has_it or time.monotonic() - began >= seconds:
                raise TgenError(
                    f"rank {mine.rank} does not reach rank 0 at {host}:{port}",
                    "check torchrun's --master-addr",
                ) from None
        else:  # torchrun may start its ranks anew
            return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _meet(mine: Ranks, store: "Store", seconds: float, note: Callable[[str], None] | None) -> None:
    """Returns once all ranks have come."""
    import torch.distributed as dist

    began, noted = time.monotonic(), False
    try:
        store.set(f"here {mine.rank}", "")
        store.add("here", 1)
        while store.add("here", 0) < mine.world_size:
            waited = time.monotonic() - began
            if waited >= seconds:
                raise _missing(f"rank {_absent(mine, store)}", mine, seconds)
            if note and not noted and not mine.rank and waited >= _NOTED_AFTER:
                note(f"waiting for rank {_absent(mine, store)} of {mine.world_size}")
                noted = True
            time.sleep(_LOOK_AGAIN)  # not inside torch, where no signal is seen
    except dist.DistError:  # rank 0 had the store
        raise TgenError("rank 0 has ended before all had come", "see what it said") from None


def _absent(mine: Ranks, store: "Store") -> str:
    absent = [r for r in range(mine.world_size) if not store.check([f"here {r}"])]
    return ", ".join(map(str, absent))


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
