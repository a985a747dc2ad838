"""Files of a model that Git LFS has not fetched yet."""

from pathlib import Path

from tgen.errors import ModelError


def reject_lfs_pointer(path: Path, content: bytes) -> None:
    """Raise ModelError for the placeholder that Git LFS leaves until a file is fetched."""
    if content.startswith(b"version "):
        raise ModelError(f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`")
