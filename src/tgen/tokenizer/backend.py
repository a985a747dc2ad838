"""The tokenizers library, built from a checked TokenizerSpec."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from tgen.errors import TokenizerError
from tgen.tokenizer.allowlist import DAMAGED_HINT, damaged_error
from tgen.tokenizer.patterns import DIGIT_RUNS, FASTER, GPT2, PUNCTUATION, SINGLE_DIGITS, WORDS
from tgen.tokenizer.tokenizer_json import BYTE_CHARACTERS, SPACE, TokenizerSpec

Backend = tokenizers.Tokenizer
UNKNOWN = "<unk>"
_MAX_BYTES = 1000  # of a text: its substrings are at most this times the longest token
_MAX_TEXTS = 4  # further ones: making all merges once takes less time
_MAX_ADDED = 300  # added tokens, which the tokenizers library prepares anew for each text

_NORMALIZERS = {
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
    "Lowercase": normalizers.Lowercase,
    "StripAccents": normalizers.StripAccents,
    "BertNormalizer": normalizers.BertNormalizer,
}


class BackendPair(NamedTuple):
    """Backends for the start of a text, and for its continuation, without the prefix."""

    at_start: Backend
    continuation: Backend


class Backends(NamedTuple):
    """A pair that treats special tokens as text, and a pair that encodes them."""

    plain: BackendPair
    with_special: BackendPair


def make_backends(spec: TokenizerSpec, merges: list[tuple[str, str]]) -> Backends:
    """Return the backends of a vocabulary.

    They share the vocabulary and are never modified, so any thread may use them. Without a prefix,
    both backends of a pair are one object. Raises TokenizerError if merges or added tokens do not
    fit the vocabulary.
    """
    try:
        model = (
            models.WordLevel(spec.vocab, UNKNOWN) if spec.word_level else _make_bpe(spec, merges)
        )
        plain, with_special = (
            _make_pair(model, spec, encode_special_tokens=value) for value in (True, False)
        )
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"cannot read tokenizer.json: {reason}", DAMAGED_HINT) from None
    for token in spec.added_tokens:
        next_id = plain.at_start.token_to_id(token.content)
        if next_id != token.id:
            raise damaged_error(
                f"the added token {token.content!r} has id {token.id} (expected {next_id})"
            )
    return Backends(plain, with_special)


def _make_bpe(spec: TokenizerSpec, merges: list[tuple[str, str]]) -> models.BPE:
    return models.BPE(
        vocab=spec.vocab,
        merges=merges,
        ignore_merges=spec.ignore_merges,
        byte_fallback=not spec.byte_level and not spec.word_end,
        **({"end_of_word_suffix": spec.word_end} if spec.word_end else {}),
    )


def split_words(text: str, *, prefix: bool) -> list[str]:
    """Split a text into words for `WordLevel`, with U+2581 for spaces and as a `prefix`."""
    prepared = SPACE * prefix + text.replace(" ", SPACE)
    return [word for word, _ in _splitter(WORDS).pre_tokenize_str(prepared)]


def is_consistent(spec: TokenizerSpec, merges: Sequence[Sequence[str]]) -> bool:
    """Return whether `make_backends` would find no fault in merges and added tokens. A vocabulary
    with gaps is left to it."""
    vocab = spec.vocab
    next_id = len(vocab)
    for token in spec.added_tokens:
        if token.id != vocab.get(token.content, next_id):
            return False
        next_id = max(next_id, token.id + 1)
    try:
        "".join([*vocab, *(token.content for token in spec.added_tokens)]).encode()
    except UnicodeEncodeError:  # unpaired surrogates
        return False
    has_gaps = max(vocab.values()) >= len(vocab)
    return not has_gaps and all(map(vocab.__contains__, chain.from_iterable(merges)))


def make_normalizer(spec: TokenizerSpec) -> Callable[[str], str] | None:
    """Return a function that normalizes a text, without a prefix; None if nothing changes it."""
    if not spec.normalizers:
        return None
    normalizer = normalizers.Sequence([_NORMALIZERS[name]() for name in spec.normalizers])
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize


def _make_pair(
    model: models.Model, spec: TokenizerSpec, *, encode_special_tokens: bool
) -> BackendPair:
    """`encode_special_tokens` is the library's name for encoding them as ordinary text."""
    at_start = _make_backend(model, spec, spec.prefix)
    continuation = _make_backend(model, spec, "") if spec.prefix else at_start
    for backend in (at_start, continuation):
        backend.encode_special_tokens = encode_special_tokens
    return BackendPair(at_start, continuation)


