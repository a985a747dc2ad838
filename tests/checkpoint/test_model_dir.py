"""Model directories: save and load, and errors for damaged ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from safetensors.torch import save_file

from support.adapters import save_adapter
from support.models import ALL_FAMILIES, TEXT, make_model
from tgen.checkpoint import model_dir
from tgen.cli.app import run
from tgen.config import RopeScaling
from tgen.errors import ModelError, TgenError, UsageError
from tgen.lora import model_with_adapter
from tgen.model.transformer import Transformer
from tgen.python_api import load as load_model
from tgen.python_api import train
from tgen.storage import files
from tgen.tokenizer import Tokenizer, train_char


def test_loaded_model_equals_saved_model(model_directory, family):
    model = make_model(family, vocab_size=300)
    bundle = model_dir.load(model_directory)
    assert bundle.config == model.config
    assert bundle.end_ids == {0}
    again = Transformer.from_arrays(bundle.config, bundle.arrays)
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_saving_replaces_the_weights(model_directory, family, tokenizer):
    other = make_model(family, seed=1, vocab_size=tokenizer.vocab_size)
    model_dir.save(model_directory, other.config, tokenizer, other.to_arrays())
    arrays = model_dir.load(model_directory).arrays
    assert all(np.array_equal(arrays[name], a) for name, a in other.to_arrays().items())
    assert not list(model_directory.glob(files.TEMPORARY + "*"))


def test_tokenizer_may_have_more_tokens_than_the_model(tmp_path, tokenizer):
    file = json.loads(tokenizer.json)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    file["added_tokens"].append({"id": tokenizer.vocab_size, "content": "<image>", **flags})
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, Tokenizer(json.dumps(file)), model.to_arrays())
    loaded = load_model(tmp_path / "m")
    assert loaded.generate("The king", max_new_tokens=8, ban=["q"])
    for call in (loaded.generate, loaded.score):
        with pytest.raises(UsageError, match=r"the token .<image>. with the id"):
            call("an <image>")


def test_replacing_a_model_removes_its_other_files_and_no_others(tmp_path, tokenizer):
    old, new = (make_model("llama", vocab_size=300, d_model=width) for width in (16, 32))
    out = tmp_path / "m"
    model_dir.save(out, old.config, tokenizer, old.to_arrays())
    theirs = [
        "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "tokenizer.model", "model.safetensors.index.json", "adapter_config.json",
        "model-00001-of-00002.safetensors", "ngrams.safetensors",
    ]  # fmt: skip
    mine = ["notes.txt", "README.md", "model.gguf", "my.safetensors", "training"]
    for name in [*theirs, *mine[:-1]]:
        (out / name).write_bytes(b"{}")
    (out / "training").mkdir()
    model_dir.save(out, new.config, tokenizer, new.to_arrays())
    fresh = tmp_path / "fresh"
    model_dir.save(fresh, new.config, tokenizer, new.to_arrays())
    assert {path.name for path in out.iterdir()} == {p.name for p in fresh.iterdir()} | set(mine)
    (out / "chat_template.jinja").write_text("added by hand")
    model_dir.save(
        out, new.config, tokenizer, make_model("llama", seed=1, vocab_size=300).to_arrays()
    )
    assert (out / "chat_template.jinja").exists()  # only the weights have changed


def edit(path: Path, **values: object) -> None:
    json_config = json.loads(path.read_bytes()) | values
    path.write_text(json.dumps({k: v for k, v in json_config.items() if v != "absent"}))


def rewrite(folder: Path, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change the embedding."""
    path = folder / "model.safetensors"
    arrays = load_file(path)
    name = next(name for name in arrays if name.endswith(("embed_tokens.weight", "wte.weight")))
    path.write_bytes(save(arrays | {name: change(arrays[name])}))


