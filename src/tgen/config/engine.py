"""Options for computing a model, shared by every command that opens one."""

from dataclasses import dataclass
from typing import Any, Literal

from tgen.config.option import MAX_THREADS, check_ranges, option
from tgen.config.sampling import CacheDtype, StoredAs

Device = Literal["auto", "cpu", "cuda", "mps"]
EngineKind = Literal["auto", "kernels", "torch"]
_PANEL = "Performance"


def device_option(panel: str = "") -> Any:
    """Declare `--device`."""
    return option("auto", "Device to run on.", "--device", panel=panel)


def threads_option(panel: str) -> Any:
    """Declare `--threads`."""
    return option(
        None,
        "Number of CPU threads.",
        "--threads",
        panel=panel,
        shown_default="all cores",
        low=1,
        high=MAX_THREADS,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The device, the threads and the data types of an engine; None lets `open_engine` choose."""

    device: Device = device_option(_PANEL)
    threads: int | None = threads_option(_PANEL)
    dtype: StoredAs | None = option(
        None,
        "Data type of the weights; float16 needs CUDA, int8 and int4 (smallest, fastest, least "
        "exact) need a CPU.",
        "--dtype",
        panel=_PANEL,
        shown_default="as stored",
    )
    cache_dtype: CacheDtype | None = option(
        None,
        "Data type of the KV cache, on a CPU; long texts are faster with float16; int8 takes half "
        "its memory and costs up to 0.002 bits per byte.",
        "--cache-dtype",
        panel=_PANEL,
        shown_default="float32 with float32 weights, else float16",
    )
    kind: EngineKind = "auto"

    def __post_init__(self) -> None:
        check_ranges(self)


DEFAULT_ENGINE = EngineOptions()
