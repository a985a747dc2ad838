"""A GGUF file as a model: what export wrote, what others write, and what is no model."""

import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.command import tgen
from support.models import TEXT, make_model
from tgen import api
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.gguf import header as gguf_file
from tgen.checkpoint.gguf import rope_scaling
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import RopeScaling
from tgen.errors import ModelError, TgenError, UsageError
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_bpe, train_char

gguf = pytest.importorskip("gguf", reason="NO GGUF: nothing shows that what is written is read")

STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.5, original_context_length=16)
MODELS = [
    ("gpt2", {"d_ff": 96}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "output_bias": True, "feed_forward_bias": True}),
    ("llama", {"rope_scaling": STRETCHED, "head_dim": 16, "tied_embeddings": False}),
    ("mistral", {"sliding_window": 48}),
    ("qwen2", {"rope_scaling": RopeScaling(kind="linear", factor=2.5)}),
    ("qwen3", {"norm_eps": 3e-6, "rope_theta": 1e6}),
]


def exported(folder, tokenizer, family="llama", *, stored="float32", **values):
    """A model, saved, as it was read, and its GGUF file."""
    model = make_model(family, vocab_size=tokenizer.vocab_size + 2, **values)
    model_dir.save(folder / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(folder / "model")
    export.to_gguf(bundle, folder / "model.gguf", name="it", stored=stored, progress=lambda _: None)
    return bundle, folder / "model.gguf"


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_what_was_written_is_read(family, values, tokenizer, tmp_path):
    wanted, path = exported(tmp_path, tokenizer, family, **values)
    found = model_dir.load(path)
    assert found.config == wanted.config
    assert found.end_ids == wanted.end_ids
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        assert np.array_equal(found.arrays[name], array), name
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        ours = Transformer.from_arrays(found.config, found.arrays)(tokens)
        assert torch.equal(ours, Transformer.from_arrays(wanted.config, wanted.arrays)(tokens))


@pytest.mark.parametrize("train", [train_char, train_bpe, lambda _: train_char([b"no merges"])])
def test_the_tokenizer_gives_the_same_ids(train, tmp_path):
    text = (
        TEXT + "unseen: ñ 🙂‍↔️ \t\r\n  x 12345 they'll <|endoftext|>\n\n\n y".encode() + b"\xff\xfe"
    )
    wanted, path = exported(tmp_path, train([TEXT]))
    found = model_dir.load(path).tokenizer
    assert found.encode(text) == wanted.tokenizer.encode(text)
    assert found.vocab_size == wanted.tokenizer.vocab_size
    assert (found.end_of_text, found.pad) == (0, 1)
    assert found.decode(found.encode(text)) == text


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "int8"])
def test_weights_in_fewer_bits(stored, tokenizer, tmp_path):
    wanted, path = exported(tmp_path, tokenizer, "qwen3", stored=stored)
    found = model_dir.load(path).arrays
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    ours = found["blocks.1.feed_forward.down_proj.weight"]
    narrow = {"float16": np.float16, "bfloat16": np.uint16, "int8": np.float32}[stored]
    assert ours.dtype == narrow
    if stored == "bfloat16":
        ours = (ours.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(ours.astype(np.float32), theirs)
    norm = "final_norm.weight"
    assert np.array_equal(found[norm], wanted.arrays[norm])


def test_types_that_differ_inside_one_of_our_matrices_are_widened(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    vocabulary = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[0])
    path = tmp_path / "mixed.gguf"
    write_gguf(path, model.config, model.to_arrays(), vocabulary=vocabulary)
    plain = model_dir.load(path).arrays["blocks.0.attention.qkv_proj.weight"]
    writer = gguf.GGUFWriter(tmp_path / "again.gguf", "qwen3")
    reader = gguf.GGUFReader(path)
    for field in list(reader.fields.values())[4:]:  # the first are the header's own
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
    found = model_dir.load(tmp_path / "again.gguf").arrays["blocks.0.attention.qkv_proj.weight"]
    assert found.dtype == np.float32
    n = len(plain) * 3 // 4
    assert np.array_equal(found[:n], plain[:n])
    assert np.array_equal(found[n:], plain[n:].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("original", [8192, 4096, 16384])
def test_llama_3s_stretching_is_read_from_its_divisors(original):
    scaling = RopeScaling(factor=32.0, original_context_length=original)
    divisors = rope_scaling.divisors(5e5, 64, scaling)
    assert rope_scaling.read(5e5, divisors, {}) == scaling
    assert rope_scaling.read(5e5, np.ones(32, np.float32), {}) is None
    for odd in (divisors[::-1], divisors * 0 + 4, divisors * np.nan, divisors * np.inf):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
            rope_scaling.read(5e5, odd, {})


def test_a_file_is_a_model_wherever_a_directory_is(tokenizer, tmp_path):
    _, path = exported(tmp_path, tokenizer)
    from_file, from_folder = (api.load(p, device="cpu") for p in (path, tmp_path / "model"))
    for model in (from_file, from_folder):
        model.prompt = model.cache_prompt(model.encode("What is"))
        model.save_cache(tmp_path / "cache", model.prompt)
        assert model.load_cache(tmp_path / "cache").tokens == model.prompt.tokens
    texts = [list(model.generate("What", seed=1)) for model in (from_file, from_folder)]
    assert texts[0] == texts[1]
    commands = {
        "generate": ("--prompt", "What", "--max-new-tokens", 3),
        "inspect": ("--prompt", "What", "--view", "model", "--view", "predict"),
    }
    for command, options in commands.items():
        shown = [
            tgen(command, "-m", p, *options, "--seed", 1)
            if command == "generate"
            else tgen(command, "-m", p, *options)
            for p in (path, tmp_path / "model")
        ]
        assert [result.returncode for result in shown] == [0, 0]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="has changed"):
        model_dir.digest(from_file.bundle)


def change(data, key, value):
    """A number of a field, given by the key, as another."""
    place = data.index(key) + len(key) + 4
    return data[:place] + struct.pack("<I", value) + data[place + 4 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: d.replace(b"qwen3", b"gemma"), "architecture 'gemma' is unknown"),
        (lambda d: change(d, b"qwen3.embedding_length", 64), "disagree: token_embd.weight has"),
        (lambda d: change(d, b"qwen3.block_count", 1), r"disagree.*blk\.1\..* \(and 6 more\)"),
        (lambda d: change(d, b"qwen3.block_count", 1 << 30), "1,073,741,824 layers and"),
        (lambda d: change(d, b"qwen3.attention.head_count", 5), "n_heads|n_kv_heads"),
        (lambda d: change(d, b"qwen3.rope.dimension_count", 4), "dimension_count=4"),
        (lambda d: change(d, b"qwen3.context_length", 0), "context_length=0"),
        (lambda d: d.replace(b"ffn_up.weight", b"ffn_UP.weight"), "ffn_up.weight is missing"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "GGUF of version 1"),
        (lambda d: d[:8] + b"\xff" * 8 + d[16:], "no end|ends at byte|dimensions|two tensors"),
        (lambda d: d[:16] + b"\xff" * 7 + b"\x00" + d[24:], "ends at byte|of kind|inside"),
        (lambda d: d[:24] + b"\xff" * 8 + d[32:], "ends at byte"),
        (lambda d: d[:-1], "too few for"),
        (lambda d: d[:1000], "ends at byte 1000"),
        (lambda d: d[:-4] + struct.pack("<f", np.nan), "not finite"),
        (lambda _: b"GGUX" + bytes(100), "is no GGUF file"),
        (lambda _: b"", "ends at byte 0"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_what_is_no_model_is_refused_with_one_reason(damage, reason, tokenizer, tmp_path):
    _, path = exported(tmp_path, tokenizer, "qwen3")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TgenError, match=reason) as error:
        model_dir.load(path)
    assert error.value.hint
    assert "\n" not in error.value.message + error.value.hint
    assert str(path) in error.value.message


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_is_more_than_an_error(small_file, tmp_path_factory, data):
    changed = bytearray(small_file)
    end = 16_000  # where the tensors are described
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
    _, path = exported(tmp_path_factory.mktemp("small"), tokenizer, n_layers=1)
    return path.read_bytes()


def test_without_the_package_plain_types_are_read_and_others_refused(
    tokenizer, tmp_path, monkeypatch
):
    _, path = exported(tmp_path, tokenizer)
    (tmp_path / "q8").mkdir()
    _, small = exported(tmp_path / "q8", tokenizer, stored="int8")
    monkeypatch.setattr("tgen.checkpoint.gguf.writer.find_spec", lambda _: None)
    gguf_file._block.cache_clear()
    assert model_dir.load(path).arrays
    with pytest.raises(UsageError, match="needs the gguf package") as error:
        model_dir.load(small)
    assert error.value.hint == "pip install 'tgen-lm[gguf]'"


def test_linear_stretching_is_read_under_its_older_name(tokenizer, tmp_path, monkeypatch):
    def add(writer, factor):
        writer.add_float32(f"{writer.arch}.rope.scale_linear", factor)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_factor", add)
    scaling = RopeScaling(kind="linear", factor=2.5)
    _, path = exported(tmp_path, tokenizer, "qwen2", rope_scaling=scaling)
    assert model_dir.load(path).config.rope_scaling == scaling


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*fields):
    """A file of fields alone: each a name, the number of its kind, and its value."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, len(fields))
        + b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in fields)
    )


def test_numbers_in_a_header_take_no_more_room_than_there(tmp_path):
    path, n = tmp_path / "m.gguf", 100_000
    numbers = np.arange(n, dtype="<f4")
    path.write_bytes(header((b"a", 9, struct.pack("<IQ", 6, n) + numbers.tobytes())))
    found = gguf_file.read_header(path).fields["a"]
    assert sys.getsizeof(found) < 1.1 * numbers.nbytes
    assert list(found) == list(numbers)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([(b"a", 9, struct.pack("<IQ", 6, 9) + bytes(36))], "a list of 9 values"),
        ([(b"a", 9, struct.pack("<IQ", 8, 8) + bytes(64))], "more than 8 names and texts"),
        ([(b"%d" % i, 7, b"\1") for i in range(9)], "more than 8 names and texts"),
        ([(b"a", 8, text(b"b" * 1001))], "no end of its header"),
        ([(b"general.alignment", 8, text(b"b" * 900))], "alignment='b"),
    ],
)
def test_a_header_costs_little_whatever_it_says(fields, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MAX_TEXTS", 8)
    monkeypatch.setattr(gguf_file, "_MAX_HEADER", 1000)
    (tmp_path / "m.gguf").write_bytes(header(*fields))
    with pytest.raises(ModelError, match=reason) as error:
        gguf_file.read_header(tmp_path / "m.gguf")
    assert len(error.value.message) < len(str(tmp_path)) + 250
