"""Settings that a fine-tuned model inherits besides tokenizer and shape.

The files that describe a model are copied byte for byte, except for values that fine-tuning
changes. A GGUF file has no such files; its settings are written to new ones.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_args

from tgen.checkpoint import chat_template
from tgen.checkpoint.dtypes import Dtype
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.hf.config import read_json_object, text_part
from tgen.errors import ModelError, TgenError
from tgen.storage import files

CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_COPIED = (
    CONFIG,
    generation_config.FILE_NAME,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
)
_MAX_COPIED_BYTES = 8 << 20  # of a file: run.json contains it
_MAX_DEPTH = 4  # nested lists and objects of a value in generation_config.json


@dataclass(frozen=True, kw_only=True)
class InheritedSettings:
    """End-of-text tokens, chat template, special tokens and sampling defaults; all JSON values.

    `contents` are the files of a model directory by name; if there are any, they win.
    """

    end_ids: list[int] = field(default_factory=list)  # the tokenizer's end of text is first
    special_tokens: dict[str, str] = field(default_factory=dict)  # from tokenizer_config.json
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)  # the file's values
    contents: dict[str, str] = field(default_factory=dict)  # other bytes than UTF-8 as surrogates
    dtype: Dtype = "float32"  # of the written weights

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert `dataclasses.asdict`; raise TypeError for unknown or mistyped values."""
        settings = cls(**values)
        if not (
            _all_of(settings.end_ids, list, int)
            and _all_of(settings.special_tokens, dict, str)
            and isinstance(settings.chat_template, str | None)
            and isinstance(settings.generation_config, dict)
            and _all_of(settings.contents, dict, str)
            and settings.contents.keys() <= set(_COPIED)
            and settings.dtype in get_args(Dtype)
        ):
            raise TypeError("a value of another type")
        return settings

    def with_template(self, source: str) -> Self:
        """Return the settings with another chat template."""
        if not self.contents:
            return replace(self, chat_template=source)
        contents = {**self.contents, TEMPLATE: source}
        if "chat_template" in (config := _parse(contents.get(_TOKENIZER_CONFIG, "{}"))):
            del config["chat_template"]
            contents[_TOKENIZER_CONFIG] = _to_text(config)
        return replace(self, chat_template=source, contents=contents)

    def with_end(self, end_id: int) -> Self:
        """Return the settings with another token that ends a text."""
        ends = [*self.end_ids, *([] if end_id in self.end_ids else [end_id])]
        if not self.contents:
            return replace(self, end_ids=ends)
        name = generation_config.FILE_NAME
        values = _parse(self.contents.get(name, "{}"))
        if not values:  # transformers makes them from config.json
            keys = ("bos_token_id", "pad_token_id")
            config = _parse(self.contents[CONFIG])
            values = {key: config[key] for key in keys if config.get(key) is not None}
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return replace(self, end_ids=ends, contents={**self.contents, name: _to_text(values)})

    def with_tied_embeddings(self, tied: bool) -> Self:
        """Return the settings with another value in config.json."""
        config = _parse(self.contents[CONFIG]) | {"tie_word_embeddings": tied}
        return replace(self, contents={**self.contents, CONFIG: _to_text(config)})

    @property
    def copied_files(self) -> dict[str, bytes]:
        """The bytes of `contents`."""
        return {
            name: text.encode("utf-8", "surrogateescape") for name, text in self.contents.items()
        }


def read_inherited_settings(
    path: Path,
    *,
    config_path: Path,
    end_ids: Iterable[int],
    end_of_text: int | None,
    dtype: Dtype = "float32",
) -> InheritedSettings:
    """Return the settings of a model directory or GGUF file that has been loaded.

    `config_path` has config.json: the directory itself or, for an adapter, that of its base model.
    `end_ids` are all its end-of-text tokens, `end_of_text` the tokenizer's. Invalid values are
    skipped, because a model can be used without them.
    """
    generation: dict[str, Any] = {}
    with suppress(ModelError):  # `generation_config.read` has notes for the user
        if (file := path / generation_config.FILE_NAME).exists():
            generation = read_json_object(file, limit=1 << 20)
    return InheritedSettings(
        end_ids=sorted(end_ids, key=lambda i: (i != end_of_text, i)),
        special_tokens=chat_template.special_tokens(path),
        chat_template=chat_template.chat_template_source(path),
        generation_config={k: v for k, v in generation.items() if _is_shallow(v, _MAX_DEPTH)},
        contents=_read_contents(path, config_path),
        dtype=dtype,
    )


def _read_contents(path: Path, config_path: Path) -> dict[str, str]:
    """Return the files to copy from a model directory, without damaged ones; {} for a GGUF file."""
    contents = {}
    for name in _COPIED:
        file = (config_path if name == CONFIG else path) / name
        if file.is_file():
            with suppress(TgenError):  # too large
                text = files.read(file, limit=_MAX_COPIED_BYTES)
                contents[name] = text.decode("utf-8", "surrogateescape")
    contents = {n: text for n, text in contents.items() if n == TEMPLATE or _parse(text)}
    config = _parse(contents.get(CONFIG, ""))
    if (part := text_part(config)) is not config:
        contents[CONFIG] = _to_text(part)
    return contents if CONFIG in contents else {}


def _parse(text: str) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is damaged."""
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
        return values if isinstance(values, dict) else {}
    return {}


def _to_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _all_of(values: Any, container: type, kind: type) -> bool:
    listed = values.values() if isinstance(values, dict) else values
    return type(values) is container and all(type(value) is kind for value in listed)


def _is_shallow(value: Any, depth: int) -> bool:
    """Whether a JSON value is nested less than `depth` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(part, depth - 1) for part in parts)
