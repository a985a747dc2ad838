"""The families as transformers stores them: their config.json keys, tensor names and shapes.

tgen's own tensor names are the keys of `Transformer.state_dict()`. A `TensorMapping` lists the
transformers tensors that are stacked to make one of them, and whether they are stored transposed.
To add a family, add a row to `FAMILY_LAYOUTS`.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig
from tgen.errors import ModelError
from tgen.model.rope import sinusoid

Arrays = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

# Masks and tables that some versions of transformers saved with the weights.
_NOT_WEIGHTS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$|.*position_ids$")

_CLASSIC_NAMES = dict(
    embedding="tokens_embed.weight", positions="positions_embed.weight", block="h.{}.",
    output="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj",
    attention_norm="ln_1", feed_forward_norm="ln_2", final_norm="",
)  # fmt: skip
_GPT2_NAMES = _CLASSIC_NAMES | dict(
    embedding="wte.weight", positions="wpe.weight", final_norm="ln_f"
)
_LLAMA_NAMES = dict(
    embedding="model.embed_tokens.weight", block="model.layers.{}.",
    output="self_attn.o_proj", up="mlp.up_proj", down="mlp.down_proj",
    attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm",
    final_norm="model.norm",
)  # fmt: skip


class FamilyLayout(NamedTuple):
    """How transformers stores one family."""

    model_type: str  # in config.json
    model_class: str
    names: Mapping[str, str] = _LLAMA_NAMES
    gpt_style: bool = False  # GPT's config keys; q, k and v in one matrix; matrices (in, out)
    keys: Mapping[str, str] = {}  # config.json key -> field of ModelConfig; not in every family
    constants: Mapping[str, Any] = {}  # config.json keys that tgen writes but has no field for
    defaults: Mapping[str, Any] = {}  # values of keys that config.json may omit


_NO_WINDOW = {"use_sliding_window": False}
FAMILY_LAYOUTS = {
    "classic": FamilyLayout("openai-gpt", "OpenAIGPTLMHeadModel", _CLASSIC_NAMES, gpt_style=True),
    "gpt2": FamilyLayout("gpt2", "GPT2LMHeadModel", _GPT2_NAMES, gpt_style=True),
    "llama": FamilyLayout(
        "llama",
        "LlamaForCausalLM",
        keys={"attention_bias": "attention_bias", "mlp_bias": "feed_forward_bias"},
    ),
    "mistral": FamilyLayout(
        "mistral",
        "MistralForCausalLM",
        keys={"sliding_window": "sliding_window"},
        defaults={"sliding_window": 4096},
    ),
    "qwen2": FamilyLayout("qwen2", "Qwen2ForCausalLM", constants=_NO_WINDOW),
    "qwen3": FamilyLayout(
        "qwen3",
        "Qwen3ForCausalLM",
        keys={"attention_bias": "attention_bias"},
        constants=_NO_WINDOW,
        defaults={"head_dim": 128},
    ),
}


class TensorMapping(NamedTuple):
    """One of tgen's tensors and the transformers tensors that it is made of."""

    ours: str
    theirs: tuple[str, ...]  # stacked along the first axis
    shapes: tuple[Shape, ...]  # stored shape of each of theirs
    transposed: bool = False


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    """Return the mappings of all tensors that a weights file must contain."""
    C, V = config.d_model, config.vocab_size
    names = FAMILY_LAYOUTS[config.family].names
    mappings = [TensorMapping("token_embedding.weight", (names["embedding"],), ((V, C),))]
    if config.position == "learned":
        shape = (config.context_length, C)
        mappings.append(TensorMapping("position_embedding.weight", (names["positions"],), (shape,)))
    for layer in range(config.n_layers):
        mappings += _block(config, f"blocks.{layer}.", names["block"].format(layer))
    if not config.post_norm:
        mappings += _norm(config, "final_norm", names["final_norm"])
    if not config.tied_embeddings:
        mappings.append(TensorMapping("lm_head.weight", ("lm_head.weight",), ((V, C),)))
    return mappings


