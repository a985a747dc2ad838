"""The content of a tokenizer.json, checked: vocabulary, merges, and how a text is prepared."""

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from tgen.tokenizer.allowlist import (
    ADDED_TOKEN,
    MODEL,
    TOP_LEVEL,
    UNICODE_NORMALIZERS,
    WORD_LEVEL,
    check_settings,
    components,
    damaged_error,
    model_error,
    shorten,
    unsupported_error,
)
from tgen.tokenizer.patterns import (
    ASCII_THREE_DIGITS,
    COVERING,
    CUT_PATTERNS,
    DIGIT_RUNS,
    GPT2,
    PUNCTUATION,
    SINGLE_DIGITS,
    WORDS,
)


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # sentencepiece's, besides its characters
SPACE = "▁"  # sentencepiece's space
_BYTE_VALUES = codecs.charmap_build("".join(BYTE_CHARACTERS))
_MAX_ADDED, _MAX_ADDED_BYTES = 10_000, 512
_SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "BertPreTokenizer")
_DIGITS = (SINGLE_DIGITS, DIGIT_RUNS, ASCII_THREE_DIGITS)
_BERT_NORMALIZER = {"clean_text": True, "handle_chinese_chars": True, "lowercase": True}

WORD_STAGES: dict[str, Any] = {  # of a tokenizer of words
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": WORDS},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched verbatim in the text before all else."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer: byte-level BPE, BPE like sentencepiece's, or of words as in openai-gpt. Its
    merges are not part of it, since only few need them: see `parse_merges`."""

    vocab: dict[str, int]
    ignore_merges: bool  # a word in the vocabulary is one token
    added_tokens: list[AddedToken]
    byte_level: bool
    normalizers: tuple[str, ...] = ()  # types of the normalizers that change a text first
    patterns: tuple[str, ...] = ()  # byte-level: pre-tokenizer patterns in order
    byte_patterns: tuple[str, ...] = ()  # byte-level: patterns that then split the byte characters
    metaspace: bool = False  # sentencepiece: the pre-tokenizer replaces spaces, not the normalizer
    splits_words: bool = False  # sentencepiece: the pre-tokenizer also splits at spaces
    # A space is put before a text; with "first" not also after each added token inside it.
    prefix: Literal["", "always", "first"]
    word_end: str = ""  # words: the suffix of a word's last token
    word_level: bool = False  # every word is one token: see `WORDS`
    unknown: int | None = None  # word_level: the token of unknown words; None: they are an error
    bos_ids: tuple[int, ...]  # ids that the post-processor puts before a text

    @property
    def nfc(self) -> bool:
        """Whether a text is normalized to NFC first, and otherwise unchanged."""
        return self.normalizers == ("NFC",)

    def spell(self, token: str) -> bytes:
        """Return the bytes of a token that is neither an added token nor a byte."""
        if self.byte_level:
            try:
                return codecs.charmap_encode(token, "strict", _BYTE_VALUES)[0]
            except UnicodeEncodeError:  # other characters: no text becomes this token
                return token.encode()
        return token.replace(self.word_end or SPACE, " ").encode()

    def spell_special(self) -> tuple[dict[int, bytes], list[int | None]]:
        """Return the bytes of added tokens and of bytes by id, and each byte's token; None if the
        vocabulary has none."""
        spelled: dict[int, bytes] = {}
        names = [] if self.word_end else BYTE_CHARACTERS if self.byte_level else BYTE_TOKENS
        byte_ids = [self.vocab.get(name) for name in names] or [None] * 256
        for added in self.added_tokens:  # matched verbatim, but in sentencepiece also merged
            decoded = added.content if self.byte_level else added.content.replace(SPACE, " ")
            spelled[added.id] = b"" if added.special else decoded.encode()
        for byte, byte_id in enumerate(byte_ids):  # also those among the added tokens
            if byte_id is not None:
                spelled[byte_id] = bytes([byte])
        return spelled, byte_ids


def parse_spec(file: dict[str, Any]) -> TokenizerSpec:
    """Check the file. Raises TokenizerError for the first part that tgen does not support."""
    model = file.get("model")
    if isinstance(model, dict) and model.get("type") == "WordLevel":
        return _parse_word_level(file, model)
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise model_error(kind)
    check_settings(file, TOP_LEVEL, "the top level")
    if file.get("version", "1.0") != "1.0":
        raise unsupported_error(f"version {shorten(file['version'])}")
    check_settings(model, MODEL, "the model")
    for name in ("dropout", "continuing_subword_prefix"):
        if model.get(name):
            raise unsupported_error(f"a model with {name} {shorten(model[name])}")
    word_end = model.get("end_of_word_suffix") or ""
    vocab, added = _parse_vocab(model["vocab"]), _parse_added(file.get("added_tokens", []))
    allowed = (*UNICODE_NORMALIZERS, "BertNormalizer", "Prepend", "Replace")
    normalizers = components(file, "normalizer", "normalizers", allowed)
    splitters = components(file, "pre_tokenizer", "pretokenizers", _SPLITTERS)
    byte_level = any(component["type"] == "ByteLevel" for component in splitters)
    if word_end and (byte_level or word_end != "</w>"):
        raise unsupported_error(f"a model with end_of_word_suffix {shorten(word_end)}")
    _check_decoder(file, byte_level=byte_level, word_end=word_end)
    if not byte_level and not word_end and not model.get("byte_fallback"):
        raise unsupported_error(
            "a model without byte_fallback and a pre_tokenizer without ByteLevel"
        )
    names = BYTE_CHARACTERS if byte_level else BYTE_TOKENS
    if not word_end and vocab.keys().isdisjoint(names):
        raise unsupported_error("a vocabulary without byte tokens")
    ids = set(vocab.values())
    for token in added:
        if token.content not in vocab and token.id in ids:
            raise damaged_error(f"two tokens with the id {token.id}")
    ids |= {token.id for token in added}
    parse_stages = _parse_byte_level if byte_level else _parse_sentencepiece
    parse_stages = _parse_words if word_end else parse_stages
    return TokenizerSpec(
        vocab=vocab,
        ignore_merges=model.get("ignore_merges", False),
        added_tokens=added,
        byte_level=byte_level,
        word_end=word_end,
        bos_ids=_parse_bos(file, ids),
        **parse_stages(normalizers, splitters),
    )


def _parse_word_level(file: dict[str, Any], model: dict[str, Any]) -> TokenizerSpec:
    """Check a tokenizer of words as `train_words` makes it; others are not supported."""
    check_settings(file, TOP_LEVEL, "the top level")
    check_settings(model, WORD_LEVEL, "the model of type 'WordLevel'")
    stages = {name: file.get(name) for name in WORD_STAGES}
    if different := [name for name, stage in stages.items() if stage != WORD_STAGES[name]]:
        raise unsupported_error(f"a model of type 'WordLevel' with another {different[0]}")
    vocab, added = _parse_vocab(model["vocab"]), _parse_added(file.get("added_tokens", []))
    if foreign := [token for token in added if vocab.get(token.content) != token.id]:
        raise damaged_error(
            f"the added token {shorten(foreign[0].content)} is not in the vocabulary"
        )
    return TokenizerSpec(
        vocab=vocab,
        ignore_merges=False,
        added_tokens=added,
        byte_level=False,
        patterns=(WORDS,),
        prefix="always",
        word_level=True,
        unknown=vocab.get(model["unk_token"]),
        bos_ids=(),
    )


def _parse_vocab(vocab: dict[str, Any]) -> dict[str, int]:
    ids = list(vocab.values())
    for token, i in vocab.items() if set(map(type, ids)) != {int} else ():
        if type(i) is not int:
            raise damaged_error(f"the token {shorten(token)} with the id {shorten(i)}")
    if not ids or "" in vocab:
        raise damaged_error("an empty token" if ids else "no tokens")
    if min(ids) < 0 or max(ids) >= 2 * len(ids):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise damaged_error(f"the id {shorten(wrong)} among {len(ids)} tokens")
    if len(set(ids)) < len(ids):
        seen: set[int] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise damaged_error(f"two tokens with the id {twice}")
    return vocab


def parse_merges(file: dict[str, Any], vocab: Collection[str]) -> list[Sequence[str]]:
    """Return pairs, which older files store as one string. The library checks their tokens.

    Raises TokenizerError for other items, and for results that the vocabulary lacks.
    """
    if file["model"].get("type") == "WordLevel":
        return []
    merges: list[Any] = file["model"]["merges"]
    kinds = set(map(type, merges))
    if not kinds <= {list, tuple, str}:
        raise damaged_error("merges that are not pairs")
    if str in kinds:
        named = (m for m in merges if type(m) is not str or not m.startswith("#version"))
        merges = [merge.split(" ") if type(merge) is str else merge for merge in named]
    if not set(map(len, merges)) <= {2} or set(map(type, chain.from_iterable(merges))) - {str}:
        raise damaged_error("merges that are not pairs")
    # The library panics if the result is longer than all tokens.
    if not all(map(vocab.__contains__, map("".join, merges))):
        left, right = next(pair for pair in merges if "".join(pair) not in vocab)
        raise damaged_error(f"a merge out of vocabulary: {shorten(left)} {shorten(right)}")
    return merges


def _parse_added(listed: Any) -> list[AddedToken]:
    if not isinstance(listed, list) or len(listed) > _MAX_ADDED:
        n = f"{len(listed):,}" if isinstance(listed, list) else shorten(listed)
        raise unsupported_error(f"{n} as added tokens (limit {_MAX_ADDED:,})")
    for token in listed:
        check_settings(token, ADDED_TOKEN, "an added token")
        size = len(token["content"].encode(errors="surrogatepass"))
        if not 0 < size <= _MAX_ADDED_BYTES:
            raise unsupported_error(f"an added token of {size} bytes")
    added = [AddedToken(**token) for token in listed]
    seen: set[int | str] = set()
    for token in added:
        if seen & {token.id, token.content}:
            raise damaged_error(f"the added token {shorten(token.content)}, {token.id} twice")
        seen |= {token.id, token.content}
    return added


def _parse_byte_level(
    normalizers: Sequence[dict[str, Any]], splitters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    names = [part["type"] for part in normalizers]
    if other := [name for name in names if name not in UNICODE_NORMALIZERS]:
        raise unsupported_error(f"the normalizer {other[0]} with ByteLevel")
    i = next(i for i, part in enumerate(splitters) if part["type"] == "ByteLevel")
    first, level, last = splitters[:i], splitters[i], splitters[i + 1 :]
    patterns, byte_patterns = [_parse_pattern(p) for p in first], [_parse_pattern(p) for p in last]
    if not set(byte_patterns) <= set(_DIGITS):
        raise unsupported_error("the pre_tokenizer ByteLevel before another")
    if level["add_prefix_space"] and first:
        raise unsupported_error("add_prefix_space with a pre_tokenizer before it")
    return {
        "normalizers": tuple(names),
        "patterns": (*patterns, GPT2) if level.get("use_regex", True) else tuple(patterns),
        "byte_patterns": tuple(byte_patterns),
        "prefix": "always" if level["add_prefix_space"] else "",
    }


def _parse_pattern(part: dict[str, Any]) -> str:
    if part["type"] not in ("Split", "Digits", "Punctuation"):
        raise unsupported_error(f"the pre_tokenizer {part['type']} beside ByteLevel")
    if part["type"] == "Digits":
        return SINGLE_DIGITS if part["individual_digits"] else DIGIT_RUNS
    if part["type"] == "Punctuation":
        if part["behavior"] != "Contiguous":
            raise unsupported_error(f"Punctuation with behavior {shorten(part['behavior'])}")
        return PUNCTUATION
    regex = part["pattern"].get("Regex") if len(part["pattern"]) == 1 else None
    # Some files have the characters themselves instead of their escapes.
    pattern = regex.replace("\r", r"\r").replace("\n", r"\n") if isinstance(regex, str) else ""
    if pattern not in CUT_PATTERNS or pattern in (SINGLE_DIGITS, DIGIT_RUNS, PUNCTUATION):
        raise unsupported_error(f"a Split with the pattern {shorten(part['pattern'])}")
    split = (part["behavior"], part["invert"])
    # To remove what does not match changes nothing if everything matches.
    if split != ("Isolated", False) and (split != ("Removed", True) or pattern not in COVERING):
        raise unsupported_error(
            f"a Split with behavior {shorten(part['behavior'])} and invert {part['invert']}"
        )
    return pattern


def _parse_sentencepiece(
    normalizers: Sequence[dict[str, Any]], splitters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    names = [part["type"] for part in normalizers]
    unicode = [name for name in names if name in UNICODE_NORMALIZERS]
    kinds = names[len(unicode) :] if names[: len(unicode)] == unicode else names
    if kinds and len(splitters) == 1 and _splits_at_no_space(splitters[0]):
        splitters = []  # the normalizer has replaced all spaces
    kinds += [part["type"] for part in splitters]
    prefix: str = "always" if kinds == ["Prepend", "Replace"] else ""
    if kinds not in (["Prepend", "Replace"], ["Replace"], ["Metaspace"]):
        raise unsupported_error(f"{' and '.join(kinds) or 'nothing'} to replace spaces")
    for part in normalizers:
        _check_replacement(part, " ", SPACE)
    metaspace = splitters[0] if splitters else {}
    if metaspace:
        prefix = _prepend_scheme(metaspace)
    return {
        "normalizers": tuple(unicode),
        "metaspace": bool(metaspace),
        "splits_words": metaspace.get("split", True),
        "prefix": "" if prefix == "never" else prefix,
    }


def _splits_at_no_space(part: dict[str, Any]) -> bool:
    settings = {"pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return part == {"type": "Split", **settings}


def _parse_words(
    normalizers: Sequence[dict[str, Any]], splitters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Parse the stages of openai-gpt, which are BERT's."""
    kinds = [part["type"] for part in [*normalizers, *splitters]]
    if kinds != ["BertNormalizer", "BertPreTokenizer"]:
        raise unsupported_error(f"{' and '.join(kinds) or 'nothing'} with end_of_word_suffix")
    different = [k for k, v in _BERT_NORMALIZER.items() if normalizers[0][k] is not v]
    if different or normalizers[0]["strip_accents"] is False:
        raise unsupported_error(f"a BertNormalizer with another {(*different, 'strip_accents')[0]}")
    return {"normalizers": ("BertNormalizer",), "prefix": ""}


def _prepend_scheme(metaspace: dict[str, Any]) -> str:
    """Return when a Metaspace puts a space before a text: "always", "first" or "never"."""
    prefix: str = metaspace.get("prepend_scheme", "always")
    add_prefix = metaspace.get("add_prefix_space", True)  # older than prepend_scheme
    prefix = "never" if not add_prefix and "prepend_scheme" not in metaspace else prefix
    if metaspace["replacement"] != SPACE or prefix not in ("always", "first", "never"):
        replacement = shorten(metaspace["replacement"])
        raise unsupported_error(f"a Metaspace with {replacement} and {shorten(prefix)}")
    if not add_prefix and prefix != "never":
        raise unsupported_error(f"a Metaspace without add_prefix_space, but with {prefix}")
    return prefix


def _check_replacement(part: dict[str, Any], old: str, new: str) -> None:
    """Raise TokenizerError unless the part replaces `old` by `new`, or prepends `new`."""
    if part["type"] == "Prepend" and part["prepend"] != new:
        raise unsupported_error(f"Prepend of {shorten(part['prepend'])}")
    if part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": old}, new):
        old, new = shorten(part["pattern"]), shorten(part["content"])
        raise unsupported_error(f"Replace of {old} with {new}")


def _check_decoder(file: dict[str, Any], *, byte_level: bool, word_end: str) -> None:
    """Raise TokenizerError unless it fits the kind; tgen decodes by the tokens' names."""
    allowed = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "BPEDecoder")
    stages = components(file, "decoder", "decoders", allowed)
    kinds = [part["type"] for part in stages]
    if word_end or "BPEDecoder" in kinds:
        if [part for part in stages if part != {"type": "BPEDecoder", "suffix": word_end}]:
            raise unsupported_error(f"the decoder {', '.join(kinds)} with {shorten(word_end)}")
        if word_end and stages:
            return
    spaces = [kind for kind in kinds if kind in ("Replace", "Metaspace")]
    expected = ["ByteLevel"] if byte_level else [*spaces, "ByteFallback"]
    if not (kinds == expected if byte_level else spaces and set(expected) <= set(kinds)):
        raise unsupported_error(f"the decoder {', '.join(kinds) or None}")
    if not byte_level and "ByteLevel" in kinds:
        raise unsupported_error("the decoder ByteLevel without a ByteLevel pre_tokenizer")
    for part in stages:
        _check_replacement(part, SPACE, " ")
        if part["type"] == "Metaspace":
            _prepend_scheme(part)
        if part["type"] == "Strip" and (
            part["content"] != " " or part["start"] not in (0, 1) or part["stop"]
        ):
            raise unsupported_error(
                f"a Strip of {shorten(part['content'])} from {part['start']} to {part['stop']}"
            )


