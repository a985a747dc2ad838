"""The manifest of a directory: `manifest.json`, written last, proves that it is complete.

The manifest contains the size and SHA-256 of every other file, and its own SHA-256. A directory
that matches its manifest was written to the end and has not changed since.
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
_MAX_BYTES = 1 << 20


def describe(contents: Mapping[str, files.Content]) -> dict[str, dict[str, Any]]:
    """Return the size and digest of each file of a directory."""
    entries = {}
    for name, content in contents.items():
        digest, n_bytes = hashlib.sha256(), 0
        for block in files.blocks(content):
            digest.update(block)
            n_bytes += len(block)
        entries[name] = {"bytes": n_bytes, "sha256": digest.hexdigest()}
    return entries


def seal(values: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    """Return the manifest's content: `values`, the entries of `describe`, and its own digest."""
    manifest = {"format": _FORMAT, "files": dict(entries), **values}
    return json.dumps(manifest | {"sha256": _digest(manifest)}, indent=2).encode() + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """Return a directory's manifest after checking all its files.

    Raise ModelError if a file is damaged, TrainingError if another version wrote the manifest or a
    file cannot currently be read.
    """
    manifest = parse(folder)
    check(folder, manifest["files"])
    return manifest


def check(folder: Path, entries: Mapping[str, Any]) -> None:
    """Check the files of these entries; raise errors as `read`."""
    for name, entry in entries.items():
        path = folder / name
        if (size := _size(path)) != entry["bytes"]:
            raise ModelError(f"{path} has {size:,} bytes (expected {entry['bytes']:,})")
        with _convert_read_error(path):
            digest = files.sha256(path).hex()
        if digest != entry["sha256"]:
            raise ModelError(f"{path} has changed since it was written")


def parse(folder: Path) -> dict[str, Any]:
    """Return a directory's manifest without looking at its files; raise errors as `read`."""
    path = folder / NAME
    if _size(path) > _MAX_BYTES:
        raise ModelError(f"{path} is damaged")
    with _convert_read_error(path):
        content = files.read(path, limit=_MAX_BYTES)
    try:
        manifest: dict[str, Any] = json.loads(content)
        is_valid = manifest.pop("sha256") == _digest(manifest) and _has_files(manifest)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        is_valid = False
    if not is_valid:
        raise ModelError(f"{path} is damaged")
    if manifest.get("format") != _FORMAT:
        raise TrainingError(
            f"{path} was written by another version of tgen", "resume with that version"
        )
    return manifest


def _has_files(manifest: Mapping[str, Any]) -> bool:
    """Whether all entries of `describe` have the right types, for files inside the directory."""
    return manifest.get("format") != _FORMAT or all(
        Path(name).name == name and type(entry["bytes"]) is int and isinstance(entry["sha256"], str)
        for name, entry in manifest["files"].items()
    )


def _size(path: Path) -> int:
    """Return a file's size; raise ModelError if it is missing."""
    with _convert_read_error(path):
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise ModelError(f"{path} is missing") from None


@contextmanager
def _convert_read_error(path: Path) -> Iterator[None]:
    """Turn a read error into TrainingError, since it does not prove that the file is damaged."""
    try:
        yield
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
    except ModelError:
        raise
    except TgenError as error:
        reason = error.message
    else:
        return
    raise TrainingError(reason, "fix this, then resume again; nothing was changed")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