def _make_backend(model: models.Model, spec: TokenizerSpec, prefix: str) -> Backend:
    backend = Backend(model)
    stages: list[normalizers.Normalizer] = [_NORMALIZERS[name]() for name in spec.normalizers]
    if spec.byte_level:
        backend.pre_tokenizer = _byte_level_pre_tokenizer(spec, prefix)
    elif spec.word_end:
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif spec.metaspace:
        scheme = prefix or "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, spec.splits_words)
    else:
        stages += [normalizers.Prepend(SPACE)] if prefix else []
        stages.append(normalizers.Replace(" ", SPACE))
    if spec.word_level:
        backend.pre_tokenizer = _splitter(WORDS)
    backend.normalizer = normalizers.Sequence(stages) if stages else None
    added = [asdict(token) for token in spec.added_tokens]
    backend.add_tokens(
        [AddedToken(**{name: token[name] for name in token if name != "id"}) for token in added]
    )
    return backend


def _byte_level_pre_tokenizer(spec: TokenizerSpec, prefix: str) -> pre_tokenizers.PreTokenizer:
    """Return the splitters in order; ByteLevel writes bytes in GPT-2's characters."""
    built_in = spec.patterns[-1:] == (GPT2,)  # ByteLevel has this pattern
    before = spec.patterns[:-1] if built_in else spec.patterns
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=built_in)
    return pre_tokenizers.Sequence(
        [*map(_splitter, before), byte_level, *map(_splitter, spec.byte_patterns)]
    )


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern in (SINGLE_DIGITS, DIGIT_RUNS):
        return pre_tokenizers.Digits(individual_digits=pattern == SINGLE_DIGITS)
    if pattern == PUNCTUATION:
        return pre_tokenizers.Punctuation("contiguous")
    return pre_tokenizers.Split(Regex(FASTER.get(pattern, pattern)), "isolated")


class MergesOfText:
    """The merges that a short text can need: those whose result it contains.

    A process with one prompt saves the time to make all. `pairs` returns the merges of byte-level
    BPE in their order, as sequences of two tokens. Others, and merges with a token that the
    vocabulary lacks, are ignored.
    """

    def __init__(
        self, vocab: Mapping[str, int], pairs: Callable[[], Iterable[Sequence[str]]]
    ) -> None:
        self._vocab, self._pairs = vocab, pairs
        self._n_texts = 0

    def find(
        self, text: str, added: dict[str, int]
    ) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """Return the added tokens and those that may occur in a text, with their ids, and the
        merges that give them; None if it takes less time to make all merges."""
        data = text.encode(errors="surrogatepass")
        self._n_texts += 1
        if len(data) > _MAX_BYTES or self._n_texts > _MAX_TEXTS or len(added) > _MAX_ADDED:
            return None
        spelled = "".join(map(BYTE_CHARACTERS.__getitem__, data))
        parts = {
            spelled[start:end]
            for start in range(len(spelled))
            for end in range(start + 1, min(start + self._longest, len(spelled)) + 1)
        }
        tokens = {part: self._vocab[part] for part in parts if part in self._vocab}
        merges = [
            (pair[0], pair[1])
            for pair in self._pairs()
            if pair[0] in tokens and len(pair) == 2 and pair[1] in tokens
            if "".join(pair) in tokens
        ]
        return tokens | added, merges

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._vocab))
