"""Settings that a fine-tuned model inherits besides tokenizer and shape."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tgen.checkpoint import chat_template
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.hf.config import read_json_object
from tgen.errors import ModelError

_MAX_DEPTH = 4  # nested lists and objects of a value in generation_config.json


@dataclass(frozen=True, kw_only=True)
class InheritedSettings:
    """End-of-text tokens, chat template, special tokens and sampling defaults; all JSON values."""

    end_ids: list[int] = field(default_factory=list)  # the tokenizer's end of text is first
    special_tokens: dict[str, str] = field(default_factory=dict)  # from tokenizer_config.json
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)  # the file's values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert `dataclasses.asdict`; raise TypeError for unknown or mistyped values."""
        settings = cls(**values)
        if not (
            _all_of(settings.end_ids, list, int)
            and _all_of(settings.special_tokens, dict, str)
            and isinstance(settings.chat_template, str | None)
            and isinstance(settings.generation_config, dict)
        ):
            raise TypeError("a value of another type")
        return settings


def read_inherited_settings(
    path: Path, *, end_ids: Iterable[int], end_of_text: int | None
) -> InheritedSettings:
    """Return the settings of a model directory or GGUF file that has been loaded.

    `end_ids` are all its end-of-text tokens, `end_of_text` the tokenizer's. Invalid
    values are skipped, because a model can be used without them.
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
    )


def _all_of(values: Any, container: type, kind: type) -> bool:
    listed = values.values() if isinstance(values, dict) else values
    return type(values) is container and all(type(value) is kind for value in listed)


def _is_shallow(value: Any, depth: int) -> bool:
    """Whether a JSON value is nested less than `depth` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(part, depth - 1) for part in parts)
