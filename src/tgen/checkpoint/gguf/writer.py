"""Writing a model as llama.cpp reads it, in its own file format, GGUF."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tgen.checkpoint.dtypes import Array, Dtype, cast
from tgen.checkpoint.gguf import rope_scaling, tensor_names
from tgen.checkpoint.gguf.tokenizer import Vocabulary
from tgen.config import ModelConfig
from tgen.errors import ModelError, UsageError

GgufType = Dtype | Literal["int8"]

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's numbers for files
_INT8_GROUP = 32  # numbers that share a scale


def write_gguf(
    path: Path,
    config: ModelConfig,
    arrays: Mapping[str, Array],
    *,
    stored: GgufType = "float32",
    vocabulary: Vocabulary | None = None,
    name: str = "",
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Writes `arrays`, by our names, to `path`, matrices as `stored` says (int8: Q8_0).

    A matrix whose rows are no multiple of 32 long stays float32 under int8, as do the learnt
    positions and all that is no matrix always. Without a `vocabulary` the file has none and is only
    good for ids. `progress` is told the fraction done. Raises UsageError if the package gguf is
    missing, ModelError if llama.cpp has no place for this model.
    """
    check(config)
    gguf = require_package("writing GGUF")
    writer = gguf.GGUFWriter(path, tensor_names.ARCHITECTURES[config.family])
    try:
        _describe(writer, config, stored, name)
        _add_vocabulary(writer, vocabulary)
        if config.rope_scaling and config.rope_scaling.kind == "llama3":
            found = rope_scaling.divisors(config.rope_theta, config.head_dim, config.rope_scaling)
            writer.add_tensor(tensor_names.ROPE_FREQS, found)
        n, total = 0, sum(array.size for array in arrays.values())
        for tensor, array in tensor_names.to_layout(config, arrays):
            narrow = array.ndim > 1 and "position" not in tensor
            if stored == "int8" and array.shape[-1] % _INT8_GROUP:
                narrow = False
            kind = _KINDS[stored if narrow else "float32"]
            _add_tensor(gguf, writer, tensor, array, kind)
            progress((n := n + array.size) / total)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def require_package(what: str) -> Any:
    """The package gguf; raises UsageError where it is not installed."""
    if find_spec("gguf") is None:
        raise UsageError(f"{what} needs the gguf package", "pip install 'tgen-lm[gguf]'")
    import gguf

    return gguf


def check(config: ModelConfig) -> None:
    """Raises ModelError, naming what it is, if llama.cpp could not compute this model."""
    family = config.family
    architecture = tensor_names.ARCHITECTURES.get(family)
    scaling, window = config.rope_scaling, config.sliding_window
    llama3 = scaling is not None and scaling.kind == "llama3"
    width = config.n_heads * config.head_dim
    reasons = {
        f"norms after each addition, which make the {family} family": config.post_norm,
        f"place for the {family} family": architecture is None,
        f"activation {config.activation} in gpt2": config.activation not in ("gelu_tanh", "swiglu"),
        f"attention_bias in {family}": family == "qwen3" and config.attention_bias,
        f"head_dim={config.head_dim} in {family}": (
            architecture == "qwen2" and width != config.d_model
        ),
        f"rope_scaling as Llama 3's in {family}": architecture != "llama" and llama3,
        f"sliding window of {window} in {family}": (
            window is not None and window < config.context_length
        ),
    }
    refused = [reason for reason, holds in reasons.items() if holds]
    if refused:
        raise ModelError(
            f"llama.cpp has no {refused[0]}",
            f"it runs the {', '.join(tensor_names.ARCHITECTURES)} families as `tgen train` "
            "makes them",
        )


def _describe(writer: Any, config: ModelConfig, stored: GgufType, name: str) -> None:
    """The shape, in llama.cpp's keys."""
    if name:
        writer.add_name(name)
    kind = _KINDS[stored]
    writer.add_file_type(_FILE_TYPES[kind])
    if kind == "Q8_0":
        writer.add_quantization_version(2)
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
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    scaling = config.rope_scaling
    if scaling and scaling.kind == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling:
        for key, number in rope_scaling.fields(scaling).items():
            writer.add_float64(key, number)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary | None) -> None:
    if vocabulary is None:  # llama.cpp wants a tokenizer named, and takes it that there is none
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for key, i in vocabulary.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", i)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _add_tensor(gguf: Any, writer: Any, name: str, array: Array, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        data: Array = np.ascontiguousarray(cast(name, array, "bfloat16")).view(np.uint8)
    elif kind == "Q8_0":
        data = gguf.quants.quantize(cast(name, array, "float32"), number)
    else:
        data = cast(name, array, "float32" if kind == "F32" else "float16")
    writer.add_tensor(name, data, raw_dtype=number)
