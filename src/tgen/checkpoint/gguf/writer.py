"""Writing GGUF files, llama.cpp's model format, with its choice of a quantized type per matrix.

The package gguf rounds to the types with blocks of 32 weights. It cannot round to Q6_K, which is
done here as in llama.cpp's `quantize_row_q6_K_ref` (ggml/src/ggml-quants.c).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Array, Dtype, Floats, cast
from tgen.checkpoint.gguf import config_fields, tensor_names
from tgen.checkpoint.gguf.architectures import ARCHITECTURES, check_supported, shares_head
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix, Rows
from tgen.config import GgufType, ModelConfig
from tgen.errors import ModelError

DTYPES: dict[GgufType, Dtype] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_Q6K_BLOCK, _Q6K_GROUP = 256, 16  # weights that share a float16 scale; an 8-bit factor of it
_TINY = 1e-15  # llama.cpp stores groups of smaller weights as zeros
_VALUES_AT_ONCE = 1 << 18


def choose_type(name: str, n_columns: int, stored: GgufType, *, tied: bool) -> GgufType:
    """Return the type of the matrix `name`, llama.cpp's name, in a file of the type `stored`.

    As llama.cpp's quantization does: the output matrix, or the token embedding that serves as it,
    has 6 bits at least. Rows that are not whole blocks are stored as Q8_0 instead of Q6_K, and as
    float16 if they are not whole blocks of 32.
    """
    if stored in DTYPES:
        return stored
    is_output = name == ("token_embd.weight" if tied else "output.weight")
    wanted: GgufType = "q6_k" if is_output and stored != "q8_0" else stored
    if wanted == "q6_k" and n_columns % _Q6K_BLOCK:
        wanted = "q8_0"
    return "f16" if n_columns % 32 else wanted


def convert(gguf: Any, name: str, array: Array, stored: GgufType) -> Array:
    """Convert a matrix: floats, bfloat16 bits as bytes, or bytes of quantized blocks.

    Raises ModelError, with the tensor's `name`, for values too large for the type.
    """
    if stored in DTYPES:
        data = np.ascontiguousarray(cast(name, array, DTYPES[stored]))
        return data.view(np.uint8) if stored == "bf16" else data
    wide = cast(name, array, "float32")
    ggml_type = gguf.GGMLQuantizationType[stored.upper()]
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        data = _to_q6_k(wide) if stored == "q6_k" else gguf.quants.quantize(wide, ggml_type)
    if not QuantizedMatrix([Rows(data, ggml_type.value)], wide.shape[1]).is_finite():
        largest = float(np.abs(wide).max())
        raise ModelError(f"{name}: {largest:.4g} is too large for {stored}", "use --type f32")
    return data


def _to_q6_k(matrix: Floats) -> NDArray[np.uint8]:
    """(m, n) -> (m, n / 256 * 210), some rows at a time."""
    n_rows = max(1, _VALUES_AT_ONCE // matrix.shape[1])
    parts = [_q6_k_rows(matrix[i : i + n_rows]) for i in range(0, len(matrix), n_rows)]
    return np.concatenate(parts)


def _q6_k_rows(rows: Floats) -> NDArray[np.uint8]:
    groups = np.ascontiguousarray(rows).reshape(-1, _Q6K_BLOCK // _Q6K_GROUP, _Q6K_GROUP)
    scales = _best_scales(groups)  # (blocks, 16)
    largest = _largest(scales)  # (blocks, 1)
    zero = np.abs(largest) < _TINY
    inverse = np.float32(-128) / np.where(zero, 1, largest)
    block_scales = np.where(zero, 0, 1 / inverse).astype(np.float16)
    factors = np.where(zero, 0, np.minimum(127, np.rint(inverse * scales))).astype(np.int8)
    steps = (block_scales.astype(np.float32) * factors)[:, :, None]
    levels = np.clip(np.rint(groups / np.where(steps == 0, 1, steps)), -32, 31) + 32
    numbers = np.where(steps == 0, 0, levels).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = numbers & 15, numbers >> 4
    parts = [  # (blocks, 128), (blocks, 64), (blocks, 16), (blocks, 2)
        (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128),
        (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(
            -1, 64
        ),
        factors.view(np.uint8),
        block_scales.view(np.uint8),
    ]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _best_scales(groups: Floats) -> Floats:
    """Return each group's scale with the least squared error, weighted by the squared weights, of
    19 candidates: (..., 16) -> (...)."""
    values = np.ascontiguousarray(np.moveaxis(groups, -1, 0))  # sums add in llama.cpp's order
    largest = _largest(groups)[..., 0]
    tiny = np.abs(largest) < _TINY
    cubes, squares = values * values * values, values * values
    scales = best = np.zeros(largest.shape, np.float32)
    for change in [0, *range(-9, 0), *range(1, 10)]:
        factor = -(np.float32(32) + np.float32(0.1) * np.float32(change))
        levels = np.clip(np.rint(factor / np.where(tiny, 1, largest) * values), -32, 31)
        dot, norm = (cubes * levels).sum(0), (squares * levels * levels).sum(0)
        better = (norm > 0) & (dot * dot > best * norm)
        scale = dot / np.where(better, norm, 1)
        scales, best = np.where(better, scale, scales), np.where(better, scale * dot, best)
    return np.where(tiny, np.float32(0), scales)


def _largest(values: Floats) -> Floats:
    """Return the value of the largest magnitude, with its sign: (..., n) -> (..., 1)."""
    return np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)


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
    fields: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[float], None] = lambda _: None,
) -> Counter[GgufType]:
    """Write `arrays`, by tgen's names, to `path`; return the number of matrices of each type.

    Matrices have the type `stored` or another one, see `choose_type`; vectors and learned positions
    stay float32. Without `tokenizer_fields` the file works with token ids only.
    `fields` describe the model. `progress` is called with the fraction written. Raises ModelError
    if llama.cpp does not support the model.
    """
    import gguf

    check_supported(config)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family].name)
    try:
        # llama.cpp needs the name of a tokenizer and accepts this one
        tokenizer_fields = tokenizer_fields or {"tokenizer.ggml.model": "no_vocab"}
        values = config_fields.to_fields(config) | tokenizer_fields | dict(fields)
        values |= _file_fields(gguf, stored) | ({"general.name": name} if name else {})
        for key, value in values.items():
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
        divisors = config_fields.compute_divisors(config.rope_theta, config.head_dim, scaling)
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
        writer.add_string(key, value.encode(errors="replace").decode())  # a name of any bytes
    else:
        writer.add_array(key, value)
