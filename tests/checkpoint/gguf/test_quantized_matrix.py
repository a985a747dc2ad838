"""Quantized GGUF files: values as llama.cpp's, in little more memory than the file takes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.command import tgen
from support.models import cpu_engine, make_model
from tgen.checkpoint import dtypes, export, model_dir
from tgen.checkpoint.gguf import header, quantized_matrix
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix, Rows
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.errors import ModelError
from tgen.machine import memory

gguf = pytest.importorskip("gguf", reason="NO GGUF: reading quantized GGUF files is not tested")

TYPES = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ1_S", "TQ2_0"),
    *(("MXFP4",) if "MXFP4" in gguf.GGMLQuantizationType.__members__ else ()),  # since 0.18
]


def export_model(folder, tokenizer, stored, **values):
    """Return a GGUF file of a model whose heads are whole groups of the kernels."""
    shape = {"vocab_size": tokenizer.vocab_size, "d_model": 256, "n_layers": 1, "d_ff": 288}
    model = make_model("llama", **shape | values)
    model_dir.save(folder / "model", model.config, tokenizer, model.to_arrays())
    path = folder / "model.gguf"
    export.export_gguf(
        model_dir.load(folder / "model"), path, name="it", stored=stored, progress=lambda _: None
    )
    return path


def random_blocks(kind, n_rows, n_columns):
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n_rows, n_columns // n_values * n_bytes)).astype(np.uint8)


def dequantize(data, kind):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_those_of_the_gguf_package(kind):
    data = random_blocks(kind, 9, 512)
    ggml_type = gguf.GGMLQuantizationType[kind].value
    half = np.arange(2 * 512).reshape(2, 512).astype(np.float16)
    expected = np.concatenate([dequantize(data, kind), half.astype(np.float32)])
    first = QuantizedMatrix([Rows(data[:4], ggml_type)], 512)
    matrix = QuantizedMatrix.stack([first, QuantizedMatrix([Rows(data[4:], ggml_type)], 512), half])
    assert matrix.shape == (11, 512)
    assert matrix.nbytes == data.nbytes + half.nbytes
    for rows in (slice(None), slice(3, 5), slice(2), slice(8, 99), slice(10, None), slice(5, 5)):
        assert np.array_equal(matrix[rows], expected[rows], equal_nan=True)
    assert np.array_equal(dtypes.to_float32(matrix), expected, equal_nan=True)
    assert np.array_equal(np.asarray(matrix), expected, equal_nan=True)
    swapped = first.map_rows(lambda rows: rows[::-1])
    assert np.array_equal(swapped[:], expected[3::-1], equal_nan=True)


@pytest.mark.parametrize("kind", TYPES)
def test_infinite_scales_are_found_in_every_type(kind):
    n_columns = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    blocks = random_blocks(kind, 400, n_columns)
    expected = [bool(np.isfinite(dequantize(block[None], kind)).all()) for block in blocks]
    ggml_type = gguf.GGMLQuantizationType[kind].value
    actual = [QuantizedMatrix([Rows(b[None], ggml_type)], n_columns).is_finite() for b in blocks]
    assert actual == expected
    assert kind == "MXFP4" or len(set(expected)) == 2


@pytest.mark.parametrize("stored", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q6_k"])
def test_engine_gives_the_same_logits_as_from_float32(stored, tokenizer, tmp_path):
    bundle = model_dir.load(export_model(tmp_path, tokenizer, stored))
    assert bundle.quantized
    stored_bytes = sum(array.nbytes for array in bundle.arrays.values())
    assert stored_bytes < 1.2 * (tmp_path / "model.gguf").stat().st_size
    wide = {name: np.array(array) for name, array in bundle.arrays.items()}
    expected = cpu_engine(bundle.config, wide, n_threads=1, dtype="int8")
    actual = open_engine(bundle, EngineOptions(device="cpu", threads=1, dtype="int8"))
    tokens = [list(range(30))]
    assert np.array_equal(actual.extend(tokens), expected.extend(tokens))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_are_kept_exactly(kind):
    data = random_blocks(kind, 40, 512)
    n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    for at in (0, 2) if kind != "Q4_0" else (0,):  # scales that are finite
        scales = np.random.default_rng(at).normal(size=data.size // n_bytes).astype("<f2")
        data.reshape(-1, n_bytes)[:, at : at + 2] = scales[:, None].view(np.uint8)
    matrix = QuantizedMatrix([Rows(data, gguf.GGMLQuantizationType[kind].value)], 512)
    assert matrix.has_four_bits
    numbers, scales, minima = matrix.four_bit_groups(3, 37)
    wide = (np.repeat(factor.astype(np.float32), 32, axis=1) for factor in (scales, minima))
    scale, minimum = wide
    actual, expected = scale * numbers + minimum, dequantize(data, kind)[3:37]
    if kind == "Q4_K":  # a product of two numbers, rounded to float16
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    else:
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("q4_0", "int4"), ("q4_1", "int4"), ("q8_0", "int8")]
)
def test_quantized_files_run_as_they_are_stored(stored, dtype, tokenizer, tmp_path):
    bundle = model_dir.load(export_model(tmp_path, tokenizer, stored))
    wide = {name: np.array(array) for name, array in bundle.arrays.items()}
    expected = cpu_engine(bundle.config, wide, n_threads=1).extend([list(range(30))])
    engine = open_engine(bundle, EngineOptions(device="cpu", threads=1))
    assert engine.dtype == dtype
    error = np.abs(engine.extend([list(range(30))]) - expected).max()  # of rounded inputs
    assert error < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("values", [{}, {"n_heads": 8, "head_dim": 48}])
def test_matrices_are_never_dequantized_as_a_whole(values, tokenizer, tmp_path, monkeypatch):
    """Except the attention's, if its heads are padded to whole groups."""
    path = export_model(tmp_path, tokenizer, "q4_0", vocab_size=9000, **values)
    largest = 0
    dequantize = quantized_matrix.dequantize

    def observe(data, kind):
        nonlocal largest
        wide = dequantize(data, kind)
        largest = max(largest, wide.nbytes)
        return wide

    monkeypatch.setattr(quantized_matrix, "dequantize", observe)
    engine = open_engine(model_dir.load(path), EngineOptions(device="cpu", threads=1))
    assert engine.dtype == "int4"
    assert 0 < largest <= 4096 * 256 * 4


