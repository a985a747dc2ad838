"""llama.cpp's architectures: what each supports, its tensor names and shapes, both ways.

The tensor names are the same for all architectures. llama.cpp's `llama` rotates the neighbors
(x_2i, x_2i+1), tgen and its other architectures rotate (x_i, x_i+D/2): its q and k are permuted.
To add a family, add it to `ARCHITECTURES`, and what llama.cpp lacks to `check_supported`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tgen.checkpoint.dtypes import Array, dtype_of, to_float32
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.checkpoint.hf import families as hf_families
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError

Shape = tuple[int, ...]

# tgen's family -> llama.cpp's architecture. Its llama has no sliding window: a mistral fits only
# if its context is not longer than the window.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma3": "gemma3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "starcoder2": "starcoder2",
}
_ROTATE_NEIGHBORS = {"llama", "smollm3", "granite"}  # architectures
_NEED_HEAD = {"gptneox", "olmo2"}  # architectures without tied embeddings
# Families whose biases are optional: config field -> a tensor that only exists with the bias.
_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "output_bias": "blk.0.attn_output.bias",
    "feed_forward_bias": "blk.0.ffn_up.bias",
}
OPTIONAL_BIASES = {"llama": _BIASES, "granite": _BIASES}
NOPE_STEP = 4  # every fourth layer of a smollm3 does not rotate; llama.cpp has no field for it
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
    interleaved_heads: int  # heads whose two halves are interleaved; 0: tgen's order


class TensorMapping(NamedTuple):
    """Some of tgen's tensors and llama.cpp's that contain them, both stacked."""

    ours: tuple[str, ...]
    rows: tuple[int, ...]  # of each of ours
    tensors: list[GgufTensor]
    adds_one: bool  # llama.cpp's are larger by 1


def check_supported(config: ModelConfig) -> None:
    """Raise ModelError naming the first feature that llama.cpp cannot compute."""
    family = config.family
    architecture = ARCHITECTURES.get(family)
    scaling, window = config.rope_scaling, config.sliding_window
    kind = scaling.kind if scaling else ""
    gemma = family == "gemma3"
    biased = family not in OPTIONAL_BIASES and config.attention_bias
    reasons = {
        f"post-norm layers, as in the {family} family": config.post_norm,
        f"the {family} family": architecture is None,
        f"activation {config.activation} in {family}": (
            config.activation != FAMILIES[family]["activation"]
        ),
        f"attention_bias in {family}": biased and not FAMILIES[family]["attention_bias"],
        f"attention_bias=False in {family}": family == "gpt_neox" and not config.attention_bias,
        f"feed_forward_bias in {family}": family == "smollm3" and config.feed_forward_bias,
        f"head_dim={config.head_dim} in {family}": (
            architecture in ("qwen2", "olmo2", "granite")
            and config.n_heads * config.head_dim != config.d_model
        ),
        f"Llama 3 RoPE scaling in {family}": architecture != "llama" and kind == "llama3",
        f"{kind} RoPE scaling in {family}": (
            (kind == "longrope" and family != "phi3") or (gemma and kind not in ("", "linear"))
        ),
        f"YaRN with attention_factor={scaling.attention_factor if scaling else 1}": (
            scaling is not None
            and kind == "yarn"
            and not (scaling.truncate and _has_default_attention_factor(scaling))
        ),
        f"a sliding window of {window} in {family}": (
            family in ("mistral", "starcoder2")
            and window is not None
            and window < config.context_length
        ),
        f"sliding_layers={config.sliding_layers}": gemma and gemma_pattern(config) is None,
        f"attention_scale={config.attention_scale} in {family}": (
            gemma and not math.isclose(config.score_scale, _gemma_scale_of(config))
        ),
        f"an LM head of its own in {family}": gemma and not config.tied_embeddings,
        f"rope_layers={config.rope_layers}": (
            family == "smollm3" and not rotates_as_smollm3(config)
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(
                f"llama.cpp does not support {reason}",
                "use --to transformers; of the families that tgen trains, gpt2, llama and qwen3 "
                "can be exported",
            )


def gemma_pattern(config: ModelConfig) -> int | None:
    """Return n if every n-th layer, and no other, sees the whole context; None if there is none."""
    full = [config.window(layer) is None for layer in range(config.n_layers)]
    for n in range(1, config.n_layers + 2):
        if full == [(layer + 1) % n == 0 for layer in range(config.n_layers)]:
            return n
    return None


def gemma_scale(n_layers: int, *, d_model: int, n_heads: int, head_dim: int) -> float:
    """Return the attention scale that llama.cpp uses for a gemma3; the 27B model has 62 layers."""
    scale: float = (d_model / n_heads if n_layers == 62 else head_dim) ** -0.5
    return scale


def _gemma_scale_of(config: ModelConfig) -> float:
    return gemma_scale(
        config.n_layers,
        d_model=config.d_model,
        n_heads=config.n_heads,
        head_dim=config.head_dim,
    )


def describe_difference(config: ModelConfig) -> str:
    """Return how llama.cpp computes an exported model differently; empty if it does not."""
    window = config.sliding_window
    if config.family == "phi3" and window is not None and window < config.context_length:
        return f"llama.cpp ignores phi3's sliding window: texts over {window:,} tokens differ"
    return ""


def rotates_as_smollm3(config: ModelConfig) -> bool:
    """Return whether every fourth layer, and no other, does not rotate."""
    layers = range(config.n_layers)
    return all((config.rope(i) is None) == ((i + 1) % NOPE_STEP == 0) for i in layers)


def yarn_attention_factor(factor: float) -> float:
    """Return the factor of cosines and sines that llama.cpp uses for YaRN."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _has_default_attention_factor(scaling: RopeScaling) -> bool:
    return math.isclose(scaling.attention_factor, yarn_attention_factor(scaling.factor))


