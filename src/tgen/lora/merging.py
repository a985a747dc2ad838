"""The formulas by which an adapter is added to the weights of its base model.

Pairs of the matrices in the blocks add their product. PEFT's adapters may have more: DoRA (Liu et
al. 2024), pairs of the embedding and the LM head, trained biases, whole modules (`modules_to_save`)
and rows of the embedding (`trainable_token_indices`). These `Extras` are merged by PEFT's formulas
for transformers' tensors; such an adapter cannot be trained further.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Dtype, cast, to_float32
from tgen.checkpoint.hf import tensor_names
from tgen.config import ModelConfig
from tgen.errors import ModelError
from tgen.lora.matrices import Pair, adapter_layout, changes
from tgen.machine.memory import check_ram

Arrays = dict[str, NDArray[Any]]

_PARTS = {  # endings of names: what the tensor is
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "pair bias",
    ".lora_embedding_A": "embedding a",
    ".lora_embedding_B": "embedding b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "rows",
}
_WRAPPERS = (".base_layer", ".modules_to_save.default", ".modules_to_save")
BASE_HINT = "name the base that the adapter was trained on with --model or --from"


class Extras(NamedTuple):
    """The tensors of such an adapter, by module and part, and what its configuration says."""

    parts: dict[str, dict[str, NDArray[np.float32]]]
    scales: dict[str, float]  # of the pairs, by module
    token_ids: dict[str, list[int]] | list[int]  # of "rows", by the end of the module's name
    separate: Sequence[str]  # modules_to_save: they are not tied any more


def merge_pairs(
    config: ModelConfig, arrays: Mapping[str, NDArray[Any]], pairs: Mapping[str, Pair]
) -> dict[str, NDArray[Any]]:
    """Return the arrays with the adapter added; changed matrices are float32."""
    layout = adapter_layout(config)
    merged = dict(arrays)
    changed = {name for name, parts in layout.items() if any(p.pair in pairs for p in parts)}
    check_ram(4 * sum(arrays[name].size for name in changed), "merging the adapter")
    for name, start, change in changes(layout, pairs):
        if merged[name] is arrays[name]:
            merged[name] = np.array(to_float32(np.asarray(arrays[name])))
        merged[name][start : start + len(change)] += change
    return merged


def rounding_error(
    config: ModelConfig,
    merged: Mapping[str, NDArray[Any]],
    pairs: Mapping[str, Pair],
    dtype: Dtype,
) -> float:
    """Return the error of an adapter's changes when the sums are rounded to `dtype`, relative to
    the changes: the root of the ratio of the sums of squares."""
    errors = total = 0.0
    for name, start, change in changes(adapter_layout(config), pairs):
        exact = to_float32(merged[name][start : start + len(change)])
        rounded = to_float32(cast(name, exact, dtype))
        errors += float(np.square(rounded - exact, dtype=np.float64).sum())
        total += float(np.square(change, dtype=np.float64).sum())
    return math.sqrt(errors / total) if total else 0.0


def split_name(name: str) -> tuple[str, str]:
    """Return the module and the part of a tensor, by its name without PEFT's prefix; the part of a
    whole tensor is "weight" or its own last name."""
    for ending, part in _PARTS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), part
    module, _, part = name.rpartition(".")
    for wrapper in _WRAPPERS:
        module = module.removesuffix(wrapper)
    return module, part


def describe(extras: Extras) -> str:
    """Return what the adapter has besides pairs of matrices."""
    found = {part for parts in extras.parts.values() for part in parts}
    kinds = {
        "magnitude": "DoRA",
        "embedding a": "LoRA on embeddings",
        "pair bias": "lora_bias",
        "bias": "trained biases",
        "rows": "trainable_token_indices",
        "weight": "modules_to_save",
    }
    return next((kind for part, kind in kinds.items() if part in found), "LoRA on the LM head")


def merge_extras(
    config: ModelConfig, arrays: Mapping[str, NDArray[Any]], extras: Extras
) -> tuple[ModelConfig, Arrays]:
    """Return the config and the float32 arrays of a model with the adapter in it.

    The config differs if the adapter has an embedding of another size, or an LM head that was tied.
    Raises ModelError for tensors that do not fit the model.
    """
    check_ram(8 * sum(array.size for array in arrays.values()), "merging the adapter")
    floats = {name: to_float32(np.asarray(array)) for name, array in arrays.items()}
    stored = tensor_names.to_hf_arrays(config, floats)
    weights = {tensor_names.full_name(config, name): array for name, array in stored.items()}
    mappings = tensor_names.tensor_mappings(config)
    embedding = tensor_names.full_name(config, mappings[0].theirs[0])
    head = tensor_names.full_name(config, tensor_names.head_name(config))
    transposed = {
        tensor_names.full_name(config, name) for m in mappings if m.transposed for name in m.theirs
    }
    if config.tied_embeddings:
        weights[head] = weights[embedding]
    tied = (embedding, head) if config.tied_embeddings else (embedding,)
    for module, parts in extras.parts.items():
        for part, array in parts.items():
            if part not in _PARTS.values():
                name = f"{module}.{part}"
                shared = name in tied and module.rpartition(".")[2] not in extras.separate
                _check(weights, name, array, any_rows=name in (embedding, head))
                weights |= dict.fromkeys(tied if shared else (name,), array)
    for module, parts in extras.parts.items():
        if (rows := parts.get("rows")) is not None:
            ids = _token_ids(extras, module, embedding, rows)
            for name in tied if f"{module}.weight" in tied else (f"{module}.weight",):
                matrix = weights.get(name, rows[:0]).copy()
                if rows.shape != (len(ids), *matrix.shape[1:]) or max(ids) >= len(matrix):
                    raise ModelError(
                        f"{module}: its trained tokens do not fit the model", BASE_HINT
                    )
                matrix[ids] = rows
                weights[name] = matrix
    for module, parts in extras.parts.items():
        name = f"{module}.weight"
        if "a" in parts or "embedding a" in parts:
            is_embedding, flip = "a" not in parts, name in transposed
            a, b = (parts[f"embedding {c}" if is_embedding else c] for c in "ab")
            change = (b @ a) * np.float32(extras.scales[module])
            change = change.T if is_embedding else change
            _check(weights, name, change.T if flip else change)
            matrix = (weights[name].T if flip else weights[name]) + change
            if (magnitude := parts.get("magnitude")) is not None:
                norms = np.linalg.norm(matrix, axis=0 if is_embedding else 1, keepdims=True)
                if magnitude.size != norms.size:
                    raise ModelError(f"{module}: its DoRA vector does not fit", BASE_HINT)
                matrix = matrix * (magnitude.reshape(norms.shape) / norms)
            weights[name] = np.ascontiguousarray(matrix.T) if flip else matrix
        if (bias := parts.get("pair bias")) is not None:
            _check(weights, f"{module}.bias", bias)
            weights[f"{module}.bias"] = (
                weights[f"{module}.bias"] + np.float32(extras.scales[module]) * bias
            )
    if config.tied_embeddings and np.array_equal(weights[head], weights[embedding]):
        del weights[head]
    else:
        config = replace(config, tied_embeddings=False)
        if len(weights[head]) != len(weights[embedding]):
            raise ModelError("the adapter's embedding and LM head have different sizes", BASE_HINT)
    config = replace(config, vocab_size=len(weights[embedding]))
    theirs = [name for mapping in tensor_names.tensor_mappings(config) for name in mapping.theirs]
    named = {name: weights[tensor_names.full_name(config, name)] for name in theirs}
    return config, tensor_names.from_hf_arrays(config, named)


def _check(
    weights: Mapping[str, NDArray[Any]], name: str, array: NDArray[Any], *, any_rows: bool = False
) -> None:
    """Raise ModelError unless an array has the shape of one of the model's tensors; a vocabulary
    may have another size."""
    if name not in weights:
        raise ModelError(f"the model has no {name[:200]}, which the adapter changes", BASE_HINT)
    expected, shape = weights[name].shape, array.shape
    if shape[any_rows:] != expected[any_rows:] or len(shape) != len(expected):
        raise ModelError(
            f"the adapter has {name} of shape {list(shape)} (expected {list(expected)})",
            BASE_HINT,
        )


def _token_ids(
    extras: Extras, module: str, embedding: str, rows: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Return the ids of the trained rows of a module."""
    ids: object = extras.token_ids
    if isinstance(ids, dict):
        named = (value for key, value in ids.items() if f".{module}".endswith(f".{key}"))
        ids = next(named, None)
    elif f"{module}.weight" != embedding:
        ids = None
    valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    if not valid or not ids or not isinstance(ids, list) or len(ids) != len(rows):
        raise ModelError(f"{module}: trainable_token_indices does not fit its rows", BASE_HINT)
    return np.array(ids, np.int64)
