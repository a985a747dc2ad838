"""Chat templates and special tokens of model directories and GGUF files.

A directory has them in tokenizer_config.json and the files beside it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.hf.config import read_json_object, text_part
from tgen.errors import ModelError, TgenError
from tgen.storage import files

_MAX_CHARACTERS = 1 << 20
_MAX_FILE_BYTES = 32 << 20
SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_TOOL_USE = "tool_use"  # the name that transformers has for a template of chats with tools
_OBEY_BOS_FLAG = ("LlamaTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer")
NO_CHAT_HINT = "choose a model with a chat template, or continue a prompt without --chat"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the variables `bos_token`, `eos_token` and so on that it may use."""

    source: str
    variables: dict[str, str]
    tool_source: str = ""  # of another template for chats with tools, if there is one

    @property
    def for_tools(self) -> "ChatTemplate":
        """The template of chats with tools."""
        return replace(self, source=self.tool_source or self.source)


def read_chat_template(path: Path) -> ChatTemplate:
    """Read the chat template of a model directory or a GGUF file.

    Raises ModelError if it is missing, cannot be read or is too large.
    """
    source, variables, tool_source = _read(path)
    if source is None:
        raise ModelError(f"{str(path)!r} has no chat template", NO_CHAT_HINT)
    if not isinstance(source, str) or len(source) > _MAX_CHARACTERS:
        raise ModelError(
            f"the chat template of {str(path)!r} is not a string or is larger than 1 MiB",
            NO_CHAT_HINT,
        )
    usable = isinstance(tool_source, str) and len(tool_source) <= _MAX_CHARACTERS
    return ChatTemplate(source, variables, tool_source if usable else "")


def chat_template_source(path: Path) -> str | None:
    """Return the chat template of a model directory or a GGUF file; None without a valid one."""
    with suppress(TgenError):
        return read_chat_template(path).source
    return None


def special_tokens(path: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and so on that a model's files name."""
    with suppress(TgenError):
        return _read(path)[1]
    return {}


def read_end_ids(path: Path, added_tokens: Mapping[str, int]) -> list[int]:
    """Return the ids of the end-of-text tokens that the files beside a tokenizer.json name, the
    tokenizer's first; none without readable files."""
    ends: list[Any] = []
    with suppress(TgenError):
        ends.append(added_tokens.get(_read_folder(path)[1].get("eos_token", "")))
    ends += generation_config.read(path).end_ids or []
    with suppress(TgenError):
        named = text_part(_read_json(path / "config.json")).get("eos_token_id")
        ends += named if isinstance(named, list) else [named]
    return [i for i in ends if type(i) is int]


def bos_flag(path: Path) -> bool | None:
    """Return `add_bos_token` of a model directory where transformers 4.57 obeys it; else None.

    Other classes and version 5 do what tokenizer.json says, as tgen does.
    """
    try:
        config = _read_json(path / "tokenizer_config.json")
    except ModelError:
        return None
    obeyed = str(config.get("tokenizer_class")).startswith(_OBEY_BOS_FLAG)
    flag = config.get("add_bos_token")
    return flag if obeyed and isinstance(flag, bool) else None


def _read(path: Path) -> tuple[Any, dict[str, str], Any]:
    if not path.is_file():
        return _read_folder(path)
    from tgen.checkpoint.gguf import reader

    return reader.chat_template(path)


def _read_folder(path: Path) -> tuple[Any, dict[str, str], Any]:
    """Return the chat template or None, the texts of `bos_token` and so on, and the template of
    chats with tools or None.

    Raises TgenError for unreadable files.
    """
    config = _read_json(path / "tokenizer_config.json")
    variables = {
        key: text
        for values in (_read_json(path / "special_tokens_map.json"), config)
        for key, value in values.items()
        if key in SPECIAL_TOKENS and (text := token_text(value)) is not None
    }
    file = path / "chat_template.jinja"
    if file.exists():
        other = path / "additional_chat_templates" / f"{_TOOL_USE}.jinja"
        source, tool_source = (_read_text(one) if one.exists() else None for one in (file, other))
        return source, variables, tool_source
    source, tool_source = config.get("chat_template"), None
    if isinstance(source, list):  # several named templates
        templates = {str(t.get("name")): t.get("template") for t in source if isinstance(t, dict)}
        source, tool_source = templates.get("default"), templates.get(_TOOL_USE)
        if source is None and templates:
            names_found = ", ".join(templates)[:200]
            raise ModelError(f"no chat template is named default (got {names_found})", NO_CHAT_HINT)
    return source, variables, tool_source


def token_text(token: Any) -> str | None:
    """Return a token's text, given as a string or as an object with settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_text(path: Path) -> str:
    return files.read(path, limit=_MAX_FILE_BYTES).decode("utf-8", "replace")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, limit=_MAX_FILE_BYTES) if path.exists() else {}
    except ModelError as error:
        raise ModelError(error.message, NO_CHAT_HINT) from None
