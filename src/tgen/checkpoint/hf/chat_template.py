"""A model's chat template as it lies there, and the names of tokens that it may use."""

import json
from pathlib import Path
from typing import Any

from tgen.checkpoint.gguf import reader
from tgen.errors import ModelError, TgenError
from tgen.storage import files

_LIMIT = 32 << 20  # bytes of a file
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
REMEDY = "leave --chat away: the text is then continued as it is"


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """The template of a model directory or a GGUF file, None where there is none, and the texts of
    `bos_token` and the like. Raises ModelError for files that cannot be read."""
    if path.is_file():
        return reader.chat_template(path)
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
            raise ModelError(f"none of the chat templates {listed} is called default", REMEDY)
    return source, variables


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
        raise ModelError(f"{path} is not valid JSON", REMEDY) from None
    except TgenError as error:
        raise ModelError(error.message, REMEDY) from None
    return found if isinstance(found, dict) else {}
