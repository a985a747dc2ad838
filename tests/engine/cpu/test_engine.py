"""The CPU engine computes the torch engine's logits, with the same bits in any batch."""

import dataclasses
import functools
import os
import threading
import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.compiling import link
from support.models import cpu_engine
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import ModelConfig, RopeScaling, output_dtype
from tgen.engine.cpu import (
    attention_tiles,
    job_layout,
    kernels,
    kv_cache,
    simd,
    target,
    thread_pool,
)
from tgen.engine.cpu.amx_permission import may_use_amx
from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.intrinsics import address, primitive
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    FLOAT32,
    GROUP,
    INT4,
    INT8,
    LANES,
    PANEL,
    SERVE,
    allocate_aligned,
)
from tgen.engine.cpu.kernel_cache import enter_function
from tgen.engine.cpu.weights import PackedWeights, to_int4, to_int8, to_panels
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError
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
    "gpt_neo": dict(family="gpt_neo", sliding_window=40, sliding_layers=(False, True, True)),
    "gpt_neox": dict(family="gpt_neox", rotary_dim=6),
    "sequential": dict(
        family="gpt_neox", norm_placement="pre", attention_bias=False, output_bias=False
    ),
    "phi3": dict(family="phi3", n_kv_heads=1, rotary_dim=12, sliding_window=40),
    "gemma3": dict(
        family="gemma3",
        n_kv_heads=2,
        head_dim=32,
        attention_scale=0.05,
        local_rope_theta=100.0,
        sliding_window=40,
        sliding_layers=(True, False, True),
    ),
    "olmo2": dict(family="olmo2", n_kv_heads=2),
    "smollm3": dict(family="smollm3", n_kv_heads=2, rope_layers=(True, True, False)),
    "granite": dict(
        family="granite",
        n_kv_heads=2,
        embedding_scale=3.0,
        attention_scale=0.3,
        residual_scale=0.5,
        logits_divisor=4.0,
    ),
    "no norm parameters": dict(family="olmo", n_kv_heads=2),
    "output bias": dict(family="phi", n_kv_heads=2, rotary_dim=6),
    "shared norm": dict(family="cohere", n_kv_heads=2, logits_divisor=4.0, d_model=40),
    "squared relu": dict(family="arcee", n_kv_heads=2),
    "norm after the rotation": dict(family="hunyuan", head_dim=12),
    "yarn": dict(
        family="llama",
        rope_scaling=RopeScaling(
            kind="yarn", factor=4.0, original_context_length=64, attention_factor=1.1
        ),
    ),
}
VOCABULARY, CONTEXT = 211, 300
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 290).tolist()