def add_tensors(folder: Path, tensors: dict[str, NDArray[Any]]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(save(load_file(path) | tensors))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DAMAGE = {
    "missing directory": lambda d: shutil.rmtree(d),
    "empty directory": lambda d: [p.unlink() for p in d.iterdir()],
    "missing config": lambda d: (d / "config.json").unlink(),
    "config is invalid JSON": lambda d: (d / "config.json").write_bytes(b"\xff{"),
    "config is a list": lambda d: (d / "config.json").write_text("[]"),
    "unknown model type": lambda d: edit(d / "config.json", model_type="bert"),
    "missing model type": lambda d: edit(d / "config.json", model_type="absent"),
    "model type is a list": lambda d: edit(d / "config.json", model_type=["gpt2"]),
    "n_heads not divisible": lambda d: edit(
        d / "config.json", n_head=5, num_key_value_heads=3, head_dim=8
    ),
    "negative size": lambda d: edit(d / "config.json", vocab_size=-1),
    "size is text": lambda d: edit(d / "config.json", vocab_size="many"),
    "wrong vocab_size": lambda d: edit(d / "config.json", vocab_size=301),
    "size is true": lambda d: edit(d / "config.json", n_layer=True, num_hidden_layers=True),
    "one layer too many": lambda d: edit(d / "config.json", n_layer=3, num_hidden_layers=3),
    "billions of layers": lambda d: edit(
        d / "config.json", n_layer=1 << 30, num_hidden_layers=1 << 30
    ),
    "one layer too few": lambda d: edit(d / "config.json", n_layer=1, num_hidden_layers=1),
    "missing d_model": lambda d: edit(d / "config.json", n_embd="absent", hidden_size="absent"),
    "missing weights": lambda d: (d / "model.safetensors").unlink(),
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "weights one byte short": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes()[:-1]
    ),
    "weights one byte long": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes() + b"x"
    ),
    "weights are a Git LFS pointer": lambda d: (d / "model.safetensors").write_text(POINTER),
    "weights are a folder": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors").mkdir(),
    ],
    "index leads outside": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
    ],
    "missing shard": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
    ],
    "config is a Git LFS pointer": lambda d: (d / "config.json").write_text(POINTER),
    "tokenizer is a Git LFS pointer": lambda d: (d / "tokenizer.json").write_text(POINTER),
    "only pickle files": lambda d: [
        (d / "model.safetensors").rename(d / "pytorch_model.bin"),
    ],
    "quantized weights": lambda d: edit(
        d / "config.json", quantization_config={"quant_method": "gptq"}
    ),
    "unknown RoPE type": lambda d: edit(
        d / "config.json",
        scale_attn_weights=False,  # the error of gpt2, which has no RoPE
        rope_parameters={"rope_type": "proportional", "factor": 4.0},
    ),
    "sliding-window layers": lambda d: edit(
        d / "config.json", layer_types=["sliding_attention"], n_embd=7
    ),
    "integer weights": lambda d: rewrite(d, lambda a: a.astype(np.int32)),
    "NaN weight": lambda d: rewrite(d, lambda a: a * np.float32("nan")),
    "infinite weight": lambda d: rewrite(d, lambda a: a + np.float32("inf")),
    "contradictory RoPE parameters": lambda d: edit(
        d / "config.json", rope_theta=123.0, scale_attn_weights=False
    ),
    "RoPE parameters are a list": lambda d: edit(
        d / "config.json", rope_parameters=[1], scale_attn_weights=False
    ),
    "missing index": lambda d: (d / "model.safetensors").rename(
        d / "model-00001-of-00002.safetensors"
    ),
    "transposed weight": lambda d: rewrite(d, lambda a: np.ascontiguousarray(a.T)),
    "missing tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "invalid tokenizer": lambda d: (d / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_directory_is_an_error_with_a_hint(model_directory, damage):
    damage(model_directory)
    with pytest.raises(TgenError) as caught:
        model_dir.load(model_directory)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("family", ["classic", "llama"], indirect=True)
def test_missing_tensor_is_named(model_directory):
    path = model_directory / "model.safetensors"
    arrays = load_file(path)
    for name in arrays:
        path.write_bytes(save({n: a for n, a in arrays.items() if n != name}))
        if "positions_embed" in name:  # tgen computes them
            model_dir.load(model_directory)
            continue
        with pytest.raises(ModelError, match="is missing"):
            model_dir.load(model_directory)


BOTH_MASKS: dict[str, NDArray[Any]] = {
    "bias": np.tril(np.ones((48, 48), np.uint8)),
    "masked_bias": np.array(-np.inf, np.float32),
}
FREQUENCIES: dict[str, NDArray[Any]] = {"inv_freq": np.ones(4, np.float32)}
# Extra tensors that some versions of transformers saved, and the prefix that some left out.
HARMLESS: dict[str, tuple[str, dict[str, NDArray[Any]], str]] = {
    "gpt2": ("h.0.attn.", BOTH_MASKS, "transformer."),
    "gpt_neo": ("h.0.attn.attention.", BOTH_MASKS, "transformer."),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.",
        BOTH_MASKS | {"rotary_emb.inv_freq": np.ones(2, np.float32)},
        "",
    ),
    "llama": ("model.layers.0.self_attn.rotary_emb.", FREQUENCIES, ""),
    "phi3": ("model.rotary_emb.", FREQUENCIES, ""),
}


