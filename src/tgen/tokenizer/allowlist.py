"""The allow-list: which components a tokenizer.json may be made of, and in which values.

The tokenizers library may end the whole process over a file that means harm, or never come back. So
no file gets to it: only what is found here, checked, is handed on. What is not known is refused by
name; truncation and padding are left out, for tgen has its own.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Collection
from typing import Any

from tgen.errors import TokenizerError

DAMAGED = "the file is damaged: fetch it again"
_READ = "tgen reads byte-level BPE, and BPE of sentencepiece's kind with byte fallback"
_MAX_PARTS = 8
_BOOL, _WORD, _COUNT, _ANY = (bool,), (str,), (int,), (object,)
# Each component's settings: those that must be there, and those that may.
Settings = dict[str, tuple[type, ...]]
_COMPONENTS: dict[str, tuple[Settings, Settings]] = {
    "NFC": ({}, {}),
    "Prepend": ({"prepend": _WORD}, {}),
    "Replace": ({"pattern": (dict,), "content": _WORD}, {}),
    "ByteLevel": ({"add_prefix_space": _BOOL, "trim_offsets": _BOOL}, {"use_regex": _BOOL}),
    "Split": ({"pattern": (dict,), "behavior": _WORD, "invert": _BOOL}, {}),
    "Digits": ({"individual_digits": _BOOL}, {}),
    "Metaspace": (
        {"replacement": _WORD},
        {"add_prefix_space": _BOOL, "prepend_scheme": _WORD, "split": _BOOL, "str_rep": _WORD},
    ),
    "ByteFallback": ({}, {}),
    "Fuse": ({}, {}),
    "Strip": ({"content": _WORD, "start": _COUNT, "stop": _COUNT}, {}),
    "TemplateProcessing": ({"single": (list,), "pair": (list,), "special_tokens": (dict,)}, {}),
}
ADDED: Settings = {
    "id": _COUNT,
    "content": _WORD,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _BOOL),
}
TOP: Settings = {"model": (dict,)}
TOP_POSSIBLE: Settings = {
    **dict.fromkeys(("version", "truncation", "padding", "added_tokens"), _ANY),
    **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"), _ANY),
}
MODEL: Settings = {"vocab": (dict,), "merges": (list,)}
MODEL_POSSIBLE: Settings = {
    "type": _ANY,
    "dropout": (float, int, type(None)),
    **dict.fromkeys(
        ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), (str, type(None))
    ),
    **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), _BOOL),
}

_shown = reprlib.Repr()
_shown.maxstring = 80


def read(text: str) -> dict[str, Any]:
    """The JSON object, in which no key is there twice. Raises TokenizerError if it is none."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer.json cannot be read: {error}", DAMAGED) from None
    if not isinstance(found, dict):
        raise TokenizerError("tokenizer.json is not a JSON object", DAMAGED)
    return found


def parts(
    file: dict[str, Any], key: str, inside: str, allowed: Collection[str]
) -> list[dict[str, Any]]:
    """One of the four stages as a list of components, of allowed types, each with its settings."""
    value = file.get(key)
    listed: list[Any] = [] if value is None else [value]
    if isinstance(value, dict) and value.get("type") == "Sequence":
        settings(value, {"type": _WORD, inside: (list,)}, {}, f"the {key}")
        listed = value[inside]
    if len(listed) > _MAX_PARTS:
        raise unknown(f"a {key} of {len(listed)} parts")
    for part in listed:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in allowed:
            raise unknown(f"the {key} {show(kind)}")
        needed, possible = _COMPONENTS[kind]
        settings(part, {"type": _WORD} | needed, possible, f"the {key} {kind}")
    return listed


def settings(value: Any, needed: Settings, possible: Settings, where: str) -> None:
    """Raises TokenizerError if a setting is not there, unknown, or of another type."""
    if not isinstance(value, dict):
        raise unknown(f"{show(value)} as {where}")
    if missing := needed.keys() - value.keys():
        raise unknown(f"{where} without {min(missing)}")
    kinds = needed | possible
    for name, setting in value.items():
        if name not in kinds:
            raise unknown(f"{where} with an unknown {show(name)}")
        if kinds[name] != _ANY and type(setting) not in kinds[name]:
            raise unknown(f"{where} with {name} {show(setting)}")


def show(value: object) -> str:
    """One line for a message, however much the file has there."""
    return _shown.repr(value)


def unknown(what: str) -> TokenizerError:
    """The file has what tgen does not read."""
    return TokenizerError(f"tokenizer.json has {what}", _READ)


def damaged(what: str) -> TokenizerError:
    """The file has what no tokenizer has."""
    return TokenizerError(f"tokenizer.json has {what}", DAMAGED)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{show(twice)} is there twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
