"""Small random models that transformers makes, of every family that tgen reads."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from tgen.tokenizer import Tokenizer

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
OLDER_SHAPE = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Keys in the spelling of version 4, which version 5 reads too.
VARIANTS = {
    "openai-gpt": OLDER_SHAPE,
    "gpt2": OLDER_SHAPE,
    "gpt_neox": SHAPE | {"hidden_size": 96},  # 6 of 24 dimensions are rotated
    "gpt_neox sequential": SHAPE
    | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}
    | {"rotary_emb_base": 500.0, "hidden_act": "gelu_fast"},
    "gpt_neo": {
        "hidden_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "window_size": 9,
    },
    "llama": GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA_3},
    "llama yarn": GROUPED | {"rope_scaling": YARN},
    "llama yarn with all keys": GROUPED
    | {
        "rope_scaling": YARN
        | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}
        | {"beta_fast": 4.0, "beta_slow": 0.5}
    },
    "llama dynamic": GROUPED | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama longrope": GROUPED
    | {"rope_scaling": LONGROPE | {"rope_type": "longrope", "factor": 1.5}}
    | {"original_max_position_embeddings": 120}
    | {"max_position_embeddings": 180},
    "mistral": GROUPED | {"sliding_window": 9, "head_dim": 16},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "phi3": SHAPE | {"num_key_value_heads": 1},
    "phi3 window": GROUPED | {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "phi3 longrope": GROUPED
    | {"rope_scaling": LONGROPE | {"type": "longrope"}, "original_max_position_embeddings": 120},
    "gemma3_text": GROUPED
    | {
        "head_dim": 32,
        "num_hidden_layers": 5,  # no multiple of the window's pattern
        "sliding_window": 9,
        "layer_types": ["sliding_attention"] * 2
        + ["full_attention"]
        + ["sliding_attention"] * 2,
        "query_pre_attn_scalar": 20,
        "rope_local_base_freq": 100.0,
    },
    "gemma3_text linear": SHAPE
    | {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "olmo2": SHAPE | {"num_key_value_heads": 1},
    "smollm3": GROUPED | {"num_hidden_layers": 5, "head_dim": 16},  # the fourth has no RoPE
    "granite": GROUPED
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
    | {"residual_multiplier": 0.5, "logits_scaling": 4.0},
    "starcoder2": GROUPED | {"sliding_window": 9},
}  # fmt: skip
# Of the families in `support.families.COMBINED`.
MORE_VARIANTS = {
    "gemma": GROUPED | {"head_dim": 16},
    "olmo": GROUPED | {"attention_bias": True},
    "olmo3": GROUPED
    | {"num_hidden_layers": 5, "sliding_window": 9, "rope_scaling": YARN, "rope_theta": 500_000.0},
    "phi": GROUPED,
    "gptj": OLDER_SHAPE | {"rotary_dim": 8},
    "opt": {
        "hidden_size": 48,
        "ffn_dim": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "gpt_bigcode": OLDER_SHAPE,
    "gpt_bigcode all heads": OLDER_SHAPE | {"multi_query": False, "n_inner": 72},
    "stablelm": GROUPED | {"hidden_size": 96},
    "stablelm parallel": GROUPED
    | {"hidden_size": 96, "use_parallel_residual": True, "use_qkv_bias": True},
    "cohere": GROUPED | {"attention_bias": True, "logit_scale": 0.3},
    "cohere2": GROUPED | {"num_hidden_layers": 5, "sliding_window": 9},
    "glm4": GROUPED | {"head_dim": 16},
    "ministral3": GROUPED
    | {
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": YARN
        | {"rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1},
    },
    "arcee": GROUPED | {"mlp_bias": True},
    "seed_oss": GROUPED | {"head_dim": 16, "mlp_bias": True},
    "hunyuan_v1_dense": GROUPED
    | {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "exaone4": GROUPED | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 9},
    "exaone4 without window": GROUPED
    | {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 3},
}  # fmt: skip


def make_config(variant: str, **values: object) -> Any:
    """Return transformers' config of a variant."""
    transformers = pytest.importorskip("transformers")

    kind = variant.partition(" ")[0]
    own = deepcopy((VARIANTS | MORE_VARIANTS)[variant])  # transformers changes inner objects
    return transformers.CONFIG_MAPPING[kind](**own, **values)


def make_theirs(variant: str, tokenizer: Tokenizer, *, tied: bool) -> Any:
    """Make a random model of transformers whose weights are large enough for all to matter."""
    transformers = pytest.importorskip("transformers")

    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    size = tokenizer.vocab_size
    config = make_config(variant, vocab_size=size, tie_word_embeddings=tied, **ends)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def hook_theirs(model: Any, part: str, layer: int, edit: Any) -> Any:
    """Hook a part of a layer of transformers' model, as `tgen.inspection.hooks.hook_part` does."""
    kind, n_heads = model.config.model_type, model.config.num_attention_heads
    older = kind in ("gpt2", "openai-gpt")
    block = model.transformer.h[layer] if older else model.model.layers[layer]
    attention = block.attn if older else block.self_attn
    projection = attention.c_proj if older else attention.o_proj
    modules = {"residual": block, "heads": projection, "attention": attention}
    modules["feed_forward"] = block.mlp
    if kind == "gemma3_text":  # norms of outputs
        modules["attention"] = block.post_attention_layernorm
        modules["feed_forward"] = block.post_feedforward_layernorm

    def edit_input(_: Any, arguments: Any) -> Any:
        x = arguments[0]
        new = edit(x.unflatten(-1, (n_heads, -1)) if part == "heads" else x)
        return None if new is None else (new.flatten(2), *arguments[1:])

    def edit_output(_: Any, __: Any, out: Any) -> Any:
        new = edit(out[0] if isinstance(out, (tuple, list)) else out)
        if new is None or not isinstance(out, (tuple, list)):
            return new
        return type(out)([new, *out[1:]])

    if part in ("residual", "heads"):
        return modules[part].register_forward_pre_hook(edit_input)
    return modules[part].register_forward_hook(edit_output)
