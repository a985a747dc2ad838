"""Data-parallel training: DDP replicates the model on every rank, FSDP2 shards its tensors by rows,
and HSDP replicates these shards between machines.

Each rank computes the gradients of its own windows of the batch; torch averages them over ranks.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from tgen import distributed
from tgen.config.training import Parallel
from tgen.training.loss import LossModule

_SYNC_BUFFERS = ("forward_sync_buffers", "broadcast_buffers")  # torch's names, newest first


def make_mesh(device: torch.device, parallel: Parallel) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks; with HSDP, one of machines and of their ranks."""
    n_ranks, n_local = dist.get_world_size(), distributed.ranks().local_world_size
    if parallel != "hsdp":
        return init_device_mesh(device.type, (n_ranks,))
    shape, names = (n_ranks // n_local, n_local), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        distributed.shorten_timeout(group)
    return mesh


def parallelize(loss_module: LossModule, parallel: Parallel, mesh: DeviceMesh) -> nn.Module:
    """Return the module that a step calls; with FSDP or HSDP, the model's
    parameters become DTensors."""
    if parallel == "ddp":
        names = inspect.signature(DistributedDataParallel).parameters
        no_sync: dict[str, Any] = {next(n for n in _SYNC_BUFFERS if n in names): False}
        return DistributedDataParallel(loss_module, gradient_as_bucket_view=True, **no_sync)
    policy = MixedPrecisionPolicy()
    if loss_module.precision == "bfloat16":  # inputs, and sums of gradients, stay float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in loss_module.model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Embedding and LM head are gathered in float32, in which the CPU computes logits. An evaluation
    # has no backward pass that would free them.
    fully_shard(loss_module, mesh=mesh, reshard_after_forward=True)
    return loss_module


def own_rows(parameter: Tensor) -> slice:
    """Return the rows of a sharded parameter that this rank stores; the last rank may have none."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    size = -(-len(parameter) // mesh.size(mesh.ndim - 1))  # as torch.chunk
    index = mesh.get_local_rank(mesh.ndim - 1)
    return slice(index * size, (index + 1) * size)


def scatter(whole: Tensor | None, parameter: Tensor) -> None:
    """Set a sharded parameter to a tensor that rank 0 has; the others pass None."""
    rows = parameter.detach()
    assert isinstance(rows, DTensor)
    whole = torch.empty(rows.shape) if whole is None else whole.detach()
    whole = whole.to(parameter.device)
    dist.broadcast(whole, 0)
    rows.to_local().copy_(whole[own_rows(parameter)])


def shard_like(rows: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor of which each rank has its `own_rows`."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def one_rank_per_matrix(function: Callable[..., Tensor], mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Distribute a function of matrices (N, m, n) -> (N, m, n): each matrix on one rank
    or, with HSDP, on one of each machine."""
    each_on_one = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]

    def distributed_function(stack: Tensor, *arguments: Any) -> Tensor:
        if isinstance(stack, DTensor):
            placements = stack.placements
            local = _redistribute(stack, each_on_one)
        else:
            placements = (Replicate(),)
            local = DTensor.from_local(stack, mesh, placements, run_check=False)
            local = local.redistribute(placements=each_on_one)
        result = DTensor.from_local(
            function(local.to_local(), *arguments),
            mesh,
            each_on_one,
            run_check=False,
            shape=stack.shape,
            stride=stack.stride(),
        )
        result = _redistribute(result, placements)
        return result if isinstance(stack, DTensor) else result.to_local()

    return distributed_function


def _redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tensor.device.type == "cpu":  # gloo has no all-to-all, and torch's own fallback warns
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor.redistribute(placements=placements)
