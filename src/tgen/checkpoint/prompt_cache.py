"""Prompt caches: the keys and values of a long prompt in a file, bound to the model they are of."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import files
from tgen.checkpoint import tensors
from tgen.config import ModelConfig, StoredAs
from tgen.errors import ModelError

VERSION = 1  # of the file, and of how keys and values are computed
_ANOTHER = "write another with --save-cache"


class Owner(NamedTuple):
    """The model that keys and values are of."""

    digest: str
    path: Path
    weights: StoredAs  # as the engine held them

    def labels(self) -> dict[str, bytes]:
        """What the file says of it."""
        sha256 = f"{VERSION} {self.digest} {self.weights}".encode()
        return {"model": sha256, "name": os.fsencode(self.path)}


def save(path: Path, arrays: dict[str, NDArray[Any]], owner: Owner) -> None:
    """Writes `tokens` (n,), `keys` and `values` (L, n_kv_heads, n, D), and whose they are."""
    labels = {name: np.frombuffer(text, np.uint8) for name, text in owner.labels().items()}
    files.publish(path, tensors.serialise(arrays | labels))


def load(path: Path, config: ModelConfig, owner: Owner) -> dict[str, NDArray[Any]]:
    """What `save` wrote; raises ModelError if it is of another model, or damaged."""
    header = tensors.read_header(path)
    kinds = {name: (entry.dtype, len(entry.shape)) for name, entry in header.items()}
    wanted = {"tokens": ("I64", 1), "keys": ("F32", 4), "values": ("F32", 4)}
    if kinds != wanted | dict.fromkeys(owner.labels(), ("U8", 1)):
        raise ModelError(f"{path} is no prompt cache", _ANOTHER)
    labels = tensors.read(path, {name: header[name] for name in owner.labels()})
    if labels["model"].tobytes() != owner.labels()["model"]:
        name = os.fsdecode(labels["name"].tobytes()[:200])
        raise ModelError(
            f"{path} is of {name!r}, not of {str(owner.path)!r} as it is now, with {owner.weights} "
            "weights",
            _ANOTHER,
        )
    (n,) = header["tokens"].shape
    shape = (config.n_layers, config.n_kv_heads, n, config.head_dim)
    if n > config.context_length or {header["keys"].shape, header["values"].shape} != {shape}:
        raise ModelError(f"{path} does not fit its model", _ANOTHER)
    return tensors.read(path, {name: header[name] for name in wanted})
