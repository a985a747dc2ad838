"""The allowlist: the components a tokenizer.json may have, and their settings.

A hostile file can make the tokenizers library abort the process or never return. So the library
never sees a file, only components that are checked here. Others are rejected by name; truncation
and padding are ignored, because tgen has its own.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Collection
from typing import Any

from tgen.errors import TokenizerError

DAMAGED_HINT = "download the file again"
_SUPPORTED = "use byte-level BPE, or BPE like sentencepiece's with byte fallback"
_OTHER_MODELS = {  # models of other kinds, and who uses them
    "WordPiece": "BERT and other encoders",
    "Unigram": "T5, XLNet and other models with sentencepiece's unigram model",
}
_MAX_COMPONENTS = 8
_BOOL, _STR, _INT, _ANY = (bool,), (str,), (int,), (object,)
UNICODE_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
Settings = dict[str, tuple[type, ...]]  # the types allowed for each; "?" marks an optional one
_COMPONENTS: dict[str, Settings] = {
    **{name: {} for name in (*UNICODE_NORMALIZERS, "BertPreTokenizer")},
    "BertNormalizer": {
        **dict.fromkeys(("clean_text", "handle_chinese_chars", "lowercase"), _BOOL),
        "strip_accents": (bool, type(None)),
    },
    "Prepend": {"prepend": _STR},
    "Replace": {"pattern": (dict,), "content": _STR},
    "ByteLevel": {"add_prefix_space": _BOOL, "trim_offsets": _BOOL, "use_regex?": _BOOL},
    "Split": {"pattern": (dict,), "behavior": _STR, "invert": _BOOL},
    "Digits": {"individual_digits": _BOOL},
    "Punctuation": {"behavior": _STR},
    "Metaspace": {
        "replacement": _STR,
        "add_prefix_space?": _BOOL,
        "prepend_scheme?": _STR,
        "split?": _BOOL,
        "str_rep?": _STR,
    },
    "ByteFallback": {},
    "Fuse": {},
    "BPEDecoder": {"suffix": _STR},
    "Strip": {"content": _STR, "start": _INT, "stop": _INT},
    "TemplateProcessing": {"single": (list,), "pair": (list,), "special_tokens": (dict,)},
}
TOP_LEVEL: Settings = {
    "model": (dict,),
    **dict.fromkeys(("version?", "truncation?", "padding?", "added_tokens?"), _ANY),
    **dict.fromkeys(("normalizer?", "pre_tokenizer?", "post_processor?", "decoder?"), _ANY),
}
MODEL: Settings = {
    "vocab": (dict,),
    "merges": (list,),
    "type?": _ANY,
    "dropout?": (float, int, type(None)),
    **dict.fromkeys(
        ("unk_token?", "continuing_subword_prefix?", "end_of_word_suffix?"), (str, type(None))
    ),
    **dict.fromkeys(("fuse_unk?", "byte_fallback?", "ignore_merges?"), _BOOL),
}
WORD_LEVEL: Settings = {"type": _STR, "vocab": (dict,), "unk_token": _STR}
ADDED_TOKEN: Settings = {
    "id": _INT,
    "content": _STR,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _BOOL),
}

_repr = reprlib.Repr()
_repr.maxstring = 80


def parse_json(text: str) -> dict[str, Any]:
    """Return a JSON object without duplicate keys. Raises TokenizerError for any other text."""
    try:
        value = json.loads(text, object_pairs_hook=_to_dict, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read tokenizer.json: {error}", DAMAGED_HINT) from None
    if not isinstance(value, dict):
        raise TokenizerError("tokenizer.json is not a JSON object", DAMAGED_HINT)
    return value


def components(
    file: dict[str, Any], stage: str, sequence_key: str, allowed: Collection[str]
) -> list[dict[str, Any]]:
    """Return the components of a stage, with their settings checked.

    A stage is one component, or a Sequence with a list of them under `sequence_key`.
    """
    value = file.get(stage)
    listed: list[Any] = [] if value is None else [value]
    if isinstance(value, dict) and value.get("type") == "Sequence":
        check_settings(value, {"type": _STR, sequence_key: (list,)}, f"the {stage}")
        listed = value[sequence_key]
    if len(listed) > _MAX_COMPONENTS:
        raise unsupported_error(f"a {stage} with {len(listed)} components")
    for component in listed:
        kind = component.get("type") if isinstance(component, dict) else component
        if not isinstance(component, dict) or not isinstance(kind, str) or kind not in allowed:
            raise unsupported_error(f"the {stage} {shorten(kind)}")
        check_settings(component, {"type": _STR} | _COMPONENTS[kind], f"the {stage} {kind}")
    return listed


def check_settings(value: Any, settings: Settings, name: str) -> None:
    """Raise TokenizerError if a setting is missing, unknown or of another type."""
    if not isinstance(value, dict):
        raise unsupported_error(f"{shorten(value)} as {name}")
    if missing := [key for key in settings if not key.endswith("?") and key not in value]:
        raise unsupported_error(f"{name} without {missing[0]}")
    types = {key.removesuffix("?"): allowed for key, allowed in settings.items()}
    for key, setting in value.items():
        if key not in types:
            raise unsupported_error(f"{name} with an unknown {shorten(key)}")
        if types[key] != _ANY and type(setting) not in types[key]:
            raise unsupported_error(f"{name} with {key} {shorten(setting)}")


def shorten(value: object) -> str:
    """Return a value as one line for a message, however large it is."""
    return _repr.repr(value)


def unsupported_error(what: str) -> TokenizerError:
    """Return the error for a file that tgen does not support."""
    return TokenizerError(f"tokenizer.json: not supported: {what}", _SUPPORTED)


def model_error(kind: object) -> TokenizerError:
    """Return the error for a file whose model is not BPE."""
    hint = _SUPPORTED
    if isinstance(kind, str) and kind in _OTHER_MODELS:
        hint = f"{_SUPPORTED}; {kind} is the tokenizer of {_OTHER_MODELS[kind]}"
    return TokenizerError(
        f"tokenizer.json: not supported: a model of type {shorten(kind)} (expected BPE)", hint
    )


def damaged_error(what: str) -> TokenizerError:
    """Return the error for a file that no program could use."""
    return TokenizerError(f"tokenizer.json is damaged: {what}", DAMAGED_HINT)


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {shorten(key)}")
    return values


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
