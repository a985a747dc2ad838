"""llama.cpp's architectures: what each supports, its tensor names and shapes, both ways.

The tensor names are the same for all architectures. llama.cpp's `llama` rotates the neighbors
(x_2i, x_2i+1), tgen and its other architectures rotate (x_i, x_i+D/2): its q and k are permuted.
To add a family, add it to `ARCHITECTURES`, and what llama.cpp lacks to `check_supported`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tgen.checkpoint.dtypes import Array, dtype_of, to_float32
from tgen.checkpoint.hf import families as hf_families
from tgen.config import ModelConfig
from tgen.errors import ModelError

Shape = tuple[int, ...]

# tgen's family -> llama.cpp's architecture. Its llama has no sliding window: a mistral fits only
# if its context is not longer than the window.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Families whose biases are optional: config field -> a tensor that only exists with the bias.
OPTIONAL_BIASES = {
    "llama": {
        "attention_bias": "blk.0.attn_q.bias",
        "output_bias": "blk.0.attn_output.bias",
        "feed_forward_bias": "blk.0.ffn_up.bias",
    }
}
ROPE_FREQS = "rope_freqs.weight"
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.qkv_proj": "attn_qkv",
    "attention.o_proj": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}


class GgufTensor(NamedTuple):
    """One of llama.cpp's tensors, a slice of one of tgen's."""

    name: str
    shape: Shape
    interleaved_heads: int  # heads whose two halves are interleaved; 0: tgen's order


def check_supported(config: ModelConfig) -> None:
    """Raise ModelError naming the first feature that llama.cpp cannot compute."""
    family = config.family
    architecture = ARCHITECTURES.get(family)
    scaling, window = config.rope_scaling, config.sliding_window
    reasons = {
        f"post-norm layers, as in the {family} family": config.post_norm,
        f"the {family} family": architecture is None,
        f"activation {config.activation} in gpt2": config.activation not in ("gelu_tanh", "swiglu"),
        f"attention_bias in {family}": family == "qwen3" and config.attention_bias,
        f"head_dim={config.head_dim} in {family}": (
            architecture == "qwen2" and config.n_heads * config.head_dim != config.d_model
        ),
        f"Llama 3 RoPE scaling in {family}": (
            architecture != "llama" and scaling is not None and scaling.kind == "llama3"
        ),
        f"a sliding window of {window} in {family}": (
            window is not None and window < config.context_length
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(
                f"llama.cpp does not support {reason}",
                f"use --to transformers, or train {', '.join(ARCHITECTURES)} with `tgen train`",
            )


def tensor_mappings(config: ModelConfig) -> Iterator[tuple[str, list[GgufTensor]]]:
    """Yield each of tgen's tensors with the llama.cpp tensors that are stacked to make it."""
    interleaved = ARCHITECTURES[config.family] == "llama"
    heads = (config.n_heads, config.n_kv_heads, 0) if interleaved else (0, 0, 0)
    for mapping in hf_families.tensor_mappings(config):
        (ours,) = mapping.ours
        prefix, stem, part = _split_name(ours)
        shapes = [shape[::-1] if mapping.transposed else shape for shape in mapping.shapes]
        if len(shapes) == 1:
            yield ours, [GgufTensor(f"{prefix}{_NAMES[stem]}.{part}", shapes[0], 0)]
        else:
            names = [f"{prefix}attn_{letter}.{part}" for letter in "qkv"]
            yield ours, list(map(GgufTensor, names, shapes, heads))


def to_gguf_arrays(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield tgen's arrays under llama.cpp's names, contiguous, one at a time."""
    for ours, tensors in tensor_mappings(config):
        start = 0
        for name, shape, heads in tensors:
            part = arrays[ours][start : start + shape[0]]
            if heads:  # (heads, halves, D / 2, ...) -> (heads, D / 2, halves, ...)
                split = part.reshape(heads, 2, -1, *part.shape[1:])
                part = split.swapaxes(1, 2).reshape(part.shape)
            yield name, np.ascontiguousarray(part)
            start += shape[0]


def from_gguf_arrays(config: ModelConfig, arrays: dict[str, Array]) -> dict[str, Array]:
    """Stack llama.cpp's arrays to tgen's, emptying `arrays`; `check_shapes` has passed."""
    out: dict[str, Array] = {}
    for ours, tensors in tensor_mappings(config):
        parts = [arrays.pop(tensor.name) for tensor in tensors]
        if len({dtype_of(part) for part in parts}) > 1:
            parts = [to_float32(part) for part in parts]
        for i, (part, tensor) in enumerate(zip(parts, tensors, strict=True)):
            if heads := tensor.interleaved_heads:  # see `to_gguf_arrays`
                split = part.reshape(heads, -1, 2, *part.shape[1:])
                parts[i] = split.swapaxes(1, 2).reshape(part.shape)
        out[ours] = np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return out


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    hint = "use another model: this one is damaged or not supported"
    if config.n_layers > len(shapes):  # do not build billions of names
        raise ModelError(f"it has {config.n_layers:,} layers but {len(shapes):,} tensors", hint)
    expected = {t.name: t.shape for _, tensors in tensor_mappings(config) for t in tensors}
    if differences := hf_families.describe_differences(expected, shapes, {ROPE_FREQS}):
        raise ModelError(f"its tensors and its fields disagree: {differences}", hint)


def _split_name(ours: str) -> tuple[str, str, str]:
    """blocks.3.attention.o_proj.bias -> blk.3., attention.o_proj, bias."""
    stem, _, part = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return "", stem, part
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.", stem, part
