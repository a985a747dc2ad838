"""Adapters in PEFT's format: the same logits in both directions, and what is refused."""

import hashlib
import json
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from support.models import make_model
from support.transformers_models import make_theirs
from tgen.checkpoint import model_dir, safetensors_file
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tgen.errors import ModelError
from tgen.lora import adapter, adapter_base, model_with_adapter
from tgen.lora.matrices import Pair, adapter_layout, new_shapes
from tgen.model.transformer import Transformer

if find_spec("peft") is None:
    pytest.skip("peft is not installed", allow_module_level=True)
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(  # PEFT 0.21 with transformers 5.23
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
VARIANTS = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "openai-gpt", "gpt_neox", "phi3", "glm4"]
MORE = {
    "rslora": {"use_rslora": True, "r": 9},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"model\.layers\.0\.mlp\.down_proj": 5},
        "alpha_pattern": {"up_proj": 3, "layers.1.self_attn.v_proj": 40},
    },
    "bias": {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "r": 16},
}
IDS = torch.arange(40).view(2, 20) * 7 % 290


def save_theirs(variant, tokenizer, folder, **settings):
    """Save a model of transformers, and PEFT's adapter of it with B that is not zero."""
    peft = pytest.importorskip("peft")  # takes seconds: only where it is used

    model = make_theirs(variant, tokenizer, tied=variant not in ("gpt_neox", "phi3"))
    model.save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text(tokenizer.json)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", **{"r": 4, "lora_alpha": 8} | settings
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config).eval()
    wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
        logits = wrapped(IDS).logits
        with wrapped.disable_adapter():
            base = wrapped(IDS).logits
    assert (logits - base).abs().max() > 0.05
    wrapped.save_pretrained(folder / "adapter")
    return logits


def our_logits(path, **values):
    bundle = model_with_adapter.load(path, **values)
    with torch.no_grad():
        return Transformer.from_arrays(bundle.config, bundle.arrays)(IDS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_pefts(variant, tokenizer, tmp_path):
    expected = save_theirs(variant, tokenizer, tmp_path)
    assert torch.allclose(our_logits(tmp_path / "adapter"), expected, atol=1e-5)


@pytest.mark.parametrize("more", MORE)
def test_logits_are_pefts_with_other_settings(more, tokenizer, tmp_path):
    expected = save_theirs("llama", tokenizer, tmp_path, **MORE[more])
    assert torch.allclose(our_logits(tmp_path / "adapter"), expected, atol=1e-5)


def test_bfloat16_files_are_read(tokenizer, tmp_path):
    peft = pytest.importorskip("peft")

    save_theirs("qwen3", tokenizer, tmp_path)
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    save({n: t.bfloat16() for n, t in load(path).items()}, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = wrapped(IDS).logits
    assert torch.allclose(our_logits(tmp_path / "adapter"), expected, atol=1e-5)


def make_ours(folder, tokenizer, family="llama", *, rank=4, targets="all", **values):
    """Save a model of ours and an adapter with B that is not zero; return the pairs."""
    model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
    arrays = model.to_arrays()
    model_dir.save(folder / "base", model.config, tokenizer, arrays)
    layout = adapter_layout(model.config)
    sites = {part.pair: part for parts in layout.values() for part in parts}
    random = np.random.default_rng(1)
    pairs = {}
    for name, (r, scale) in new_shapes(model.config, rank, 32.0, targets).items():
        a, b = (
            random.normal(0, 0.1, shape).astype(np.float32)
            for shape in ((r, sites[name].n_inputs), (sites[name].pair_rows, r))
        )
        pairs[name] = Pair(a, b, scale)
    base = str((folder / "base").resolve())
    digest = adapter_base.base_digest(arrays)
    model_with_adapter.save(
        folder / "adapter",
        model.config,
        tokenizer,
        pairs,
        base=base,
        base_digest=digest,
        alpha=32.0,
    )
    return pairs


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2", "classic", "gpt_neox",
                                    "phi3", "glm4"])  # fmt: skip
