"""Options for computing a model, shared by every command that opens one; types of its weights."""

from dataclasses import dataclass
from typing import Any, Literal

from tgen.config.option import MAX_THREADS, check_ranges, option

Device = Literal["auto", "cpu", "cuda", "mps"]
EngineKind = Literal["auto", "kernels", "torch"]
# Dtype of the weights in memory.
StoredAs = Literal["float32", "float16", "bfloat16", "int8", "int4"]
CacheDtype = Literal["float32", "float16", "int8"]  # dtype of cached keys and values
# Type of the matrices in a GGUF file: llama.cpp's names in lower case.
GgufType = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_1", "q5_0", "q4_1", "q4_0"]
# Bytes per parameter, scales and minima included.
STORED_BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int8": 34 / 32,
    "int4": 20 / 32,
}
_PANEL = "Performance"


def output_dtype(dtype: StoredAs) -> StoredAs:
    """Return how the output matrix and the embedding are stored beside other weights."""
    return "int8" if dtype == "int4" else dtype


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
        "Data type of the weights; float16 needs CUDA, int8 and int4 a CPU. int4 is the smallest, "
        "the fastest for one text, and the least exact.",
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
