"""An error on one rank ends all ranks; rank 0 prints the first one, once.

A rank that fails puts its error into the shared store and closes its connections; ranks that wait
for it then read the error. torchrun kills all ranks as soon as one has exited, so a failed rank
waits until rank 0 has printed.
"""

import gc
import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tgen.errors import RankError, TgenError, describe_os_error, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_REASON_TIMEOUT = timedelta(seconds=1)
_PRINT_TIMEOUT = timedelta(seconds=20)  # after that, rank 0 is considered busy or dead
_ERROR_KEY, _PRINTED_KEY = "tgen error", "tgen printed"
_NO_MESSAGE = "a rank ended without an error message"
# Torch's messages about a rank that does not answer, and about one that has exited.
_TIMED_OUT = "Timed out waiting"
_PEER_GONE = ("Connection closed", "reset by peer", "Broken pipe", "remote process exited")


def share_error(
    error: Exception,
    rank: int,
    store: "Store",
    print_error: Callable[[str, str], None] | None,
    step_timeout: timedelta,
) -> Exception:
    """Publish an error unless another rank was first; return the exception to raise here.

    Rank 0 prints the first error of all ranks; another rank prints its own only if rank 0 does not
    answer. `step_timeout` is named if a rank has not answered in a step.
    """
    import torch.distributed as dist

    own = first = _describe(error, rank, step_timeout)
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
        _forget_groups()
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


def _forget_groups() -> None:
    """Remove the groups from meshes, which stay in torch's caches for distributed tensors and would
    keep connections open."""
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in [one for one in gc.get_objects() if type(one) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()  # older versions of torch have none


def _describe(error: Exception, rank: int, step_timeout: timedelta) -> dict[str, Any]:
    """Return an error as a dictionary for all ranks; `bug` marks an unexpected one."""
    message, hint, status, is_bug = str(error), "", 1, False
    if isinstance(error, TgenError):
        message, hint, status = error.message, error.hint, error.exit_status
    elif isinstance(error, RuntimeError) and _TIMED_OUT in message:
        message = f"a rank did not answer within {step_timeout.total_seconds():g} s"
        hint = "look for a machine that hangs, or a network without a route"
    elif isinstance(error, RuntimeError) and any(words in message for words in _PEER_GONE):
        message, hint = _NO_MESSAGE, "see torchrun's report"
    elif is_out_of_memory(error):
        message, hint = f"rank {rank}: out of memory", "use a smaller batch or model, or more ranks"
    elif isinstance(error, OSError):
        message = describe_os_error(error)
    else:
        message, is_bug = f"rank {rank}: {type(error).__name__}: {message}"[:300], True
        status = getattr(error, "exit_status", 70)
    return {"rank": rank, "message": message, "hint": hint, "status": status, "bug": is_bug}
