"""Scores of texts."""

import numpy as np
import pytest

from tgen.generation.context_window import window_start
from tgen.generation.samplers import softmax
from tgen.loaded_model import open_model


def test_score_is_the_bits_per_byte_of_the_text(trained):
    model = open_model(trained, threads=1)
    engine = model.engine
    text = "The king said: what is this? " * 5
    stream = [0, *model.encode(text)]
    nats, length = 0.0, engine.context_length
    for n in range(1, len(stream)):
        engine.rewind([0])
        first = 0 if n <= length else window_start(n, length)
        (logits,) = engine.extend([stream[first:n]])
        nats -= np.log(softmax(logits[None])[0, stream[n]])
    assert model.bits_per_byte(text) == pytest.approx(nats / np.log(2) / len(text), rel=1e-4)
