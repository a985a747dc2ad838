"""What a tokenizer.json says: its vocabulary, and what is done to a text before it is looked up."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from tgen.tokenizer.allowlist import (
    ADDED,
    MODEL,
    MODEL_POSSIBLE,
    TOP,
    TOP_POSSIBLE,
    damaged,
    parts,
    settings,
    show,
    unknown,
)
from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS, BYTE_TOKENS, SPACE
from tgen.tokenizer.patterns import CUTS, DIGIT, DIGITS, GPT2

_MAX_ADDED, _MAX_ADDED_BYTES = 10_000, 512


@dataclass(frozen=True)
class Added:
    """A token that is looked for in the text as it is written, before all else."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer: byte-level, or else of sentencepiece's kind."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    ignore_merges: bool  # a word that is in the vocabulary is one token
    added: list[Added]
    byte_level: bool
    nfc: bool  # text is composed by Unicode's rules first
    splits: tuple[str, ...]  # byte-level: the patterns, one after the other
    metaspace: bool  # sentencepiece: spaces are replaced by the splitter, not by the normalizer
    words: bool  # and it splits at them
    # A space that is put before a text: "" is none, and by "first" only before its beginning,
    # not also after an added token in it.
    prefix: Literal["", "always", "first"]
    start: tuple[int, ...]  # what the post-processor puts before a text


def check(file: dict[str, Any]) -> TokenizerSpec:
    """What the file says. Raises TokenizerError for the first thing that tgen does not know."""
    model = file.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise unknown(f"a model of type {show(kind)}")
    settings(file, TOP, TOP_POSSIBLE, "a top level")
    if file.get("version", "1.0") != "1.0":
        raise unknown(f"version {show(file['version'])}")
    settings(model, MODEL, MODEL_POSSIBLE, "the model")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise unknown(f"a model with {name} {show(model[name])}")
    vocab, added = _vocab(model["vocab"]), _added(file.get("added_tokens", []))
    normalizers = parts(file, "normalizer", "normalizers", ("NFC", "Prepend", "Replace"))
    splitters = parts(
        file, "pre_tokenizer", "pretokenizers", ("ByteLevel", "Split", "Digits", "Metaspace")
    )
    byte_level = any(part["type"] == "ByteLevel" for part in splitters)
    _check_decoder(file, byte_level=byte_level)
    names = BYTE_CHARACTERS if byte_level else BYTE_TOKENS
    special = {token.content for token in added if token.special}
    if missing := [name for name in names if name not in vocab or name in special]:
        raise unknown(f"{256 - len(missing)} of the 256 byte tokens")
    if not byte_level and not model.get("byte_fallback"):
        raise unknown("a model without byte_fallback and a pre_tokenizer without ByteLevel")
    kind = _byte_level if byte_level else _sentencepiece
    known = set(vocab.values())
    for token in added:
        if token.content not in vocab and token.id in known:
            raise damaged(f"two tokens with the id {token.id}")
    known |= {token.id for token in added}
    return TokenizerSpec(
        vocab=vocab,
        merges=_merges(model["merges"]),
        ignore_merges=model.get("ignore_merges", False),
        added=added,
        byte_level=byte_level,
        start=_start(file, known),
        **kind(normalizers, splitters),
    )


def _vocab(vocab: dict[str, Any]) -> dict[str, int]:
    ids = list(vocab.values())
    for token, i in vocab.items() if set(map(type, ids)) != {int} else ():
        if type(i) is not int:
            raise damaged(f"the token {show(token)} with the id {show(i)}")
    if not ids or "" in vocab:
        raise damaged("an empty token" if ids else "no tokens")
    if min(ids) < 0 or max(ids) >= 2 * len(ids):
        wild = min(ids) if min(ids) < 0 else max(ids)
        raise damaged(f"the id {show(wild)} among {len(ids)} tokens")
    if len(set(ids)) < len(ids):
        seen: set[int] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise damaged(f"two tokens with the id {twice}")
    return vocab


def _merges(merges: list[Any]) -> list[tuple[str, str]]:
    """Pairs; in older files both in one string. The library looks for them in the vocabulary."""
    if not set(map(type, merges)) <= {list, str}:
        raise damaged("merges that are no pairs")
    pairs = [
        tuple(merge.split(" ")) if type(merge) is str else tuple(merge)
        for merge in merges
        if type(merge) is list or not merge.startswith("#version")
    ]
    if not set(map(len, pairs)) <= {2} or set(map(type, chain.from_iterable(pairs))) - {str}:
        raise damaged("merges that are no pairs")
    return pairs  # type: ignore[return-value]


def _added(listed: Any) -> list[Added]:
    if not isinstance(listed, list) or len(listed) > _MAX_ADDED:
        n = f"{len(listed):,}" if isinstance(listed, list) else show(listed)
        raise unknown(f"{n} as added tokens, of which {_MAX_ADDED:,} may be")
    for token in listed:
        settings(token, ADDED, {}, "an added token")
        size = len(token["content"].encode(errors="surrogatepass"))
        if not 0 < size <= _MAX_ADDED_BYTES:
            raise unknown(f"an added token of {size} bytes")
    added = [Added(**token) for token in listed]
    seen: set[int | str] = set()
    for token in added:
        if seen & {token.id, token.content}:
            raise damaged(f"the added token {show(token.content)}, {token.id} twice")
        seen |= {token.id, token.content}
    return added


