"""The torch engine: decoding steps of fixed shape, bfloat16 weights, CUDA graphs."""

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.engine.torch_engine import TorchEngine

PROMPTS = [[1, 2, 3], [7], [4, 5, 6, 7, 8, 9]]


def test_step_equals_extension_by_one_token(family):
    model = make_model(family, context_length=300).double()
    one, other = TorchEngine(model), TorchEngine(model)
    for engine in (one, other):
        engine.select([0, 0, 0])
        engine.extend(PROMPTS)
    random = np.random.default_rng(0)
    for turn in range(150):  # past the first capacity of the cache
        if turn == 80:
            for engine in (one, other):
                engine.select([2, 0])
                engine.rewind([20, 70])
        tokens = random.integers(0, 300, len(one.lengths)).tolist()
        expected = one.extend([[token] for token in tokens])
        np.testing.assert_allclose(other.step(tokens), expected, rtol=0, atol=1e-6)
        assert other.lengths == one.lengths
    prompt = [[5, 6], [7]]
    np.testing.assert_allclose(other.extend(prompt), one.extend(prompt), rtol=0, atol=1e-6)


def test_bfloat16_weights_stay_close(family):
    exact = TorchEngine(make_model(family))
    narrow = TorchEngine(make_model(family), dtype="bfloat16")
    assert narrow.model.token_embedding.weight.dtype == torch.bfloat16
    assert narrow.dtype == "bfloat16"
    text = [list(range(40))]
    expected, logits = (engine.extend(text, every_position=True) for engine in (exact, narrow))
    assert 0 < np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()
    narrow.extend([[1]])
    narrow.step([2])
    fresh = TorchEngine(make_model(family), dtype="bfloat16")
    at_once = fresh.extend([[*text[0], 1, 2, 3]])
    np.testing.assert_allclose(narrow.step([3]), at_once, rtol=0, atol=0.1 * np.abs(expected).max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graph_equals_plain_steps(family):
    model = make_model(family, context_length=300)
    on_gpu = TorchEngine(model.cuda())
    plain = TorchEngine(make_model(family, context_length=300))
    for engine in (on_gpu, plain):
        engine.extend([[1, 2, 3]])
    for token in range(200):
        logits, expected = on_gpu.extend([[token]]), plain.extend([[token]])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    assert on_gpu._graphed_step._graph is not None
