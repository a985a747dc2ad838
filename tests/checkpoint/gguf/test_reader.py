"""Reading GGUF files: tgen's own, those of other programs, and damaged ones."""

import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import TEXT, make_model
from tgen import python_api
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.gguf import config_fields, reader
from tgen.checkpoint.gguf import header as gguf_header
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import RopeScaling
from tgen.errors import ModelError, TgenError
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_bpe, train_char

gguf = pytest.importorskip("gguf", reason="NO GGUF: reading GGUF files is not tested")

SCALED = RopeScaling(factor=8.0, low_freq_factor=1.5, original_context_length=16)
MODELS = [
    ("gpt2", {"d_ff": 96}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "output_bias": True, "feed_forward_bias": True}),
    ("llama", {"rope_scaling": SCALED, "head_dim": 16, "tied_embeddings": False}),
    ("mistral", {"sliding_window": 48}),
    ("qwen2", {"rope_scaling": RopeScaling(kind="linear", factor=2.5)}),
    ("qwen3", {"norm_eps": 3e-6, "rope_theta": 1e6}),
]


def export_model(folder, tokenizer, family="llama", *, stored="f32", **values):
    """Return a saved and loaded model, and the path of its GGUF file."""
    model = make_model(family, vocab_size=tokenizer.vocab_size + 2, **values)
    model_dir.save(folder / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(folder / "model")
    export.export_gguf(
        bundle, folder / "model.gguf", name="it", stored=stored, progress=lambda _: None
    )
    return bundle, folder / "model.gguf"


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_exported_model_is_read(family, values, tokenizer, tmp_path):
    expected, path = export_model(tmp_path, tokenizer, family, **values)
    actual = model_dir.load(path)
    assert actual.config == expected.config
    assert actual.end_ids == expected.end_ids
    assert actual.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert np.array_equal(actual.arrays[name], array), name
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        ours = Transformer.from_arrays(actual.config, actual.arrays)(tokens)
        assert torch.equal(ours, Transformer.from_arrays(expected.config, expected.arrays)(tokens))


def test_file_that_is_replaced_during_the_load_is_read_again(tokenizer, tmp_path, monkeypatch):
    _, new = export_model(tmp_path / "new", train_char([b"new"]))
    _, path = export_model(tmp_path, tokenizer)
    expected = model_dir.load(new)

    def replace_and_read(entries):
        if new.exists():
            new.replace(path)
        return gguf_header.read_tensors(entries)

    monkeypatch.setattr(reader, "read_tensors", replace_and_read)
    bundle = model_dir.load(path)
    assert bundle.tokenizer.json == expected.tokenizer.json
    assert all(np.array_equal(bundle.arrays[n], a) for n, a in expected.arrays.items())


@pytest.mark.parametrize("train", [train_char, train_bpe, lambda _: train_char([b"no merges"])])
def test_tokenizer_gives_the_same_ids(train, tmp_path):
    text = (
        TEXT + "unseen: ñ 🙂‍↔️ \t\r\n  x 12345 they'll <|endoftext|>\n\n\n y".encode() + b"\xff\xfe"
    )
    expected, path = export_model(tmp_path, train([TEXT]))
    actual = model_dir.load(path).tokenizer
    assert actual.encode(text) == expected.tokenizer.encode(text)
    assert actual.vocab_size == expected.tokenizer.vocab_size
    assert (actual.end_of_text, actual.pad) == (0, 1)
    assert actual.decode(actual.encode(text)) == text


@pytest.mark.parametrize("stored", ["f16", "bf16", "q8_0"])
def test_narrow_dtypes_are_read(stored, tokenizer, tmp_path):
    expected, path = export_model(tmp_path, tokenizer, "qwen3", stored=stored)
    actual = model_dir.load(path).arrays
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    ours = actual["blocks.1.feed_forward.down_proj.weight"]
    narrow = {"f16": np.float16, "bf16": np.uint16, "q8_0": np.float32}[stored]
    assert ours.dtype == narrow
    if stored == "bf16":
        ours = (ours.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(ours.astype(np.float32), theirs)
    norm = "final_norm.weight"
    assert np.array_equal(actual[norm], expected.arrays[norm])


def test_mixed_dtypes_in_one_matrix_become_float32(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    fields = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[0])
    path = tmp_path / "mixed.gguf"
    write_gguf(path, model.config, model.to_arrays(), tokenizer_fields=fields)
    plain = model_dir.load(path).arrays["blocks.0.attention.qkv_proj.weight"]
    writer = gguf.GGUFWriter(tmp_path / "again.gguf", "qwen3")
    reader = gguf.GGUFReader(path)
    for field in list(reader.fields.values())[4:]:  # the first are of the header
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        half = tensor.name == "blk.0.attn_v.weight"
        writer.add_tensor(tensor.name, tensor.data.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    actual = model_dir.load(tmp_path / "again.gguf").arrays["blocks.0.attention.qkv_proj.weight"]
    assert actual.dtype == np.float32
    n = len(plain) * 3 // 4
    assert np.array_equal(actual[:n], plain[:n])
    assert np.array_equal(actual[n:], plain[n:].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("original", [8192, 4096, 16384])
def test_llama3_rope_scaling_is_inferred_from_its_divisors(original):
    scaling = RopeScaling(factor=32.0, original_context_length=original)
    divisors = config_fields.compute_divisors(5e5, 64, scaling)
    assert config_fields.infer_scaling(5e5, divisors, {}) == scaling
    assert config_fields.infer_scaling(5e5, np.ones(32, np.float32), {}) is None
    for wrong in (divisors[::-1], divisors * 0 + 4, divisors * np.nan, divisors * np.inf):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
            config_fields.infer_scaling(5e5, wrong, {})


def test_commands_accept_gguf_files(run_here, tokenizer, tmp_path):
    _, path = export_model(tmp_path, tokenizer)
    from_file, from_folder = (python_api.load(p, device="cpu") for p in (path, tmp_path / "model"))
    for model in (from_file, from_folder):
        cache = model.cache_prompt("What is")
        model.save_cache(tmp_path / "cache", cache)
        assert model.load_cache(tmp_path / "cache").tokens == cache.tokens
    texts = [model.generate("What", seed=1) for model in (from_file, from_folder)]
    assert texts[0] == texts[1]
    commands = {
        "generate": ("--prompt", "What", "--max-new-tokens", 3),
        "inspect": ("--prompt", "What", "--view", "model", "--view", "predict"),
    }
    for command, options in commands.items():
        shown = [
            run_here(command, "-m", p, *options, "--seed", 1)
            if command == "generate"
            else run_here(command, "-m", p, *options)
            for p in (path, tmp_path / "model")
        ]
        assert [result.returncode for result in shown] == [0, 0]
    bundle = model_dir.load(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="has changed"):
        model_dir.digest(bundle)


def change(data, key, value):
    """Replace the uint32 value of a field."""
    start = data.index(key) + len(key) + 4
    return data[:start] + struct.pack("<I", value) + data[start + 4 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: d.replace(b"qwen3", b"bloom"), "unknown GGUF architecture 'bloom'"),
        (
            lambda d: d.replace(
                b"general.architecture" + struct.pack("<IQ", 8, 5) + b"qwen3",
                b"general.architecture" + struct.pack("<IIQB", 9, 0, 1, 1),
            ),
            r"unknown GGUF architecture array",
        ),
        (lambda d: d.replace(b"_rms_epsilon", b"_rms_epsilom"), "layer_norm_rms_epsilon=None"),
        (lambda d: change(d, b"_rms_epsilon", 0), "layer_norm_rms_epsilon=0.0"),
        (lambda d: change(d, b"qwen3.embedding_length", 64), "disagree: token_embd.weight has"),
        (lambda d: change(d, b"qwen3.block_count", 1), r"disagree.*blk\.1\..* \(and 6 more\)"),
        (lambda d: change(d, b"qwen3.block_count", 1 << 30), "1,073,741,824 layers"),
        (lambda d: change(d, b"qwen3.attention.head_count", 5), "n_heads|n_kv_heads"),
        (lambda d: change(d, b"qwen3.rope.dimension_count", 4), "rotary_dim: invalid value 4"),
        (lambda d: change(d, b"qwen3.context_length", 0), "context_length=0"),
        (lambda d: d.replace(b"ffn_up.weight", b"ffn_UP.weight"), "ffn_up.weight is missing"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "GGUF version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian numbers"),
        (lambda d: d.replace(b"general.name", b"general.type"), "the file has the type"),
        (
            lambda d: d[:8] + b"\xff" * 8 + d[16:],
            "header of more|ends at byte|dimensions|two tensors",
        ),
        (lambda d: d[:16] + b"\xff" * 7 + b"\x00" + d[24:], "ends at byte|unknown type|inside"),
        (lambda d: d[:24] + b"\xff" * 8 + d[32:], "ends at byte"),
        (lambda d: d[:-1], "too few for"),
        (lambda d: d[:1000], "ends at byte 1000"),
        (lambda d: d[:-4] + struct.pack("<f", np.nan), "infinite or NaN"),
        (lambda _: b"GGUX" + bytes(100), "is not a GGUF file"),
        (lambda _: b"", "ends at byte 0"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_damaged_file_is_an_error_with_a_reason(damage, reason, tokenizer, tmp_path):
    _, path = export_model(tmp_path, tokenizer, "qwen3")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TgenError, match=reason) as error:
        model_dir.load(path)
    assert error.value.hint
    assert "\n" not in error.value.message + error.value.hint
    assert str(path) in error.value.message


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_files_never_crash(small_file, tmp_path_factory, data):
    changed = bytearray(small_file)
    end = 16_000  # of the tensor entries
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(4, end))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(4, len(changed))) :]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(changed)
    errors = []
    try:
        model_dir.load(path)
    except TgenError as error:
        errors = [error]
    assert all(error.hint and "\n" not in error.message + error.hint for error in errors)


@pytest.fixture(scope="module")
def small_file(tokenizer, tmp_path_factory):
    _, path = export_model(tmp_path_factory.mktemp("small"), tokenizer, n_layers=1)
    return path.read_bytes()


@pytest.mark.parametrize("stored", ["f16", "q8_0", "q4_1", "q6_k"])
def test_common_types_are_read_without_the_gguf_package(stored, tokenizer, tmp_path, monkeypatch):
    _, path = export_model(tmp_path, tokenizer, stored=stored)
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_header.describe_type.cache_clear()
    assert model_dir.load(path).arrays["token_embedding.weight"][:].any()


def test_linear_rope_scaling_is_read_under_its_older_name(tokenizer, tmp_path, monkeypatch):
    add_float32 = gguf.GGUFWriter.add_float32

    def add_older_name(writer, key, value):
        add_float32(writer, key.replace("rope.scaling.factor", "rope.scale_linear"), value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_float32", add_older_name)
    scaling = RopeScaling(kind="linear", factor=2.5)
    _, path = export_model(tmp_path, tokenizer, "qwen2", rope_scaling=scaling)
    assert model_dir.load(path).config.rope_scaling == scaling


def test_two_rope_scalings_at_once_are_refused(tokenizer, tmp_path, monkeypatch):
    scaling = RopeScaling(factor=8.0, original_context_length=16)
    model = make_model("llama", vocab_size=tokenizer.vocab_size, rope_scaling=scaling)
    to_fields = config_fields.to_fields
    factor = {"llama.rope.scaling.factor": 2.0}
    monkeypatch.setattr(config_fields, "to_fields", lambda config: to_fields(config) | factor)
    fields = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[0])
    write_gguf(tmp_path / "m.gguf", model.config, model.to_arrays(), tokenizer_fields=fields)
    with pytest.raises(ModelError, match=r"rope_freqs.weight and rope.scaling.factor") as caught:
        model_dir.load(tmp_path / "m.gguf")
    assert "yarn" in caught.value.hint


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*fields):
    """Return a file with these fields only: name, number of the type, value."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, len(fields))
        + b"".join(
            text(name) + struct.pack("<I", value_type) + value for name, value_type, value in fields
        )
    )


def test_number_lists_take_as_much_memory_as_in_the_file(tmp_path):
    path, n = tmp_path / "m.gguf", 100_000
    numbers = np.arange(n, dtype="<f4")
    path.write_bytes(header((b"a", 9, struct.pack("<IQ", 6, n) + numbers.tobytes())))
    actual = gguf_header.read_header(path).fields["a"]
    assert sys.getsizeof(actual) < 1.1 * numbers.nbytes
    assert list(actual) == list(numbers)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([(b"a", 9, struct.pack("<IQ", 6, 9) + bytes(36))], "a list of 9 values"),
        ([(b"a", 9, struct.pack("<IQ", 8, 8) + bytes(64))], "more than 8 strings"),
        ([(b"%d" % i, 7, b"\1") for i in range(9)], "more than 8 strings"),
        ([(b"a", 8, text(b"b" * 1001))], "header of more than 1,000 bytes"),
        ([(b"general.alignment", 8, text(b"b" * 900))], "alignment='b"),
    ],
)
def test_header_limits_hold(fields, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "_MAX_STRINGS", 8)
    monkeypatch.setattr(gguf_header, "_MAX_HEADER", 1000)
    (tmp_path / "m.gguf").write_bytes(header(*fields))
    with pytest.raises(ModelError, match=reason) as error:
        gguf_header.read_header(tmp_path / "m.gguf")
    assert len(error.value.message) < len(str(tmp_path)) + 250
