"""Choice of a new tokenizer for a corpus: characters or BPE, and the vocabulary size."""

import math

from tgen.reports.number_format import count

_MIN_BPE_BYTES = 10_000  # a smaller corpus repeats too few words to learn them as tokens
_SMALL_BYTES = 200_000  # a smaller corpus has too few for more than 512 tokens


def choose_tokenizer(n_bytes: int, alphabet: int) -> tuple[str, int | None, str]:
    """Return `char` or `bpe`, the vocabulary size and the reason.

    `n_bytes` is the size of the corpus, `alphabet` the number of distinct characters.
    """
    if n_bytes < _MIN_BPE_BYTES:
        return "char", None, f"below {_MIN_BPE_BYTES // 1000} KB, too few words repeat"
    doublings = -1 if n_bytes < _SMALL_BYTES else max(0, round(math.log2(n_bytes / 1e6) / 2) + 1)
    letters = 1 << max(0, alphabet - 1).bit_length()  # a large alphabet needs a large vocabulary
    vocab_size = max(1024 * 2 ** min(doublings, 4), min(2 * letters, 1 << 14))
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} KB"
    why = f"{size} of text, {count(alphabet, 'distinct character')}"
    return "bpe", round(vocab_size), why
