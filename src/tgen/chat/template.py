"""Where a model directory keeps its chat template, and the names of tokens that it may use."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgen import files
from tgen.checkpoint import gguf_reader
from tgen.errors import ModelError, TgenError

_LIMIT, _LONGEST = 32 << 20, 1 << 20  # bytes of a file, characters of a template
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_REMEDY = "leave --chat away: the text is then continued as it is"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the variables `bos_token`, `eos_token` and so on that it may name."""

    source: str
    variables: dict[str, str]


def read(path: Path) -> ChatTemplate:
    """The template of a model directory or a GGUF file; raises ModelError if it has none that can
    be used."""
    if path.is_file():
        return checked(path, *gguf_reader.chat_template(path))
    config = _json(path / "tokenizer_config.json")
    names = {f"{name}_token" for name in _NAMED}
    variables = {
        key: text
        for found in (_json(path / "special_tokens_map.json"), config)
        for key, value in found.items()
        if key in names and (text := _content(value)) is not None
    }
    file = path / "chat_template.jinja"
    source: Any = None
    if file.exists():
        source = files.read(file, limit=_LIMIT).decode("utf-8", "replace")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
        if source is None and named:
            listed = ", ".join(map(str, named))[:200]
            raise ModelError(f"none of the chat templates {listed} is called default", _REMEDY)
    return checked(path, source, variables)


def checked(path: Path, source: Any, variables: dict[str, str]) -> ChatTemplate:
    """What a model at `path` has as its template; raises ModelError unless it can be one."""
    if source is None:
        raise ModelError(f"{str(path)!r} has no chat template", _REMEDY)
    if not isinstance(source, str) or len(source) > _LONGEST:
        raise ModelError(f"the chat template of {str(path)!r} is no text of a usual size", _REMEDY)
    return ChatTemplate(source, variables)


def _content(token: Any) -> str | None:
    """A token's text, which may be in an object that says more of it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(files.read(path, limit=_LIMIT))
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON", _REMEDY) from None
    except TgenError as error:
        raise ModelError(error.message, _REMEDY) from None
    return found if isinstance(found, dict) else {}
