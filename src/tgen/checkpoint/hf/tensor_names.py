"""The families' tensor names and shapes on disk, both ways.

tgen's own names are the keys of `Transformer.state_dict()`; theirs are transformers'. A `TensorMapping` says
which of their tensors, stacked, make one of ours, and whether they store the transpose.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig
from tgen.errors import ModelError

Arrays = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

# Masks and tables that some versions of transformers saved beside the weights.
_NO_WEIGHTS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$|.*position_ids$")


class TensorMapping(NamedTuple):
    """One of our tensors and where it lives in their layout."""

    ours: str
    theirs: tuple[str, ...]  # stacked along the first axis
    shapes: tuple[Shape, ...]  # of each of theirs, as stored
    transposed: bool = False


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    """All tensors of a model; what it lists is exactly what a file must hold."""
    C, V = config.d_model, config.vocab_size
    names = _NAMES[_layout(config)]
    table = [TensorMapping("token_embedding.weight", (names["embedding"],), ((V, C),))]
    if config.position == "learned":
        shape = (config.context_length, C)
        table.append(TensorMapping("position_embedding.weight", (names["positions"],), (shape,)))
    for layer in range(config.n_layers):
        table += _block(config, f"blocks.{layer}.", names["block"].format(layer), names)
    if not config.post_norm:
        table += _norm(config, "final_norm", names["final_norm"], C)
    if not config.tied_embeddings:
        table.append(TensorMapping("lm_head.weight", ("lm_head.weight",), ((V, C),)))
    return table


def _block(
    config: ModelConfig, ours: str, theirs: str, names: Mapping[str, str]
) -> list[TensorMapping]:
    C, F = config.d_model, config.d_ff
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    old = _layout(config) != "llama"
    qkv = [(f"self_attn.{name}_proj", n) for name, n in zip("qkv", (n_q, n_kv, n_kv), strict=True)]
    if old:
        qkv = [("attn.c_attn", n_q + 2 * n_kv)]
    matrices = [  # ours, theirs with their outputs, inputs, bias
        ("attention.qkv_proj", qkv, C, config.attention_bias),
        ("attention.o_proj", [(names["output"], C)], n_q, config.output_bias),
        ("feed_forward.gate_proj", [("mlp.gate_proj", F)], C, config.feed_forward_bias),
        ("feed_forward.up_proj", [(names["up"], F)], C, config.feed_forward_bias),
        ("feed_forward.down_proj", [(names["down"], C)], F, config.feed_forward_bias),
    ]
    if config.activation != "swiglu":
        del matrices[2]
    table = []
    for our, parts, n_in, bias in matrices:
        shapes: tuple[Shape, ...] = tuple((n_in, n) if old else (n, n_in) for _, n in parts)
        paths = [theirs + part for part, _ in parts]
        table.append(
            TensorMapping(f"{ours}{our}.weight", tuple(f"{p}.weight" for p in paths), shapes, old)
        )
        if bias:
            shapes = tuple((n,) for _, n in parts)
            table.append(
                TensorMapping(f"{ours}{our}.bias", tuple(f"{p}.bias" for p in paths), shapes)
            )
    for norm in ("attention_norm", "feed_forward_norm"):
        table += _norm(config, ours + norm, theirs + names[norm], C)
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        path = f"{theirs}self_attn.{norm}.weight"
        table.append(
            TensorMapping(f"{ours}attention.{norm}.weight", (path,), ((config.head_dim,),))
        )
    return table


def _layout(config: ModelConfig) -> str:
    """Which names a family uses; the two old ones store (in, out) and q, k, v as one matrix."""
    return config.family if config.family in ("classic", "gpt2") else "llama"


_NAMES = {
    "classic": dict(embedding="tokens_embed.weight", positions="positions_embed.weight",
                    block="h.{}.", output="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj",
                    attention_norm="ln_1", feed_forward_norm="ln_2", final_norm=""),
    "gpt2": dict(embedding="wte.weight", positions="wpe.weight",
                 block="h.{}.", output="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj",
                 attention_norm="ln_1", feed_forward_norm="ln_2", final_norm="ln_f"),
    "llama": dict(embedding="model.embed_tokens.weight", positions="",
                  block="model.layers.{}.", output="self_attn.o_proj", up="mlp.up_proj",
                  down="mlp.down_proj", attention_norm="input_layernorm",
                  feed_forward_norm="post_attention_layernorm", final_norm="model.norm"),
}  # fmt: skip


def _norm(config: ModelConfig, ours: str, theirs: str, size: int) -> list[TensorMapping]:
    parts = ["weight"] if config.norm == "rms_norm" else ["weight", "bias"]
    return [TensorMapping(f"{ours}.{part}", (f"{theirs}.{part}",), ((size,),)) for part in parts]


def to_layout(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Our arrays under their names, contiguous."""
    out: Arrays = {}
    for row in tensor_mappings(config):
        start = 0
        for name, shape in zip(row.theirs, row.shapes, strict=True):
            n = shape[-1] if row.transposed else shape[0]
            part = arrays[row.ours][start : start + n]
            out[name] = np.ascontiguousarray(part.T if row.transposed else part)
            start += n
    if config.position == "sinusoidal":  # they keep a table where we compute one
        positions = np.arange(config.context_length)[:, None]
        angles = positions / 10_000.0 ** (np.arange(0, config.d_model, 2) / config.d_model)
        table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), -1)
        out[_NAMES["classic"]["positions"]] = table.astype(np.float32)
    return out


def from_layout(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Their arrays under our names; `check` has passed."""
    out: Arrays = {}
    for row in tensor_mappings(config):
        parts = [arrays[name].T if row.transposed else arrays[name] for name in row.theirs]
        out[row.ours] = np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return out


def plain_name(name: str) -> str:
    """A tensor's name without the prefix that only some writers of the old layouts put there."""
    return name.removeprefix("transformer.")


def check(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises ModelError with the first differences if a file's tensors are not the model's."""
    if config.n_layers > len(shapes):  # whose names need not be thought of
        raise ModelError(
            f"config.json has {config.n_layers:,} layers, the weights {len(shapes):,} tensors",
            "the directory mixes two models or is damaged: fetch or train it again",
        )
    wanted = {
        name: shape
        for row in tensor_mappings(config)
        for name, shape in zip(row.theirs, row.shapes, strict=True)
    }
    allowed = {"lm_head.weight"} if config.tied_embeddings else set()
    if config.position == "sinusoidal":
        allowed.add(_NAMES["classic"]["positions"])
    problems = [f"{n} is missing" for n in wanted if n not in shapes]
    problems += [
        f"{n} has shape {list(shapes[n])}, not {list(shape)}"
        for n, shape in wanted.items()
        if shapes.get(n, shape) != shape
    ]
    problems += [
        f"{name} is not part of the model"
        for name in shapes
        if name not in wanted | dict.fromkeys(allowed, ()) and not _NO_WEIGHTS.match(name)
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelError(
            f"weights and config.json disagree: {'; '.join(problems[:5])}{more}",
            "the directory mixes two models or is damaged: fetch or train it again",
        )