def test_peft_reads_what_we_write(family, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")

    pairs = make_ours(tmp_path, tokenizer, family, tied_embeddings=family != "phi3")
    config = model_dir.load(tmp_path / "base").config
    for name, pair in adapter.read(tmp_path / "adapter", config).pairs.items():
        assert np.allclose(pair.b, pairs[name].b, atol=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = wrapped(IDS).logits
    assert torch.allclose(our_logits(tmp_path / "adapter"), expected, atol=1e-5)


def test_written_configuration_has_only_keys_that_every_peft_knows(tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    values = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert set(values) == {
        "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "lora_alpha",
        "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type",
    }  # fmt: skip
    assert values["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    arrays = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    assert not (tmp_path / "adapter" / "config.json").exists()


def test_ranks_and_scales_survive_writing(tokenizer, tmp_path):
    pairs = make_ours(tmp_path, tokenizer)
    name = "model.layers.1.mlp.up_proj"
    pair = pairs[name]
    pairs[name] = Pair(pair.a[:2], pair.b[:, :2], 3.0)
    config = model_with_adapter.load(tmp_path / "base").config
    files = adapter.build_files(config, pairs, base="b", digest="d", alpha=32.0)
    for file, content in files.items():
        whole = content if isinstance(content, bytes) else b"".join(content)
        (tmp_path / "adapter" / file).write_bytes(whole)
    again = adapter.read(tmp_path / "adapter", config)
    assert (again.base, again.base_digest) == ("b", "d")
    for key, (a, b, scale) in again.pairs.items():
        assert np.allclose((b @ a) * scale, (pairs[key].b @ pairs[key].a) * pairs[key].scale)


def test_base_is_found_by_name_and_beside_the_adapter(tokenizer, tmp_path, monkeypatch):
    make_ours(tmp_path, tokenizer)
    logits = our_logits(tmp_path / "adapter")
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"base_model_name_or_path": "/gone/base"}))
    assert torch.equal(our_logits(tmp_path / "adapter"), logits)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"'/gone/base' of the adapter .* does not exist"):
        model_with_adapter.load(tmp_path / "adapter")
    path.write_text(json.dumps(values | {"base_model_name_or_path": "named"}))
    (tmp_path / "models").mkdir()
    (tmp_path / "moved").rename(tmp_path / "models" / "named")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(our_logits(tmp_path / "adapter"), logits)
    assert torch.equal(
        our_logits(tmp_path / "models" / "named", adapter=tmp_path / "adapter"), logits
    )


def test_another_base_is_refused_with_both_names(tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    other = make_model("llama", vocab_size=tokenizer.vocab_size, seed=5)
    model_dir.save(tmp_path / "other", other.config, tokenizer, other.to_arrays())
    with pytest.raises(ModelError, match=r"trained on '.*base', not on '.*other'"):
        model_with_adapter.load(tmp_path / "other", adapter=tmp_path / "adapter")


def test_base_of_another_shape_is_refused_with_both_names(tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    other = make_model("llama", vocab_size=tokenizer.vocab_size, d_model=128)
    model_dir.save(tmp_path / "other", other.config, tokenizer, other.to_arrays())
    words = r"trained on '.*base', not on '.*other': .*lora_A has shape .* \(expected "
    with pytest.raises(ModelError, match=words):
        model_with_adapter.load(tmp_path / "other", adapter=tmp_path / "adapter")


@pytest.mark.parametrize("values", [{"seed": 5}, {"d_model": 128}])
def test_changed_base_is_not_called_another_one(tokenizer, tmp_path, values, monkeypatch):
    make_ours(tmp_path, tokenizer)
    changed = make_model("llama", vocab_size=tokenizer.vocab_size, **values)
    model_dir.save(tmp_path / "base", changed.config, tokenizer, changed.to_arrays())
    monkeypatch.chdir(tmp_path)
    words = "the base model '.*base' has changed since the adapter '.*adapter' was trained: "
    with pytest.raises(ModelError, match=words) as error:
        model_with_adapter.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert error.value.hint == "restore the base model, or train the adapter again"
    with pytest.raises(ModelError, match=words):
        model_with_adapter.load(tmp_path / "adapter")


def test_digest_does_not_depend_on_the_file(tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    arrays = model.to_arrays()
    narrow = {n: a.view(np.uint32) >> 16 << 16 for n, a in arrays.items()}
    wide = {n: a.astype(np.uint32).view(np.float32) for n, a in narrow.items()}
    bits = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in wide.items()}
    assert adapter_base.base_digest(wide) == adapter_base.base_digest(bits)
    assert adapter_base.base_digest(wide) != adapter_base.base_digest(arrays)
    vectors = {n: a + (a.ndim == 1) for n, a in arrays.items()}
    assert adapter_base.base_digest(vectors) == adapter_base.base_digest(arrays)


def test_pefts_adapter_of_another_name_is_a_warning(tokenizer, tmp_path):
    save_theirs("llama", tokenizer, tmp_path)
    assert model_with_adapter.load(tmp_path / "adapter").warnings == ()
    (tmp_path / "base").rename(tmp_path / "renamed")
    (warning,) = model_with_adapter.load(
        tmp_path / "renamed", adapter=tmp_path / "adapter"
    ).warnings
    assert "names the base" in warning


def change_config(folder, **values):
    path = folder / "adapter" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, change):
    path = folder / "adapter" / ADAPTER_WEIGHTS
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata={"format": "pt"})


