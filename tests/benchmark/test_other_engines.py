"""Other programs compute what ours does, at any depth, and say what they lack."""

import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.benchmark.other_engines import PEERS, open_peer
from tgen.benchmark.throughput import EngineBackend, Workload, random_tokens, run
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_dir import ModelBundle
from tgen.config import RopeScaling
from tgen.engine.base import Engine
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.model.transformer import Transformer

STRETCHED = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
)
VARIANTS = [
    ("gpt2", {}),
    ("gpt2", {"tied_embeddings": False, "d_ff": 96}),
    ("llama", {}),
    ("llama", {"tied_embeddings": False, "attention_bias": True, "output_bias": True}),
    ("llama", {"rope_scaling": STRETCHED, "feed_forward_bias": True, "head_dim": 16}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "tied_embeddings": False, "rope_theta": 1e6}),
]
TRANSFORMERS_ALONE = [("classic", {}), ("qwen3", {"rope_scaling": STRETCHED})]
TESTS = [  # in an order that makes an arm go back, go on, and change its rows
    Workload(n_prompt=7, n_gen=3, n_depth=depth, batch=batch)
    for batch in (1, 3)
    for depth in (5, 0, 5, 9)
]


@pytest.fixture
def save(tokenizer, tmp_path):
    def saved(family, **values) -> ModelBundle:
        model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
        model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
        return model_dir.load(tmp_path / "model")

    return saved


def tokens_of(bundle: ModelBundle) -> list[int]:
    return random_tokens(bundle.config.vocab_size, bundle.config.context_length, seed=1)


def our_engine(bundle: ModelBundle) -> Engine:
    return TorchEngine(Transformer.from_arrays(bundle.config, bundle.arrays))


def need(name: str) -> None:
    if any(find_spec(module) is None for module in PEERS.get(name, ())):
        pytest.skip(f"NO {name.upper()}")


def opened(name: str, bundle: ModelBundle, stored="float32"):
    need(name)
    return closing(
        open_peer(name, bundle, threads=1, stored=stored, tokens=tokens_of(bundle), exact=True)
    )


def ours(engine: Engine, tokens: list[int], test: Workload) -> list[np.ndarray]:
    """The logits after the prompt, then after each step."""
    arm = EngineBackend(engine, tokens)
    arm.prepare(test)
    held = test.n_depth
    found = []
    for n in (test.n_prompt, *[1] * test.n_gen):
        found.append(engine.extend([tokens[held : held + n]] * test.batch))
        held += n
    return found


def differences(peer, bundle: ModelBundle) -> list[float]:
    engine, tokens = our_engine(bundle), tokens_of(bundle)
    found = []
    for test in TESTS:
        peer.prepare(test)
        for number, wanted in enumerate(ours(engine, tokens, test)):
            peer.prompt(test) if number == 0 else peer.step()
            assert peer.logits().shape == wanted.shape
            assert peer.logits().dtype == np.float32
            found.append(float(np.abs(peer.logits() - wanted).max()))
    return found


@pytest.mark.parametrize(
    ("family", "values"), [("classic", {}), ("qwen3", {"rope_scaling": STRETCHED}), *VARIANTS]
)
def test_transformers_computes_what_ours_does(family, values, save):
    bundle = save(family, **values)
    with opened("transformers", bundle) as peer:
        assert max(differences(peer, bundle)) <= 1e-4


@pytest.mark.parametrize(("family", "values"), VARIANTS)
def test_llama_cpp_computes_what_ours_does(family, values, save):
    bundle = save(family, **values)
    with opened("llama.cpp", bundle) as peer:  # its GELU is a table of float16
        assert max(differences(peer, bundle)) <= (1e-3 if family == "gpt2" else 1e-4)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_llama_cpp_reads_what_does_not_fit_a_call_in_pieces(size, save, monkeypatch):
    need("llama.cpp")
    from tgen.benchmark.other_engines import llama_cpp_backend

    monkeypatch.setattr(llama_cpp_backend, "_BATCH", size)
    bundle = save("llama")
    with opened("llama.cpp", bundle) as peer:
        assert max(differences(peer, bundle)) <= 1e-4


