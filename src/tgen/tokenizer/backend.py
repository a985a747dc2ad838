"""The tokenizers library, put together from what the allow-list found in a tokenizer.json."""

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tgen.errors import TokenizerError
from tgen.tokenizer.allowlist import DAMAGED, damaged
from tgen.tokenizer.byte_alphabet import SPACE
from tgen.tokenizer.patterns import DIGIT, DIGITS, GPT2
from tgen.tokenizer.spec import TokenizerSpec

__all__ = ["Backend", "make_backends"]


def make_backends(layout: TokenizerSpec) -> tuple[Backend, Backend]:
    """For the beginning of a text, and for what continues one: there nothing is put before it.

    They share the vocabulary, and are one where nothing ever is. Raises TokenizerError if merges
    or added tokens do not fit the vocabulary.
    """
    try:
        model = models.BPE(
            vocab=layout.vocab,
            merges=layout.merges,
            ignore_merges=layout.ignore_merges,
            byte_fallback=not layout.byte_level,
        )
        first = _backend(model, layout, layout.prefix)
        inner = _backend(model, layout, "") if layout.prefix else first
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"tokenizer.json cannot be read: {reason}", DAMAGED) from None
    for token in layout.added:
        next_id = first.token_to_id(token.content)
        if next_id != token.id:
            raise damaged(f"the added token {token.content!r} as {token.id}, but it is {next_id}")
    return first, inner


def _backend(model: models.Model, layout: TokenizerSpec, prefix: str) -> Backend:
    backend = Backend(model)
    if layout.byte_level:
        backend.normalizer = normalizers.NFC() if layout.nfc else None
        backend.pre_tokenizer = _words(layout, prefix)
    elif layout.metaspace:
        scheme = prefix or "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, layout.words)
    else:
        before = [normalizers.Prepend(SPACE)] if prefix else []
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token in layout.added
        ]
    )
    backend.encode_special_tokens = True  # text never turns into control tokens
    return backend


def _words(layout: TokenizerSpec, prefix: str) -> pre_tokenizers.PreTokenizer:
    """The byte-level kind's splitters, one after the other; the last writes bytes in stand-ins."""
    own = layout.splits[-1:] == (GPT2,)  # the last has this pattern built in
    splitters: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Digits(individual_digits=pattern == DIGIT)
        if pattern in (DIGIT, DIGITS)
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in (layout.splits[:-1] if own else layout.splits)
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=own)
    return pre_tokenizers.Sequence([*splitters, level])
