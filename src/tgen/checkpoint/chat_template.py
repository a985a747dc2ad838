"""Chat templates and special tokens of model directories and GGUF files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgen.checkpoint.hf.tokenizer_config import NO_CHAT_HINT, read_template_and_tokens
from tgen.errors import ModelError, TgenError

_MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the variables `bos_token`, `eos_token` and so on that it may use."""

    source: str
    variables: dict[str, str]


def read_chat_template(path: Path) -> ChatTemplate:
    """Read the chat template of a model directory or a GGUF file.

    Raises ModelError if it is missing, cannot be read or is too large.
    """
    source, variables = _read(path)
    if source is None:
        raise ModelError(f"{str(path)!r} has no chat template", NO_CHAT_HINT)
    if not isinstance(source, str) or len(source) > _MAX_CHARACTERS:
        raise ModelError(
            f"the chat template of {str(path)!r} is not a string or is larger than 1 MiB",
            NO_CHAT_HINT,
        )
    return ChatTemplate(source, variables)


def chat_template_source(path: Path) -> str | None:
    """Return the chat template of a model directory or a GGUF file; None without a valid one."""
    try:
        return read_chat_template(path).source
    except TgenError:
        return None


def special_tokens(path: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and so on that a model's files name."""
    try:
        return _read(path)[1]
    except TgenError:
        return {}


def _read(path: Path) -> tuple[Any, dict[str, str]]:
    if not path.is_file():
        return read_template_and_tokens(path)
    from tgen.checkpoint.gguf import reader

    return reader.chat_template(path)
