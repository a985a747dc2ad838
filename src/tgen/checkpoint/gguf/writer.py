"""Writing GGUF files, llama.cpp's model format."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgen.checkpoint.dtypes import Array, Floats
from tgen.checkpoint.gguf import config_fields, rope_scaling, tensor_names
from tgen.checkpoint.gguf.architectures import ARCHITECTURES, check_supported, shares_head
from tgen.checkpoint.gguf.package import require_package
from tgen.checkpoint.gguf.quantization import DTYPES, choose_type, convert
from tgen.config import GgufType, ModelConfig


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
    stored: GgufType = "f32",
    tokenizer_fields: dict[str, Any] | None = None,
    name: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> Counter[GgufType]:
    """Write `arrays`, by tgen's names, to `path`; return the number of matrices of each type.

    Matrices have the type `stored` or another one, see `choose_type`; vectors and learned positions
    stay float32. Without `tokenizer_fields` the file works with token ids only.
    `progress` is called with the fraction written. Raises UsageError if the package gguf is
    missing, ModelError if llama.cpp does not support the model.
    """
    check_supported(config)
    gguf = require_package("writing GGUF")
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family].name)
    try:
        # llama.cpp needs the name of a tokenizer and accepts this one
        tokenizer_fields = tokenizer_fields or {"tokenizer.ggml.model": "no_vocab"}
        fields = config_fields.to_fields(config) | tokenizer_fields
        fields |= _file_fields(gguf, stored) | ({"general.name": name} if name else {})
        for key, value in fields.items():
            _add_field(writer, key, value)
        for tensor, factors in _rope_tensors(config).items():
            writer.add_tensor(tensor, factors)
        types: Counter[GgufType] = Counter()
        tied = shares_head(config)
        n, total = 0, sum(array.size for array in arrays.values())
        for tensor, array in tensor_names.to_gguf_arrays(config, arrays):
            kind: GgufType = "f32"
            if array.ndim == 2 and "position" not in tensor:
                kind = choose_type(tensor, array.shape[1], stored, tied=tied)
                types[kind] += 1
            data = convert(gguf, tensor, array, kind)
            ggml_type = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor(tensor, data.view(_WrittenArray), raw_dtype=ggml_type)
            progress(min(1.0, (n := n + array.size) / total))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        return types
    finally:
        writer.close()


def _file_fields(gguf: Any, stored: GgufType) -> dict[str, Any]:
    name = f"{'ALL' if stored == 'f32' else 'MOSTLY'}_{stored.upper()}"
    fields = {"general.file_type": gguf.LlamaFileType[name].value}
    if stored not in DTYPES:
        fields["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    return fields


def _rope_tensors(config: ModelConfig) -> dict[str, Floats]:
    """Return the tensors that hold parameters of the RoPE scaling."""
    scaling = config.rope_scaling
    if scaling and scaling.kind == "llama3":
        divisors = rope_scaling.compute_divisors(config.rope_theta, config.head_dim, scaling)
        return {tensor_names.ROPE_FREQS: divisors}
    if scaling and scaling.kind == "longrope":
        factors = scaling.short_factor, scaling.long_factor
        names = tensor_names.SHORT_FACTORS, tensor_names.LONG_FACTORS
        return {n: np.array(f, np.float32) for n, f in zip(names, factors, strict=True)}
    return {}


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