def test_ram_is_checked_for_what_is_used(tokenizer, tmp_path, monkeypatch):
    path = export_model(tmp_path, tokenizer, "q4_0", vocab_size=9000)
    bundle = model_dir.load(path)
    n_values = sum(array.size for array in bundle.arrays.values())
    n_bytes = sum(array.nbytes for array in bundle.arrays.values())
    monkeypatch.setattr(memory, "free_ram", lambda: n_bytes + 1000)
    assert open_engine(model_dir.load(path), EngineOptions(device="cpu", threads=1)).dtype == "int4"
    monkeypatch.setattr(memory, "free_ram", lambda: n_bytes - 1000)
    with pytest.raises(ModelError, match=r"loading .* needs"):
        model_dir.load(path)
    monkeypatch.setattr(memory, "free_ram", lambda: 2 * n_values)
    with pytest.raises(ModelError, match="as float32 needs"):
        open_engine(bundle, EngineOptions(device="cpu", threads=1, dtype="float32"))
    with pytest.raises(ModelError, match="weights to float32 needs"):
        open_engine(model_dir.load(path), EngineOptions(device="cpu", threads=1, kind="torch"))


def test_cuda_stores_files_in_sixteen_bits(tokenizer, tmp_path, monkeypatch):
    gpu = SimpleNamespace(major=8, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    monkeypatch.setattr("tgen.machine.device.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("tgen.engine.torch_engine.TorchEngine", lambda _, **given: given["dtype"])
    path = export_model(tmp_path, tokenizer, "q4_0")
    assert open_engine(model_dir.load(path), EngineOptions(device="cuda")) == "bfloat16"
    assert (
        open_engine(model_dir.load(path), EngineOptions(device="cuda", dtype="float32"))
        == "float32"
    )
    assert (
        open_engine(model_dir.load(tmp_path / "model"), EngineOptions(device="cuda")) == "float32"
    )
    half = model_dir.load(tmp_path / "model")
    half.arrays.update({n: a.astype("f2") for n, a in half.arrays.items() if a.ndim == 2})
    gpu.major, gpu.minor = 7, 5  # emulates bfloat16
    assert open_engine(half, EngineOptions(device="cuda")) == "float16"
    assert open_engine(model_dir.load(path), EngineOptions(device="cuda")) == "float32"


def test_quantized_weights_are_not_silently_stored_as_float32(tokenizer, tmp_path):
    path = export_model(tmp_path, tokenizer, "q4_0")
    options = ("--prompt", "What", "-n", 1, "--device", "cpu")
    message = b"warning: the quantized weights are stored as float32"
    assert message in tgen("generate", "-m", path, *options, TGEN_KERNELS="0").stderr
    assert message not in tgen("generate", "-m", path, *options).stderr


def test_infinite_scale_in_a_file_is_an_error(tokenizer, tmp_path):
    path = export_model(tmp_path, tokenizer, "q4_0")
    entry = header.read_header(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[entry.start + 18 : entry.start + 20] = b"\x00\x7c"  # the second block's scale
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"ffn_up\.weight contains infinite or NaN"):
        model_dir.load(path)


def test_quantized_model_is_written_as_float32(tokenizer, tmp_path):
    bundle = model_dir.load(export_model(tmp_path, tokenizer, "q5_0"))
    out = tmp_path / "out"
    export.export_transformers(
        bundle, out, stored="f32", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    again = model_dir.load(out)
    for name, array in bundle.arrays.items():
        assert np.array_equal(again.arrays[name], np.asarray(array)), name
