"""Writing GGUF: the content of the file, and unsupported models."""

import numpy as np
import pytest

from support.models import make_model
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import ModelConfig, RopeScaling
from tgen.errors import ModelError, UsageError

SCALED = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
)


def write_and_read(tmp_path, family, *, stored="float32", arrays=None, **values):
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
    for stored, kind in (("float32", "F32"), ("bfloat16", "BF16"), ("int8", "Q8_0")):
        _, _, _, tensors = write_and_read(tmp_path, "gpt2", stored=stored)
        kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
        matrices = {n for n, t in tensors.items() if len(t.shape) == 2} - {"position_embd.weight"}
        assert {kinds.pop(name) for name in matrices} == {kind}
        assert set(kinds.values()) == {"F32"}


def test_matrices_without_whole_int8_blocks_stay_float32(tmp_path):
    _, arrays, _, tensors = write_and_read(tmp_path, "llama", stored="int8", d_ff=72)
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"
    down = tensors["blk.0.ffn_down.weight"]
    assert np.array_equal(down.data, arrays["blocks.0.feed_forward.down_proj.weight"])


def test_bfloat16_is_copied_and_float16_becomes_float32(tmp_path):
    arrays = make_model("llama").to_arrays()
    bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    _, _, _, tensors = write_and_read(tmp_path, "llama", stored="bfloat16", arrays=bits)
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
        ("gpt2", {"activation": "gelu"}, "activation gelu in gpt2"),
        ("qwen3", {"attention_bias": True, "output_bias": True}, "attention_bias in qwen3"),
        ("qwen3", {"rope_scaling": SCALED}, "Llama 3 RoPE scaling in qwen3"),
    ],
)
def test_unsupported_models_are_an_error(family, values, reason, tmp_path):
    config = ModelConfig.of(family, vocab_size=300, **values)
    with pytest.raises(ModelError, match=reason):
        write_gguf(tmp_path / "model.gguf", config, {})
    assert not (tmp_path / "model.gguf").exists()


def test_missing_gguf_package_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tgen.checkpoint.gguf.writer.find_spec", lambda _: None)
    model = make_model("llama")
    with pytest.raises(UsageError, match="needs the gguf package") as error:
        write_gguf(tmp_path / "model.gguf", model.config, model.to_arrays())
    assert error.value.hint == "pip install 'tgen-lm[gguf]'"
