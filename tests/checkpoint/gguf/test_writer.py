"""Writing GGUF: the content of the file, and unsupported models."""

import hashlib

import numpy as np
import pytest

from support.models import make_model
from tgen.checkpoint.gguf.writer import convert, write_gguf
from tgen.config import ModelConfig, RopeScaling
from tgen.errors import ModelError

DIGEST = "e3960ede2520819673f2c997bafc6662409477d258106e721ca301cc8730295f"
SCALED = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
)


def write_and_read(tmp_path, family, *, stored="f32", arrays=None, **values):
    """Return the model's config and arrays, and the file's fields and tensors."""
    gguf = pytest.importorskip("gguf", reason="NO GGUF")
    model = make_model(family, **values)
    arrays = arrays or model.to_arrays()
    write_gguf(tmp_path / "model.gguf", model.config, arrays, stored=stored)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return model.config, arrays, fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_file_has_the_config(family, tmp_path):
    config, _, fields, tensors = write_and_read(tmp_path, family, tied_embeddings=False)
    assert fields["general.architecture"] == family
    assert fields["tokenizer.ggml.model"] == "no_vocab"
    expected = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    assert {name: fields[f"{family}.{name}"] for name in expected} == expected
    assert "output.weight" in tensors


def test_q_and_k_are_interleaved_only_for_llama(tmp_path):
    for family in ("llama", "qwen3"):
        config, arrays, _, tensors = write_and_read(tmp_path, family)
        q = arrays["blocks.1.attention.qkv_proj.weight"][: config.n_heads * config.head_dim]
        theirs = tensors["blk.1.attn_q.weight"].data
        half = config.head_dim // 2
        assert np.array_equal(theirs[1], q[half if family == "llama" else 1])
        assert sorted(map(bytes, theirs)) == sorted(map(bytes, q))


def test_only_matrices_get_the_requested_dtype(tmp_path):
    for stored, kind in (("f32", "F32"), ("bf16", "BF16"), ("q8_0", "Q8_0")):
        _, _, _, tensors = write_and_read(tmp_path, "gpt2", stored=stored)
        kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
        matrices = {n for n, t in tensors.items() if len(t.shape) == 2} - {"position_embd.weight"}
        assert {kinds.pop(name) for name in matrices} == {kind}
        assert set(kinds.values()) == {"F32"}


QUANTIZED = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1"}


@pytest.mark.parametrize(("stored", "kind"), [*QUANTIZED.items(), ("q6_k", "Q6_K")])
@pytest.mark.parametrize("tied", [True, False])
def test_types_are_those_that_llama_cpp_chooses(stored, kind, tied, tmp_path):
    """With whole blocks of 256 and rows of 256, 288 and 72 weights."""
    shape = {"d_model": 256, "n_layers": 1, "tied_embeddings": tied}
    _, _, fields, tensors = write_and_read(tmp_path, "llama", stored=stored, d_ff=288, **shape)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    output = "token_embd.weight" if tied else "output.weight"
    assert kinds.pop(output) == ("Q8_0" if stored == "q8_0" else "Q6_K")
    assert kinds.pop("blk.0.ffn_down.weight") == ("Q8_0" if kind == "Q6_K" else kind)
    matrices = {name for name in kinds if "norm" not in name}
    assert len(matrices) == (6 if tied else 7)
    assert {kinds.pop(name) for name in matrices} == {kind}
    assert set(kinds.values()) == {"F32"}
    numbers = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q6_K": 18}
    assert fields["general.file_type"] == numbers[kind]
    assert fields["general.quantization_version"] == 2
    _, _, _, tensors = write_and_read(tmp_path, "llama", stored=stored, d_ff=72, d_model=32)
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"


