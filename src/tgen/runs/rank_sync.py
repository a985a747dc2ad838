"""What ranks that share a run agree on, and what the first tells the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tgen import __version__, distributed
from tgen.config import Parallel
from tgen.errors import UsageError
from tgen.model.device import Device, rank_bytes, torch_version
from tgen.runs.prepared import PreparedRun
from tgen.tokenizer import Tokenizer
from tgen.training.plan.memory_estimate import choose_parallel
from tgen.training.plan.plan import Plan


def check_alike(device: Device) -> None:
    """Raises TgenError where ranks are of different versions, or compute on other devices."""
    distributed.assert_same("the device", device.type)
    distributed.assert_same("the version of tgen", __version__)
    distributed.assert_same("the version of torch", torch_version())


def least_memory(device: Device) -> int | None:
    """The bytes that every rank may have; None: unknown."""
    found = distributed.all_gather(rank_bytes(device))
    return None if None in found else min(found)


def choose(
    plan: Plan, device: Device, memory: int | None, wanted: Parallel | None
) -> Parallel | None:
    """How ranks with so many bytes each share the model of a plan: as is `wanted`, or as there is
    memory for; None: there are no ranks.

    Raises UsageError where the model is too large for them, or the batch too small.
    """
    here = distributed.ranks()
    if here.world_size == 1 and not wanted:
        return None
    if (batch_size := plan.train.batch_size) < here.world_size:
        raise UsageError(
            f"{here.world_size} ranks cannot share a batch of {batch_size} windows", "start fewer"
        )
    return choose_parallel(
        plan.model,
        replace(plan.train, batch_size=-(-batch_size // here.world_size)),
        context=plan.context_length,
        n_ranks=here.world_size,
        memory=memory,
        on_gpu=device.type == "cuda",
        wanted=wanted,
    )


def broadcast_prepared(
    prepared: PreparedRun | None, device: Device, weights: Mapping[str, NDArray[Any]] | None
) -> PreparedRun:
    """What rank 0 has prepared, on all ranks; the others have no tokens yet."""
    what = prepared and (prepared.record, prepared.tokenizer.json, prepared.parallel)
    record, tokenizer, parallel = distributed.broadcast(what)
    if prepared is not None:
        return prepared
    ends = [] if record.end_of_text is None else [record.end_of_text]
    return PreparedRun(record, Tokenizer(tokenizer, ends=ends), {}, device, weights, parallel)
