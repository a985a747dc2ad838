"""llama.cpp's tensors: names, which are the same for all architectures, and shapes, both ways.

The rows of q and k are interleaved in architectures that rotate neighbors.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tgen.checkpoint.dtypes import Array
from tgen.checkpoint.gguf.architectures import ARCHITECTURES, shares_head
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.checkpoint.hf import tensor_names as hf_names
from tgen.checkpoint.tensor_mapping import Shape, TensorMapping, separate_halves, shapes_by_name
from tgen.config import ModelConfig
from tgen.errors import ModelError

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


def tensor_mappings(config: ModelConfig) -> Iterator[TensorMapping]:
    """Yield the mappings of all tensors of a file, but an LM head that equals the embedding."""
    for mapping in hf_names.tensor_mappings(config):
        prefix, stem, part = _split_name(mapping.ours[-1])  # of a fused gate: up_proj
        shapes = tuple(shape[::-1] if mapping.transposed else shape for shape in mapping.shapes)
        architecture = ARCHITECTURES[config.family]
        own = _NAMES | {"feed_forward_norm": architecture.feed_forward_norm}
        names = [f"attn_{letter}" for letter in "qkv"] if len(shapes) == 3 else [own[stem]]
        rotates_neighbors = architecture.rotates_neighbors and len(shapes) == 3
        yield TensorMapping(
            mapping.ours,
            mapping.rows,
            tuple(f"{prefix}{name}.{part}" for name in names),
            shapes,
            interleaved_halves=(config.n_heads, config.n_kv_heads, 0) if rotates_neighbors else (),
            n_rotated=config.n_rotated,
            adds_one=config.norm_adds_one and len(shapes[0]) == 1 and part == "weight",
        )


def to_gguf_arrays(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield tgen's arrays under llama.cpp's names, contiguous, one at a time."""
    for mapping in tensor_mappings(config):
        yield from mapping.to_theirs(arrays)
    if config.tied_embeddings and not shares_head(config):
        yield f"{_NAMES['lm_head']}.weight", arrays["token_embedding.weight"][:]


def from_gguf_arrays(
    config: ModelConfig, arrays: dict[str, Array | QuantizedMatrix]
) -> dict[str, Array]:
    """Stack llama.cpp's arrays to tgen's, emptying `arrays`; `check_shapes` has passed.

    A quantized matrix stays quantized. It is used like an array, and typed as one.
    """
    out: dict[str, Any] = {}
    for mapping in tensor_mappings(config):
        parts: list[Any] = [arrays.pop(name) for name in mapping.theirs]
        quantized = any(isinstance(part, QuantizedMatrix) for part in parts)
        out |= _stack_quantized(mapping, parts) if quantized else mapping.to_ours(parts)
    return out


def _stack_quantized(mapping: TensorMapping, parts: list[Any]) -> Iterator[tuple[str, Any]]:
    for i, heads in enumerate(mapping.interleaved_halves):
        if heads and isinstance(parts[i], QuantizedMatrix):
            parts[i] = parts[i].map_rows(
                partial(separate_halves, heads=heads, n_rotated=mapping.n_rotated)
            )
        else:
            parts[i] = separate_halves(parts[i], heads, mapping.n_rotated)
    stacked = parts[0] if len(parts) == 1 else QuantizedMatrix.stack(parts)
    split = stacked.split(mapping.rows) if len(mapping.rows) > 1 else [stacked]
    return zip(mapping.ours, split, strict=True)


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    expected = shapes_by_name(tensor_mappings(config))
    if differences := hf_names.describe_differences(expected, shapes, ROPE_TENSORS):
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