def _block(config: ModelConfig, ours: str, theirs: str) -> list[TensorMapping]:
    C, F, D = config.d_model, config.d_ff, config.head_dim
    n_q, n_kv = config.n_heads * D, config.n_kv_heads * D
    layout = FAMILY_LAYOUTS[config.family]
    names, transposed = layout.names, layout.gpt_style
    qkv = [(f"self_attn.{name}_proj", n) for name, n in zip("qkv", (n_q, n_kv, n_kv), strict=True)]
    if layout.gpt_style:
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
    mappings = []
    for name, stacked, n_in, bias in matrices:
        paths = [theirs + part for part, _ in stacked]
        shapes: tuple[Shape, ...]
        shapes = tuple((n_in, n) if transposed else (n, n_in) for _, n in stacked)
        weights = tuple(f"{path}.weight" for path in paths)
        mappings.append(TensorMapping(f"{ours}{name}.weight", weights, shapes, transposed))
        if bias:
            shapes = tuple((n,) for _, n in stacked)
            biases = tuple(f"{path}.bias" for path in paths)
            mappings.append(TensorMapping(f"{ours}{name}.bias", biases, shapes))
    for norm in ("attention_norm", "feed_forward_norm"):
        mappings += _norm(config, ours + norm, theirs + names[norm])
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        path = f"{theirs}self_attn.{norm}.weight"
        mappings.append(TensorMapping(f"{ours}attention.{norm}.weight", (path,), ((D,),)))
    return mappings


def _norm(config: ModelConfig, ours: str, theirs: str) -> list[TensorMapping]:
    parts = ["weight"] if config.norm == "rms_norm" else ["weight", "bias"]
    shapes = ((config.d_model,),)
    return [TensorMapping(f"{ours}.{part}", (f"{theirs}.{part}",), shapes) for part in parts]


def to_hf_arrays(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Rename and split tgen's arrays to transformers' tensors; contiguous."""
    out: Arrays = {}
    for mapping in tensor_mappings(config):
        start = 0
        for name, shape in zip(mapping.theirs, mapping.shapes, strict=True):
            n = shape[-1] if mapping.transposed else shape[0]
            part = arrays[mapping.ours][start : start + n]
            out[name] = np.ascontiguousarray(part.T if mapping.transposed else part)
            start += n
    if config.position == "sinusoidal":  # transformers stores the table that tgen computes
        table = sinusoid(config.context_length, config.d_model)
        out[_CLASSIC_NAMES["positions"]] = table
    return out


def from_hf_arrays(config: ModelConfig, arrays: Arrays) -> Arrays:
    """Rename and stack transformers' tensors to tgen's, emptying `arrays`; `check_shapes` has
    passed."""
    out: Arrays = {}
    for mapping in tensor_mappings(config):
        parts = [arrays.pop(name) for name in mapping.theirs]
        parts = [part.T for part in parts] if mapping.transposed else parts
        stacked = np.concatenate(parts) if len(parts) > 1 else parts[0]
        out[mapping.ours] = np.ascontiguousarray(stacked)
    return out


def strip_prefix(name: str) -> str:
    """Remove the prefix that only some writers put before GPT's tensor names."""
    return name.removeprefix("transformer.")


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    hint = "download or train the model again: the directory mixes two models or is damaged"
    if config.n_layers > len(shapes):  # do not build billions of names
        raise ModelError(
            f"config.json has {config.n_layers:,} layers, but the weights have only "
            f"{len(shapes):,} tensors",
            hint,
        )
    expected = {
        name: shape
        for mapping in tensor_mappings(config)
        for name, shape in zip(mapping.theirs, mapping.shapes, strict=True)
    }
    optional = {"lm_head.weight"} if config.tied_embeddings else set()
    if optional & shapes.keys():  # it is compared with the embedding
        expected["lm_head.weight"] = (config.vocab_size, config.d_model)
    if config.position == "sinusoidal":
        optional.add(_CLASSIC_NAMES["positions"])
    optional |= {name for name in shapes if _NOT_WEIGHTS.match(name)}
    if differences := describe_differences(expected, shapes, optional):
        raise ModelError(f"weights and config.json disagree: {differences}", hint)


def describe_differences(
    expected: Mapping[str, Shape], shapes: Mapping[str, Shape], optional: set[str]
) -> str:
    """Return the first 5 differences between a model's tensors and a file's; empty if none."""
    differences = [f"{name} is missing" for name in expected if name not in shapes]
    differences += [
        f"{name} has shape {list(shapes[name])} (expected {list(shape)})"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    extra = [name for name in shapes if name not in expected and name not in optional]
    differences += [f"{name} is not part of the model" for name in extra]
    more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
    return "; ".join(differences[:5]) + more
