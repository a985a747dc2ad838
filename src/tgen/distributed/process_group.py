"""The ranks of a run: read from torchrun's variables, joined, and all ended after an error on one.

Reading this process's rank does not import torch; only the process group does.

Rank 0 prints the first error of any rank, once. A rank that fails puts its error into the shared
store and closes its connections; ranks that wait for it then read the error. torchrun kills all
ranks as soon as one has exited, so a failed rank waits until rank 0 has printed.
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
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_REPORT_SECONDS = 1.0  # time for rank 0 to print an error before the ranks have joined
_POLL_SECONDS = 0.1
_NOTICE_AFTER_SECONDS = 10.0
_CONNECT_TIMEOUT = timedelta(seconds=2)  # short: torch handles no signal meanwhile
_STORE_TIMEOUT = timedelta(minutes=10)  # NCCL's first collective waits for the slowest rank
_REASON_TIMEOUT = timedelta(seconds=1)
_PRINT_TIMEOUT = timedelta(seconds=20)  # after that, rank 0 is considered busy or dead
_COLLECTIVE_TIMEOUT = timedelta(days=1)  # rank 0 prepares and saves alone for a long time
_STEP_TIMEOUT = timedelta(minutes=10)  # in a step, all ranks work
_ERROR_KEY, _PRINTED_KEY, _MARK = "tgen error", "tgen printed", "tgen mark "
# Launchers that start processes which do not know of each other: their variables of the process's
# number and of the number of processes. A shell of salloc has SLURM_NTASKS, too.
_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
}
_NO_MESSAGE = "a rank ended without an error message"
# Torch's messages about a rank that does not answer, and about one that has exited.
_TIMED_OUT = "Timed out waiting"
_PEER_GONE = ("Connection closed", "reset by peer", "Broken pipe", "remote process exited")


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


def set_mark(name: str) -> None:
    """Store a name until torchrun itself ends, so that restarted ranks find it with `has_mark`.

    Does nothing outside `join_process_group`.
    """
    for store in _stores():
        store.set(_MARK + name, "")


def has_mark(name: str) -> bool:
    """Return whether ranks that torchrun has restarted since have called `set_mark(name)`."""
    return [store.check([_MARK + name]) for store in _stores()] == [False, True]


def _stores() -> "list[Store]":
    """Return the store of the ranks' present starts and the one around it, which outlives them;
    none outside `join_process_group`."""
    if not launched():
        return []
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    if not dist.is_initialized():
        return []
    own = root = _get_default_store()
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    return [own, root]


@contextmanager
def join_process_group(
    print_error: Callable[[str, str], None] | None = None,
    print_status: Callable[[str], None] | None = None,
    *,
    join_seconds: float = 300.0,
) -> Iterator[Ranks]:
    """Join all ranks as torch's default process group: gloo, and NCCL for CUDA tensors.

    An error on any rank ends the block on all ranks with a RankError that has the same message,
    hint and exit status; rank 0 calls `print_error(message, hint)` once. An exception that is not
    a TgenError, i.e. a bug or Ctrl-C, is raised unchanged on its own rank.

    Raise UsageError if rank 0's address is not set, TgenError if its port is in use or ranks do not
    join within `join_seconds`; rank 0 calls `print_status` while it waits.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # no messages about closed connections
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    own = ranks()
    store = _connect_store(own, join_seconds)
    store = _wait_for_ranks(own, store, join_seconds, print_status)
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",  # decisions use CPU tensors
        store=PrefixStore("group", store),
        rank=own.rank,
        world_size=own.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        yield own
    except Exception as error:
        raise _share_error(error, own.rank, store, print_error) from error
    finally:
        with suppress(Exception):  # connections may be closed
            dist.destroy_process_group()


@contextmanager
def short_timeout() -> Iterator[None]:
    """Let the collectives inside wait for minutes only: all ranks are about to call them."""
    if ranks().world_size == 1:
        yield
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    shorten_timeout(None)
    try:
        yield
    finally:
        _set_pg_timeout(_COLLECTIVE_TIMEOUT)


def shorten_timeout(group: "ProcessGroup | None") -> None:
    """Let all later collectives of a group, or of the default one, wait for minutes only."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(_STEP_TIMEOUT, group)


def _connect_store(own: Ranks, join_seconds: float) -> "Store":
    """Connect to the key-value store, hosted by torchrun or, without torchrun, by rank 0."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdigit()):
        raise UsageError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not name rank 0's address",
            "start the processes with torchrun",
        )
    is_host = not own.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    started_at = time.monotonic()
    while True:
        try:
            store = TCPStore(
                host,
                int(port),
                is_master=is_host,
                timeout=_CONNECT_TIMEOUT,
                wait_for_workers=False,
            )
        except (dist.DistError, ValueError) as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error):
                raise TgenError(
                    f"the port of {host}:{port} is in use", "choose another torchrun --master-port"
                ) from None
            if is_host or time.monotonic() - started_at >= join_seconds:
                raise TgenError(
                    f"rank {own.rank} cannot reach rank 0 at {host}:{port}",
                    "check torchrun's --master-addr",
                ) from None
        else:
            store.set_timeout(_STORE_TIMEOUT)
            return store


