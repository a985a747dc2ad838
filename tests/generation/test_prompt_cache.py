"""Prompt caches: the same text as without one, for the same model only."""

import numpy as np
import pytest

from support.models import TEXT, cpu_engine
from tgen.checkpoint import model_dir, prompt_cache
from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.loaded_model import Decoding, LoadedModel
from tgen.model.transformer import Transformer

PROMPT = b"The king said: what is this? 'Tis"


@pytest.fixture(params=["kernels", "torch"])
def model(request, model_directory):
    bundle = model_dir.load(model_directory)
    if request.param == "torch":
        return LoadedModel(
            bundle, TorchEngine(Transformer.from_arrays(bundle.config, bundle.arrays))
        )
    return LoadedModel(bundle, cpu_engine(bundle.config, dict(bundle.arrays), n_threads=1))


def text(model, prompts, **options):
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=20, seed=2)
    out = [[] for _ in prompts]
    decoding = Decoding(draft="off", **options)
    for token in model.tokens(prompts, sampling=sampling, decoding=decoding):
        out[token.sequence].append(token.id)
    return out


def test_prompt_cache_does_not_change_the_text(model, tmp_path, monkeypatch):
    ids = model.encode(PROMPT)
    model.save_cache(tmp_path / "c", model.cache_prompt(ids))
    cache = model.load_cache(tmp_path / "c")
    assert cache.tokens == ids
    extend, computed = model.engine.extend, []
    monkeypatch.setattr(model.engine, "continue_text", lambda *_, **__: [])  # only `extend`

    def counted(tokens, **options):
        computed.append(sum(map(len, tokens)))
        return extend(tokens, **options)

    prompts = {1: ids, 2: [*ids, 40, 41], 3: [*ids[:7], 50, 51, 52], 4: [299, 1, 2, 3]}
    for n_new, prompt in prompts.items():
        fresh = text(model, [prompt])
        monkeypatch.setattr(model.engine, "extend", counted)
        assert text(model, [prompt], prompt_cache=cache) == fresh
        monkeypatch.setattr(model.engine, "extend", extend)
        assert computed[0] == n_new
        computed.clear()
    for prompt in (ids[:5], ids * 10):  # shorter; past the context
        assert text(model, [prompt], prompt_cache=cache) == text(model, [prompt])
    rows = [ids, [*ids, 7], ids]
    fresh = text(model, rows)
    monkeypatch.setattr(model.engine, "extend", counted)
    assert text(model, rows, prompt_cache=cache) == fresh
    assert computed[0] == 3  # one token for the first and third prompt, two for the second


def test_prompt_cache_can_be_extended(model):
    ids = model.encode(PROMPT)
    longer = model.cache_prompt([*ids, 9, 8], known=model.cache_prompt(ids))
    fresh = model.cache_prompt([*ids, 9, 8])
    assert longer.tokens == fresh.tokens
    assert np.abs(longer.keys - fresh.keys).max() < 1e-5
    assert np.abs(longer.values - fresh.values).max() < 1e-5
    with pytest.raises(UsageError, match="a prompt of 330 tokens cannot be cached"):
        model.cache_prompt([5] * 330)


def test_prompt_cache_of_another_model_is_an_error(model, tmp_path):
    path = tmp_path / "c"
    model.save_cache(path, model.cache_prompt([1, 2, 3]))
    bundle = model.bundle
    int8_model = LoadedModel(
        bundle, cpu_engine(bundle.config, dict(bundle.arrays), n_threads=1, dtype="int8")
    )
    arrays = dict(bundle.arrays)
    narrow = cpu_engine(bundle.config, arrays, n_threads=1, cache_dtype="float16")
    with pytest.raises(ModelError, match="was computed with keys and values in 'float32', but"):
        LoadedModel(bundle, narrow).load_cache(path)
    with pytest.raises(ModelError, match="was computed with 'float32' weights"):
        int8_model.load_cache(path)
    weights = bundle.path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match="has changed since it was read"):
        LoadedModel(bundle, model.engine).load_cache(path)
    other = model_dir.load(bundle.path)
    with pytest.raises(ModelError, match=str(bundle.path)):
        LoadedModel(other, model.engine).load_cache(path)
    weights.write_bytes(content)
    same = LoadedModel(model_dir.load(bundle.path), model.engine)
    assert same.load_cache(path).tokens == [1, 2, 3]
    original = path.read_bytes()
    path.write_bytes(original[:-1])
    with pytest.raises(ModelError, match=r"bytes \(expected") as error:
        model.load_cache(path)
    assert "--save-cache" in error.value.hint
    middle = len(original) // 2
    flipped = bytes([original[middle] ^ 1])
    path.write_bytes(original[:middle] + flipped + original[middle + 1 :])
    with pytest.raises(ModelError, match="is damaged"):
        model.load_cache(path)
    with pytest.raises(ModelError, match="is not a prompt cache"):
        model.load_cache(weights)
    config, identity = bundle.config, model._identity
    shape = (config.n_layers, config.n_kv_heads, 3, config.head_dim)
    valid = {
        "tokens": np.zeros(3, np.int64),
        "keys": np.zeros(shape, np.float32),
        "values": np.zeros(shape, np.float32),
    }
    for invalid in (
        {"tokens": np.zeros((), np.int64)},
        {"tokens": np.zeros(2, np.int64)},
        {"tokens": np.zeros(3, np.int32)},
        {"keys": np.zeros((0, 10**6, 10**6, 1), np.float32)},
        {"values": np.zeros((1, *shape[1:]), np.float32)},
    ):
        prompt_cache.save(path, valid | invalid, identity)
        with pytest.raises(ModelError, match=r"is not a prompt cache|does not fit"):
            prompt_cache.load(path, config, identity)
    prompt_cache.save(path, valid, identity)
    assert prompt_cache.load(path, config, identity)["tokens"].tolist() == [0, 0, 0]


def test_save_cache_overwrites_prompt_caches_only(run_here, trained, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"precious")
    run = ["generate", "--model", trained, "--prompt", "The", "-n", 0]
    saved = run_here(*run, "--save-cache", tmp_path / "c")
    assert b"tokens saved" in saved.stderr
    (tmp_path / "link").symlink_to("c")
    assert run_here(*run, "--save-cache", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert run_here(*run, "--save-cache", tmp_path / "new/c").returncode == 0
    for target in ("corpus.txt", ".", "corpus.txt/c"):
        error = run_here(*run, "--save-cache", tmp_path / target)
        assert error.returncode == 2
        assert b"--save-cache" in error.stderr
    assert run_here(*run, "--save-cache", trained / "model.safetensors").returncode == 2
    assert (tmp_path / "corpus.txt").read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "corpus.txt", "link", "new"]


def test_command_saves_and_loads_a_prompt_cache(run_here, trained, tmp_path):
    prompt = TEXT[:40].decode()
    run = ["generate", "--model", trained, "--seed", 1, "-n", 12]
    fresh = run_here(*run, "--prompt", prompt)
    saved = run_here(*run, "--prompt", prompt, "--save-cache", tmp_path / "c")
    loaded = run_here(*run, "--prompt", prompt, "--load-cache", tmp_path / "c")
    assert fresh.returncode == saved.returncode == loaded.returncode == 0, loaded.stderr.decode()
    assert fresh.stdout == saved.stdout == loaded.stdout
    assert b"prompt tokens cached: 15 of 15" in loaded.stderr
    other = run_here("generate", "--prompt", prompt, "--load-cache", tmp_path / "c")
    assert other.returncode == 1
    assert str(trained).encode() in other.stderr
