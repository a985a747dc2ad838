"""The torch engine: decoding steps of fixed shape, bfloat16 weights, CUDA graphs."""

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.engine.torch_engine import TorchEngine, get_graph_lock, group_by_count
from tgen.model.transformer import Transformer

PROMPTS = [[1, 2, 3], [7], [4, 5, 6, 7, 8, 9]]


@torch.inference_mode()
def step(engine, tokens, width=1):
    """Append tokens to each sequence as on a GPU, with fixed shapes."""
    with engine._autocast:
        return engine._graphed_steps[width].step(tokens).float().cpu().numpy()


def make_two_engines(family, *, context_length):
    """Return two engines with the same three sequences of 57, 1 and 6 tokens."""
    model = make_model(family, context_length=context_length).double()
    engines = TorchEngine(model), TorchEngine(model)
    for engine in engines:
        engine.select([0, 0, 0])
        engine.extend([[*range(1, 58)], *PROMPTS[1:]])
    return engines


def test_step_equals_extension_by_one_token(family):
    one, other = make_two_engines(family, context_length=300)
    random = np.random.default_rng(0)
    for turn in range(20):  # past the first capacity of the cache
        if turn == 11:
            for engine in (one, other):
                engine.select([2, 0])
                engine.rewind([10, 66])
        tokens = random.integers(0, 300, (len(one.lengths), 1)).tolist()
        expected = one.extend(tokens)
        np.testing.assert_allclose(step(other, tokens), expected, rtol=0, atol=1e-6)
        assert other.lengths == one.lengths
    prompt = [[5, 6], [7]]
    np.testing.assert_allclose(other.extend(prompt), one.extend(prompt), rtol=0, atol=1e-6)


def test_padded_steps_with_drafts_equal_extension(family):
    one, other = make_two_engines(family, context_length=100)
    random = np.random.default_rng(0)
    for width in (4, 1, 8, 4, 2, 8, 16):  # past the first capacity of the cache
        tokens = [random.integers(0, 300, n).tolist() for n in random.integers(1, width + 1, 3)]
        expected = one.extend(tokens, every_position=True)
        np.testing.assert_allclose(step(other, tokens, width), expected, rtol=0, atol=1e-6)
        accepted = [
            length - int(random.integers(0, len(new)))
            for length, new in zip(one.lengths, tokens, strict=True)
        ]
        for engine in (one, other):
            engine.rewind(accepted)
    assert other._graphed_steps[16].has_room
    other.extend([[1] * (85 - max(other.lengths))] * 3)
    assert not other._graphed_steps[16].has_room


def test_bfloat16_weights_stay_close(family):
    exact = TorchEngine(make_model(family))
    narrow = TorchEngine(make_model(family), dtype="bfloat16")
    assert narrow.model.token_embedding.weight.dtype == torch.bfloat16
    assert narrow.dtype == "bfloat16"
    text = [list(range(40))]
    expected, logits = (engine.extend(text, every_position=True) for engine in (exact, narrow))
    assert 0 < np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()
    narrow.extend([[1]])
    step(narrow, [[2]])
    fresh = TorchEngine(make_model(family), dtype="bfloat16")
    at_once = fresh.extend([[*text[0], 1, 2, 3]])
    np.testing.assert_allclose(
        step(narrow, [[3]]), at_once, rtol=0, atol=0.1 * np.abs(expected).max()
    )


