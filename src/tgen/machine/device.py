"""Devices for torch: choice, memory, threads."""

import torch

from tgen import distributed
from tgen.errors import UsageError
from tgen.machine import memory
from tgen.machine.cpus import cpu_count, default_threads
from tgen.machine.openmp_wait import watch_load

Device = torch.device


def choose_device(name: str) -> Device:
    """Resolve a device name; `auto` prefers a GPU. Raises UsageError if it is not available."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        # torch has no communication between ranks on MPS.
        "mps": torch.backends.mps.is_available() and distributed.ranks().world_size == 1,
    }
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available.get(name, False):
        usable = " or ".join(kind for kind, usable in available.items() if usable)
        raise UsageError(f"--device: {name!r} is not available", f"use --device {usable}")
    if name == "cuda" and distributed.launched():
        distributed.check_gpus(torch.cuda.device_count())
        torch.cuda.set_device(distributed.ranks().local_rank)
    return torch.device(name)


def memory_bytes(device: Device) -> int | None:
    """Return the RAM that the process can still allocate, in bytes, or None if the device is a
    GPU or the size is unknown."""
    return memory.free_ram() if device.type == "cpu" else None


def free_bytes(device: Device) -> int | None:
    """Return the free memory of a GPU, or the RAM that the process can still allocate, in bytes;
    None if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.free_ram()


def rank_bytes(device: Device) -> int | None:
    """Return the memory of each rank: of its GPU, or its share of RAM; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    n_bytes = memory_bytes(device)
    return n_bytes and n_bytes // distributed.ranks().local_world_size


def gpu_name(kind: str) -> str:
    """Return the name of a device that is not the CPU."""
    return torch.cuda.get_device_name() if kind == "cuda" else kind


def torch_version() -> str:
    """Return the version of torch."""
    return str(torch.__version__)


def describe_device(device: Device) -> dict[str, str | int]:
    """Return what determines the last bits of results; stored in training states."""
    return {
        "torch": torch_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "threads": n_threads(),
    }


def set_threads(n: int | None) -> None:
    """Set torch's CPU threads, at most one per CPU; None sets `default_threads`, or this rank's
    share of them, but never more than torch's own default. From now on the threads wait without
    spinning while the machine is busy."""
    if n is None:
        n = default_threads(shared_by=distributed.ranks().local_world_size)
        n = n if distributed.launched() else min(n, n_threads())  # torchrun sets 1
    if (n := min(n, cpu_count())) != n_threads():
        torch.set_num_threads(n)
    watch_load(n)


def n_threads() -> int:
    """Return torch's number of CPU threads."""
    return torch.get_num_threads()
