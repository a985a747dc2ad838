"""What a folder holds, and that it is whole: `manifest.json`, written last.

It has the size and SHA-256 of every other file, and its own. A folder whose manifest holds has been
written to its end and has not changed since.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tgen.errors import ModelError, TgenError, TrainingError
from tgen.storage import files

NAME = "manifest.json"
_FORMAT = 1
_LIMIT = 1 << 20


def describe(contents: Mapping[str, files.Content]) -> dict[str, dict[str, Any]]:
    """The sizes and digests of a folder's files."""
    described = {}
    for name, content in contents.items():
        digest = hashlib.sha256()
        for part in files.parts(content):
            digest.update(part)
        described[name] = {"bytes": files.n_bytes(content), "sha256": digest.hexdigest()}
    return described


def seal(values: Mapping[str, Any], described: Mapping[str, Any]) -> bytes:
    """The manifest's bytes: what is to be said of the folder, its files, and its own digest."""
    manifest = {"format": _FORMAT, "files": dict(described), **values}
    return json.dumps(manifest | {"sha256": _digest(manifest)}, indent=2).encode() + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """A folder's manifest. Raises ModelError, saying why, unless it and all its files are whole;
    TrainingError where another version wrote it, and where something cannot be read now."""
    manifest = _parsed(folder / NAME)
    for name, wanted in manifest["files"].items():
        path = folder / name
        if (size := _size(path)) != wanted["bytes"]:
            raise ModelError(f"{path} has {size:,} bytes, not {wanted['bytes']:,}")
        with _readable(path):
            digest = files.sha256(path).hex()
        if digest != wanted["sha256"]:
            raise ModelError(f"{path} has changed since it was written")
    return manifest


def _parsed(path: Path) -> dict[str, Any]:
    if _size(path) > _LIMIT:
        raise ModelError(f"{path} is damaged")
    with _readable(path):
        content = files.read(path, limit=_LIMIT)
    try:
        manifest: dict[str, Any] = json.loads(content)
        claimed = manifest.pop("sha256")
        whole = claimed == _digest(manifest)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise ModelError(f"{path} is damaged")
    if manifest.get("format") != _FORMAT:
        raise TrainingError(
            f"{path} was written by another version of tgen", "go on with the version that wrote it"
        )
    return manifest


def _size(path: Path) -> int:
    """Of a file; one that is missing is a damage."""
    with _readable(path):
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise ModelError(f"{path} is missing") from None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What keeps a file from being read says nothing of what it holds."""
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
    except ModelError:
        raise
    except TgenError as error:
        reason = error.message
    else:
        return
    raise TrainingError(reason, "nothing was changed: see to that, and go on then")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