def test_head_that_is_written_twice_has_the_type_of_an_output(tmp_path):
    """gptneox needs a head, so the embedding is not the output."""
    values = {"d_model": 256, "n_layers": 1, "d_ff": 256, "tied_embeddings": True}
    _, _, _, tensors = write_and_read(tmp_path, "gpt_neox", stored="q4_0", **values)
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    assert tensors["token_embd.weight"].tensor_type.name == "Q4_0"


@pytest.mark.parametrize(("stored", "kind"), QUANTIZED.items())
def test_blocks_are_those_of_the_gguf_package(stored, kind, tmp_path):
    gguf = pytest.importorskip("gguf", reason="NO GGUF")
    _, arrays, _, tensors = write_and_read(tmp_path, "qwen3", stored=stored)
    ggml_type = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.quantize(arrays["blocks.1.feed_forward.up_proj.weight"], ggml_type)
    assert np.array_equal(tensors["blk.1.ffn_up.weight"].data, expected)


def test_q6_k_blocks_are_llama_cpps():
    """The digest is of the bytes that its quantize_row_q6_K_ref writes for these weights."""
    gguf = pytest.importorskip("gguf", reason="NO GGUF")
    numbers = np.arange(8 * 512).reshape(8, 512) * 7919 % 2003 - 1001
    weights = (numbers * np.abs(numbers) / 2**20).astype(np.float32)
    weights[1, :16] = weights[2] = 0
    weights[3] = 3
    blocks = convert(gguf, "x", weights, "q6_k")
    assert hashlib.sha256(blocks.tobytes()).hexdigest() == DIGEST
    again = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    steps = np.abs(weights).reshape(8, -1, 16).max(-1) / 32
    assert (np.abs(again - weights).reshape(8, -1, 16).max(-1) <= 0.6 * steps + 1e-3).all()


@pytest.mark.parametrize("stored", ["q8_0", "q4_0", "q6_k"])
def test_weights_that_overflow_a_type_are_an_error(stored, tmp_path):
    pytest.importorskip("gguf", reason="NO GGUF")
    model = make_model("llama", d_model=256, n_layers=1)
    arrays = model.to_arrays()
    arrays["blocks.0.feed_forward.up_proj.weight"][3, 5] = 1e12
    with pytest.raises(ModelError, match=r"ffn_up\.weight: 1e\+12 is too large for"):
        write_gguf(tmp_path / "model.gguf", model.config, arrays, stored=stored)


def test_bfloat16_is_copied_and_float16_becomes_float32(tmp_path):
    arrays = make_model("llama").to_arrays()
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    _, _, _, tensors = write_and_read(tmp_path, "llama", stored="bf16", arrays=bits)
    actual = tensors["token_embd.weight"].data.view(np.uint16)
    assert np.array_equal(actual, bits["token_embedding.weight"])
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    _, _, _, tensors = write_and_read(tmp_path, "llama", arrays=halves)
    expected = halves["token_embedding.weight"].astype(np.float32)
    assert np.array_equal(tensors["token_embd.weight"].data, expected)


def test_llama3_rope_scaling_is_written_as_divisors(tmp_path):
    _, _, _, tensors = write_and_read(tmp_path, "llama", rope_scaling=SCALED, head_dim=16)
    divisors = tensors["rope_freqs.weight"].data
    assert divisors.shape == (8,)
    assert divisors[-1] == 8
    assert list(divisors) == sorted(divisors)


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("classic", {}, "post-norm layers"),
        ("gpt2", {"activation": "gelu"}, "activation=gelu in GGUF"),
        (
            "qwen3",
            {"attention_bias": True, "output_bias": True},
            "attention_bias=True in GGUF",
        ),
        ("qwen3", {"rope_scaling": SCALED}, "llama3 RoPE scaling in qwen3"),
    ],
)
def test_unsupported_models_are_an_error(family, values, reason, tmp_path):
    config = ModelConfig.of(family, vocab_size=300, **values)
    with pytest.raises(ModelError, match=reason):
        write_gguf(tmp_path / "model.gguf", config, {})
    assert not (tmp_path / "model.gguf").exists()
