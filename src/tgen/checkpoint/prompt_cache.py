"""Prompt caches: the keys and values of a long prompt in a file, bound to the model they are of."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import files
from tgen.checkpoint import tensors
from tgen.config import ModelConfig, StoredAs
from tgen.errors import ModelError


class Owner(NamedTuple):
    """The model that keys and values are of."""

    sha256: str
    name: str
    weights: StoredAs  # as the engine held them


def save(path: Path, arrays: dict[str, NDArray[Any]], owner: Owner) -> None:
    """Writes `tokens` (n,), `keys` and `values` (L, n_kv_heads, n, D)."""
    names = {name: np.frombuffer(text.encode(), np.uint8) for name, text in owner._asdict().items()}
    files.publish(path, tensors.serialise(arrays | names))


def load(path: Path, config: ModelConfig, owner: Owner) -> dict[str, NDArray[Any]]:
    """What `save` wrote; raises ModelError if it is of another model, or damaged."""
    header = tensors.read_header(path)
    if set(header) != {"tokens", "keys", "values", *Owner._fields}:
        raise ModelError(f"{path} is no prompt cache", "write one with --save-cache")
    arrays = tensors.read(path, header)
    found = {name: arrays.pop(name).tobytes().decode(errors="replace") for name in Owner._fields}
    if found["sha256"] != owner.sha256 or found["weights"] != owner.weights:
        raise ModelError(
            f"{path} is of {found['name']} with {found['weights']} weights, not of {owner.name} "
            f"with {owner.weights} weights",
            "write another with --save-cache",
        )
    n = len(arrays["tokens"])
    shape = (config.n_layers, config.n_kv_heads, n, config.head_dim)
    wanted = {"tokens": ("I64", (n,)), "keys": ("F32", shape), "values": ("F32", shape)}
    if any(header[name][:2] != entry for name, entry in wanted.items()):
        raise ModelError(f"{path} does not fit its model", "write another with --save-cache")
    return arrays
