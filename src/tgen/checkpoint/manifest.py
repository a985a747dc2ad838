"""What a folder holds, and that it is whole: `manifest.json`, written last.

It has the size and SHA-256 of every other file, and its own. A folder whose manifest holds has been
written to its end and has not changed since.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgen import files
from tgen.errors import ModelError

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
    """A folder's manifest; raises ModelError, saying why, unless it and all its files are whole."""
    manifest = _parsed(folder / NAME)
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.exists():
            raise ModelError(f"{path} is missing")
        if (size := path.stat().st_size) != wanted["bytes"]:
            raise ModelError(f"{path} has {size:,} bytes, not {wanted['bytes']:,}")
        if files.sha256(path).hex() != wanted["sha256"]:
            raise ModelError(f"{path} has changed since it was written")
    return manifest


def _parsed(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelError(f"{path} is missing")
    try:
        manifest: dict[str, Any] = json.loads(files.read(path, limit=_LIMIT))
        claimed = manifest.pop("sha256")
        whole = claimed == _digest(manifest)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise ModelError(f"{path} is damaged")
    if manifest["format"] != _FORMAT:
        raise ModelError(f"{path} was written by another version of tgen")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
