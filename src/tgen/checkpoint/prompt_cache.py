"""Prompt caches: the keys and values of a long prompt in a file, bound to the model they are of."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.config import ModelConfig, StoredAs
from tgen.errors import ModelError, TgenError, UsageError
from tgen.storage import files

VERSION = 1  # of the file, and of how keys and values are computed
_ANOTHER = "write another with --save-cache"
_KINDS = {"tokens": ("I64", 1), "keys": ("F32", 4), "values": ("F32", 4)}
_LABELS = ("model", "weights", "name", "sha256")


class Owner(NamedTuple):
    """The model that keys and values are of."""

    digest: str
    path: Path
    weights: StoredAs  # as the engine held them


def check_target(path: Path) -> None:
    """Raises UsageError unless `save` may write there: nothing but another prompt cache is lost."""
    if not path.parent.is_dir():
        raise UsageError(f"--save-cache {path}: there is no folder {path.parent}", "create it")
    if path.is_file():
        try:
            _header(path)
            return
        except TgenError:
            pass
    elif not path.exists():
        return
    raise UsageError(f"--save-cache {path} is there, and no prompt cache", "name another file")


def save(path: Path, arrays: Mapping[str, NDArray[Any]], owner: Owner) -> None:
    """Writes `tokens` (n,), `keys` and `values` (L, n_kv_heads, n, D), and whose they are."""
    labels = {
        "model": f"{VERSION} {owner.digest}".encode(),
        "weights": owner.weights.encode(),
        "name": os.fsencode(owner.path),
        "sha256": _digest(arrays),
    }
    kept = {name: np.frombuffer(text, np.uint8) for name, text in labels.items()}
    files.publish(path.resolve(), safetensors_file.serialize({**arrays, **kept}))


def load(path: Path, config: ModelConfig, owner: Owner) -> dict[str, NDArray[Any]]:
    """What `save` wrote; raises ModelError if it is of another model, or damaged."""
    header = _header(path)
    kept = safetensors_file.read(path, {name: header[name] for name in _LABELS})
    labels = {name: kept[name].tobytes()[:1000] for name in _LABELS}
    if labels["model"] != f"{VERSION} {owner.digest}".encode():
        name = os.fsdecode(labels["name"])
        raise ModelError(
            f"{path} is of {name!r}, not of {str(owner.path)!r} as it is now", _ANOTHER
        )
    if labels["weights"] != owner.weights.encode():
        weights = labels["weights"].decode(errors="replace")
        raise ModelError(
            f"{path} was kept with {weights!r} weights, the model holds them as {owner.weights!r}",
            f"add --weights {weights[:10]}, or {_ANOTHER}",
        )
    (n,) = header["tokens"].shape
    shape = (config.n_layers, config.n_kv_heads, n, config.head_dim)
    if n > config.context_length or {header["keys"].shape, header["values"].shape} != {shape}:
        raise ModelError(f"{path} does not fit its model", _ANOTHER)
    arrays = safetensors_file.read(path, {name: header[name] for name in _KINDS})
    if labels["sha256"] != _digest(arrays):
        raise ModelError(f"{path} is damaged: it is not what was written", _ANOTHER)
    return arrays


def _header(path: Path) -> dict[str, safetensors_file.Entry]:
    try:
        header = safetensors_file.read_header(path)
    except ModelError as error:
        raise ModelError(error.message, _ANOTHER) from None
    kinds = {name: (entry.dtype, len(entry.shape)) for name, entry in header.items()}
    if kinds != _KINDS | dict.fromkeys(_LABELS, ("U8", 1)):
        raise ModelError(f"{path} is no prompt cache", _ANOTHER)
    return header


def _digest(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    found = hashlib.sha256()
    for name in _KINDS:
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.digest()
