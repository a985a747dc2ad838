"""The longest shared run against brute force; verdicts at their thresholds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.runs import memorization
from tgen.runs.memorization import judge_memorization, longest_shared_run

few = st.lists(st.sampled_from([b"a", b"b", b"\0", b"king", b"a crown "]), max_size=30)
texts = few.map(b"".join) | st.binary(max_size=60)


def brute_force(sample: bytes, text: bytes) -> bytes:
    for length in range(min(len(sample), len(text)), 0, -1):
        windows = {sample[i : i + length] for i in range(len(sample) - length + 1)}
        for i in range(len(text) - length + 1):
            if text[i : i + length] in windows:
                return text[i : i + length]
    return b""


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
@given(sample=texts, text=texts)
@settings(deadline=None)
def test_longest_run_equals_brute_force(chunk, sample, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memorization, "_CHUNK", chunk)
        assert longest_shared_run(sample, text) == brute_force(sample, text)


def test_copied_passage_is_found_at_any_position():
    text = np.random.default_rng(0).integers(97, 123, 50_000, np.uint8).tobytes()
    for start in (0, 20_000, 50_000 - 500):
        passage = text[start : start + 500]
        assert longest_shared_run(b"\n" + passage + b"\n", text) == passage
    assert longest_shared_run(text[-4096:], text) == text[-4096:]


def verdict(longest, natural, train=2.0, held_out=2.1, epochs=3.0):
    bits = dict(train_bits_per_byte=train, held_out_bits_per_byte=held_out)
    report = judge_memorization(longest, natural, **bits, epochs=epochs)
    assert (report.longest_run_bytes, report.natural_run_bytes) == (longest, natural)
    assert (report.train_bits_per_byte, report.held_out_bits_per_byte) == (train, held_out)
    assert (
        f" {longest:,} bytes" in report.verdict
        or " bits/byte on the training text" in report.verdict
    )
    return report.verdict.split(":")[0]


@pytest.mark.parametrize("held_out", [2.1, None])
def test_run_is_compared_with_that_of_unseen_text(held_out):
    for longest, expected in [
        (0, "does not memorize"),
        (59, "does not memorize"),
        (60, "begins to memorize"),
        (119, "begins to memorize"),
        (120, "memorizes"),
        (4096, "memorizes"),
    ]:
        assert verdict(longest, 30, held_out=held_out) == expected
    assert verdict(500, 250, held_out=held_out) == "begins to memorize"
    assert verdict(500, 300, held_out=held_out) == "does not memorize"


def test_a_few_shared_words_are_not_memorization():
    assert verdict(39, 2) == "does not memorize"
    assert verdict(40, 2) == "begins to memorize"
    assert verdict(80, 0) == "memorizes"


def test_rows_have_no_text_to_compare_with():
    report = judge_memorization(
        39, None, train_bits_per_byte=1.0, held_out_bits_per_byte=None, epochs=3.0
    )
    assert report.verdict == "does not memorize: longest copied run 39 bytes"


def test_much_lower_training_loss_is_a_sign_but_not_proof():
    assert verdict(30, 30, train=1.5, held_out=2.0) == "begins to memorize"
    assert verdict(30, 30, train=1.51, held_out=2.0) == "does not memorize"
    assert verdict(30, 30, train=0.1, held_out=4.0) == "begins to memorize"
    assert verdict(30, 30, train=0.0, held_out=0.02) == "does not memorize"
    assert verdict(120, 30, train=0.1, held_out=4.0) == "memorizes"
    assert verdict(30, 30, train=0.1, held_out=4.0, epochs=0.5) == "does not memorize"


def test_without_held_out_text_near_zero_loss_is_proof():
    assert verdict(40, 300, train=0.02, held_out=None) == "memorizes"
    assert verdict(30, 30, train=0.5, held_out=None) == "does not memorize"
    assert verdict(30, 30, train=0.02, held_out=None, epochs=0.5) == "does not memorize"