def _wait_for_ranks(
    own: Ranks, store: "Store", join_seconds: float, print_status: Callable[[str], None] | None
) -> "Store":
    """Return the part of the store that belongs to these starts of the ranks, once all are there.

    torchrun restarts the ranks of one machine after those of another, and each machine counts its
    own restarts. So rank 0 answers each start of a rank with the name of its own start.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    started_at, n, printed = time.monotonic(), own.world_size, False
    start, group = os.urandom(8).hex(), ""
    try:
        store.set(f"start {own.rank}", start)
        while not group or store.add(f"{group} joined", 0) < n:
            for rank in range(0 if own.rank else n):
                if store.check([f"start {rank}"]):
                    store.set(store.get(f"start {rank}").decode(), start)
            if store.check([start]) and (answer := store.get(start).decode()) != group:
                group = answer
                store.set(f"{group} joined {own.rank}", "")
                store.add(f"{group} joined", 1)
                continue
            waited = time.monotonic() - started_at
            absent = (r for r in range(n) if not store.check([f"{group} joined {r}"]))
            missing = ", ".join(map(str, absent)) if group else "0"
            if waited >= join_seconds:
                raise TgenError(
                    f"rank {missing} of {n} did not join within {join_seconds:g} s",
                    "start torchrun on every machine",
                )
            if print_status and not printed and not own.rank and waited >= _NOTICE_AFTER_SECONDS:
                print_status(f"waiting for rank {missing} of {n}")
                printed = True
            time.sleep(_POLL_SECONDS)  # not inside torch, which handles no signal
    except dist.DistError:  # rank 0 hosted the store
        raise TgenError(
            "rank 0 ended before all ranks joined", "check the output of rank 0"
        ) from None
    return PrefixStore(group, store)


def _share_error(
    error: Exception, rank: int, store: "Store", print_error: Callable[[str, str], None] | None
) -> Exception:
    """Publish an error unless another rank was first; return the exception to raise here.

    Rank 0 prints the first error of all ranks; another rank prints its own only if rank 0 does not
    answer.
    """
    import torch.distributed as dist

    own = first = _describe(error, rank)
    is_shared = False
    if own["message"] == _NO_MESSAGE:  # the rank that has closed its connections may have one
        with suppress(dist.DistError):
            store.wait([_ERROR_KEY], _REASON_TIMEOUT)
    with suppress(dist.DistError):  # if rank 0 hosted the store and has ended
        first = json.loads(store.compare_set(_ERROR_KEY, "", json.dumps(own)))
        is_shared = True
    is_own_bug = own["bug"] and first == own  # its traceback is printed on this rank
    prints = rank == 0
    with suppress(Exception):  # so that other ranks stop waiting for this one
        traceback.clear_frames(error.__traceback__)  # their objects keep connections open
        gc.collect()
        dist.destroy_process_group()
    try:
        if rank:
            store.wait([_PRINTED_KEY], _PRINT_TIMEOUT)
    except dist.DistNetworkError:  # rank 0 hosted the store and has ended, but printed first
        prints = not is_shared
    except dist.DistError:  # rank 0 does not answer
        prints = first == own
    if prints and print_error and not is_own_bug:
        print_error(first["message"], first["hint"])
    if rank == 0 and not (is_own_bug and own["status"]):  # a traceback is still to be printed
        with suppress(dist.DistError):
            store.set(_PRINTED_KEY, "")
    return error if is_own_bug else RankError(first["message"], first["hint"], first["status"])


def _describe(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error as a dictionary for all ranks; `bug` marks an unexpected one."""
    message, hint, status, is_bug = str(error), "", 1, False
    if isinstance(error, TgenError):
        message, hint, status = error.message, error.hint, error.exit_status
    elif isinstance(error, RuntimeError) and _TIMED_OUT in message:
        message = f"a rank did not answer within {_STEP_TIMEOUT.total_seconds():g} s"
        hint = "look for a machine that hangs, or a network without a route"
    elif isinstance(error, RuntimeError) and any(words in message for words in _PEER_GONE):
        message, hint = _NO_MESSAGE, "see torchrun's report"
    elif is_out_of_memory(error):
        message, hint = f"rank {rank}: out of memory", "use a smaller batch or model, or more ranks"
    elif not isinstance(error, OSError):
        message, is_bug = f"rank {rank}: {type(error).__name__}: {message}"[:300], True
        status = getattr(error, "exit_status", 70)
    return {"rank": rank, "message": message, "hint": hint, "status": status, "bug": is_bug}
