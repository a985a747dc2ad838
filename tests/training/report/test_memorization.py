"""The longest run against brute force, the verdicts at their borders, the error by its formula."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.training.report import memorization
from tgen.training.report.memorization import judge_memorization, longest_shared_run
from tgen.training.uncertainty import bits_per_byte_error

few = st.lists(st.sampled_from([b"a", b"b", b"\0", b"king", b"a crown "]), max_size=30)
texts = few.map(b"".join) | st.binary(max_size=60)


def brute_force(sample: bytes, text: bytes) -> bytes:
    for length in range(min(len(sample), len(text)), 0, -1):
        windows = {sample[i : i + length] for i in range(len(sample) - length + 1)}
        for i in range(len(text) - length + 1):
            if text[i : i + length] in windows:
                return text[i : i + length]
    return b""


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
@given(sample=texts, text=texts)
@settings(deadline=None)
def test_the_longest_run_is_the_one_that_brute_force_finds(piece, sample, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memorization, "_PIECE", piece)
        assert longest_shared_run(sample, text) == brute_force(sample, text)


def test_a_copied_passage_is_found_whole_wherever_it_stands():
    text = np.random.default_rng(0).integers(97, 123, 50_000, np.uint8).tobytes()
    for start in (0, 20_000, 50_000 - 500):
        passage = text[start : start + 500]
        assert longest_shared_run(b"\n" + passage + b"\n", text) == passage
    assert longest_shared_run(text[-4096:], text) == text[-4096:]


def verdict(longest, natural, train=2.0, held_out=2.1, readings=3.0):
    bits = dict(train_bits_per_byte=train, held_out_bits_per_byte=held_out)
    report = judge_memorization(longest, natural, **bits, readings=readings)
    assert (report.longest_run_bytes, report.natural_run_bytes) == (longest, natural)
    assert (report.train_bits_per_byte, report.held_out_bits_per_byte) == (train, held_out)
    assert f" {longest} bytes" in report.verdict or " bits a byte for its text" in report.verdict
    return report.verdict.split(":")[0]


@pytest.mark.parametrize("held_out", [2.1, None])
def test_a_run_is_judged_by_what_unseen_text_shares(held_out):
    for longest, expected in [
        (0, "does not memorise"),
        (59, "does not memorise"),
        (60, "begins to memorise"),
        (119, "begins to memorise"),
        (120, "memorises"),
        (4096, "memorises"),
    ]:
        assert verdict(longest, 30, held_out=held_out) == expected
    assert verdict(500, 250, held_out=held_out) == "begins to memorise"
    assert verdict(500, 300, held_out=held_out) == "does not memorise"


def test_a_few_words_are_nobodys():
    assert verdict(39, 2) == "does not memorise"
    assert verdict(40, 2) == "begins to memorise"
    assert verdict(80, 0) == "memorises"


def test_knowing_the_training_text_much_better_is_a_sign_but_no_proof():
    assert verdict(30, 30, train=1.5, held_out=2.0) == "begins to memorise"
    assert verdict(30, 30, train=1.51, held_out=2.0) == "does not memorise"
    assert verdict(30, 30, train=0.1, held_out=4.0) == "begins to memorise"
    assert verdict(30, 30, train=0.0, held_out=0.02) == "does not memorise"
    assert verdict(120, 30, train=0.1, held_out=4.0) == "memorises"
    assert verdict(30, 30, train=0.1, held_out=4.0, readings=0.5) == "does not memorise"


def test_with_nothing_held_out_needing_no_bits_is_the_proof():
    assert verdict(40, 300, train=0.02, held_out=None) == "memorises"
    assert verdict(30, 30, train=0.5, held_out=None) == "does not memorise"
    assert verdict(30, 30, train=0.02, held_out=None, readings=0.5) == "does not memorise"


def test_windows_of_one_size_have_the_usual_standard_error():
    bits = np.random.default_rng(1).normal(2.0, 0.5, 50)  # per byte, of windows of 100 bytes
    usual = bits.std(ddof=1) / math.sqrt(50)
    error = bits_per_byte_error(bits * 100 * math.log(2), [100] * 50)
    assert error == pytest.approx(usual, rel=1e-12)


def test_a_window_s_size_alone_makes_no_error():
    sizes = np.array([10, 200, 35])
    assert bits_per_byte_error(sizes * 1.7, sizes) == pytest.approx(0, abs=1e-12)
    assert bits_per_byte_error([3.0], [2]) == math.inf
    assert bits_per_byte_error([], []) == math.inf


def test_the_error_is_how_far_samples_really_scatter():
    random = np.random.default_rng(2)
    n_bytes = random.integers(50, 150, (2000, 40))
    nats = n_bytes * 1.4 + random.normal(0, 1, n_bytes.shape) * n_bytes * 0.3
    ratios = nats.sum(1) / math.log(2) / n_bytes.sum(1)
    errors = [bits_per_byte_error(*window) for window in zip(nats, n_bytes, strict=True)]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)
