"""Sentencepiece vocabularies in GGUF, whose tokens have scores instead of merges.

llama.cpp joins two neighbors if their text is a token: the token with the highest score first, the
leftmost pair if scores are equal. BPE with a merge for every split of every token, ordered by the
token's score, gives the same ids; transformers converts sentencepiece models in this way, too.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice, zip_longest

from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer.byte_alphabet import BYTE_TOKENS, SPACE

_MAX_MERGES = 1 << 22  # Gemma's 262,144 tokens have an eighth
_MAX_CHARACTERS = 256  # of a token: the work grows with the square
_HINT = "use --to transformers, which keeps it"

Pair = tuple[str, str]


def merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[Pair]:
    """Return the merges of the tokens in `vocab`; `scores` are by id. Equal scores: by id.

    Raises ModelError for a token too long to be one, and for too many merges.
    """
    if longest := next((name for name in vocab if len(name) > _MAX_CHARACTERS), ""):
        raise ModelError(
            f"it has a token of {len(longest)} characters (limit {_MAX_CHARACTERS})",
            "use another model",
        )
    find = vocab.get
    splits = list(
        islice(
            (
                (-scores[i], i, left, right, name, k)
                for name, i in vocab.items()
                for k in range(1, len(name))
                if (left := find(name[:k])) is not None and (right := find(name[k:])) is not None
            ),
            _MAX_MERGES + 1,
        )
    )
    if len(splits) > _MAX_MERGES:
        raise ModelError(f"its tokens have more than {_MAX_MERGES:,} merges", "use another model")
    return [(name[:k], name[k:]) for *_, name, k in sorted(splits)]


def scores_of(
    vocab: Mapping[str, int], merges: Sequence[Pair], added: Collection[str]
) -> dict[str, float]:
    """Return the scores with which llama.cpp merges like `merges`; 0 for tokens not listed.

    tokenizer.json has no scores. Sentencepiece numbers tokens in the order in which it learned
    them, from 0 downward and characters last, and llama.cpp's converter copies these numbers from
    tokenizer.model: the rank of a token's first merge gives the same order. `added` tokens are
    never merged. Raises TokenizerError if no scores make llama.cpp merge in this way.
    """
    atomic = {*added, *BYTE_TOKENS}
    mergeable = {name: i for name, i in vocab.items() if name not in atomic}
    pairs = [p for p in merges if not atomic & {*p, "".join(p)}]
    ranked = dict.fromkeys(map("".join, pairs))
    order = [*ranked, *(name for name in mergeable if name not in ranked)]
    scores = {name: -float(rank) for rank, name in enumerate(order)}
    by_id = [0.0] * (max(vocab.values(), default=0) + 1)
    for name, score in scores.items():
        by_id[vocab[name]] = score
    expected = merges_by_score(mergeable, by_id)
    known = set(pairs)
    if more := next((pair for pair in expected if pair not in known), None):
        left, right = more
        raise TokenizerError(f"llama.cpp would also merge {left!r} and {right!r}"[:200], _HINT)
    # the order of one token's own pairs matters only where they overlap
    for pair, other in zip_longest(pairs, expected, fillvalue=("", "")):
        if "".join(pair) != "".join(other):
            raise TokenizerError(
                f"GGUF cannot store the order of the merges of {''.join(pair)!r}"[:200], _HINT
            )
    return scores


def check_words(vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError if a token spans words, for a tokenizer that splits texts at spaces."""
    if spanning := next((name for name in vocab if SPACE in name[1:]), None):
        raise TokenizerError(
            f"the token {spanning!r} spans words, at which llama.cpp does not split texts"[:200],
            _HINT,
        )


def check_tokens(vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError if llama.cpp cannot read a token, or stops at a byte without one."""
    if unreadable := next((name for name in vocab if "\0" in name), None):
        raise TokenizerError(f"llama.cpp cannot read the token {unreadable!r}"[:200], _HINT)
    for byte, name in enumerate(BYTE_TOKENS):
        if name not in vocab and (byte > 127 or chr(byte) not in vocab):
            raise TokenizerError(f"llama.cpp needs a token {name}", _HINT)