def tensor_mappings(config: ModelConfig) -> Iterator[TensorMapping]:
    """Yield the mappings of all tensors of a file, but an LM head that equals the embedding."""
    interleaved = ARCHITECTURES[config.family] in _ROTATE_NEIGHBORS
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
        yield TensorMapping(mapping.ours, mapping.rows, tensors, adds_one=adds_one)


def shares_head(config: ModelConfig) -> bool:
    """Return whether a file has no LM head, so that llama.cpp uses the token embedding."""
    return config.tied_embeddings and ARCHITECTURES[config.family] not in _NEED_HEAD


def to_gguf_arrays(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield tgen's arrays under llama.cpp's names, contiguous, one at a time."""
    for ours, _, tensors, adds_one in tensor_mappings(config):
        parts = [arrays[name] for name in ours]
        stacked = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if adds_one:
            stacked = to_float32(stacked) + np.float32(1)
        start = 0
        for name, shape, heads in tensors:
            part = stacked[start : start + shape[0]]
            if heads:  # (heads, halves, D / 2, ...) -> (heads, D / 2, halves, ...)
                split = part.reshape(heads, 2, -1, *part.shape[1:])
                part = split.swapaxes(1, 2).reshape(part.shape)
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
        if len({dtype_of(part) for part in parts}) > 1:
            parts = [to_float32(part) for part in parts]
        stacked = np.concatenate(parts) if len(parts) > 1 else parts[0]
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
        return part.reorder(lambda rows: _to_halves(rows, heads))
    split = part.reshape(heads, -1, 2, *part.shape[1:])
    return split.swapaxes(1, 2).reshape(part.shape)


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    hint = "use another model: this one is damaged or not supported"
    if config.n_layers > len(shapes):  # do not build billions of names
        raise ModelError(f"it has {config.n_layers:,} layers but {len(shapes):,} tensors", hint)
    mappings = tensor_mappings(config)
    expected = {tensor.name: tensor.shape for m in mappings for tensor in m.tensors}
    if differences := hf_families.describe_differences(expected, shapes, ROPE_TENSORS):
        raise ModelError(f"its tensors and its fields disagree: {differences}", hint)


def _split_name(ours: str) -> tuple[str, str, str]:
    """blocks.3.attention.o_proj.bias -> blk.3., attention.o_proj, bias."""
    stem, _, part = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return "", stem, part
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.", stem, part
