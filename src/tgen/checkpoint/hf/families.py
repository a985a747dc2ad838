"""The families as transformers stores them: a table of their config.json keys and tensor names.

To add a family, add a row to `FAMILY_LAYOUTS`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Names of tgen's tensors, without ".weight" and ".bias". Several names are stacked in one of ours.
_LLAMA_NAMES = dict(
    token_embedding="model.embed_tokens", lm_head="lm_head", final_norm="model.norm",
    block="model.layers.{}.",
    qkv_proj="self_attn.q_proj self_attn.k_proj self_attn.v_proj", o_proj="self_attn.o_proj",
    q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
    gate_proj="mlp.gate_proj", up_proj="mlp.up_proj", down_proj="mlp.down_proj",
    attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm",
)  # fmt: skip
_OUTPUT_NORMS = dict(
    attention_output_norm="post_attention_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)
_CLASSIC_NAMES = dict(
    token_embedding="tokens_embed", position_embedding="positions_embed", lm_head="lm_head",
    block="h.{}.",
    qkv_proj="attn.c_attn", o_proj="attn.c_proj", up_proj="mlp.c_fc", down_proj="mlp.c_proj",
    attention_norm="ln_1", feed_forward_norm="ln_2",
)  # fmt: skip
_GPT2_NAMES = _CLASSIC_NAMES | dict(
    token_embedding="wte", position_embedding="wpe", final_norm="ln_f"
)
_GPT_NEO_NAMES = _GPT2_NAMES | dict(
    qkv_proj="attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
    o_proj="attn.attention.out_proj",
)
_GPT_NEOX_NAMES = dict(
    token_embedding="gpt_neox.embed_in", lm_head="embed_out",
    final_norm="gpt_neox.final_layer_norm", block="gpt_neox.layers.{}.",
    qkv_proj="attention.query_key_value", o_proj="attention.dense",
    up_proj="mlp.dense_h_to_4h", down_proj="mlp.dense_4h_to_h",
    attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm",
)  # fmt: skip

_GPTJ_NAMES = _GPT2_NAMES | dict(
    qkv_proj="attn.q_proj attn.k_proj attn.v_proj", o_proj="attn.out_proj",
    up_proj="mlp.fc_in", down_proj="mlp.fc_out",
)  # fmt: skip
_PHI_NAMES = _LLAMA_NAMES | dict(
    up_proj="mlp.fc1", down_proj="mlp.fc2",
    o_proj="self_attn.dense", final_norm="model.final_layernorm",
)  # fmt: skip
_OPT_NAMES = dict(
    token_embedding="model.decoder.embed_tokens", lm_head="lm_head",
    position_embedding="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm", block="model.decoder.layers.{}.",
    qkv_proj="self_attn.q_proj self_attn.k_proj self_attn.v_proj", o_proj="self_attn.out_proj",
    up_proj="fc1", down_proj="fc2",
    attention_norm="self_attn_layer_norm", feed_forward_norm="final_layer_norm",
)  # fmt: skip
_GLM4_NAMES = _LLAMA_NAMES | dict(
    attention_output_norm="post_self_attn_layernorm", feed_forward_output_norm="post_mlp_layernorm",
    gate_proj="mlp.gate_up_proj",
)  # fmt: skip

# config.json key -> field of ModelConfig, with the same value.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "context_length",
    "tie_word_embeddings": "tied_embeddings",
}
_RMS_NORM = _SIZES | {"num_key_value_heads": "n_kv_heads", "rms_norm_eps": "norm_eps"}
_LLAMA_KEYS = _RMS_NORM | {"head_dim": "head_dim"}
_LAYER_NORM = _SIZES | {"num_key_value_heads": "n_kv_heads", "layer_norm_eps": "norm_eps"}
_ATTENTION_BIAS = {"attention_bias": "attention_bias"}  # and output_bias
_BIASES = _ATTENTION_BIAS | {"mlp_bias": "feed_forward_bias"}
_GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_positions": "context_length",
    "tie_word_embeddings": "tied_embeddings",
    "layer_norm_epsilon": "norm_eps",
}
_GPT2_INNER_KEYS = _GPT2_KEYS | {"n_inner": "d_ff"}
_OPT_KEYS = {key: name for key, name in _SIZES.items() if name != "d_ff"} | {"ffn_dim": "d_ff"}
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_WINDOW = {"use_sliding_window": False}


FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers


class FamilyLayout(NamedTuple):
    """The layout of one family in transformers."""

    model_type: str  # in config.json
    model_class: str
    names: Mapping[str, str] = _LLAMA_NAMES
    keys: Mapping[str, str] = _LLAMA_KEYS
    # Values of keys that config.json may omit, where they differ from `COMMON_DEFAULTS`.
    defaults: Mapping[str, Any] = {}
    constants: Mapping[str, Any] = {}  # keys that tgen writes but has no field for
    required: Mapping[str, Any] = {}  # keys with the only value that tgen supports
    activation_key: str = "hidden_act"
    transposed: bool = False  # matrices are stored as (in, out)
    interleaved_qkv: bool = False  # stored head by head, each with its query, key and value
    fused_gate: bool = False  # gate and up projection are one tensor
    windowed: bool = False  # sliding_window, if it is not null, applies to all layers
    pattern: int | None = None  # every n-th layer has no window, unless config.json says which
    rotates_neighbors: bool = False  # pairs (x_2i, x_2i+1), where tgen has (x_i, x_i+n/2)
    unused_positions: int = 0  # first rows of the position embedding that no token has
    output_bias: bool = True  # attention_bias is also that of the output projection
    parallel: str | None = None  # the norm placement that use_parallel_residual means


COMMON_DEFAULTS = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "activation_function": "gelu_new",
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "sliding_window": None,
}
_COHERE_DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "logit_scale": 0.0625,
}
_MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FAMILY_LAYOUTS = {
    "classic": FamilyLayout(
        "openai-gpt", "OpenAIGPTLMHeadModel", _CLASSIC_NAMES, _GPT2_KEYS,
        defaults=dict(tie_word_embeddings=True, n_positions=512, afn="gelu"),
        constants=_NO_DROPOUT, activation_key="afn", transposed=True,
    ),
    "gpt2": FamilyLayout(
        "gpt2", "GPT2LMHeadModel", _GPT2_NAMES, _GPT2_INNER_KEYS,
        defaults=dict(tie_word_embeddings=True, n_positions=1024, n_inner=None),
        constants=_NO_DROPOUT | dict(scale_attn_weights=True),
        required=dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        activation_key="activation_function", transposed=True,
    ),
    "gpt_neo": FamilyLayout(
        "gpt_neo", "GPTNeoForCausalLM", _GPT_NEO_NAMES,
        _SIZES | dict(num_layers="n_layers", num_heads="n_heads", layer_norm_epsilon="norm_eps"),
        defaults=dict(tie_word_embeddings=True, intermediate_size=None, window_size=256),
        activation_key="activation_function",
    ),
    "gpt_neox": FamilyLayout(
        "gpt_neox", "GPTNeoXForCausalLM", _GPT_NEOX_NAMES,
        _SIZES | _ATTENTION_BIAS | dict(layer_norm_eps="norm_eps"),
        defaults=dict(attention_bias=True, hidden_act="gelu", partial_rotary_factor=0.25,
                      use_parallel_residual=True),
        interleaved_qkv=True, parallel="parallel",
    ),
    "llama": FamilyLayout("llama", "LlamaForCausalLM", keys=_LLAMA_KEYS | _BIASES),
    "mistral": FamilyLayout(
        "mistral", "MistralForCausalLM",
        defaults=dict(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131_072),
        windowed=True,
    ),
    "qwen2": FamilyLayout(
        "qwen2", "Qwen2ForCausalLM",
        defaults=dict(num_key_value_heads=32, max_position_embeddings=32_768),
        constants=_NO_WINDOW, required=_NO_WINDOW,
    ),
    "qwen3": FamilyLayout(
        "qwen3", "Qwen3ForCausalLM", keys=_LLAMA_KEYS | _ATTENTION_BIAS,
        defaults=dict(head_dim=128, num_key_value_heads=32, max_position_embeddings=32_768),
        constants=_NO_WINDOW, required=_NO_WINDOW,
    ),
    "phi3": FamilyLayout(
        "phi3", "Phi3ForCausalLM",
        _LLAMA_NAMES | dict(qkv_proj="self_attn.qkv_proj", gate_proj="mlp.gate_up_proj"), _RMS_NORM,
        defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096,
                      original_max_position_embeddings=4096),
        constants=dict(resid_pdrop=0.0, embd_pdrop=0.0), fused_gate=True, windowed=True,
    ),
    "gemma3": FamilyLayout(
        "gemma3_text", "Gemma3ForCausalLM",
        _LLAMA_NAMES | _OUTPUT_NORMS | dict(feed_forward_norm="pre_feedforward_layernorm"),
        _LLAMA_KEYS | _ATTENTION_BIAS,
        defaults=dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=256,
                      max_position_embeddings=131_072, query_pre_attn_scalar=256,
                      sliding_window=4096, rope_theta=1_000_000.0,
                      hidden_activation="gelu_pytorch_tanh"),
        required=dict(use_bidirectional_attention=False, final_logit_softcapping=None),
        activation_key="hidden_activation", pattern=6,
    ),
    "olmo2": FamilyLayout(
        "olmo2", "Olmo2ForCausalLM", _LLAMA_NAMES | _OUTPUT_NORMS, _RMS_NORM | _ATTENTION_BIAS,
        defaults=dict(rms_norm_eps=1e-5),
    ),
    "smollm3": FamilyLayout(
        "smollm3", "SmolLM3ForCausalLM", keys=_LLAMA_KEYS | _BIASES,
        defaults=dict(tie_word_embeddings=True, num_key_value_heads=4,
                      max_position_embeddings=32_768, rope_theta=2_000_000.0),
        constants=_NO_WINDOW, required=_NO_WINDOW,
    ),
    "granite": FamilyLayout(
        "granite", "GraniteForCausalLM", keys=_LLAMA_KEYS | _BIASES | _GRANITE_SCALES,
        defaults=dict.fromkeys(_GRANITE_SCALES, 1.0),
    ),
    "starcoder2": FamilyLayout(
        "starcoder2", "Starcoder2ForCausalLM",
        _LLAMA_NAMES | dict(up_proj="mlp.c_fc", down_proj="mlp.c_proj"),
        _SIZES | dict(num_key_value_heads="n_kv_heads", norm_epsilon="norm_eps"),
        defaults=dict(tie_word_embeddings=True, num_key_value_heads=2, norm_epsilon=1e-5,
                      max_position_embeddings=4096, hidden_act="gelu_pytorch_tanh"),
        constants=dict(use_bias=True, residual_dropout=0.0, embedding_dropout=0.0),
        required=dict(use_bias=True), windowed=True,
    ),
    "gemma": FamilyLayout(
        "gemma", "GemmaForCausalLM", keys=_LLAMA_KEYS | _ATTENTION_BIAS,
        defaults=dict(tie_word_embeddings=True, num_key_value_heads=16, head_dim=256,
                      max_position_embeddings=8192, hidden_act="gelu_pytorch_tanh"),
        required=dict(use_bidirectional_attention=False),
    ),
    "olmo": FamilyLayout(
        "olmo", "OlmoForCausalLM",
        keys=_SIZES | _ATTENTION_BIAS | dict(num_key_value_heads="n_kv_heads"),
        required=dict(clip_qkv=None),
    ),
    "olmo3": FamilyLayout(
        "olmo3", "Olmo3ForCausalLM", _LLAMA_NAMES | _OUTPUT_NORMS, _RMS_NORM | _ATTENTION_BIAS,
        defaults=dict(rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096),
        pattern=4,
    ),
    "phi": FamilyLayout(
        "phi", "PhiForCausalLM", _PHI_NAMES, _LAYER_NORM,
        defaults=dict(partial_rotary_factor=0.5, hidden_act="gelu_new"),
        constants=dict(resid_pdrop=0.0, embd_pdrop=0.0), required=dict(qk_layernorm=False),
    ),
    "gptj": FamilyLayout(
        "gptj", "GPTJForCausalLM", _GPTJ_NAMES, _GPT2_INNER_KEYS,
        defaults=dict(n_inner=None, rotary_dim=64),
        constants=_NO_DROPOUT, activation_key="activation_function", rotates_neighbors=True,
    ),
    "opt": FamilyLayout(
        "opt", "OPTForCausalLM", _OPT_NAMES, _OPT_KEYS,
        defaults=dict(tie_word_embeddings=True, ffn_dim=3072, activation_function="relu"),
        constants=dict(dropout=0.0),
        required=dict(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True,
                      layer_norm_elementwise_affine=True),
        activation_key="activation_function", unused_positions=2,
    ),
    "gpt_bigcode": FamilyLayout(
        "gpt_bigcode", "GPTBigCodeForCausalLM", _GPT2_NAMES, _GPT2_INNER_KEYS,
        defaults=dict(tie_word_embeddings=True, n_positions=1024, n_inner=None,
                      activation_function="gelu_pytorch_tanh", multi_query=True),
        constants=_NO_DROPOUT, required=dict(scale_attn_weights=True, add_cross_attention=False),
        activation_key="activation_function", interleaved_qkv=True,
    ),
    "stablelm": FamilyLayout(
        "stablelm", "StableLmForCausalLM", keys=_LAYER_NORM | dict(use_qkv_bias="attention_bias"),
        defaults=dict(num_key_value_heads=32, max_position_embeddings=4096,
                      partial_rotary_factor=0.25, use_qkv_bias=False, use_parallel_residual=False),
        required=dict(qk_layernorm=False), output_bias=False, parallel="shared",
    ),
    "cohere": FamilyLayout(
        "cohere", "CohereForCausalLM", keys=_LAYER_NORM | _ATTENTION_BIAS,
        defaults=_COHERE_DEFAULTS,
        required=dict(use_qk_norm=False), rotates_neighbors=True,
    ),
    "cohere2": FamilyLayout(
        "cohere2", "Cohere2ForCausalLM", keys=_LAYER_NORM | _ATTENTION_BIAS,
        defaults=_COHERE_DEFAULTS | dict(rope_theta=10_000.0, sliding_window=4096),
        pattern=4, rotates_neighbors=True,
    ),
    "glm4": FamilyLayout(
        "glm4", "Glm4ForCausalLM", _GLM4_NAMES, _LLAMA_KEYS | _ATTENTION_BIAS,
        defaults=dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131_072,
                      rms_norm_eps=1.5625e-7, attention_bias=True, partial_rotary_factor=0.5),
        fused_gate=True, rotates_neighbors=True, output_bias=False,
    ),
    "ministral3": FamilyLayout(
        "ministral3", "Ministral3ForCausalLM",
        defaults=dict(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
                      max_position_embeddings=262_144, rope_parameters=_MINISTRAL_ROPE),
        windowed=True,
    ),
    "arcee": FamilyLayout(
        "arcee", "ArceeForCausalLM", keys=_LLAMA_KEYS | _BIASES,
        defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=4096, hidden_act="relu2"),
    ),
    "seed_oss": FamilyLayout(
        "seed_oss", "SeedOssForCausalLM",
        keys=_LLAMA_KEYS | _BIASES | dict(attention_out_bias="output_bias"),
        defaults=dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=524_288,
                      attention_bias=True, attention_out_bias=False),
        constants=dict(attention_dropout=0.0, residual_dropout=0.0), output_bias=False,
    ),
    "hunyuan": FamilyLayout(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        _LLAMA_NAMES | dict(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        _LLAMA_KEYS | _ATTENTION_BIAS,
        defaults=dict(rms_norm_eps=1e-5),
    ),
    "exaone4": FamilyLayout(
        "exaone4", "Exaone4ForCausalLM", _LLAMA_NAMES | _OUTPUT_NORMS,
        defaults=dict(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096),
        pattern=4,
    ),
}  # fmt: skip
# Model types whose layers tgen lacks, and why; gguf's names of architectures, too.
UNSUPPORTED = {
    "gemma2": "its soft caps of attention scores and logits are not implemented",
    "nanochat": "its soft cap of logits and its norm before the first layer are not implemented",
    "apertus": "its activation xIELU, which has parameters of its own, is not implemented",
}
