"""The compiled kernels: the torch engine's logits, and the same bits whatever the company."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import ModelConfig, RopeScaling
from tgen.engine.cpu import kernel_cache, kernels, threads, weights
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT32, GROUP, GROUP_BYTES, INT8
from tgen.engine.torch_engine import TorchEngine
from tgen.model.rope import rotary_tables
from tgen.model.transformer import Transformer

SHAPES = {
    "qwen3": dict(family="qwen3"),
    "odd sizes": dict(family="qwen3", d_model=72, n_heads=4, n_kv_heads=2, head_dim=12),
    "biases": dict(family="qwen3", attention_bias=True, output_bias=True, tied_embeddings=False),
    "llama": dict(family="llama", n_kv_heads=1, d_ff=40),
    "llama 3": dict(
        family="llama",
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
        ),
    ),
    "gpt2": dict(family="gpt2", d_model=40),
    "gelu": dict(family="gpt2", activation="gelu"),
    "classic": dict(family="classic", d_model=24, n_heads=2),
}
VOCABULARY, CONTEXT = 211, 300
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 250).tolist()


def model(**fields: object) -> Transformer:
    """With norms and biases that matter, and attention that is not even."""
    torch.manual_seed(1)
    shape = dict(n_layers=3, d_model=64, n_heads=4)
    config = ModelConfig.of(**shape | fields, vocab_size=VOCABULARY, context_length=CONTEXT)
    made = Transformer(config)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        else:
            parameter.data *= 3
    return made


def engine(made: Transformer, n_threads: int = 2, stored: str = "float32") -> CpuEngine:
    return CpuEngine(made.config, made.to_arrays(), n_threads=n_threads, stored=stored)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def made(request) -> Transformer:
    return model(**request.param)


def test_logits_are_those_of_the_torch_engine(made):
    (wanted,) = TorchEngine(made).extend([IDS], every_position=True)
    (found,) = engine(made).extend([IDS], every_position=True)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_logits_are_the_same_bits_however_a_text_is_taken(made):
    mine = engine(made)
    (whole,) = mine.extend([IDS], every_position=True)
    mine.rewind([0])
    one_by_one = np.concatenate([mine.extend([[token]]) for token in IDS])
    assert np.array_equal(one_by_one, whole)
    for border in (1, 5, 96, 100, 249):
        mine.rewind([border])
        assert np.array_equal(mine.extend([IDS[border:]])[0], whole[-1])


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
def test_rows_depend_on_neither_their_neighbours_nor_the_threads(stored):
    made = model(**SHAPES["odd sizes"])
    (alone,) = engine(made, 1, stored).extend([IDS], every_position=True)
    for n_threads in (1, 3):
        mine = engine(made, n_threads, stored)
        mine.select([0] * 4)
        texts = [IDS[:100], IDS, IDS[:1], IDS[:33]]
        for found, text in zip(mine.extend(texts, every_position=True), texts, strict=True):
            assert np.array_equal(found, alone[: len(text)])
        mine.select([3, 1, 1])
        mine.rewind([33, 200, 40])
        after = mine.extend([IDS[33:34], IDS[200:201], IDS[40:41]])
        assert np.array_equal(after, alone[[33, 200, 40]])
        assert mine.lengths == [34, 201, 41]


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_weights_held_in_fewer_bits_are_those_numbers(stored):
    made = model(family="llama", n_heads=2, n_kv_heads=1, d_ff=40)
    arrays = made.to_arrays()
    for name, array in arrays.items():
        if array.ndim == 2:
            arrays[name] = rounded(array, stored)
    same = Transformer.from_arrays(made.config, arrays)
    (wanted,) = TorchEngine(same).extend([IDS], every_position=True)
    (found,) = engine(made, stored=stored).extend([IDS], every_position=True)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def rounded(array: np.ndarray, stored: str) -> np.ndarray:
    """What remains of a matrix."""
    if stored == "bfloat16":
        return torch.tensor(array).bfloat16().float().numpy()
    groups = np.pad(array, ((0, 0), (0, -array.shape[1] % GROUP))).reshape(len(array), -1, GROUP)
    wanted = torch.tensor(np.abs(groups).max(axis=2, keepdims=True) / np.float32(127))
    near = wanted.bfloat16()
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    scale = torch.where(near.float() < wanted, above, near).float().numpy()
    values = np.rint(groups / np.where(scale > 0, scale, 1)) * scale
    return values.reshape(len(array), -1)[:, : array.shape[1]].astype(np.float32)


@given(
    n_vectors=st.integers(1, 13),
    rows=st.integers(1, 30),
    first=st.integers(0, 5),
    groups=st.integers(1, 4),
    stored=st.sampled_from([FLOAT32, BFLOAT16, INT8]),
)
@settings(deadline=None, max_examples=60)
def test_a_product_writes_its_rows_and_nothing_else(n_vectors, rows, first, groups, stored):
    random = np.random.default_rng(rows)
    n, last = groups * GROUP, first + rows
    w = random.standard_normal((last, n)).astype(np.float32)
    x = random.standard_normal((n_vectors, n)).astype(np.float32)
    held = {FLOAT32: w, BFLOAT16: weights.to_bfloat16(w), INT8: weights.to_int8(w)}[stored]
    if stored == INT8:
        assert held.shape == (last, groups * GROUP_BYTES)
    out = np.full((n_vectors + 1, last + 2), 7, np.float32)
    kernels.products(
        stored,
        held.ctypes.data,
        first,
        last,
        n,
        x.ctypes.data,
        n_vectors,
        out.ctypes.data,
        last + 2,
    )
    wide = {FLOAT32: w, BFLOAT16: weights.to_float32(held)}.get(stored)
    wide = rounded(w, "int8") if wide is None else wide
    expected = np.full_like(out, 7)
    expected[:n_vectors, first:last] = (x @ wide.T)[:, first:last]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_many_passes_at_once_do_not_disturb_each_other():
    made = model(**SHAPES["qwen3"])
    (wanted,) = engine(made).extend([IDS], every_position=True)
    found: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        mine = engine(made, n_threads=1 + i % 3)
        found[i] = np.concatenate([mine.extend([[token]]) for token in IDS])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(found[i], wanted) for i in range(4))


def test_what_does_not_fit_is_refused_and_changes_nothing():
    mine = engine(model(**SHAPES["qwen3"]))
    mine.extend([IDS[:10]])
    for wrong in ([[]], [[1] * 291], [[VOCABULARY]], [[-1]]):
        with pytest.raises((ValueError, IndexError)):
            mine.extend(wrong)
        assert mine.lengths == [10]


def test_a_late_helper_finds_nothing_to_do():
    """One that still stands in an old pass, of a deeper model, while a new job is there."""
    deep = engine(model(n_layers=5, **SHAPES["qwen3"]))
    shallow = engine(model(n_layers=1, **SHAPES["qwen3"]), n_threads=1)
    deep.extend([IDS[:50]])
    pool = threads.threads()
    number = int(pool._memory[(pool._newest - pool._memory.ctypes.data) // 8])
    (wanted,) = shallow.extend([IDS], every_position=True)
    before = [buffer.copy() for buffer in shallow._buffers.values()]
    newest = np.zeros(1, np.int64)  # as it was when the helper looked
    for late in range(max(0, number - 30), number + 2):
        newest[0] = late
        kernel_cache.kernels()(pool._place, newest.ctypes.data, 0, 0, 0, late - 1, 0)
    for buffer, copy in zip(shallow._buffers.values(), before, strict=True):
        assert np.array_equal(buffer, copy)
    shallow.rewind([0])
    (again,) = shallow.extend([IDS], every_position=True)
    assert np.array_equal(again, wanted)


def test_models_of_other_depths_and_threads_take_turns():
    models = [model(n_layers=n, **SHAPES["qwen3"]) for n in (1, 4, 2)]
    wanted = [engine(made, 1).extend([IDS], every_position=True)[0] for made in models]
    mine = [engine(made, 1 + i) for i, made in enumerate(models)]
    for i, token in enumerate(IDS):
        for k in range(3):
            assert np.array_equal(mine[k].extend([[token]])[0], wanted[k][i])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_goes_on_with_an_engine_of_its_parent():
    mine = engine(model(**SHAPES["qwen3"]))
    (wanted,) = mine.extend([IDS[:50]])
    mine.rewind([0])
    child = os.fork()
    if child == 0:
        (found,) = mine.extend([IDS[:50]])
        os._exit(0 if np.array_equal(found, wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("fields", [dict(head_dim=80), dict(n_layers=1, d_ff=3)])
def test_shapes_that_fill_no_vector(fields):
    made = model(family="llama", **fields)
    (wanted,) = TorchEngine(made).extend([IDS[:40]], every_position=True)
    (found,) = engine(made).extend([IDS[:40]], every_position=True)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_a_tiny_vocabulary_and_a_context_of_one():
    config = ModelConfig.of(
        "gpt2", vocab_size=3, context_length=1, n_layers=1, d_model=4, n_heads=2
    )
    made = Transformer(config)
    np.testing.assert_allclose(
        engine(made).extend([[2]]), TorchEngine(made).extend([[2]]), rtol=0, atol=1e-5
    )


def test_positions_turn_by_the_same_angles_far_from_the_start():
    fields = dict(vocab_size=8, n_layers=1, d_model=64, n_heads=1, context_length=32768)
    cos, sin = rotary_tables(ModelConfig.of("llama", **fields))
    frequencies = (1 / 10_000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)).float()
    angles = torch.arange(32768, dtype=torch.float32)[:, None] * frequencies
    np.testing.assert_allclose(cos, angles.cos().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, angles.sin().numpy(), rtol=0, atol=1e-6)


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_rows_keep_their_texts_wherever_they_are_moved(data):
    made = model(family="qwen3", n_layers=1, d_model=16, n_heads=2)
    moved, fresh = engine(made, 1), engine(made, 1)
    texts = [IDS[:20]]
    moved.extend(texts)
    for _ in range(4):
        places = st.integers(0, len(texts) - 1)
        rows = data.draw(st.lists(places, min_size=1, max_size=2 * len(texts)))
        moved.select(rows)
        new = [data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=20)) for _ in rows]
        texts = [texts[row] + tokens for row, tokens in zip(rows, new, strict=True)]
        found = moved.extend(new)
        for text, logits in zip(texts, found, strict=True):
            fresh.rewind([0])
            assert (fresh.extend([text])[0] == logits).all()
