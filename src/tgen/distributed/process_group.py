"""The ranks joined as torch's process group, with timeouts and marks that outlive a restart."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from tgen.distributed.launch import Ranks, launched, ranks
from tgen.distributed.rank_errors import share_error
from tgen.errors import TgenError, UsageError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_POLL_SECONDS = 0.1
_NOTICE_AFTER_SECONDS = 10.0
_CONNECT_TIMEOUT = timedelta(seconds=2)  # short: torch handles no signal meanwhile
_STORE_TIMEOUT = timedelta(minutes=10)  # NCCL's first collective waits for the slowest rank
_COLLECTIVE_TIMEOUT = timedelta(days=1)  # rank 0 prepares and saves alone for a long time
_STEP_TIMEOUT = timedelta(minutes=10)  # in a step, all ranks work
_MARK = "tgen mark "


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
        raise share_error(error, own.rank, store, print_error, _STEP_TIMEOUT) from error
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


def new_group() -> "ProcessGroup":
    """Return a group of all ranks, over gloo, for `in_group`; all ranks must call this."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(timeout=_COLLECTIVE_TIMEOUT, backend="gloo")
    return group


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
