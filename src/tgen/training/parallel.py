"""One model on many ranks: DDP has all of it on each, FSDP2 a share of every tensor's rows.

Either way a rank computes the gradients of its own rows of the batch, and torch makes of them the
mean over the ranks.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tgen.config import Parallel
from tgen.training.evaluation import LossModule

_BUFFERS_STAY = ("forward_sync_buffers", "broadcast_buffers")  # torch's names, the new one first


def all_ranks(device: torch.device) -> DeviceMesh:
    """In a row, each with such a device."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def parallelize(learner: LossModule, parallel: Parallel, mesh: DeviceMesh) -> nn.Module:
    """What a step calls in place of `learner`, on all ranks alike; with `fsdp` the parameters of
    its model are DTensors on the mesh's devices from here on."""
    if parallel == "ddp":
        named = inspect.signature(DistributedDataParallel).parameters
        still: dict[str, Any] = {next(n for n in _BUFFERS_STAY if n in named): False}
        return DistributedDataParallel(learner, gradient_as_bucket_view=True, **still)
    for block in learner.model.blocks:
        fully_shard(block, mesh=mesh)
    # An evaluation has no backward pass that would free the outer weights.
    fully_shard(learner, mesh=mesh, reshard_after_forward=True)
    return learner


def broadcast_or_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Rank 0's tensor, on all ranks: in shares where it has the shape of a parameter `like` that
    is in shares. The others give one of the same shape and dtype, on the same device."""
    dist.broadcast(tensor, 0)
    if isinstance(like, DTensor) and tensor.shape == like.shape:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def one_rank_per_matrix(
    function: Callable[[Tensor], Tensor], mesh: DeviceMesh
) -> Callable[[Tensor], Tensor]:
    """`function` of matrices (N, m, n) -> (N, m, n), each of which one rank computes for all."""

    def everywhere(stack: Tensor) -> Tensor:
        if isinstance(stack, DTensor):
            placements = stack.placements
            mine = _placed(stack, [Shard(0)])
        else:
            placements = (Replicate(),)
            mine = DTensor.from_local(stack, mesh, placements, run_check=False)
            mine = mine.redistribute(placements=[Shard(0)])
        done = DTensor.from_local(
            function(mine.to_local()),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=stack.shape,
            stride=stack.stride(),
        )
        done = _placed(done, placements)
        return done if isinstance(stack, DTensor) else done.to_local()

    return everywhere


def _placed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tensor.device.type == "cpu":  # gloo has no all-to-all, and torch would warn of its own way
        tensor = tensor.redistribute(placements=[Replicate()])
    return tensor.redistribute(placements=placements)
