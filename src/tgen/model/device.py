"""Where the model runs."""

import os

import torch

from tgen import distributed
from tgen.errors import UsageError
from tgen.model.cpu_count import cpu_count

Device = torch.device


def choose_device(name: str) -> Device:
    """`auto` takes a GPU where there is one; raises UsageError if the named one is not there."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        # Nothing carries its tensors between ranks.
        "mps": torch.backends.mps.is_available() and distributed.ranks().world_size == 1,
    }
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available.get(name, False):
        usable = ", ".join(kind for kind, there in available.items() if there)
        raise UsageError(f"device {name!r} is not there", f"this machine has {usable}")
    here = distributed.ranks()
    if name == "cuda" and distributed.launched():  # a GPU for each rank
        if here.local_world_size > (n_gpus := torch.cuda.device_count()):
            raise UsageError(
                f"there are {here.local_world_size} ranks on this machine, and {n_gpus} GPUs",
                "start as many as there are, or add --device cpu",
            )
        torch.cuda.set_device(here.local_rank)
    return torch.device(name)


def memory_bytes(device: Device) -> int | None:
    """All the memory beside the processor; None where it cannot be told, as on a GPU."""
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rank_bytes(device: Device) -> int | None:
    """The memory that each rank may have: of its GPU, or its part beside the processor."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = memory_bytes(device)
    return memory and memory // distributed.ranks().local_world_size


def gpu_name(kind: str) -> str:
    """What computes on a device that is no processor."""
    return torch.cuda.get_device_name() if kind == "cuda" else kind


def torch_version() -> str:
    """Of the library that computes."""
    return str(torch.__version__)


def describe_device(device: Device) -> dict[str, str | int]:
    """What the last bits of results depend on."""
    return {
        "torch": torch_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "threads": n_threads(),
    }


def set_threads(n: int | None) -> None:
    """Limits the processor threads that torch uses, to those there are; None: its own choice, or
    this rank's share of them."""
    if n is None and distributed.launched():  # torchrun says 1
        n = cpu_count(shared_by=distributed.ranks().local_world_size)
    if n is not None:
        torch.set_num_threads(min(n, cpu_count()))


def n_threads() -> int:
    """The processor threads that torch uses."""
    return torch.get_num_threads()
