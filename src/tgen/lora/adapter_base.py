"""The base model of an adapter: its name, where it is, and the digest of its weights."""

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.hf.config import read_json_object
from tgen.checkpoint.model_lookup import find_model
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, is_adapter
from tgen.errors import ModelError, TgenError

_LIMIT = 1 << 22  # bytes of the configuration
_HASHED_ROWS = 1024  # of a matrix at once
_THREADS, _LARGE = 4, 1 << 24  # bytes of a model that several threads hash


def read_settings(path: Path) -> dict[str, Any]:
    """Return the configuration of an adapter; raises ModelError if it is missing or damaged."""
    check_is_adapter(path)
    return read_json_object(path / ADAPTER_CONFIG, limit=_LIMIT)


def check_is_adapter(path: Path) -> None:
    """Raise ModelError for a directory without the configuration of an adapter."""
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{str(path)!r} is not an adapter: it has no {ADAPTER_CONFIG}", _name_hint(path)
        )


def _name_hint(path: Path) -> str:
    if (path / "config.json").exists():
        return "it is a model: name it with --model or --from"
    return "name the directory that `tgen train --lora` or PEFT's save_pretrained wrote"


def base_name(path: Path) -> str | None:
    """Return the name of an adapter's base model as its configuration has it."""
    return named_base(read_settings(path))


def named_base(values: Mapping[str, Any]) -> str | None:
    """Return the name of the base model in the settings of an adapter."""
    name = values.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def find_base(path: Path, *, option: str = "--model") -> Path:
    """Return the path of an adapter's base model: by the name in its configuration, or a directory
    of that name beside the adapter. Raises ModelError that says where it was looked for, and that
    `option` names a base."""
    name = base_name(path)
    if name is None:
        raise ModelError(
            f"the adapter {str(path)!r} does not name its base model",
            f"name both: {option} BASE --adapter {shlex.quote(str(path))}",
        )
    beside = path.resolve().parent / Path(name).name
    for candidate in (name, str(beside)):
        try:
            found = find_model(candidate).path
        except TgenError:
            continue
        if not is_adapter(found) and found.exists():
            return found
    raise ModelError(
        f"the base model {name[:200]!r} of the adapter {str(path)!r} does not exist: not a path "
        f"or name of a model, and not {str(beside)!r}",
        f"name both: {option} BASE --adapter {shlex.quote(str(path))}",
    )


def base_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of all matrices by name, as float32: the same for every file format."""
    matrices = sorted(name for name, array in arrays.items() if len(array.shape) == 2)
    if sum(arrays[name].nbytes for name in matrices) < _LARGE:
        digests = [_digest(arrays[name]) for name in matrices]
    else:
        from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(lambda name: _digest(arrays[name]), matrices))
    lines = [f"{name} {digest}\n" for name, digest in zip(matrices, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_base(path: Path, model: Path) -> bool:
    """Return whether a model is the one that an adapter names as its base."""
    try:
        return find_base(path).samefile(model)
    except (TgenError, OSError):
        return False


def _digest(array: NDArray[Any]) -> str:
    sha256 = hashlib.sha256(str(array.shape).encode())
    for i in range(0, len(array), _HASHED_ROWS):
        rows = to_float32(np.asarray(array[i : i + _HASHED_ROWS]))
        sha256.update(np.ascontiguousarray(rows, dtype="<f4").data)
    return sha256.hexdigest()
