"""Reading a model from a GGUF file: config, tokenizer, weights and chat template."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tgen.checkpoint import safetensors_file
from tgen.checkpoint.dtypes import Array
from tgen.checkpoint.gguf import tensor_names, tokenizer
from tgen.checkpoint.gguf.config_fields import read_config
from tgen.checkpoint.gguf.header import Header, describe_type, read_header, read_tensors
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.config import ModelConfig
from tgen.errors import ModelError, TgenError, UsageError
from tgen.machine.memory import check_ram
from tgen.tokenizer import Tokenizer

_DAMAGED = "download or export the file again"
_OTHER_FILE = "name the GGUF file of a model with weights"


def load(
    path: Path, *, with_weights: bool = True
) -> tuple[ModelConfig, Tokenizer, dict[str, Array], list[int], bool]:
    """Return config, tokenizer, arrays by tgen's names (none without weights), end-of-text token
    ids, and whether the file's matrices are quantized.

    Raises ModelError or TokenizerError.
    """
    header = read_header(path)
    with _path_in_errors(path):
        config = _read_config(header)
        shapes = {name: entry.shape for name, entry in header.tensors.items()}
        tensor_names.check_shapes(config, shapes)
        loaded_tokenizer, ends = _read_tokenizer(header, config)
    entries = {n: e for n, e in header.tensors.items() if n not in tensor_names.ROPE_TENSORS}
    quantized = any(entry.quantized for entry in entries.values())
    if not with_weights:
        return config, loaded_tokenizer, {}, ends, quantized
    check_ram(sum(entry.n_bytes for entry in entries.values()), f"loading {str(path)!r}")
    arrays = read_tensors(entries)
    _check_finite(path, arrays)
    named = tensor_names.from_gguf_arrays(config, arrays)
    return config, loaded_tokenizer, named, ends, quantized


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer alone; errors as `load`."""
    header = read_header(path)
    with _path_in_errors(path):
        return _read_tokenizer(header, _read_config(header))[0]


def describe(path: Path) -> tuple[ModelConfig, Counter[str]]:
    """Return the config and the number of parameters by type, from the header; errors as `load`."""
    header = read_header(path)
    with _path_in_errors(path):
        config = _read_config(header)
        counts: Counter[str] = Counter()
        for name, entry in header.tensors.items():
            if name not in tensor_names.ROPE_TENSORS:
                counts[describe_type(entry.ggml_type)[0]] += math.prod(entry.shape)
    return config, counts


def _read_tokenizer(header: Header, config: ModelConfig) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer and the end-of-text token ids."""
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > config.vocab_size:
        raise ModelError(f"it has {len(tokens)} tokens (expected {config.vocab_size})", _DAMAGED)
    return tokenizer.read(header.fields)


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Put the path before the message of an error."""
    try:
        yield
    except UsageError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except TgenError as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from None


def _check_finite(path: Path, arrays: Mapping[str, Array | QuantizedMatrix]) -> None:
    plain = {n: array for n, array in arrays.items() if not isinstance(array, QuantizedMatrix)}
    safetensors_file.check_finite(path, plain)
    for name, array in arrays.items():
        if isinstance(array, QuantizedMatrix) and not array.is_finite():
            raise safetensors_file.not_finite_error(path, name)


def chat_template(path: Path) -> tuple[str | None, dict[str, str], Any]:
    """Return the chat template or None, the special tokens that it may name, and the template of
    chats with tools or None.

    Raises ModelError.
    """
    fields = read_header(path).fields
    source, tokens = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.tokens")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if type(i) is int and isinstance(tokens, list) and 0 <= i < len(tokens):
            special[f"{name}_token"] = str(tokens[i])
    tool_source = fields.get("tokenizer.chat_template.tool_use")
    return source if isinstance(source, str) else None, special, tool_source


def _read_config(header: Header) -> ModelConfig:
    _check_is_model(header)
    return read_config(header)


def _check_is_model(header: Header) -> None:
    """Raise ModelError that names what the file is instead."""
    fields, entries = header
    kind, architecture = fields.get("general.type", "model"), fields.get("general.architecture")
    if kind == "adapter":
        name = fields.get("general.base_model.0.name", "")
        of = f" for {name[:100]!r}" if isinstance(name, str) and name else ""
        raise ModelError(
            f"it is a LoRA adapter for llama.cpp{of}, not a model",
            "name its base model with --model, and PEFT's directory of the adapter with --adapter",
        )
    if kind == "imatrix" or any(name.endswith(".in_sum2") for name in entries):
        raise ModelError("it is an importance matrix for quantization, not a model", _OTHER_FILE)
    if kind == "mmproj" or architecture == "clip":
        raise ModelError("it is the image or audio encoder of a model", _OTHER_FILE)
    if kind != "model":
        raise ModelError(f"the file has the type {str(kind)[:50]!r}, not 'model'", _OTHER_FILE)
    if not entries and "tokenizer.ggml.model" in fields:
        raise ModelError("it has a vocabulary, but no weights", _OTHER_FILE)
    if not entries:
        raise ModelError("it has no tensors", _OTHER_FILE)
