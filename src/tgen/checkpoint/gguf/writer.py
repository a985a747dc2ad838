"""Writing GGUF files, llama.cpp's model format."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tgen.checkpoint.dtypes import Array, Dtype, cast
from tgen.checkpoint.gguf import rope_scaling, tensor_names
from tgen.config import ModelConfig
from tgen.errors import UsageError

GgufType = Dtype | Literal["int8"]

_GGML_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's file type numbers
_INT8_GROUP = 32  # weights that share a scale


class _WrittenArray(np.ndarray[Any, Any]):
    """An array that names the system's error if it cannot be written, which numpy does not."""

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:  # noqa: A002, ARG002
        """Write the bytes to an open file."""
        fid.write(np.ascontiguousarray(self).view(np.uint8))


def write_gguf(
    path: Path,
    config: ModelConfig,
    arrays: Mapping[str, Array],
    *,
    stored: GgufType = "float32",
    tokenizer_fields: dict[str, Any] | None = None,
    name: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Write `arrays`, by tgen's names, to `path`; matrices in the dtype `stored` (int8: Q8_0).

    Vectors and learned positions stay float32, and so do matrices under int8 whose rows are not a
    multiple of 32 long. Without `tokenizer_fields` the file works with token ids only. `progress`
    is called with the fraction written. Raises UsageError if the package gguf is missing,
    ModelError if llama.cpp does not support the model.
    """
    tensor_names.check_supported(config)
    gguf = require_package("writing GGUF")
    writer = gguf.GGUFWriter(path, tensor_names.ARCHITECTURES[config.family])
    try:
        # llama.cpp needs the name of a tokenizer and accepts this one
        tokenizer_fields = tokenizer_fields or {"tokenizer.ggml.model": "no_vocab"}
        for key, value in (_config_fields(config, stored, name) | tokenizer_fields).items():
            _add_field(writer, key, value)
        if config.rope_scaling and config.rope_scaling.kind == "llama3":
            divisors = rope_scaling.compute_divisors(
                config.rope_theta, config.head_dim, config.rope_scaling
            )
            writer.add_tensor(tensor_names.ROPE_FREQS, divisors)
        n, total = 0, sum(array.size for array in arrays.values())
        for tensor, array in tensor_names.to_gguf_arrays(config, arrays):
            narrow = array.ndim > 1 and "position" not in tensor
            if stored == "int8" and array.shape[-1] % _INT8_GROUP:
                narrow = False
            _add_tensor(gguf, writer, tensor, array, stored if narrow else "float32")
            progress((n := n + array.size) / total)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def require_package(purpose: str) -> Any:
    """Return the package gguf; raises UsageError if it is not installed."""
    if find_spec("gguf") is None:
        raise UsageError(f"{purpose} needs the gguf package", "pip install 'tgen-lm[gguf]'")
    import gguf

    return gguf


def _config_fields(config: ModelConfig, stored: GgufType, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    rms = "_rms" if config.norm == "rms_norm" else ""
    fields[f"attention.layer_norm{rms}_epsilon"] = config.norm_eps
    if config.position == "rotary":
        fields["rope.freq_base"] = config.rope_theta
        fields["rope.dimension_count"] = config.head_dim
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling and scaling.kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    architecture = tensor_names.ARCHITECTURES[config.family]
    fields = {f"{architecture}.{key}": value for key, value in fields.items()}
    if scaling and scaling.kind == "llama3":
        fields |= rope_scaling.to_fields(scaling)
    fields["general.file_type"] = _FILE_TYPES[_GGML_TYPES[stored]]
    if stored == "int8":
        fields["general.quantization_version"] = 2
    return fields | ({"general.name": name} if name else {})


def _add_field(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float) and key.startswith("tgen."):
        writer.add_float64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(gguf: Any, writer: Any, name: str, array: Array, stored: GgufType) -> None:
    ggml_type = gguf.GGMLQuantizationType[_GGML_TYPES[stored]]
    if stored == "int8":
        data: Array = gguf.quants.quantize(cast(name, array, "float32"), ggml_type)
    else:
        data = np.ascontiguousarray(cast(name, array, stored))
        if stored == "bfloat16":
            data = data.view(np.uint8)
    writer.add_tensor(name, data.view(_WrittenArray), raw_dtype=ggml_type)