def test_float16_weights_stay_closer_and_do_not_overflow():
    model = make_model("gemma3", tied_embeddings=False)
    exact, text = TorchEngine(model).extend([[1, 2, 3]]), [[1, 2, 3]]
    half = TorchEngine(model, dtype="float16")
    assert half._cache.keys[0].dtype == torch.float16
    assert 0 < np.abs(half.extend(text) - exact).max() < 0.005 * np.abs(exact).max()
    model.token_embedding.weight.data.fill_(6e4)  # times the scale of embeddings
    assert np.isfinite(half.clone().extend(text)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_matrices_are_never_float32_on_the_device(monkeypatch, dtype):
    moved = []
    monkeypatch.setattr(
        Transformer, "to", lambda self, _: moved.append(self.token_embedding.weight.dtype)
    )
    TorchEngine(make_model("qwen3"), dtype=dtype, device=torch.device("cpu"))
    assert moved == [getattr(torch, dtype)]


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
    assert on_gpu._graphed_steps[1]._graph is not None
    for engine in (on_gpu, plain):
        engine.rewind([100])
    for turn in range(20):
        tokens = [list(range(turn, turn + 3 + turn % 2))]
        logits, expected = (
            engine.extend(tokens, every_position=True) for engine in (on_gpu, plain)
        )
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
        for engine in (on_gpu, plain):
            engine.rewind([102 + turn])
    assert on_gpu._graphed_steps[4]._graph is not None


def count_computed_tokens(engine, monkeypatch) -> list[int]:
    """Record the tokens of each pass, padding included."""
    computed, hidden_states = [], engine.model.hidden_states

    def counted(tokens, **how):
        computed.append(tokens.numel())
        return hidden_states(tokens, **how)

    monkeypatch.setattr(engine.model, "hidden_states", counted)
    return computed


def test_a_prompt_beside_decoding_rows_computes_few_more_tokens(monkeypatch):
    engine = TorchEngine(make_model("llama", context_length=200))
    engine.select([0] * 16)
    engine.extend([[1, 2, 3]] * 16)
    computed = count_computed_tokens(engine, monkeypatch)
    engine.extend([[7]] * 9 + [[5] * 100] + [[7]] * 6)
    assert computed == [99, 16]
    computed.clear()
    engine.extend([[7]] * 12 + [[5] * 50, [6] * 48] + [[7]] * 2, every_position=True)
    assert computed == [100, 14]


def test_mixed_lengths_give_each_sequence_its_logits_alone(family):
    model = make_model(family, context_length=120).double()
    random = np.random.default_rng(1)
    for every_position in (False, True):
        engine = TorchEngine(model)
        engine.select([0] * 24)
        before = [random.integers(0, 300, n).tolist() for n in random.integers(1, 60, 24)]
        more = [random.integers(0, 300, n).tolist() for n in [*[1] * 12, *range(2, 60, 6), 1, 1]]
        engine.extend(before)
        logits = engine.extend(more, every_position=every_position)
        assert engine.lengths == [len(a) + len(b) for a, b in zip(before, more, strict=True)]
        for first, new in zip(before, more, strict=True):
            n = len(new) if every_position else 1
            alone = TorchEngine(model).extend([[*first, *new]], every_position=True)[-n:]
            np.testing.assert_allclose(logits[:n], alone, rtol=0, atol=1e-6)
            logits = logits[n:]
        assert len(logits) == 0


def test_the_cache_never_holds_more_than_the_context(family):
    model = make_model(family, context_length=100)
    engine = TorchEngine(model)
    engine.select([0, 0])
    engine.extend([[1] * 99, [2]])
    engine.extend([[1], [2] * 98])
    assert engine.lengths == [100, 99]
    assert {storage.shape[2] for storage in engine._cache.keys + engine._cache.values} == {100}


def test_sequences_that_end_leave_the_storage_in_place(family):
    model = make_model(family).double()
    engine = TorchEngine(model)
    engine.select([0] * 4)
    texts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]
    engine.extend(texts)
    storage = engine._cache.keys[0]
    for indices in ([0, 3, 2], [2, 0], [1, 0, 0, 1], [3]):
        engine.select(indices)
        texts = [[*texts[i], 11] for i in indices]
        for text, logits in zip(texts, engine.extend([[11]] * len(texts)), strict=True):
            alone = TorchEngine(model).extend([text])[0]
            np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-6)
        assert engine._cache.keys[0] is storage
    engine.select([0] * 5)
    assert engine._cache.keys[0] is not storage


def test_steps_skip_storage_that_no_sequence_uses(family):
    model = make_model(family).double()
    engine, plain = TorchEngine(model), TorchEngine(model)
    for one in (engine, plain):
        one.select([0] * 4)
        one.extend([[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]])
    for indices in ([0, 1, 2, 3], [0, 3, 2], [2, 0], [0, 1, 0, 1]):
        for one in (engine, plain):
            one.select(indices)
        tokens = [[token] for token in range(len(indices))]
        expected = plain.extend(tokens)
        np.testing.assert_allclose(step(engine, tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([5], [[0]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([1, 0, 1], [[0, 2]]),
        ([0, 0], []),
        ([3, 1, 4], [[0, 1, 2]]),  # little padding
        ([1, 100, 1], [[1], [0, 2]]),
        ([100, 90, 30, 20], [[0, 1], [2, 3]]),
    ],
)
def test_groups_have_similar_counts(counts, groups):
    assert group_by_count(counts, 16) == groups


def test_engines_of_a_gpu_share_one_lock() -> None:
    gpu, same, other, cpu = (torch.device(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu"))
    assert get_graph_lock(gpu) is get_graph_lock(same)
    assert get_graph_lock(gpu) is not get_graph_lock(other)
    assert get_graph_lock(cpu) is not get_graph_lock(cpu)
