"""Scores of texts."""

import tracemalloc

import numpy as np
import pytest

from support.models import cpu_engine, make_model
from tgen.benchmark.sweep import compare_precision
from tgen.generation.logprobs import score_stream
from tgen.generation.sequence import window_start
from tgen.generation.truncation import softmax
from tgen.python_api import load


def test_score_is_the_bits_per_byte_of_the_text(trained):
    model = load(trained, threads=1)
    engine = model._loaded.engine
    text = "The king said: what is this? " * 5
    stream = [0, *model.encode(text)]
    nats, length = 0.0, engine.context_length
    for n in range(1, len(stream)):
        engine.rewind([0])
        first = 0 if n <= length else window_start(n, length)
        (logits,) = engine.extend([stream[first:n]])
        nats -= np.log(softmax(logits[None])[0, stream[n]])
    assert model.score(text) == pytest.approx(nats / np.log(2) / len(text), rel=1e-4)


def test_pieces_of_a_text_give_the_scores_of_the_whole():
    engine = large_vocabulary(context_length=100)
    ids = np.random.default_rng(1).integers(0, 4000, 450).tolist()
    whole = np.concatenate([scores.nats for scores in score_stream(engine, [ids])])
    for size in (1, 101, 300):
        pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
        nats = [scores.nats for scores in score_stream(engine, [[], *pieces])]
        assert np.concatenate(nats).tolist() == whole.tolist()
    assert list(score_stream(engine, [])) == list(score_stream(engine, [[5]])) == []


@pytest.fixture
def peak():
    """Return a function that calls a function and returns the peak of its allocations in bytes."""

    def measure(call):
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure


def large_vocabulary(dtype="float32", context_length=2048):
    size = {"vocab_size": 4000, "n_layers": 1, "d_model": 32, "context_length": context_length}
    arrays = make_model("llama", **size).to_arrays()
    return cpu_engine(make_model("llama", **size).config, arrays, n_threads=1, dtype=dtype)


def test_a_score_needs_the_logits_of_one_pass_only(peak):
    engine = large_vocabulary()
    ids = np.random.default_rng(0).integers(0, 4000, 2048).tolist()
    engine.extend([ids])  # allocates the KV cache
    assert peak(lambda: list(score_stream(engine, [ids]))) < 4 * 4 * 96 * 4000  # of 4 * 2048 * 4000


def test_comparing_precisions_needs_the_logits_of_one_pass_only(peak):
    engines = large_vocabulary("int8"), large_vocabulary()
    run = lambda: compare_precision(*engines, [1], decode=lambda ids: b"x" * len(ids), seed=0)  # noqa: E731
    whole = 4 * 256 * 4000  # the logits of a text
    assert peak(run) < 3 * whole
