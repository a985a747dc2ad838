"""Checks and choices that all ranks of a run make together before it starts."""

from collections.abc import Sequence
from dataclasses import replace

from tgen import distributed
from tgen.config.training import SHARDED, Parallel
from tgen.corpus.open_sources import fingerprint
from tgen.errors import UsageError
from tgen.machine.device import Device, rank_bytes, torch_version
from tgen.planning.costs import FrozenModel
from tgen.planning.multi_gpu import choose_parallel
from tgen.planning.plan import Plan
from tgen.runs.output_folder import own_files
from tgen.version import __version__


def check_same_software(device: Device) -> None:
    """Raise TgenError if ranks have different versions or kinds of device."""
    distributed.assert_same("the device", device.type)
    distributed.assert_same("the version of tgen", __version__)
    distributed.assert_same("the version of torch", torch_version())


def check_same_corpus(paths: Sequence[str]) -> None:
    """Raise TgenError if ranks see other files; only rank 0 reads and converts them."""
    if distributed.ranks().world_size > 1:
        distributed.assert_same("the corpus", fingerprint(paths, own_files))


def min_rank_memory(device: Device) -> int | None:
    """Return the smallest memory of any rank in bytes, or None if unknown."""
    memory = distributed.all_gather(rank_bytes(device))
    return None if None in memory else min(memory)


def resolve_parallel(
    plan: Plan,
    device: Device,
    memory: int | None,
    requested: Parallel | None,
    *,
    frozen: FrozenModel | None = None,
) -> Parallel | None:
    """Return how ranks with `memory` bytes each share the model; None for a single process.

    Raise UsageError if the model is too large for them or the batch size too small.
    """
    n_ranks = distributed.ranks().world_size
    if n_ranks == 1 and not requested:
        return None
    if (batch_size := plan.train.batch_size) < n_ranks:
        raise UsageError(
            f"batch_size: smaller than the number of ranks (got {batch_size}, {n_ranks} ranks)",
            "start fewer processes, or set a larger batch_size",
        )
    if frozen is not None and requested in SHARDED:
        raise UsageError(
            f"--parallel {requested} cannot be combined with LoRA",
            "use ddp: the base model is not trained",
        )
    return choose_parallel(
        plan.model,
        replace(plan.train, batch_size=-(-batch_size // n_ranks)),
        context=plan.context_length,
        n_ranks=n_ranks,
        n_local=distributed.ranks().local_world_size,
        memory=memory,
        on_gpu=device.type == "cuda",
        wanted="ddp" if frozen is not None else requested,
        frozen=frozen,
    )