@pytest.mark.parametrize("family", list(HARMLESS), indirect=True)
def test_saved_masks_and_frequencies_are_ignored(model_directory, family):
    path = model_directory / "model.safetensors"
    prefix, extra, missing_prefix = HARMLESS[family]
    before = model_dir.load(model_directory).arrays
    arrays = load_file(path) | {prefix + name: array for name, array in extra.items()}
    arrays = {missing_prefix + name: array for name, array in arrays.items()}
    path.write_bytes(save(arrays))
    after = model_dir.load(model_directory)
    assert not after.warnings
    assert before.keys() == after.arrays.keys()
    assert all(np.array_equal(before[name], after.arrays[name]) for name in before)


OTHER_MODELS = {
    "vision_tower.vision_model.encoder.layers.0.weight": "the image part of a model",
    "model.multi_modal_projector.weight": "the image part of a model",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": "an adapter",
    "model.layers.0.mlp.experts.0.up_proj.weight": "a mixture of experts",
    "score.weight": r"a classifier \(score.weight\)",
}


@pytest.mark.parametrize("family", ["gemma3", "llama"], indirect=True)
@pytest.mark.parametrize(("name", "message"), OTHER_MODELS.items())
def test_tensors_of_other_models_are_refused_by_name(model_directory, name, message):
    add_tensors(model_directory, {name: np.ones((2, 2), np.float32)})
    with pytest.raises(ModelError, match=message) as caught:
        model_dir.load(model_directory)
    assert name in caught.value.message
    assert caught.value.hint


def rename_tensors(folder: Path, change: Callable[[str], str | None]) -> None:
    """Rename the tensors of a file, and remove those whose new name is None."""
    path = folder / "model.safetensors"
    renamed = {change(name): array for name, array in load_file(path).items()}
    renamed.pop(None, None)
    path.write_bytes(save(renamed))


HEADS = ("lm_head.weight", "embed_out.weight")


def without_prefix(name: str) -> str:
    return name.removeprefix("model.").removeprefix("gpt_neox.")


@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f != "qwen2"], indirect=True)
def test_base_model_is_read_if_its_head_is_tied(tokenizer, family, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size, tied_embeddings=True)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    before = model_dir.load(tmp_path / "m")
    rename_tensors(tmp_path / "m", without_prefix)
    after = model_dir.load(tmp_path / "m")
    assert after.config == before.config == model.config
    assert not after.warnings
    assert all(np.array_equal(array, after.arrays[name]) for name, array in before.arrays.items())


@pytest.mark.parametrize("family", ["gpt_neox", "olmo2"], indirect=True)
def test_base_model_without_its_own_head_is_refused(model_directory):
    rename_tensors(
        model_directory,
        lambda name: (
            None if name in ("lm_head.weight", "embed_out.weight") else without_prefix(name)
        ),
    )
    with pytest.raises(ModelError, match="has no LM head") as caught:
        model_dir.load(model_directory)
    assert "ForCausalLM" in caught.value.hint


def mistied(folder: Path, family: str, tokenizer: Tokenizer, *, tied: bool) -> Transformer:
    """Save a model whose config.json says the opposite of `tied`, and return it."""
    model = make_model(family, vocab_size=tokenizer.vocab_size, tied_embeddings=tied)
    model_dir.save(folder, model.config, tokenizer, model.to_arrays())
    edit(folder / "config.json", tie_word_embeddings=not tied)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["no head", "own head"])
