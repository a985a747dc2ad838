"""The model as llama.cpp reads it, in its own file format, GGUF: without a vocabulary so far.

Its names are llama.cpp's for the family, and so is the order of the rows of q and k: where its
`llama` turns the neighbours (x_2i, x_2i+1), tgen and its `qwen3` turn (x_i, x_i+D/2).
"""

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig, RopeScaling, StoredAs
from tgen.errors import ModelError, UsageError

Array = NDArray[Any]
Floats = NDArray[np.float32]

_KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # of matrices; the rest is F32
_INT8_GROUP = 32  # numbers that share a scale
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


def write_gguf(
    path: Path,
    config: ModelConfig,
    arrays: Mapping[str, Array],
    *,
    stored: StoredAs = "float32",
) -> None:
    """Writes `arrays`, by our names, to `path`, matrices as `stored` says (int8: Q8_0).

    A matrix whose rows are no multiple of 32 long stays float32 under int8, as do the learnt
    positions always. Raises UsageError if the package gguf is missing, ModelError if llama.cpp
    has no place for this model.
    """
    check(config)
    if find_spec("gguf") is None:
        raise UsageError("writing GGUF needs the gguf package", "pip install 'tgen-lm[gguf]'")
    import gguf

    writer = gguf.GGUFWriter(path, config.family)
    try:
        _describe(writer, config)
        for name, array in _tensors(config, arrays):
            kind = _KINDS["float32" if array.ndim == 1 or "position" in name else stored]
            if kind == "Q8_0" and array.shape[1] % _INT8_GROUP:
                kind = "F32"
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, number), raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def check(config: ModelConfig) -> None:
    """Raises ModelError, naming what it is, if llama.cpp could not compute this model."""
    qwen3 = config.family == "qwen3"
    reasons = {
        f"norms after each addition, which make the {config.family} family": config.post_norm,
        f"activation {config.activation} in gpt2": config.activation not in ("gelu_tanh", "swiglu"),
        "attention_bias in qwen3": qwen3 and config.attention_bias,
        "rope_scaling in qwen3": qwen3 and config.rope_scaling is not None,
    }
    refused = [reason for reason, holds in reasons.items() if holds]
    if refused:
        raise ModelError(
            f"llama.cpp has no {refused[0]}",
            "it runs the gpt2, llama and qwen3 families as `tgen train` makes them",
        )


def _describe(writer: Any, config: ModelConfig) -> None:
    """The shape; llama.cpp wants a tokenizer named, and takes it that there is none."""
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if config.norm == "rms_norm":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if config.position == "rotary":
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("no_vocab")


def _tensors(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Floats]]:
    """Every tensor under llama.cpp's name, contiguous."""
    if config.rope_scaling:
        yield "rope_freqs.weight", _frequency_divisors(config, config.rope_scaling)
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for ours, array in arrays.items():
        prefix, stem, part = _split(ours)
        wide = _to_float32(array)
        if stem != "attention.qkv_proj" or config.family == "gpt2":
            yield f"{prefix}{_NAMES[stem]}.{part}", wide
            continue
        q, k, v = np.split(wide, [n_q, n_q + n_kv])
        if config.family == "llama":
            q, k = _interleaved(q, config.n_heads), _interleaved(k, config.n_kv_heads)
        for name, rows in (("q", q), ("k", k), ("v", v)):
            yield f"{prefix}attn_{name}.{part}", np.ascontiguousarray(rows)


def _split(ours: str) -> tuple[str, str, str]:
    """blocks.3.attention.o_proj.bias -> blk.3., attention.o_proj, bias."""
    stem, _, part = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return "", stem, part
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.", stem, part


def _interleaved(rows: Floats, n_heads: int) -> Floats:
    """(heads * D, ...) -> the same, each head's halves in turns."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _frequency_divisors(config: ModelConfig, scaling: RopeScaling) -> Floats:
    """(D / 2,): what Llama 3's stretching divides each frequency by."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    turns = scaling.original_context_length / (2 * math.pi * config.rope_theta**exponents)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: turns so often that it stays
    return (1 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)


def _to_float32(array: Array) -> Floats:
    """float32, float16 or bfloat16 as uint16 bits -> float32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)