def _byte_level(
    normalizers: Sequence[dict[str, Any]], splitters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    if other := [part["type"] for part in normalizers if part["type"] != "NFC"]:
        raise unknown(f"the normalizer {other[0]} with ByteLevel")
    *before, level = splitters
    if wrong := [p["type"] for p in before if p["type"] in ("ByteLevel", "Metaspace")]:
        raise unknown(f"the pre_tokenizer {wrong[0]} before another")
    if level["add_prefix_space"] and before:
        raise unknown("add_prefix_space with a pre_tokenizer before it")
    splits = [_split(part) for part in before]
    return {
        "nfc": bool(normalizers),
        "splits": (*splits, GPT2) if level.get("use_regex", True) else tuple(splits),
        "metaspace": False,
        "words": False,
        "prefix": "always" if level["add_prefix_space"] else "",
    }


def _split(part: dict[str, Any]) -> str:
    if part["type"] == "Digits":
        return DIGIT if part["individual_digits"] else DIGITS
    known = [pattern for pattern in CUTS if part["pattern"] == {"Regex": pattern}]
    if not known or known[0] in (DIGIT, DIGITS):
        raise unknown(f"a Split by the pattern {show(part['pattern'])}")
    if part["behavior"] != "Isolated" or part["invert"]:
        raise unknown(f"a Split with {show(part['behavior'])} and invert {part['invert']}")
    return known[0]


def _sentencepiece(
    normalizers: Sequence[dict[str, Any]], splitters: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    kinds = [part["type"] for part in [*normalizers, *splitters]]
    prefix: str = "always" if kinds == ["Prepend", "Replace"] else ""
    if kinds not in (["Prepend", "Replace"], ["Replace"], ["Metaspace"]):
        raise unknown(f"{' and '.join(kinds) or 'nothing'} to replace spaces")
    for part in normalizers:
        _check_replaced(part, " ", SPACE)
    metaspace = splitters[0] if splitters else {}
    if metaspace:
        prefix = metaspace.get("prepend_scheme", "always")
        old = metaspace.get("add_prefix_space", True)  # of before there were schemes
        prefix = "never" if not old and "prepend_scheme" not in metaspace else prefix
        if metaspace["replacement"] != SPACE or prefix not in ("always", "first", "never"):
            raise unknown(f"a Metaspace of {show(metaspace['replacement'])}, {show(prefix)}")
        if not old and prefix != "never":
            raise unknown(f"a Metaspace without add_prefix_space, but {prefix}")
    return {
        "nfc": False,
        "splits": (),
        "metaspace": bool(metaspace),
        "words": metaspace.get("split", True),
        "prefix": "" if prefix == "never" else prefix,
    }


def _check_replaced(part: dict[str, Any], old: str, new: str) -> None:
    """Raises TokenizerError for what is not just one character to another, or one put before."""
    if part["type"] == "Prepend" and part["prepend"] != new:
        raise unknown(f"Prepend of {show(part['prepend'])}")
    if part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": old}, new):
        raise unknown(f"Replace of {show(part['pattern'])} by {show(part['content'])}")


def _check_decoder(file: dict[str, Any], *, byte_level: bool) -> None:
    """Bytes come from the tokens' names, so that it only has to be the one that goes with them."""
    allowed = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
    stages = parts(file, "decoder", "decoders", allowed)
    kinds = [part["type"] for part in stages]
    spaces = [kind for kind in kinds if kind in ("Replace", "Metaspace")]
    fits = ["ByteLevel"] if byte_level else [*spaces, "ByteFallback"]
    if not (kinds == fits if byte_level else spaces and set(fits) <= set(kinds)):
        raise unknown(f"the decoder {', '.join(kinds) or None}")
    if not byte_level and "ByteLevel" in kinds:
        raise unknown("the decoder ByteLevel without such a pre_tokenizer")
    for part in stages:
        _check_replaced(part, SPACE, " ")
        if part["type"] == "Strip" and (part["content"] != " " or part["stop"]):
            raise unknown(f"a Strip of {show(part['content'])}")


def _start(file: dict[str, Any], known: Collection[int]) -> tuple[int, ...]:
    """The ids before a text; what would come after it is not for a text that is to go on."""
    stages = parts(file, "post_processor", "processors", ("ByteLevel", "TemplateProcessing"))
    templates = [part for part in stages if part["type"] == "TemplateProcessing"]
    if len(templates) > 1:
        raise unknown("two templates")
    return tuple(i for part in templates for i in _before_text(part, known))


def _before_text(template: dict[str, Any], known: Collection[int]) -> list[int]:
    found: list[int] = []
    for piece in template["single"]:
        kind, value = next(iter(piece.items())) if isinstance(piece, dict) and piece else ("", 0)
        name = value.get("id") if isinstance(value, dict) else None
        if (kind, name) == ("Sequence", "A"):
            return found
        named = template["special_tokens"].get(name) if isinstance(name, str) else None
        ids = named.get("ids") if isinstance(named, dict) else None
        if kind != "SpecialToken" or not isinstance(ids, list):
            raise damaged(f"a template with {show(piece)}")
        if wrong := [i for i in ids if type(i) is not int or i not in known]:
            raise damaged(f"a template with the id {show(wrong[0])}, which is no token")
        found += ids
    raise damaged("a template without the text")
