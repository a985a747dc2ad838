"""The n-gram model against one that is written down directly, the compressor against itself."""

import lzma
import math
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.training.baselines import ngram_bits_per_byte, xz_bits_per_byte

VERSE = (
    b"What is this? What is a crown? The king said: this is the king's crown, and what is "
    b"a king? 'Tis naive; the thing is what it is."
)


@cache
def followers_and_discounts(
    train: bytes, before: bytes, order: int
) -> tuple[Counter[int], tuple[float, ...]]:
    """Tokens that follow a context, with counts, and the discounts of counts of 1, 2 and more."""
    text = bytes(order) + train
    longest = [text[i : i + order + 1] for i in range(len(train))]
    length = len(before) + 1
    # A shorter gram counts once for each byte before it.
    ends = longest if length == order + 1 else {gram[-length - 1 :] for gram in longest}
    counts = Counter(gram[-length:] for gram in ends)
    of_counts = Counter(counts.values())
    n1, n2, n3, n4 = (of_counts[i] for i in (1, 2, 3, 4))
    d: tuple[float, ...] = (0.5, 1.0, 1.5)
    if n1 and n2 and n3 and n4:
        y = Fraction(n1, n1 + 2 * n2)
        exact = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if 0 < exact[0] <= 1 and 0 < exact[1] <= 2 and 0 < exact[2] <= 3:
            d = tuple(map(float, exact))
    return Counter({gram[-1]: n for gram, n in counts.items() if gram[:-1] == before}), d


def reference(train: bytes, context: bytes, byte: int, order: int) -> float:
    """Modified Kneser-Ney, gram by gram."""
    probability = 1 / 256
    for n_before in range(order + 1):
        before = context[len(context) - n_before :]
        followers, d = followers_and_discounts(train, before, order)
        if followers:
            total = sum(followers.values())
            freed = sum(d[min(n, 3) - 1] for n in followers.values())
            count = followers[byte]
            discounted = count - d[min(count, 3) - 1] if count else 0
            probability = (discounted + freed * probability) / total
    return probability


@pytest.mark.parametrize(
    ("order", "train"),
    [*product([0, 1, 2, 5, 7], [VERSE, b"a\0a", b""]), (5, VERSE * 5)],
)
def test_probabilities_equal_the_reference_and_sum_to_1(order, train):
    for extra in (b"", b"is a k", b"\xff", b"\0\0"):
        context = bytes(order) + train + extra
        before = ngram_bits_per_byte(train, extra, order=order) * len(extra) if extra else 0.0
        total = 0.0
        for byte in range(256):
            held_out = extra + bytes([byte])
            bits = ngram_bits_per_byte(train, held_out, order=order) * len(held_out) - before
            total += 2**-bits
            assert 2**-bits == pytest.approx(reference(train, context, byte, order), abs=1e-12)
        assert total == pytest.approx(1, abs=1e-12)


def test_discounts_come_from_counts_of_counts_if_plausible():
    # Four letters once, two twice, one three times, one four times: 0.5, 1.25 and 1.
    freed = 4 * 0.5 + 2 * 1.25 + 2 * 1
    for letter, own in [(b"a", 0.5), (b"e", 0.75), (b"g", 2.0), (b"h", 3.0), (b"?", 0.0)]:
        expected = -math.log2((own + freed / 256) / 15)
        assert ngram_bits_per_byte(b"abcdeeffggghhhh", letter, order=0) == pytest.approx(expected)
    # Three, one, two, one: the second would be -1.6, so all are the fallback's.
    freed = 3 * 0.5 + 1 + 3 * 1.5
    for letter, own in [(b"a", 0.5), (b"d", 1.0), (b"e", 1.5), (b"g", 2.5), (b"?", 0.0)]:
        expected = -math.log2((own + freed / 256) / 15)
        assert ngram_bits_per_byte(b"abcddeeefffgggg", letter, order=0) == pytest.approx(expected)


def test_small_example_matches_the_value_computed_by_hand():
    # "aaab": a loses 1.5 of its 3, b 0.5 of its 1; the 2 freed are spread over 256 bytes.
    a, other = (1.5 + 2 / 256) / 4, (2 / 256) / 4
    assert ngram_bits_per_byte(b"aaab", b"a", order=0) == pytest.approx(-math.log2(a))
    both = (-math.log2(a) - math.log2(other)) / 2
    assert ngram_bits_per_byte(b"aaab", b"ac", order=0) == pytest.approx(both)
    assert ngram_bits_per_byte(b"", b"any text", order=3) == 8


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=50), st.integers(0, 7))
@settings(deadline=None)
def test_bits_are_positive_and_finite(train, held_out, order):
    assert 0 < ngram_bits_per_byte(train, held_out, order=order) < math.inf


def test_held_out_text_is_not_trained_on():
    once = ngram_bits_per_byte(VERSE, b"Zyx! " * 4)
    assert ngram_bits_per_byte(VERSE, b"Zyx! " * 40) == pytest.approx(once, rel=0.2)
    assert once > 8


@pytest.mark.parametrize("text", [b"a", VERSE * 3, bytes(range(256)) * 40])
def test_xz_is_that_of_its_preset(text):
    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9))

    assert xz_bits_per_byte(VERSE, text) == 8 * (size(VERSE + text) - size(VERSE)) / len(text)


def test_xz_counts_only_what_is_new():
    assert xz_bits_per_byte(VERSE * 20, VERSE) < 0.5
    noise = bytes(i * i * 31 % 251 ^ i % 7 for i in range(4000))
    assert xz_bits_per_byte(VERSE, noise) > xz_bits_per_byte(VERSE + noise, noise) + 1
