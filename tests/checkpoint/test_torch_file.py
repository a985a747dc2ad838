"""pytorch_model.bin: read without unpickling, with the numbers of torch.load."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from support.models import make_model
from tgen.checkpoint import model_dir, safetensors_file, torch_file
from tgen.errors import ModelError

ZIP = {"_use_new_zipfile_serialization": True}
LEGACY = {"_use_new_zipfile_serialization": False}


def read(path):
    return safetensors_file.read_arrays(path, torch_file.read_header(path))


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 5, generator=generator)
    return {
        "parameter": torch.nn.Parameter(base.clone()),
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 1:3],
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "tied": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("kind", [ZIP, LEGACY])
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_those_of_torch_load(kind, protocol, tmp_path):
    tensors, path = make_tensors(), tmp_path / "it.bin"
    torch.save(tensors, path, pickle_protocol=protocol, **kind)
    arrays = read(path)
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.detach().contiguous()
        bits = expected.view(torch.int16) if expected.dtype == torch.bfloat16 else expected
        assert np.array_equal(arrays[name].view(bits.numpy().dtype), bits.numpy()), name


@pytest.mark.parametrize("kind", [ZIP, LEGACY])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_models_in_pickle_files_are_those_in_safetensors(kind, prefix, tokenizer, tmp_path):
    model = make_model("gpt2", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "it", model.config, tokenizer, model.to_arrays())
    expected = model_dir.load(tmp_path / "it")
    stored = load_file(tmp_path / "it" / "model.safetensors")
    (tmp_path / "it" / "model.safetensors").unlink()
    old = {name.replace("ln_1.weight", "ln_1.gamma"): array for name, array in stored.items()}
    tensors = {prefix + name: torch.from_numpy(array) for name, array in old.items()}
    name = next(name for name in tensors if "c_fc.weight" in name)
    tensors[name] = tensors[name].t().contiguous().t()
    torch.save(tensors, tmp_path / "it" / "pytorch_model.bin", **kind)
    bundle = model_dir.load(tmp_path / "it")
    for name, array in expected.arrays.items():
        assert np.array_equal(bundle.arrays[name], array), name
    assert model_dir.describe(tmp_path / "it")[1] == {"float32": sum(map(np.size, stored.values()))}


def test_shards_are_read(tokenizer, tmp_path):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "it", model.config, tokenizer, model.to_arrays())
    expected = model_dir.load(tmp_path / "it")
    stored = load_file(tmp_path / "it" / "model.safetensors")
    (tmp_path / "it" / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(sorted(stored)):
        weight_map[name] = f"pytorch_model-{i % 2 + 1:05}-of-00002.bin"
    for file in set(weight_map.values()):
        shard = {n: torch.from_numpy(stored[n]) for n in stored if weight_map[n] == file}
        torch.save(shard, tmp_path / "it" / file)
    index = tmp_path / "it" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    bundle = model_dir.load(tmp_path / "it")
    assert all(np.array_equal(bundle.arrays[n], a) for n, a in expected.arrays.items())


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize("kind", [ZIP, LEGACY])
def test_code_is_named_and_not_run(kind, tmp_path, capsys):
    path = tmp_path / "it.bin"
    torch.save({"weight": torch.zeros(2), "more": Runs()}, path, **kind)
    with pytest.raises(ModelError, match=r"contains (__builtin__|builtins)\.print") as error:
        read(path)
    assert "if you trust it, convert it: python -c" in error.value.hint
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("error")
def test_a_backslash_in_a_name_is_no_warning(tmp_path):
    path = replaced(tmp_path, b"ctorch._utils\n", b"ct\\orch\n")
    with pytest.raises(ModelError, match=r"contains t.orch\._rebuild_tensor_v2"):
        read(path)


def archive_with(path, pickled, data=b"\0" * 16):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("it/data.pkl", pickled)
        archive.writestr("it/data/0", data)


def replaced(tmp_path, old, new):
    """Return a file whose pickle has other bytes than torch.save wrote."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2, 2)}, buffer)
    archive = zipfile.ZipFile(buffer)
    pickled = archive.read("archive/data.pkl")
    assert old in pickled
    archive_with(tmp_path / "it.bin", pickled.replace(old, new))
    return tmp_path / "it.bin"


STRIDES = b"K\x02K\x01\x86"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (b"K\x00K\x00\x86", "several times"),
        (b"K\x01K\x01\x86", "several times"),
        (b"K\x03K\x01\x86", "outside its storage"),
        (b"K\x02\x85", "strides"),
        (b"K\x02]\x86", "non-negative integers"),
    ],
)
def test_views_outside_a_storage_are_an_error(new, reason, tmp_path):
    with pytest.raises(ModelError, match=reason):
        read(replaced(tmp_path, STRIDES, new))


DEEP = b"\x80\x02)" + b"\x85" * 100_000  # a tuple in a tuple in a ...
WIDE = b"\x80\x02)" + b"q\0h\0\x86" * 100  # both items are the tuple before


@pytest.mark.parametrize("deep", [DEEP, WIDE], ids=["deep", "wide"])
@pytest.mark.parametrize("end", [b"q\0}h\0Ns.", b"Q.", b"q\0h\0\x93.", b"q\0h\0R.", b"h\0.", b""])
def test_nested_tuples_neither_crash_nor_hang(deep, end, tmp_path):
    archive_with(tmp_path / "it.bin", deep + end)
    with pytest.raises(ModelError):
        read(tmp_path / "it.bin")


def test_a_small_pickle_does_not_copy_a_large_dict(tmp_path):
    items = b"".join(b"]X\4\0\0\0%04dNe" % i for i in range(9999)).replace(b"]X", b"](X")
    name = b"ccollections\nOrderedDict\nq\1"
    bomb = b"\x80\x02" + name + b"](" + items + b"eq\0\x85R" + b"h\1h\0\x85R" * 50_000
    archive_with(tmp_path / "it.bin", bomb + b".")
    with pytest.raises(ModelError, match="no tensors"):
        read(tmp_path / "it.bin")


def test_encrypted_and_damaged_members_are_an_error(tmp_path):
    path = tmp_path / "it.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(99))
    content = path.read_bytes()
    directory = content.index(b"PK\1\2")
    encrypted = content[: directory + 8] + b"\1" + content[directory + 9 :]
    compressed = content.index(b"data.pkl") + 8
    for damaged in (encrypted, content[:compressed] + b"\xff" + content[compressed + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match="not readable"):
            read(path)


def test_other_files_are_named(tmp_path):
    path = tmp_path / "it.bin"
    path.write_bytes(pickle.dumps({"weight": 1}))
    with pytest.raises(ModelError, match="not a file of torch"):
        read(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        read(path)


BUFFERS = []
for options in (ZIP, LEGACY):
    BUFFERS.append(io.BytesIO())
    torch.save({"w": torch.zeros(3, 2), "b": torch.ones(4).half()}, BUFFERS[-1], **options)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_are_an_error_or_tensors(data, tmp_path):
    buffer = data.draw(st.sampled_from(BUFFERS))
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "it.bin"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        arrays = read(path)
    except ModelError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(content)
