"""Other engines compute the same logits at any depth, and report what they do not support."""

import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.benchmark.backend import EngineBackend, random_tokens
from tgen.benchmark.other_engines import OTHER_ENGINES, open_other_engine
from tgen.benchmark.trials import run_trial
from tgen.benchmark.workload import Workload
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_dir import ModelBundle
from tgen.config import RopeScaling
from tgen.engine.base import Engine
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.model.transformer import Transformer

LLAMA3_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
)
VARIANTS = [
    ("gpt2", {}),
    ("gpt2", {"tied_embeddings": False, "d_ff": 96}),
    ("llama", {}),
    ("llama", {"tied_embeddings": False, "attention_bias": True, "output_bias": True}),
    ("llama", {"rope_scaling": LLAMA3_ROPE, "feed_forward_bias": True, "head_dim": 16}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "tied_embeddings": False, "rope_theta": 1e6}),
]
TESTS = [  # in an order that rewinds, extends and changes the batch
    Workload(n_prompt=7, n_gen=3, n_depth=depth, batch=batch)
    for batch in (1, 3)
    for depth in (5, 0, 5, 9)
]


@pytest.fixture
def save(tokenizer, tmp_path):
    def make_bundle(family, **values) -> ModelBundle:
        model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
        model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
        return model_dir.load(tmp_path / "model")

    return make_bundle


def tokens_of(bundle: ModelBundle) -> list[int]:
    return random_tokens(bundle.config.vocab_size, bundle.config.context_length, seed=1)


def our_engine(bundle: ModelBundle) -> Engine:
    return TorchEngine(Transformer.from_arrays(bundle.config, bundle.arrays))


def skip_if_missing(name: str) -> None:
    if any(find_spec(module) is None for module in OTHER_ENGINES[name]):
        pytest.skip(f"{name} is not installed")


def open_exact(name: str, bundle: ModelBundle, dtype="float32"):
    skip_if_missing(name)
    return closing(
        open_other_engine(
            name, bundle.path, threads=1, dtype=dtype, tokens=tokens_of(bundle), exact=True
        )
    )


def our_logits(engine: Engine, tokens: list[int], test: Workload) -> list[np.ndarray]:
    """Return the logits after the prompt, then after each step."""
    EngineBackend(engine, tokens).prepare(test)
    length = test.n_depth
    logits = []
    for n in (test.n_prompt, *[1] * test.n_gen):
        logits.append(engine.extend([tokens[length : length + n]] * test.batch))
        length += n
    return logits


def logit_differences(other, bundle: ModelBundle) -> list[float]:
    engine, tokens = our_engine(bundle), tokens_of(bundle)
    differences = []
    for test in TESTS:
        other.prepare(test)
        for number, expected in enumerate(our_logits(engine, tokens, test)):
            other.extend(test.n_prompt if number == 0 else 1)
            assert other.logits().shape == expected.shape
            assert other.logits().dtype == np.float32
            differences.append(float(np.abs(other.logits() - expected).max()))
    return differences


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("classic", {}),
        ("qwen3", {"rope_scaling": LLAMA3_ROPE}),
        ("gemma3", {"sliding_window": 6}),
        ("gpt_neox", {}),
        *VARIANTS,
    ],
)
def test_transformers_computes_the_same_logits(family, values, save):
    bundle = save(family, **values)
    with open_exact("transformers", bundle) as other:
        assert max(logit_differences(other, bundle)) <= 1e-4


@pytest.mark.parametrize(("family", "values"), VARIANTS)
def test_llama_cpp_computes_the_same_logits(family, values, save):
    bundle = save(family, **values)
    with open_exact("llama.cpp", bundle) as other:  # its GELU is a float16 table
        assert max(logit_differences(other, bundle)) <= (1e-3 if family == "gpt2" else 1e-4)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_llama_cpp_splits_long_prompts(size, save, monkeypatch):
    skip_if_missing("llama.cpp")
    from tgen.benchmark.other_engines import llama_cpp_backend

    monkeypatch.setattr(llama_cpp_backend, "_BATCH", size)
    bundle = save("llama")
    with open_exact("llama.cpp", bundle) as other:
        assert max(logit_differences(other, bundle)) <= 1e-4