def test_llama_cpp_makes_more_room_for_a_longer_test(save):
    with opened("llama.cpp", save("llama", context_length=600)) as peer:
        for n in (1, 500, 600):
            run(peer, Workload(n_prompt=n))


@pytest.mark.parametrize(
    ("name", "stored", "least", "most"),
    [
        ("transformers", "bfloat16", 1e-3, 0.1),
        ("llama.cpp", "bfloat16", 1e-4, 0.1),
        ("llama.cpp", "int8", 1e-4, 0.3),
    ],
)
def test_weights_are_held_as_asked(name, stored, least, most, save):
    bundle = save("llama", d_model=64)
    with opened(name, bundle, stored) as peer:
        assert least <= max(differences(peer, bundle)) <= most


@pytest.mark.parametrize("name", ["transformers", "llama.cpp"])
def test_a_depth_that_is_there_is_not_read_again(name, save, monkeypatch):
    with opened(name, save("qwen3")) as peer:
        read = []
        monkeypatch.setattr(peer, "_read", lambda n, inner=peer._read: (read.append(n), inner(n)))
        for _ in range(3):
            run(peer, Workload(n_prompt=4, n_gen=2, n_depth=20, batch=2))
        assert read == [20, *[4, 1, 1] * 3]


def test_transformers_holds_as_many_bytes_of_keys_and_values_as_ours(save):
    bundle = save("qwen3")
    with opened("transformers", bundle) as peer:
        for test in (Workload(n_prompt=4, n_gen=2, n_depth=3, batch=2), Workload(n_gen=1)):
            wanted = run(EngineBackend(our_engine(bundle), tokens_of(bundle)), test).cache_bytes
            assert run(peer, test).cache_bytes == wanted > 0
        peer.prepare(Workload(n_gen=4, n_depth=3))
        assert peer.cache_bytes == 3 * bundle.config.cache_bytes_per_token


def test_a_class_of_transformers_without_a_cache_holds_nothing(save):
    with opened("transformers", save("classic")) as peer:
        assert run(peer, Workload(n_prompt=4, n_gen=2, n_depth=3)).cache_bytes == 0


def test_transformers_takes_the_threads_that_were_asked_for(save):
    with opened("transformers", save("llama")) as peer:
        torch.set_num_threads(2)  # as another arm may have done
        peer.prepare(Workload(n_gen=1))
        assert torch.get_num_threads() == 1


def test_llama_cpp_leaves_no_file_behind_and_says_nothing(save, monkeypatch, tmp_path, capfd):
    need("llama.cpp")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with opened("llama.cpp", save("llama")) as peer:
        assert list((tmp_path / "temporary").iterdir()) == []
        run(peer, Workload(n_prompt=4, n_gen=1))
    peer.close()  # a second time is no harm
    assert capfd.readouterr() == ("", "")


def test_what_a_peer_cannot_do_is_said(save):
    bundle = save("classic")
    with pytest.raises(UsageError, match="unknown"):
        opened("vllm", bundle)
    with pytest.raises(UsageError, match="no int8"):
        opened("transformers", bundle, "int8")


def test_what_llama_cpp_cannot_do_is_said(save):
    with pytest.raises(ModelError, match="norms after each addition"):
        opened("llama.cpp", save("classic"))


def test_llama_cpp_says_how_many_rows_it_takes(save):
    with opened("llama.cpp", save("gpt2")) as peer, pytest.raises(UsageError, match="1000 rows"):
        peer.prepare(Workload(n_gen=1, batch=1000))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("transformers", "transformers", "transformers"),
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
        ("llama.cpp", "gguf", "gguf"),
    ],
)
def test_a_peer_that_is_not_installed_says_what_to_install(
    name, module, package, save, monkeypatch
):
    bundle = save("llama")
    monkeypatch.setattr(
        "tgen.benchmark.other_engines.find_spec",
        lambda found: None if found == module else object(),
    )
    with pytest.raises(UsageError, match=f"--against {name} needs {package}$") as error:
        open_peer(name, bundle, threads=1, stored="float32", tokens=tokens_of(bundle))
    assert error.value.hint == f"pip install {package}"


def test_peers_are_imported_only_where_they_are_asked_for():
    code = (
        "import sys, tgen.benchmark.other_engines; print({'torch', 'llama_cpp'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
