"""llama.cpp's architectures: which of tgen's families they are, and what they can compute.

To add a family that llama.cpp has, add it to `ARCHITECTURES`, and what llama.cpp lacks to
`_unsupported`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError

WINDOW_STEP = 4  # every fourth layer of an olmo3, a cohere2 and a large exaone4 sees everything
_NORMALIZED_QUERIES = 64  # a command-r of so many layers has query and key norms
NOPE_STEP = 4  # every fourth layer of a smollm3 does not rotate; llama.cpp has no field for it
# Biases that some families may have -> a tensor that a file only has with the bias.
BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "output_bias": "blk.0.attn_output.bias",
    "feed_forward_bias": "blk.0.ffn_up.bias",
}
# Scaling of RoPE. llama.cpp lacks dynamic, which only changes texts longer than the context.
_SCALING = ("linear", "yarn", "dynamic")


class Architecture(NamedTuple):
    """One of llama.cpp's architectures, and how it differs from the others."""

    name: str
    rotates_neighbors: bool = False  # (x_2i, x_2i+1), where tgen rotates (x_i, x_i+D/2)
    needs_head: bool = False  # a file has an LM head, also if it equals the embedding
    optional_biases: tuple[str, ...] = ()  # fields of `BIASES`; the others are those of the family
    feed_forward_norm: str = "ffn_norm"
    shares_head: bool = False  # a file has no LM head
    any_head_dim: bool = True  # else d_model / n_heads
    scaling: tuple[str, ...] = _SCALING  # supported kinds


_LLAMA_SCALING = (*_SCALING, "llama3")
_ALL_BIASES, _QKV_BIAS = tuple(BIASES), ("attention_bias",)
# By tgen's families. A file of an architecture is read as the first family that has it.
ARCHITECTURES = {
    "gpt2": Architecture("gpt2"),
    "gpt_neox": Architecture("gptneox", needs_head=True),
    "llama": Architecture(
        "llama", rotates_neighbors=True, optional_biases=_ALL_BIASES, scaling=_LLAMA_SCALING
    ),
    "mistral": Architecture("llama", rotates_neighbors=True, scaling=_LLAMA_SCALING),
    "qwen2": Architecture("qwen2", any_head_dim=False),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3", scaling=("longrope",)),
    "gemma3": Architecture("gemma3", scaling=("linear",), shares_head=True),
    "olmo2": Architecture("olmo2", needs_head=True),
    "smollm3": Architecture("smollm3", rotates_neighbors=True),
    "granite": Architecture(
        "granite", rotates_neighbors=True, optional_biases=_ALL_BIASES, any_head_dim=False
    ),
    "starcoder2": Architecture("starcoder2"),
    "gemma": Architecture("gemma", shares_head=True),
    "olmo": Architecture("olmo", rotates_neighbors=True),
    "olmo3": Architecture("olmo2", needs_head=True, scaling=("yarn",)),
    "phi": Architecture("phi2", needs_head=True),
    "gpt_bigcode": Architecture("starcoder"),
    "stablelm": Architecture("stablelm", needs_head=True, optional_biases=_QKV_BIAS),
    "cohere": Architecture("command-r", rotates_neighbors=True, shares_head=True),
    "cohere2": Architecture("cohere2", rotates_neighbors=True, shares_head=True),
    "glm4": Architecture("glm4", rotates_neighbors=True, optional_biases=_QKV_BIAS),
    "arcee": Architecture("arcee", rotates_neighbors=True, scaling=_LLAMA_SCALING),
    "seed_oss": Architecture(
        "seed_oss", optional_biases=_QKV_BIAS, feed_forward_norm="post_attention_norm"
    ),
    "hunyuan": Architecture("hunyuan-dense"),
    "exaone4": Architecture("exaone4", scaling=_LLAMA_SCALING),
}


def check_supported(config: ModelConfig) -> None:
    """Raise ModelError naming the first feature that llama.cpp or the writer lacks."""
    hint = "use transformers with this model: --to transformers"
    if config.family == "ministral3":
        raise ModelError("tgen does not write GGUF files of the ministral3 family", hint)
    for feature in _unsupported(config):
        raise ModelError(f"llama.cpp does not support {feature}", hint)


