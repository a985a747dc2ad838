"""The optional package gguf."""

from importlib.util import find_spec
from typing import Any

from tgen.errors import UsageError


def require_package(purpose: str) -> Any:
    """Return the package gguf; raises UsageError if it is not installed."""
    if find_spec("gguf") is None:
        raise UsageError(f"{purpose} needs the gguf package", "pip install 'tgen-lm[gguf]'")
    import gguf

    return gguf
