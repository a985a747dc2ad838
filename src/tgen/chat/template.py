"""A model's chat template, as one that can be rendered."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgen.checkpoint.hf import chat_template
from tgen.checkpoint.hf.chat_template import REMEDY
from tgen.errors import ModelError

_LONGEST = 1 << 20  # characters


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the variables `bos_token`, `eos_token` and so on that it may name."""

    source: str
    variables: dict[str, str]


def read(path: Path) -> ChatTemplate:
    """The template of the model at `path`; raises ModelError if it has none that can be used."""
    return checked(path, *chat_template.read(path))


def checked(path: Path, source: Any, variables: dict[str, str]) -> ChatTemplate:
    """What a model at `path` has as its template; raises ModelError unless it can be one."""
    if source is None:
        raise ModelError(f"{str(path)!r} has no chat template", REMEDY)
    if not isinstance(source, str) or len(source) > _LONGEST:
        raise ModelError(f"the chat template of {str(path)!r} is no text of a usual size", REMEDY)
    return ChatTemplate(source, variables)