def _parse_bos(file: dict[str, Any], ids: Collection[int]) -> tuple[int, ...]:
    """Return the ids before a text; those after it would end a text that is to continue."""
    stages = components(file, "post_processor", "processors", ("ByteLevel", "TemplateProcessing"))
    templates = [part for part in stages if part["type"] == "TemplateProcessing"]
    if len(templates) > 1:
        raise unsupported_error("two templates")
    return tuple(i for part in templates for i in _ids_before_text(part, ids))


def _ids_before_text(template: dict[str, Any], ids: Collection[int]) -> list[int]:
    before: list[int] = []
    for piece in template["single"]:
        kind, value = next(iter(piece.items())) if isinstance(piece, dict) and piece else ("", 0)
        name = value.get("id") if isinstance(value, dict) else None
        if (kind, name) == ("Sequence", "A"):
            return before
        token = template["special_tokens"].get(name) if isinstance(name, str) else None
        token_ids = token.get("ids") if isinstance(token, dict) else None
        if kind != "SpecialToken" or not isinstance(token_ids, list):
            raise damaged_error(f"a template with {shorten(piece)}")
        if wrong := [i for i in token_ids if type(i) is not int or i not in ids]:
            raise damaged_error(f"a template with the unknown id {shorten(wrong[0])}")
        before += token_ids
    raise damaged_error("a template without the text")