def test_tensors_win_over_a_config_that_disagrees_on_the_head(tied, family, tokenizer, tmp_path):
    model = mistied(tmp_path / "m", family, tokenizer, tied=tied)
    if family in ("classic", "gpt2", "gpt_neo") and tied:  # else, it could be a base model
        rename_tensors(tmp_path / "m", lambda name: f"transformer.{name}")
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.config == model.config
    (warning,) = bundle.warnings
    assert ("no head" if tied else "head of their own") in warning
    assert all(np.array_equal(a, bundle.arrays[n]) for n, a in model.to_arrays().items())
    with pytest.warns(UserWarning, match="unlike tie_word_embeddings"):
        load_model(tmp_path / "m", device="cpu", threads=1)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_without_a_row_are_ignored_with_a_warning(file, tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    edit(tmp_path / "m" / "generation_config.json", eos_token_id=None)
    edit(tmp_path / "m" / file, eos_token_id=[5, 100_000])
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.end_ids == {5}
    (warning,) = bundle.warnings
    assert "eos_token_id 100000 is ignored" in warning


def test_adapter_beside_a_model_is_ignored_with_a_warning(tokenizer, tmp_path):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    (warning,) = model_dir.load(tmp_path / "m").warnings
    assert "adapter is ignored" in warning
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(ModelError) as caught:
        model_dir.load(tmp_path / "m")
    assert "adapter" in caught.value.hint


def test_model_that_names_a_class_without_a_head_is_refused(tokenizer, tmp_path):
    mistied(tmp_path / "m", "llama", tokenizer, tied=True)
    edit(tmp_path / "m" / "config.json", architectures=["LlamaModel"])
    with pytest.raises(ModelError, match="has no LM head"):
        model_dir.load(tmp_path / "m")


def test_longrope_warns_that_it_limits_the_context(tokenizer, tmp_path):
    factors = (1.0,) * 3
    scaling = RopeScaling(
        kind="longrope", factor=4.0, original_context_length=16, short_factor=factors,
        long_factor=factors,
    )  # fmt: skip
    size = {"vocab_size": tokenizer.vocab_size, "context_length": 16}
    model = make_model("phi3", rope_scaling=scaling, **size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    (warning,) = model_dir.load(tmp_path / "m").warnings
    assert "limited to 16 tokens" in warning


def test_parts_of_one_matrix_may_have_different_dtypes(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    path = tmp_path / "m" / "model.safetensors"
    tensors = {name: torch.from_numpy(array) for name, array in load_file(path).items()}
    tensors = {n: t.bfloat16() if "q_proj" in n else t for n, t in tensors.items()}
    save_file(tensors, path)
    n_q = model.config.n_heads * model.config.head_dim
    name = "blocks.0.attention.qkv_proj.weight"
    expected, actual = model.to_arrays()[name], model_dir.load(tmp_path / "m").arrays[name]
    assert actual.dtype == np.float32
    assert np.array_equal(actual[n_q:], expected[n_q:])
    assert np.array_equal(actual[:n_q], torch.tensor(expected[:n_q]).bfloat16().float().numpy())


def test_own_head_that_equals_the_embedding_gives_no_warning(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    embedding = model.token_embedding.weight.detach().numpy()
    add_tensors(tmp_path / "m", {"lm_head.weight": embedding})
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.config == model.config
    assert not bundle.warnings


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "a", "-n", "1"],
        ["inspect", "--prompt", "a king"],
        ["export", "--to", "transformers", "--out", "OUT"],
        ["train", "CORPUS", "--dry-run"],
    ],
    ids=lambda command: command[0],
)
def test_commands_warn_once_of_a_head_that_disagrees(command, tokenizer, tmp_path, capsysbinary):
    folder, corpus = tmp_path / "m", tmp_path / "corpus.txt"
    mistied(folder, "qwen3", tokenizer, tied=False)
    corpus.write_bytes(TEXT)
    paths = {"OUT": str(tmp_path / "out"), "CORPUS": str(corpus)}
    options = {"export": [], "train": ["--from"]}.get(command[0], ["--model"])
    name, *rest = (paths.get(word, word) for word in command)
    assert run([name, *options, str(folder), *rest]) == 0
    out, err = capsysbinary.readouterr()
    assert (out + err).count(b"head of their own") == 1


@pytest.mark.parametrize("tied", [True, False], ids=["no head", "own head"])
def test_model_with_a_head_that_disagrees_is_fine_tuned_to_a_consistent_one(
    tied, tokenizer, tmp_path
):
    mistied(tmp_path / "m", "llama", tokenizer, tied=tied)
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    overrides = {"batch_size": "4", "eval_every": "2"}
    list(
        train(
            tmp_path / "corpus.txt",
            out=tmp_path / "tuned",
            start_from=tmp_path / "m",
            steps=2,
            threads=1,
            overrides=overrides,
        )
    )
    tuned = model_dir.load(tmp_path / "tuned")
    assert not tuned.warnings
    assert tuned.config.tied_embeddings == tied
    assert ("lm_head.weight" in load_file(tmp_path / "tuned" / "model.safetensors")) != tied
    described = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert described["tie_word_embeddings"] == tied


def test_classic_model_with_learned_positions_keeps_them(tokenizer, tmp_path):
    model = make_model("classic", position="learned", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.config.position == "learned"
    assert "position_embedding.weight" in bundle.arrays


def test_load_during_replacement_gives_the_old_or_the_new_model(tmp_path, monkeypatch):
    tokenizers = [train_char([text.encode()]) for text in ("é", "ü")]
    models = [make_model("llama", seed=n, vocab_size=tokenizers[0].vocab_size) for n in (0, 1)]
    read_weights, n_replaced, max_replaced = model_dir._read_weights, 0, 0

    def save(n: int) -> None:
        model_dir.save(tmp_path / "m", models[n].config, tokenizers[n], models[n].to_arrays())

    def replace_and_read(*arguments):
        nonlocal n_replaced
        if n_replaced < max_replaced:
            n_replaced += 1
            save(n_replaced % 2)
        return read_weights(*arguments)

    save(0)
    monkeypatch.setattr(model_dir, "_read_weights", replace_and_read)
    for limit in (1, 2):
        max_replaced = limit
        bundle = model_dir.load(tmp_path / "m")
        (n,) = [n for n in (0, 1) if bundle.tokenizer.json == tokenizers[n].json]
        expected = models[n].to_arrays()
        assert all(np.array_equal(bundle.arrays[name], expected[name]) for name in expected)
    max_replaced = 1_000
    with pytest.raises(ModelError, match="keeps changing while it is read"):
        model_dir.load(tmp_path / "m")


def test_load_retries_if_the_model_was_missing_for_a_moment(tmp_path, monkeypatch):
    tokenizer = train_char([b"abcd"])
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    path = tmp_path / "m"
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    read_weights, n_reads = model_dir._read_weights, 0

    def fail_first(*arguments):
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            content = (path / "config.json").read_bytes()
            (path / "config.json").unlink()
            (path / "config.json").write_bytes(content)
            raise ModelError("another model's weights")
        return read_weights(*arguments)

    monkeypatch.setattr(model_dir, "_read_weights", fail_first)
    assert model_dir.load(path).config == model.config
    assert n_reads == 2


def test_training_that_never_began_is_named(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "LOCK").touch()
    with pytest.raises(ModelError) as caught:
        model_dir.load(tmp_path)
    assert "was stopped before it began, start it again" in caught.value.hint


def test_an_adapter_is_not_its_own_base(trained, tmp_path):
    path = save_adapter(tmp_path / "kb", trained)
    with pytest.raises(ModelError, match=r"it has no config\.json") as error:
        model_with_adapter.load(path, adapter=path)
    assert error.value.hint == "this is an adapter: name its base with --model, or remove --adapter"


@pytest.mark.parametrize("settings", [{"quantization": {"bits": 4}}, {"bits": 4}])
def test_model_of_mlx_is_called_quantized(settings, tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    key = "quantization" if "quantization" in settings else "quantization_config"
    edit(tmp_path / "m" / "config.json", **{key: settings.get("quantization", settings)})
    with pytest.raises(ModelError, match=r"quantized \(mlx\)"):
        model_dir.load(tmp_path / "m")


def test_model_half_inside_distributed_data_parallel_is_named(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    path = tmp_path / "m" / "model.safetensors"
    arrays = load_file(path)
    arrays |= {f"module.{name}": arrays.pop(name) for name in [n for n in arrays if "norm" in n]}
    path.write_bytes(save(arrays))
    with pytest.raises(ModelError, match="DistributedDataParallel") as error:
        model_dir.load(tmp_path / "m")
    assert error.value.hint == "save the module in it"


def test_directory_of_a_trainer_and_a_file_of_weights_name_the_model(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    for step in (500, 1000):
        path = tmp_path / f"checkpoint-{step}"
        model_dir.save(path, model.config, tokenizer, model.to_arrays())
    for named in (tmp_path, path / "model.safetensors"):
        with pytest.raises(ModelError) as error:
            model_dir.load(named)
        assert error.value.hint.endswith(f": {path}")
