"""Does a model write, or does it recite? Its samples are compared with the text it learnt from.

Any text repeats itself; only a run far longer than what unseen text of the same kind shares with
the training text is a memory.
"""

import numpy as np

from tgen.corpus.rolling_hash import among, sums, windows
from tgen.reports import MemorizationReport

# A run by chance grows with the logarithm of the texts' sizes: to double it, square both. Real text
# is less even: of pieces of 4 KB, tinyshakespeare's share 20 to 49 bytes with its rest, their
# median is 26. Four times that, 104 bytes, are more than two whole lines of verse.
_LONG = 2  # times the natural run
_VERY_LONG = 4
_ORDINARY = 20  # bytes, three or four words: a natural run never counts as shorter
# Training over held-out bits. Parts of one text differ by less: an n-gram model's average over its
# worst tenth is 0.95 for tinyshakespeare, 0.83 for a manual of Python with chapters all unlike.
_GAP = 0.75
_GAP_BITS = 0.1  # and less than this is no gap, however small both are
_READINGS = 2  # of the text: after fewer, two parts of it differ by themselves
_BY_HEART = 0.3  # bits a byte: a good model of unseen English needs three times as many

_PIECE = 1 << 22  # bytes of the text in memory as fingerprints at a time


def longest_shared_run(sample: bytes, text: bytes) -> bytes:
    """The longest run of bytes of the sample that occurs verbatim in the text, empty if none.

    Of several the first in the text. Runs are compared by fingerprints of 64 bits.
    """
    if not sample:
        return b""
    longest = b""
    for start in range(0, len(text), _PIECE):
        # A run may begin in this piece and end in the next.
        piece = text[start : start + _PIECE + len(sample) - 1]
        longest = max(longest, _longest_in_piece(sample, piece), key=len)
    return longest


def judge_memorization(
    longest_run: int,
    natural_run: int,
    *,
    train_bits_per_byte: float,
    held_out_bits_per_byte: float | None,
    readings: float,
) -> MemorizationReport:
    """Whether a model memorises, from the bytes of two runs and its bits per byte on two texts.

    `longest_run` is that of the samples and the training text, `natural_run` that of a held-out
    text, as long as the samples, and the training text; where nothing is held out, that of the
    training text's end and all before it, and `held_out_bits_per_byte` is None. What is recited is
    a proof; knowing the training text much better than the unseen is a sign, once it has been read
    several times. Where nothing is held out, needing next to no bits for the text is the proof.
    """
    times = longest_run / max(natural_run, _ORDINARY)
    knows_better = (
        held_out_bits_per_byte is not None
        and readings >= _READINGS
        and train_bits_per_byte
        <= min(_GAP * held_out_bits_per_byte, held_out_bits_per_byte - _GAP_BITS)
    )
    by_heart = (
        held_out_bits_per_byte is None
        and readings >= _READINGS
        and train_bits_per_byte <= _BY_HEART
    )
    other = "the text's end" if held_out_bits_per_byte is None else "unseen text"
    runs = f"the longest run it copies has {longest_run} bytes, {other} shares {natural_run}"
    if by_heart:
        verdict = f"memorises: it needs {train_bits_per_byte:.2f} bits a byte for its text"
    elif times >= _VERY_LONG:
        verdict = f"memorises: {runs}"
    elif times >= _LONG:
        verdict = f"begins to memorise: {runs}"
    elif knows_better:
        verdict = (
            f"begins to memorise: it needs {train_bits_per_byte:.2f} bits a byte for its training "
            f"text, {held_out_bits_per_byte:.2f} for unseen text, though {runs}"
        )
    else:
        verdict = f"does not memorise: {runs}"
    return MemorizationReport(
        longest_run_bytes=longest_run,
        natural_run_bytes=natural_run,
        train_bits_per_byte=train_bits_per_byte,
        held_out_bits_per_byte=held_out_bits_per_byte,
        verdict=verdict,
    )


def _longest_in_piece(sample: bytes, text: bytes) -> bytes:
    """Grows a length by doubling steps, then halving ones, over the places that still match."""
    sample_sums, text_sums = sums(sample), sums(text)
    places, length, step = np.arange(len(text)), 0, 8
    while step:
        longer = length + step
        inside = places[: np.searchsorted(places, len(text) - longer, side="right")]
        of_sample = windows(sample_sums, np.arange(max(0, len(sample) - longer + 1)), longer)
        matches = among(windows(text_sums, inside, longer), of_sample)
        if len(matches):
            places, length, step = inside[matches], longer, step * 2
        else:
            step //= 2
    return text[places[0] : places[0] + length]
