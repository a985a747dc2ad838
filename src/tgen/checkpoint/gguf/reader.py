"""Reading a model from a GGUF file: config, tokenizer, weights and chat template."""

from collections.abc import Mapping
from pathlib import Path

from tgen.checkpoint import safetensors_file
from tgen.checkpoint.dtypes import Array
from tgen.checkpoint.gguf import tensor_names, tokenizer
from tgen.checkpoint.gguf.config_fields import read_config
from tgen.checkpoint.gguf.header import Header, read_header, read_tensors
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.config import ModelConfig
from tgen.errors import ModelError, TgenError, UsageError
from tgen.model.ram import check_ram
from tgen.tokenizer import Tokenizer

_DAMAGED = "download or export the file again"


def load(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, Array], list[int], bool]:
    """Return config, tokenizer, arrays by tgen's names, end-of-text token ids, and whether the
    file's matrices are quantized.

    Raises ModelError, TokenizerError, or UsageError if the package gguf is needed but missing.
    """
    header = read_header(path)
    try:
        config = read_config(path, header)
        shapes = {name: entry.shape for name, entry in header.tensors.items()}
        tensor_names.check_shapes(config, shapes)
        _check_number_of_tokens(header, config)
        text, ends = tokenizer.to_json(header.fields)
        loaded_tokenizer = Tokenizer(text, end_ids=ends)
    except UsageError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except TgenError as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from None
    entries = {n: e for n, e in header.tensors.items() if n not in tensor_names.ROPE_TENSORS}
    check_ram(sum(entry.n_bytes for entry in entries.values()), f"loading {str(path)!r}")
    arrays = read_tensors(path, entries)
    _check_finite(path, arrays)
    quantized = any(entry.quantized for entry in entries.values())
    named = tensor_names.from_gguf_arrays(config, arrays)
    return config, loaded_tokenizer, named, ends, quantized


def _check_number_of_tokens(header: Header, config: ModelConfig) -> None:
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > config.vocab_size:
        raise ModelError(f"it has {len(tokens)} tokens (expected {config.vocab_size})", _DAMAGED)


def _check_finite(path: Path, arrays: Mapping[str, Array | QuantizedMatrix]) -> None:
    plain = {n: array for n, array in arrays.items() if not isinstance(array, QuantizedMatrix)}
    safetensors_file.check_finite(path, plain)
    for name, array in arrays.items():
        if isinstance(array, QuantizedMatrix) and not array.is_finite():
            raise safetensors_file.not_finite_error(path, name)


def chat_template(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the chat template or None, and the special tokens that it may name.

    Raises ModelError.
    """
    fields = read_header(path).fields
    source, tokens = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.tokens")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if type(i) is int and isinstance(tokens, list) and 0 <= i < len(tokens):
            special[f"{name}_token"] = str(tokens[i])
    return source if isinstance(source, str) else None, special