def make_model(**fields: object) -> Transformer:
    """A model whose norms and biases differ from their defaults, with uneven attention."""
    torch.manual_seed(1)
    shape = dict(n_layers=3, d_model=64, n_heads=4)
    sizes = {"vocab_size": VOCABULARY, "context_length": CONTEXT}
    config = ModelConfig.of(**sizes | shape | fields)
    model = Transformer(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        else:
            parameter.data *= 3
    return model


def make_engine(
    model: Transformer, n_threads: int = 2, dtype: str = "float32", cache: str | None = None
) -> CpuEngine:
    arrays = model.to_arrays()
    return cpu_engine(model.config, arrays, n_threads=n_threads, dtype=dtype, cache_dtype=cache)


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def model(request) -> Transformer:
    return make_model(**request.param)


def test_logits_equal_the_torch_engines(model):
    expected = TorchEngine(model).extend([IDS], every_position=True)
    logits = make_engine(model).extend([IDS], every_position=True)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_prefill_and_decode_give_the_same_bits(model):
    engine = make_engine(model)
    prefill = engine.extend([IDS], every_position=True)
    engine.rewind([0])
    one_by_one = np.concatenate([engine.extend([[token]]) for token in IDS])
    assert np.array_equal(one_by_one, prefill)
    for split in (1, 5, 96, 100, 264, 289):
        engine.rewind([split])
        assert np.array_equal(engine.extend([IDS[split:]])[0], prefill[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_logits_do_not_depend_on_the_batch_or_the_threads(model, dtype):
    alone = make_engine(model, 1, dtype).extend([IDS], every_position=True)
    for n_threads in (1, 3):
        engine = make_engine(model, n_threads, dtype)
        engine.select([0] * 4)
        texts = [IDS[:100], IDS, IDS[:1], IDS[:33]]
        logits = engine.extend(texts, every_position=True)
        assert np.array_equal(logits, np.concatenate([alone[: len(text)] for text in texts]))
        engine.select([3, 1, 1])
        engine.rewind([33, 200, 40])
        after = engine.extend([IDS[33:34], IDS[200:201], IDS[40:41]])
        assert np.array_equal(after, alone[[33, 200, 40]])
        assert engine.lengths == [34, 201, 41]


FAMILY_VALUES = [
    {"family": "gpt_neo"},
    {"family": "gpt_neox"},
    {"family": "llama", "n_kv_heads": 1},
    {"family": "phi3", "n_kv_heads": 1},
    {"family": "gemma3", "n_kv_heads": 1, "attention_scale": 0.05},
    {"family": "olmo2", "n_kv_heads": 1},
]


def rounded_model(model, dtype):
    arrays = model.to_arrays()
    for name, array in arrays.items():
        if array.ndim == 2 and not name.startswith("position"):
            is_output = name.startswith(("token", "lm_head"))
            arrays[name] = rounded(array, output_dtype(dtype) if is_output else dtype)
    return Transformer.from_arrays(model.config, arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("values", FAMILY_VALUES, ids=lambda values: values["family"])
def test_small_dtypes_compute_with_rounded_weights_and_inputs(values, dtype, monkeypatch):
    # Groups do not cross heads. A number between two others may be rounded either way, so the
    # logits are not equal, but rounding in torch explains almost all that differs. The text is
    # short, since a number that is rounded the other way changes all later positions.
    model = make_model(d_model=64, n_heads=2, head_dim=32, d_ff=40, **values)
    same = rounded_model(model, dtype)
    exact_inputs = TorchEngine(same).extend([IDS[:30]], every_position=True)
    linear = torch.nn.functional.linear

    def quantized_linear(x, weight, bias=None):
        wide = np.pad(x.numpy().reshape(-1, x.shape[-1]), ((0, 0), (0, -x.shape[-1] % GROUP)))
        seen = rounded(wide, dtype) if dtype == "bfloat16" else quantized(wide)
        return linear(torch.from_numpy(seen[:, : x.shape[-1]].reshape(x.shape)), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", quantized_linear)
    expected = TorchEngine(same).extend([IDS[:30]], every_position=True)
    small = make_engine(model, dtype=dtype, cache="float32")
    logits = small.extend([IDS[:30]], every_position=True)
    errors = [np.median(np.abs(one - expected)) for one in (logits, exact_inputs)]
    assert errors[0] < errors[1] / 10


def from_int8(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize the result of `to_int8`."""
    wide = np.repeat(scales.astype(np.float32), GROUP, axis=1)
    return numbers * wide


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The matrix after a round trip through the dtype."""
    if dtype == "bfloat16":
        return torch.tensor(array).bfloat16().float().numpy()
    padded = np.pad(array, ((0, 0), (0, -array.shape[1] % GROUP)))
    if dtype == "int4":
        numbers, *factors = to_int4(padded)
        scales, minima = (np.repeat(f.astype(np.float32), GROUP, axis=1) for f in factors)
        return (scales * numbers + minima)[:, : array.shape[1]]
    return from_int8(*to_int8(padded))[:, : array.shape[1]]


def quantized(x: np.ndarray) -> np.ndarray:
    """The inputs that int8 products see: per group, integers times the largest magnitude / 127."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    return (np.rint(groups * inverse) * (largest * np.float32(1 / 127))).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_matrix_units_give_the_bits_of_vectors(model, dtype, monkeypatch):
    if not may_use_amx():
        pytest.skip("this processor has no AMX")
    engine = make_engine(model, dtype=dtype)
    with_tiles = engine.extend([IDS], every_position=True)
    engine.rewind([0])
    monkeypatch.setattr("tgen.engine.cpu.engine.may_use_amx", lambda: False)
    assert np.array_equal(engine.extend([IDS], every_position=True), with_tiles)


@compiled
def products_of(dtype, w, first, last, n, x, n_vectors, out, out_step):
    kernels.products(dtype, w, first, last, n, x, n_vectors, out, out_step)


@compiled
def round_input_of(x, n, out, i, width):
    kernels.round_input(kernels.INPUTS, x, n, out, i, 0, width)


@functools.cache
def link_products(inputs: int):
    parameters = {kernels.INPUTS: inputs}
    return link(products_of, parameters), link(round_input_of, parameters)


@given(
    n_vectors=st.integers(1, 21),
    panels=st.integers(1, 7),
    first=st.integers(0, 2),
    groups=st.integers(1, 12),
    dtype=st.sampled_from([FLOAT32, BFLOAT16, INT8, INT4]),
)
@settings(deadline=None, max_examples=60)
def test_product_writes_its_rows_only(n_vectors, panels, first, groups, dtype):
    random = np.random.default_rng(panels)
    n, first, last = groups * GROUP, first * PANEL, (first + panels) * PANEL - 3
    w = random.standard_normal((last, n)).astype(np.float32)
    x = random.standard_normal((n_vectors, n)).astype(np.float32)
    packed = np.ascontiguousarray(to_panels(w, dtype))
    out = np.full((n_vectors + 1, last + 5), 7, np.float32)
    inputs = x if dtype == FLOAT32 else np.zeros_like(x, shape=(n_vectors, 2 * n))
    products, round_input = link_products(min(dtype, INT8))
    for i in range(n_vectors if dtype != FLOAT32 else 0):
        round_input(x[i].ctypes.data, n, inputs.ctypes.data, i, n)
    products(
        dtype,
        packed.ctypes.data,
        first,
        last,
        n,
        inputs.ctypes.data,
        n_vectors,
        out.ctypes.data,
        last + 5,
    )
    expected = np.full_like(out, 7)
    expected[:n_vectors, first : last + 3] = 0  # up to whole panels
    name = {FLOAT32: "float32", BFLOAT16: "bfloat16", INT8: "int8", INT4: "int4"}[dtype]
    wide = w if dtype == FLOAT32 else rounded(w, name)
    seen = {FLOAT32: x, BFLOAT16: rounded(x, "bfloat16")}.get(dtype, quantized(x))
    expected[:n_vectors, first:last] = (seen @ wide.T)[:, first:last]
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e-3, 1.0, 1e8])
def test_int8_scales_round_up_to_float16(magnitude):
    rows = np.random.default_rng(0).standard_normal((5, 3 * GROUP)).astype(np.float32) * magnitude
    numbers, scales = to_int8(rows)
    error = np.abs(from_int8(numbers, scales) - rows)
    wide = np.repeat(scales.astype(np.float32), GROUP, axis=1)
    limit = np.where(wide < 65504, wide / 2 * (1 + 1e-6), np.inf)
    assert (error <= limit).all()
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("cache", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_long_pasts_are_the_same_however_they_are_divided(name, cache):
    """A pass of few tokens divides the keys of a head among threads, a prefill or a batch not."""
    model = make_model(**SHAPES[name] | {"context_length": 1300})
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 1250).tolist()
    prefill = make_engine(model, cache=cache).extend([ids], every_position=True)
    if cache == "float32":
        expected = TorchEngine(model).extend([ids], every_position=True)
        np.testing.assert_allclose(prefill, expected, rtol=0, atol=2e-5)
    for n_threads in (1, 3):
        engine = make_engine(model, n_threads, cache=cache)
        engine.extend([ids[:1100]])
        assert np.array_equal(engine.extend([ids[1100:1110]])[0], prefill[1109])
        for position in range(1110, 1113):
            assert np.array_equal(engine.extend([[ids[position]]])[0], prefill[position])
        engine.rewind([1100])
        assert np.array_equal(engine.extend([ids[1100:1113]])[0], prefill[1112])
        engine.select([0] * 30)
        assert np.array_equal(engine.extend([[ids[1113]]] * 30), prefill[[1113] * 30])


def test_float16_cache_holds_rounded_keys_and_values():
    """The first layer's keys and values do not depend on the cache; the logits hardly do."""
    model = make_model(**SHAPES["qwen3"])
    wide, narrow = make_engine(model), make_engine(model, cache="float16")
    logits, expected = narrow.extend([IDS]), wide.extend([IDS])
    for ours, theirs in zip(narrow.keys_and_values(), wide.keys_and_values(), strict=True):
        assert np.array_equal(ours[0], theirs[0].astype(np.float16).astype(np.float32))
    assert 0 < np.abs(logits - expected).max() < 1e-3
    assert narrow.cache_bytes * 2 == wide.cache_bytes
    other = make_engine(model, cache="float16")
    other.restore(*narrow.keys_and_values())
    assert np.array_equal(other.extend([IDS[:1]]), narrow.extend([IDS[:1]]))


def test_int8_cache_holds_rounded_keys_and_values():
    """A restored cache has the same integers and scales."""
    model = make_model(**SHAPES["qwen3"])
    wide, narrow = make_engine(model), make_engine(model, cache="int8")
    logits, expected = narrow.extend([IDS]), wide.extend([IDS])
    for ours, theirs in zip(narrow.keys_and_values(), wide.keys_and_values(), strict=True):
        scales = np.abs(theirs[0]).max(axis=-1, keepdims=True) / 127
        assert 0.45 < (np.abs(ours[0] - theirs[0]) / scales).max() < 0.51
    assert 0 < np.abs(logits - expected).max() < 2e-2
    size = model.config.head_dim
    assert narrow.cache_bytes * 4 * size == wide.cache_bytes * (size + 4)
    other = make_engine(model, cache="int8")
    other.restore(*narrow.keys_and_values())
    for ours, theirs in zip(other.keys_and_values(), narrow.keys_and_values(), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(other.extend([IDS[:1]]), narrow.extend([IDS[:1]]))


def test_tiny_keys_are_zero_in_an_int8_cache():
    model = make_model(**SHAPES["qwen3"])
    arrays = model.to_arrays()
    arrays["blocks.1.attention.k_norm.weight"][:] = 1e-36
    engine = cpu_engine(model.config, arrays, n_threads=1, cache_dtype="int8")
    assert np.isfinite(engine.extend([IDS])).all()
    keys, _ = engine.keys_and_values()
    assert not keys[1].any()
    engine.restore(*engine.keys_and_values())
    assert np.isfinite(engine.extend([IDS[:1]])).all()


@compiled
def round_trip(values, n, narrow, wide):
    for i in range(0, n, LANES):
        attention_tiles.store_float16(narrow, i, values + 4 * i, 1)
        load_sixteen(narrow + 2 * i, wide + 4 * i)


@primitive(address, address)
def load_sixteen(b, source, target):
    simd.store(b, simd.load_float16(b, source), target)


@pytest.mark.parametrize("has_instruction", [True, False])
def test_float16_conversion_rounds_as_numpy_does(has_instruction, monkeypatch):
    monkeypatch.setattr(target, "has_float16", lambda: has_instruction)
    random = np.random.default_rng(0)
    values = (random.standard_normal(4096) * 10.0 ** random.uniform(-9, 4, 4096)).astype(np.float32)
    values[:6] = 0, -0.0, 65504, -65504, 1e9, -1e9
    narrow, wide = np.zeros(len(values), np.float16), np.zeros_like(values)
    arrays = (array.ctypes.data for array in (narrow, wide))
    link(round_trip)(values.ctypes.data, len(values), *arrays)
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    assert np.array_equal(narrow.view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(wide, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        *product(["float32", "bfloat16", "int8", "int4"], ["float32", "float16"]),
        ("float32", "int8"),
    ],
)
@pytest.mark.parametrize("name", ["feed_forward_norm", "attention.q_norm", "attention.k_norm"])
def test_nan_in_the_weights_reaches_the_logits(dtype, cache, name):
    model = make_model(**SHAPES["qwen3"])
    arrays = model.to_arrays()
    arrays[f"blocks.1.{name}.weight"][3] = np.nan
    fields = dict(n_threads=1, dtype=dtype, cache_dtype=cache)
    logits = cpu_engine(model.config, arrays, **fields).extend([IDS[:20]])
    assert np.isnan(logits).all()


def test_concurrent_passes_do_not_interfere():
    model = make_model(**SHAPES["qwen3"])
    expected = make_engine(model).extend([IDS], every_position=True)
    logits: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        engine = make_engine(model, n_threads=1 + i % 3)
        logits[i] = np.concatenate([engine.extend([[token]]) for token in IDS])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(logits[i], expected) for i in range(4))


def test_invalid_tokens_raise_and_change_nothing():
    engine = make_engine(make_model(**SHAPES["qwen3"]))
    engine.extend([IDS[:10]])
    for wrong in ([[]], [[1] * 291], [[VOCABULARY]], [[-1]]):
        with pytest.raises((ValueError, IndexError)):
            engine.extend(wrong)
        assert engine.lengths == [10]


def test_late_helper_claims_nothing():
    """A helper may still be in an old pass of a deeper model while a new job runs."""
    deep = make_engine(make_model(n_layers=5, **SHAPES["qwen3"]))
    shallow = make_engine(make_model(n_layers=1, **SHAPES["qwen3"]), n_threads=1)
    deep.extend([IDS[:50]])
    pool = thread_pool.thread_pool()
    number = int(pool._memory[0, 0])
    expected = shallow.extend([IDS], every_position=True)
    before = [buffer.copy() for buffer in shallow._runner._buffers.values()]
    for pointer in ("LAYERS_PTR", "TOKENS_PTR", "SPANS_PTR", "SEQUENCES_PTR"):
        pool._job[getattr(job_layout, pointer)] = 0  # as if that memory was freed
    newest = np.zeros(1, np.int64)  # as it was when the helper looked
    for late in range(max(0, number - 30), number + 2):
        newest[0] = late
        enter_function()(SERVE, pool._job.ctypes.data, newest.ctypes.data, 0, 0, 0, late - 1, 0)
    for buffer, copy in zip(shallow._runner._buffers.values(), before, strict=True):
        assert buffer.tobytes() == copy.tobytes()  # scratch memory holds addresses: may be NaN
    shallow.rewind([0])
    again = shallow.extend([IDS], every_position=True)
    assert np.array_equal(again, expected)


def test_engines_of_different_depth_and_threads_interleave():
    models = [make_model(n_layers=n, **SHAPES["qwen3"]) for n in (1, 4, 2)]
    expected = [make_engine(model, 1).extend([IDS], every_position=True) for model in models]
    engines = [make_engine(model, 1 + i) for i, model in enumerate(models)]
    for i, token in enumerate(IDS):
        for k in range(3):
            assert np.array_equal(engines[k].extend([[token]])[0], expected[k][i])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_uses_its_parents_engine():
    engine = make_engine(make_model(**SHAPES["qwen3"]))
    (expected,) = engine.extend([IDS[:50]])
    engine.rewind([0])
    child = os.fork()
    if child == 0:
        (logits,) = engine.extend([IDS[:50]])
        os._exit(0 if np.array_equal(logits, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("fields", [dict(head_dim=80), dict(n_layers=1, d_ff=3)])
def test_shapes_smaller_than_a_vector(fields):
    model = make_model(family="llama", **fields)
    expected = TorchEngine(model).extend([IDS[:40]], every_position=True)
    logits = make_engine(model).extend([IDS[:40]], every_position=True)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_tiny_vocabulary_and_context_of_one():
    config = ModelConfig.of(
        "gpt2", vocab_size=3, context_length=1, n_layers=1, d_model=4, n_heads=2
    )
    model = Transformer(config)
    np.testing.assert_allclose(
        make_engine(model).extend([[2]]), TorchEngine(model).extend([[2]]), rtol=0, atol=1e-5
    )


def test_rotary_tables_are_exact_at_large_positions():
    fields = dict(vocab_size=8, n_layers=1, d_model=64, n_heads=1, context_length=32768)
    cos, sin = rotary_tables(ModelConfig.of("llama", **fields))
    frequencies = (1 / 10_000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)).float()
    angles = torch.arange(32768, dtype=torch.float32)[:, None] * frequencies
    np.testing.assert_allclose(cos, angles.cos().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, angles.sin().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("family", "n"), [("classic", 1 << 20), ("llama", (1 << 31) - 1)])
def test_unused_positions_of_a_long_context_take_no_memory(family, n):
    model = make_model(family=family)
    config = dataclasses.replace(model.config, context_length=n)
    tracemalloc.start()
    try:
        engine = cpu_engine(config, model.to_arrays(), n_threads=2)
        logits = engine.extend([IDS[:40]])
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(logits, make_engine(model).extend([IDS[:40]]))


def test_scratch_memory_grows_with_the_context_by_scores_only():
    model = make_model(**SHAPES["qwen3"] | {"context_length": 4096})
    engine, sizes = make_engine(model), []
    for n in (64, 1024, 4096):
        engine._runner._reserve_positions(n)
        sizes.append(int(engine._runner._job[job_layout.SCRATCH_BYTES]))
    assert sizes[-1] < 2 * sizes[0]


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_selected_sequences_keep_their_tokens(data):
    model = make_model(family="qwen3", n_layers=1, d_model=16, n_heads=2)
    moved, fresh = make_engine(model, 1), make_engine(model, 1)
    texts = [IDS[:20]]
    moved.extend(texts)
    for _ in range(4):
        index = st.integers(0, len(texts) - 1)
        indices = data.draw(st.lists(index, min_size=1, max_size=2 * len(texts)))
        moved.select(indices)
        new = [data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=20)) for _ in indices]
        texts = [texts[i] + tokens for i, tokens in zip(indices, new, strict=True)]
        for text, logits in zip(texts, moved.extend(new), strict=True):
            fresh.rewind([0])
            assert (fresh.extend([text])[0] == logits).all()


def test_int8_weights_change_bits_per_token_little():
    bundle = model_dir.load(shipped_model())
    ids = bundle.tokenizer.encode_prompt(b"ROMEO:\nWhat is the matter with you, my lord?\n" * 3)
    nats = []
    for dtype in ("int8", "float32"):
        engine = cpu_engine(bundle.config, dict(bundle.arrays), n_threads=1, dtype=dtype)
        logits = engine.extend([ids[:-1]], every_position=True).astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nats.append(-log_p[np.arange(len(log_p)), ids[1:]].mean())
    assert 0 < abs(nats[0] - nats[1]) < 0.02


def test_more_heads_than_a_pass_can_have_are_refused():
    """Beyond the limit, chunk numbers would run into the pass number, and threads would hang."""
    config = ModelConfig.of(
        "llama",
        vocab_size=8,
        context_length=8,
        n_layers=1,
        d_model=16,
        n_heads=10_950,
        n_kv_heads=1,
        head_dim=2,
    )
    with pytest.raises(ModelError, match="10,950 attention heads"):
        CpuEngine(PackedWeights(config, "float32", np.zeros((2, 1)), []), n_threads=1)


def test_interrupted_changes_of_the_cache_leave_it_whole(monkeypatch):
    engine = make_engine(make_model(**SHAPES["qwen3"]), 1)
    expected = engine.extend([IDS[:20]])
    monkeypatch.setattr(kv_cache, "allocate_aligned", interrupt_second_call(allocate_aligned))
    with pytest.raises(KeyboardInterrupt):
        engine.select([0] * 9)
    monkeypatch.undo()
    assert engine.lengths == [20]
    engine.rewind([0])
    assert np.array_equal(engine.extend([IDS[:20]]), expected)


def interrupt_second_call(function):
    calls = []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call