def test_llama_cpp_grows_its_context(save):
    with open_exact("llama.cpp", save("llama", context_length=600)) as other:
        for n in (1, 500, 600):
            run_trial(other, Workload(n_prompt=n))


@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        ("transformers", "bfloat16", 1e-3, 0.1),
        ("llama.cpp", "bfloat16", 1e-4, 0.1),
        ("llama.cpp", "int8", 1e-4, 0.3),
    ],
)
def test_weights_are_stored_in_the_requested_dtype(name, dtype, low, high, save):
    bundle = save("llama", d_model=64)
    with open_exact(name, bundle, dtype) as other:
        assert low <= max(logit_differences(other, bundle)) <= high


@pytest.mark.parametrize("name", ["transformers", "llama.cpp"])
def test_cached_depth_is_not_recomputed(name, save, monkeypatch):
    with open_exact(name, save("qwen3")) as other:
        passes = []
        inner = other.extend
        monkeypatch.setattr(other, "extend", lambda n: (passes.append(n), inner(n)))
        for _ in range(3):
            run_trial(other, Workload(n_prompt=4, n_gen=2, n_depth=20, batch=2))
        assert passes == [20, *[4, 1, 1] * 3]


def test_transformers_cache_has_as_many_bytes_as_ours(save):
    bundle = save("qwen3")
    with open_exact("transformers", bundle) as other:
        for test in (Workload(n_prompt=4, n_gen=2, n_depth=3, batch=2), Workload(n_gen=1)):
            expected = run_trial(
                EngineBackend(our_engine(bundle), tokens_of(bundle)), test
            ).cache_bytes
            assert run_trial(other, test).cache_bytes == expected > 0
        other.prepare(Workload(n_gen=4, n_depth=3))
        assert other.cache_bytes == 3 * bundle.config.cache_bytes_per_token()


def test_transformers_class_without_a_cache_reports_zero_bytes(save):
    with open_exact("transformers", save("classic")) as other:
        assert run_trial(other, Workload(n_prompt=4, n_gen=2, n_depth=3)).cache_bytes == 0


def test_transformers_uses_the_requested_threads(save):
    with open_exact("transformers", save("llama")) as other:
        torch.set_num_threads(2)  # as another backend may have done
        other.prepare(Workload(n_gen=1))
        assert torch.get_num_threads() == 1


def test_llama_cpp_deletes_its_file_and_prints_nothing(save, monkeypatch, tmp_path, capfd):
    skip_if_missing("llama.cpp")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with open_exact("llama.cpp", save("llama")) as other:
        assert list((tmp_path / "temporary").iterdir()) == []
        run_trial(other, Workload(n_prompt=4, n_gen=1))
    other.close()  # closing twice is allowed
    assert capfd.readouterr() == ("", "")


def test_unsupported_dtypes_are_errors(save):
    with pytest.raises(UsageError, match="does not support --dtype int8"):
        open_exact("transformers", save("classic"), "int8")


def test_llama_cpp_rejects_unsupported_families(save):
    with pytest.raises(ModelError, match="norms after each addition"):
        open_exact("llama.cpp", save("classic"))


def test_llama_cpp_limits_the_batch(save):
    with (
        open_exact("llama.cpp", save("gpt2")) as other,
        pytest.raises(UsageError, match="got 1000"),
    ):
        other.prepare(Workload(n_gen=1, batch=1000))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("transformers", "transformers", "transformers"),
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
        ("llama.cpp", "gguf", "gguf"),
    ],
)
def test_missing_engine_names_the_package_to_install(name, module, package, save, monkeypatch):
    bundle = save("llama")
    monkeypatch.setattr(
        "tgen.benchmark.other_engines.find_spec",
        lambda name: None if name == module else object(),
    )
    with pytest.raises(UsageError, match=f"--against {name} needs {package}$") as error:
        open_other_engine(name, bundle.path, threads=1, dtype="float32", tokens=tokens_of(bundle))
    assert error.value.hint == f"pip install {package}"


def test_other_engines_are_imported_only_when_used():
    code = (
        "import sys, tgen.benchmark.other_engines; print({'torch', 'llama_cpp'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