def rename(old, new):
    def change(arrays):
        for name in list(arrays):
            if old in name:
                arrays[name.replace(old, new)] = arrays.pop(name)

    return change


def add(name):
    return lambda arrays: arrays.update({name: np.zeros((4, 4), np.float32)})


PREFIX = "base_model.model.model.layers.0."
BAD_CONFIGS = {
    "peft_type 'IA3' is not LORA": {"peft_type": "IA3"},
    "peft_type 'P_TUNING' is not LORA": {"peft_type": "P_TUNING"},
    "task_type 'SEQ_CLS' is not CAUSAL_LM": {"task_type": "SEQ_CLS"},
    "use_dora and the tensors disagree": {"use_dora": True},
    "lacks the tensors of modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias is not supported": {"bias": "some"},
    "key_of_the_future is not supported": {"key_of_the_future": 1},
    "init_lora_weights 'pissa_niter_4' changes the base model": {
        "init_lora_weights": "pissa_niter_4"
    },
    "was made by mlx-lm": {"fine_tune_type": "lora"},
    r"expected rank 8 by": {"r": 8},
    "r is 0": {"r": 0},
    "lora_alpha is x": {"lora_alpha": "x"},
    "lora_alpha is 1000000001": {"lora_alpha": 10**9 + 1},
    "has the expression": {"rank_pattern": {"(a+)+q": 3}},
    "has an invalid expression": {"rank_pattern": {"(q": 3}},
}
BAD_TENSORS = {
    "the model has no matrix model.layers.9.": rename("layers.0.", "layers.9."),
    "lacks the prefix base_model.model.": rename("base_model.model.", ""),
    "has no lora_B": lambda arrays: arrays.pop(f"{PREFIX}mlp.up_proj.lora_B.weight"),
    "has no lora_A": lambda arrays: arrays.pop(f"{PREFIX}mlp.up_proj.lora_A.weight"),
    "use_dora and the tensors": add(f"{PREFIX}mlp.up_proj.lora_magnitude_vector"),
    r"lm_head.weight of shape \[4, 4\]": add("base_model.model.lm_head.weight"),
    "one matrix of a pair": add("base_model.model.model.embed_tokens.lora_embedding_A"),
    "lora_bias and the tensors": add(f"{PREFIX}mlp.up_proj.lora_B.bias"),
    "is not part of a LoRA adapter": add("something"),
    "contains infinite or NaN": lambda arrays: arrays[f"{PREFIX}mlp.up_proj.lora_B.weight"].fill(
        np.nan
    ),
    "has shape": lambda arrays: arrays.update(
        {f"{PREFIX}mlp.up_proj.lora_B.weight": np.zeros((3, 4), np.float32)}
    ),
    "has no tensors": dict.clear,
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configurations_that_change_the_result_are_refused(message, tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    change_config(tmp_path, **BAD_CONFIGS[message])
    with pytest.raises(ModelError, match=message) as error:
        model_with_adapter.load(tmp_path / "adapter")
    assert error.value.hint


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(message, tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    change_tensors(tmp_path, BAD_TENSORS[message])
    with pytest.raises(ModelError, match=message) as error:
        model_with_adapter.load(tmp_path / "adapter")
    assert error.value.hint


def test_missing_and_foreign_files_are_refused(tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    weights = tmp_path / "adapter" / ADAPTER_WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        model_with_adapter.load(tmp_path / "adapter")
    weights.unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"adapter_model\.bin is not a file of torch\.save"
    ) as error:
        model_with_adapter.load(tmp_path / "adapter")
    assert error.value.hint == "download it again"
    with pytest.raises(ModelError, match="is not an adapter"):
        model_with_adapter.load(tmp_path / "base", adapter=tmp_path / "base")


def test_a_rank_larger_than_a_matrix_is_refused(tokenizer):
    config = make_model("llama", vocab_size=tokenizer.vocab_size).config
    with pytest.raises(ModelError, match=r"--lora 17 is larger than the matrix .*k_proj") as error:
        new_shapes(config, 17, 32.0, "all")
    assert error.value.hint == "use a rank of at most 16"


def test_digest_and_metadata_are_in_the_file(tokenizer, tmp_path):
    make_ours(tmp_path, tokenizer)
    bundle = model_with_adapter.load(tmp_path / "base")
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    metadata = safetensors_file.read_metadata(path)
    assert metadata == {"format": "pt", "base_sha256": adapter_base.base_digest(bundle.arrays)}
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    merged = model_with_adapter.load(tmp_path / "adapter")
    assert model_dir.digest(merged) != model_dir.digest(bundle)
    assert model_with_adapter.reload(merged).stamp == merged.stamp
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
