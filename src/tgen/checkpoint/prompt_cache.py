"""Prompt cache files: the keys and values of a prompt, bound to the model that computed them."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.config import CacheDtype, ModelConfig, StoredAs
from tgen.errors import ModelError, TgenError, UsageError
from tgen.storage import files

VERSION = 2  # version of the file format, and of how keys and values are computed
_RENEW_HINT = "write a new one with --save-cache"
_ARRAYS = {"tokens": ("I64", 1), "keys": ("F32", 4), "values": ("F32", 4)}  # dtype, dimensions
_LABELS = ("model", "weights", "cache", "name", "sha256")  # uint8 tensors with text


class ModelIdentity(NamedTuple):
    """The model that computed keys and values."""

    digest: str
    path: Path
    dtype: StoredAs  # dtype of the weights in memory
    cache_dtype: str  # dtype of keys and values in memory


def check_cache_file(path: Path) -> None:
    """Raise UsageError unless `save` may write to `path`: only a prompt cache is overwritten."""
    if problem := files.output_problem(path):
        raise UsageError(f"--save-cache {path}: {problem}", "name another file")
    if path.is_file():
        try:
            _read_header(path)
            return
        except TgenError:
            pass
    elif not path.exists():
        return
    raise UsageError(
        f"--save-cache {path}: the file exists and is not a prompt cache", "name another file"
    )


def save(path: Path, arrays: Mapping[str, NDArray[Any]], model: ModelIdentity) -> None:
    """Write `tokens` (n,), `keys` and `values` (L, n_kv_heads, n, D), and their model."""
    labels = {
        "model": f"{VERSION} {model.digest}".encode(),
        "weights": model.dtype.encode(),
        "cache": model.cache_dtype.encode(),
        "name": os.fsencode(model.path),
        "sha256": _digest(arrays),
    }
    texts = {name: np.frombuffer(text, np.uint8) for name, text in labels.items()}
    files.make_folder(path.resolve().parent)
    files.publish(path.resolve(), safetensors_file.serialize({**arrays, **texts}))


def load(path: Path, config: ModelConfig, model: ModelIdentity) -> dict[str, NDArray[Any]]:
    """Return the arrays that `save` wrote; raises ModelError if damaged or of another model."""
    header = _read_header(path)
    texts = safetensors_file.read_arrays(path, {name: header[name] for name in _LABELS})
    labels = {name: texts[name].tobytes()[:1000] for name in _LABELS}
    if labels["model"] != f"{VERSION} {model.digest}".encode():
        name = os.fsdecode(labels["name"])
        raise ModelError(
            f"{path} belongs to {name!r}, not to {str(model.path)!r} as it is now", _RENEW_HINT
        )
    if labels["weights"] != model.dtype.encode():
        dtype = labels["weights"].decode(errors="replace")[:10]
        raise ModelError(
            f"{path} was computed with {dtype!r} weights, but the model uses {model.dtype!r}",
            f"add --dtype {dtype}, or {_RENEW_HINT}",
        )
    if labels["cache"] != model.cache_dtype.encode():
        dtype = labels["cache"].decode(errors="replace")[:10]
        raise ModelError(
            f"{path} was computed with a {dtype!r} KV cache, but the model uses "
            f"{model.cache_dtype!r}",
            f"add --cache-dtype {dtype}, or {_RENEW_HINT}"
            if dtype in get_args(CacheDtype)
            else _RENEW_HINT,
        )
    (n,) = header["tokens"].shape
    shape = (config.n_layers, config.n_kv_heads, n, config.head_dim)
    if n > config.context_length or {header["keys"].shape, header["values"].shape} != {shape}:
        raise ModelError(f"{path} does not fit its model", _RENEW_HINT)
    arrays = safetensors_file.read_arrays(path, {name: header[name] for name in _ARRAYS})
    if labels["sha256"] != _digest(arrays):
        raise ModelError(f"{path} is damaged: its checksum is wrong", _RENEW_HINT)
    return arrays


def _read_header(path: Path) -> dict[str, safetensors_file.TensorEntry]:
    header = safetensors_file.read_header(path, hint=_RENEW_HINT)
    tensors = {name: (entry.dtype, len(entry.shape)) for name, entry in header.items()}
    if tensors != _ARRAYS | dict.fromkeys(_LABELS, ("U8", 1)):
        raise ModelError(f"{path} is not a prompt cache", _RENEW_HINT)
    return header


def _digest(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    sha256 = hashlib.sha256()
    for name in _ARRAYS:
        sha256.update(np.ascontiguousarray(arrays[name]).data)
    return sha256.digest()