def _unsupported(config: ModelConfig) -> Iterator[str]:
    family = config.family
    if config.post_norm:
        yield f"post-norm layers, as in the {family} family"
    if family not in ARCHITECTURES:
        yield f"the {family} family"
        return
    architecture, implied = ARCHITECTURES[family], FAMILIES[family]
    fixed = [field for field in BIASES if field not in architecture.optional_biases]
    for field in ("activation", *fixed):  # GGUF has no fields for them
        if (value := getattr(config, field)) != implied[field]:
            yield f"{field}={value} in GGUF files of {family}"
    if not architecture.any_head_dim and config.n_heads * config.head_dim != config.d_model:
        yield f"head_dim={config.head_dim} in {family}"
    scaling = config.rope_scaling
    if scaling and scaling.kind not in architecture.scaling:
        yield f"{scaling.kind} RoPE scaling in {family}"
    if scaling and scaling.kind == "yarn" and not _is_llama_cpps_yarn(scaling):
        yield f"YaRN with attention_factor={scaling.attention_factor}, truncate={scaling.truncate}"
    if architecture.shares_head and not config.tied_embeddings:
        yield f"an LM head of its own in {family}"
    windowed_layers = window_pattern(config)
    match family:
        case "olmo3" | "cohere2" if windowed_layers != WINDOW_STEP:
            yield f"sliding_layers={config.sliding_layers}"
        case "olmo3" if config.local_rope_theta != config.rope_theta:
            yield f"local_rope_theta={config.local_rope_theta} in {family}"
        case "exaone4" if windowed_layers != exaone_step(config.n_layers):
            yield f"sliding_layers={config.sliding_layers} with {config.n_layers} layers"
        case "cohere" if config.n_layers >= _NORMALIZED_QUERIES:
            yield f"{config.n_layers} layers in {family}"
        case "gemma3":
            if windowed_layers is None:
                yield f"sliding_layers={config.sliding_layers}"
            if not math.isclose(config.score_scale, gemma_scale(vars(config))):
                yield f"attention_scale={config.attention_scale} in {family}"
        case "smollm3":
            layers = range(config.n_layers)
            if any((config.rope(i) is None) != ((i + 1) % NOPE_STEP == 0) for i in layers):
                yield f"rope_layers={config.rope_layers}"


def shares_head(config: ModelConfig) -> bool:
    """Return whether a file has no LM head, so that llama.cpp uses the token embedding."""
    return config.tied_embeddings and not ARCHITECTURES[config.family].needs_head


def exaone_step(n_layers: int) -> int:
    """Return n if every n-th layer of an exaone4 of this depth, the only one that has windows,
    sees the whole context."""
    return WINDOW_STEP if n_layers == 64 else 1


def window_pattern(config: ModelConfig) -> int | None:
    """Return n if every n-th layer, and no other, sees the whole context; None if no n fits."""
    full = [config.window(layer) is None for layer in range(config.n_layers)]
    for n in range(1, config.n_layers + 2):
        if full == [(layer + 1) % n == 0 for layer in range(config.n_layers)]:
            return n
    return None


def gemma_scale(shape: Mapping[str, Any]) -> float:
    """Return the attention scale that llama.cpp uses for a gemma3 with these fields of ModelConfig;
    the 27B model has 62 layers."""
    per_head = shape["d_model"] / shape["n_heads"]
    return float((per_head if shape["n_layers"] == 62 else shape["head_dim"]) ** -0.5)


def describe_differences(config: ModelConfig) -> list[str]:
    """Describe how llama.cpp computes an exported model differently."""
    family, window = config.family, config.sliding_window
    differences = []
    applies = ("gemma3", "olmo3", "cohere2", "exaone4")
    if family not in applies and window is not None and window < config.context_length:
        differences.append(
            f"llama.cpp ignores {family}'s sliding window: texts over {window:,} tokens differ"
        )
    if config.activation == "gelu":
        differences.append("llama.cpp computes GELU by its tanh approximation")
    return differences


def yarn_attention_factor(factor: float) -> float:
    """Return the factor of cosines and sines that llama.cpp uses for YaRN."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _is_llama_cpps_yarn(scaling: RopeScaling) -> bool:
    factor = yarn_attention_factor(scaling.factor)
    return scaling.truncate and math.isclose(scaling.attention_factor, factor)
