"""Prompt cache files: the keys and values of a prompt, bound to the model that computed them."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

    digest: str  # of its files, adapter included; in memory, their stamp
    path: Path  # for messages
    dtype: StoredAs  # dtype of the weights in memory
    cache_dtype: str  # dtype of keys and values in memory


def check_cache_file(path: Path, *, name: str = "--save-cache") -> None:
    """Raise UsageError unless `save` may write to `path`: only a prompt cache is overwritten.

    `name` is the option or keyword that has the path, for the message.
    """
    if problem := files.output_problem(path):
        raise UsageError(f"{name} {path}: {problem}", "name another file")
    if path.is_file():
        with suppress(TgenError):
            _read_header(path)
            return
    elif not path.exists():
        return
    raise UsageError(
        f"{name} {path}: the file exists and is not a prompt cache", "name another file"
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
    files.write_output(path, safetensors_file.serialize({**arrays, **texts}))


def load(path: Path, config: ModelConfig, model: ModelIdentity) -> dict[str, NDArray[Any]]:
    """Return the arrays that `save` wrote; raises ModelError if damaged or of another model."""
    header = _read_header(path)
    texts = safetensors_file.read_arrays(path, {name: header[name] for name in _LABELS})
    labels = {name: texts[name].tobytes()[:1000].decode(errors="replace") for name in _LABELS}
    name = Path(os.fsdecode(texts["name"].tobytes()[:1000]))
    found = (labels["model"], name, labels["weights"], labels["cache"])
    expected = model._replace(digest=f"{VERSION} {model.digest}")
    shapes = [header[name].shape for name in _ARRAYS]
    check_origin(str(path), found, shapes, config, expected, _RENEW_HINT)
    arrays = safetensors_file.read_arrays(path, {name: header[name] for name in _ARRAYS})
    if texts["sha256"].tobytes() != _digest(arrays):
        raise ModelError(f"{path} is damaged: its checksum is wrong", _RENEW_HINT)
    return arrays


def check_origin(
    name: str,
    found: tuple[str, Path, str, str],
    shapes: Sequence[tuple[int, ...]],
    config: ModelConfig,
    model: ModelIdentity,
    hint: str,
) -> None:
    """Raise ModelError unless a prompt cache belongs to `model`.

    `found` has the fields of the ModelIdentity that computed it, and `shapes` are those of its
    tokens, keys and values. `name` and `hint` are for the message.
    """
    digest, path, dtype, cache_dtype = found
    if digest != model.digest:
        message = f"{name} belongs to {str(path)!r}, not to {str(model.path)!r} as it is now"
        raise ModelError(message, hint)
    if dtype != model.dtype:
        raise ModelError(
            f"{name} was computed with {dtype[:10]!r} weights, but the model uses {model.dtype!r}",
            f"add --dtype {dtype[:10]}, or {hint}",
        )
    if cache_dtype != model.cache_dtype:
        raise ModelError(
            f"{name} was computed with keys and values in {cache_dtype[:10]!r}, but the model uses "
            f"{model.cache_dtype!r}",
            f"add --cache-dtype {cache_dtype}, or {hint}"
            if cache_dtype in get_args(CacheDtype)
            else hint,
        )
    tokens, *arrays = shapes
    expected = (config.n_layers, config.n_kv_heads, *tokens, config.head_dim)
    if tokens[0] > config.context_length or set(arrays) != {expected}:
        raise ModelError(f"{name} does not fit its model", hint)


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
