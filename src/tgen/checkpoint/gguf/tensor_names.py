"""llama.cpp's tensors: names, which are the same for all architectures, and shapes, both ways.

The rows of q and k are interleaved in architectures that rotate neighbors.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tgen.checkpoint.dtypes import Array, stack, to_float32
from tgen.checkpoint.gguf.architectures import ARCHITECTURES, shares_head
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.checkpoint.hf import families as hf_families
from tgen.config import ModelConfig
from tgen.errors import ModelError

Shape = tuple[int, ...]

ROPE_FREQS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = {ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS}
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "attention_output_norm": "post_attention_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.qkv_proj": "attn_qkv",
    "attention.o_proj": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}


class GgufTensor(NamedTuple):
    """One of llama.cpp's tensors, a slice of one of tgen's."""

    name: str
    shape: Shape
    interleaved_halves: int  # heads whose two halves are interleaved; 0: tgen's order


class GgufMapping(NamedTuple):
    """Some of tgen's tensors and llama.cpp's that contain them, both stacked."""

    ours: tuple[str, ...]
    rows: tuple[int, ...]  # of each of ours
    tensors: list[GgufTensor]
    adds_one: bool  # llama.cpp's are larger by 1


def tensor_mappings(config: ModelConfig) -> Iterator[GgufMapping]:
    """Yield the mappings of all tensors of a file, but an LM head that equals the embedding."""
    interleaved = ARCHITECTURES[config.family].rotates_neighbors
    heads = (config.n_heads, config.n_kv_heads, 0) if interleaved else (0, 0, 0)
    for mapping in hf_families.tensor_mappings(config):
        prefix, stem, part = _split_name(mapping.ours[-1])  # of a fused gate: up_proj
        shapes = [shape[::-1] if mapping.transposed else shape for shape in mapping.shapes]
        if len(shapes) == 1:
            tensors = [GgufTensor(f"{prefix}{_NAMES[stem]}.{part}", shapes[0], 0)]
        else:
            names = [f"{prefix}attn_{letter}.{part}" for letter in "qkv"]
            tensors = list(map(GgufTensor, names, shapes, heads))
        adds_one = config.norm_adds_one and len(shapes[0]) == 1 and part == "weight"
        yield GgufMapping(mapping.ours, mapping.rows, tensors, adds_one=adds_one)


def to_gguf_arrays(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield tgen's arrays under llama.cpp's names, contiguous, one at a time."""
    for ours, _, tensors, adds_one in tensor_mappings(config):
        stacked = stack([arrays[name] for name in ours])
        if adds_one:
            stacked = to_float32(stacked) + np.float32(1)
        start = 0
        for name, shape, heads in tensors:
            part = stacked[start : start + shape[0]]
            if heads:
                part = _transpose_heads(part, heads, 2)
            yield name, np.ascontiguousarray(part)
            start += shape[0]
    if config.tied_embeddings and not shares_head(config):
        yield f"{_NAMES['lm_head']}.weight", arrays["token_embedding.weight"][:]


def from_gguf_arrays(
    config: ModelConfig, arrays: dict[str, Array | QuantizedMatrix]
) -> dict[str, Array]:
    """Stack llama.cpp's arrays to tgen's, emptying `arrays`; `check_shapes` has passed.

    A quantized matrix stays quantized. It is used like an array, and typed as one.
    """
    out: dict[str, Any] = {}
    for ours, rows, tensors, adds_one in tensor_mappings(config):
        parts = [_to_halves(arrays.pop(name), heads) for name, _, heads in tensors]
        if any(isinstance(part, QuantizedMatrix) for part in parts):
            stacked = parts[0] if len(parts) == 1 else QuantizedMatrix.stack(parts)
            split = stacked.split(rows) if len(rows) > 1 else [stacked]
            out |= zip(ours, split, strict=True)
            continue
        stacked = stack(parts)
        if adds_one:
            stacked = to_float32(stacked) - np.float32(1)
        pieces = np.split(stacked, np.cumsum(rows)[:-1])
        out |= zip(ours, map(np.ascontiguousarray, pieces), strict=True)
    return out


def _to_halves(part: Any, heads: int) -> Any:
    """Undo the interleaving of `to_gguf_arrays`."""
    if not heads:
        return part
    if isinstance(part, QuantizedMatrix):
        return part.map_rows(lambda rows: _to_halves(rows, heads))
    return _transpose_heads(part, heads, len(part) // heads // 2)


def _transpose_heads(rows: Array, heads: int, n: int) -> Array:
    """Transpose the rows of each head: (heads, n, m, ...) -> (heads, m, n, ...)."""
    split = rows.reshape(heads, n, -1, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    mappings = tensor_mappings(config)
    expected = {tensor.name: tensor.shape for m in mappings for tensor in m.tensors}
    if differences := hf_families.describe_differences(expected, shapes, ROPE_TENSORS):
        raise ModelError(
            f"its tensors and its fields disagree: {differences}",
            "use another model: this one is damaged or not supported",
        )


def _split_name(ours: str) -> tuple[str, str, str]:
    """blocks.3.attention.o_proj.bias -> blk.3., attention.o_proj, bias."""
    stem, _, part = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return "", stem, part
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.", stem, part
