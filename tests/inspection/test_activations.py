"""Activations are those of transformers, and each part is what its name says."""

import numpy as np
import pytest
import torch

from support.models import ALL_FAMILIES, make_model
from support.transformers_models import hook_theirs
from tgen.checkpoint import model_dir
from tgen.config.index_ranges import PARTS, PATCHED_PARTS
from tgen.errors import ModelError, UsageError
from tgen.inspection import attention as attention_module
from tgen.inspection.activations import activation_bytes, record_activations
from tgen.inspection.attention import record_attention
from tgen.inspection.hooks import hooks_removed, token_batch
from tgen.inspection.inspector import Inspector
from tgen.machine import memory
from tgen.model.transformer import Transformer

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def assert_equal(ours, theirs):
    theirs = theirs[0].numpy()
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * max(1, np.abs(theirs).max())


def check_weights(model, expected):
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    for report in record_attention(model, IDS, heads)[0]:
        weights = report.weights
        assert np.abs(weights - expected[report.layer][0, report.head].numpy()).max() <= 3e-6
        assert np.abs(weights.sum(axis=1) - 1).max() <= 1e-5
        window = model.config.window(report.layer) or len(IDS)
        hidden = np.triu(np.ones_like(weights), 1) + np.tril(np.ones_like(weights), -window)
        assert (weights[hidden == 1] == 0).all()


@pytest.mark.parametrize("family", ALL_FAMILIES, indirect=True)
def test_activations_and_weights_equal_transformers(model_directory, family, monkeypatch):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory, attn_implementation="eager"
    ).eval()
    bundle = model_dir.load(model_directory)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    ours, _ = record_activations(model, IDS, [0, 1], PARTS)
    hooked = {}

    def keep(part, layer):
        return hook_theirs(theirs, part, layer, lambda x: hooked.update({f"{part}.{layer}": x}))

    has_hooks = family in ("classic", "gpt2", "llama", "qwen3", "gemma3")
    parts = PATCHED_PARTS if has_hooks else ()
    with torch.no_grad(), hooks_removed(*(keep(part, i) for part in parts for i in (0, 1))):
        options = {"output_hidden_states": True, "output_attentions": True}
        out = theirs(torch.tensor([IDS]), **options)
    assert len(hooked) == 2 * len(parts)
    hooked |= {f"residual.{i}": x for i, x in enumerate(out.hidden_states[:-1])}
    hooked |= {f"attention_weights.{i}": x for i, x in enumerate(out.attentions)}
    hooked |= {"final_norm": out.hidden_states[-1], "logits": out.logits}
    for name, expected in hooked.items():
        assert_equal(ours[name], expected)
    for chunk in (128, 7):
        monkeypatch.setattr(attention_module, "_QUERY_CHUNK", chunk)
        check_weights(model, out.attentions)


def test_each_part_is_what_its_name_says(family):
    model = make_model(family)
    config = model.config
    arrays, recorder = record_activations(model, IDS, [0, 1], PARTS)
    assert 0 < recorder.kernel_error < 1e-6
    T, H, D = len(IDS), config.n_heads, config.head_dim
    names = {f"{part}.{layer}" for part in PARTS[:-2] for layer in (0, 1)}
    assert set(arrays) == names | {"residual.2", "final_norm", "logits"}
    assert arrays["attention_weights.1"].shape == (H, T, T)
    for layer in range(2):
        q, k, v, weights, heads = (
            arrays[f"{part}.{layer}"].astype(np.float64)
            for part in ("queries", "keys", "values", "attention_weights", "heads")
        )
        assert q.shape == heads.shape == (T, H, D)
        assert k.shape == v.shape == (T, config.n_kv_heads, D)
        k, v = (np.repeat(x, H // config.n_kv_heads, axis=1) for x in (k, v))
        scores = np.exp(np.einsum("qhd,khd->hqk", q, k) * config.score_scale)
        scores[weights == 0] = 0
        assert np.abs(weights - scores / scores.sum(axis=-1, keepdims=True)).max() < 1e-5
        assert np.abs(heads - np.einsum("hqk,khd->qhd", weights, v)).max() < 1e-5
        added = arrays[f"residual.{layer + 1}"] - arrays[f"residual.{layer}"]
        if not config.post_norm:
            sums = arrays[f"attention.{layer}"] + arrays[f"feed_forward.{layer}"]
            assert np.abs(added - sums).max() < 1e-5 * np.abs(added).max()
    with torch.no_grad():
        logits = model(token_batch(model, [IDS]))[0].numpy()
    assert np.abs(arrays["logits"] - logits).max() < 1e-5


def test_only_the_selected_parts_and_layers_are_stored(monkeypatch, trained):
    inspector = Inspector(model_dir.load(trained), b"What is the king?")
    names = {"residual.1", "residual.2", "keys.1", "logits"}
    arrays = inspector.activations("-1", "residual,keys,logits")
    assert set(arrays) == names
    assert set(inspector.activations(None, None)) == {"residual.0", "residual.1", "residual.2"}
    n, config = len(inspector.ids), inspector.config
    size = activation_bytes(config, n, [0, 1], PARTS)
    everything = inspector.activations("all", "all")
    last = everything["residual.2"].nbytes  # counted with the layer before
    assert sum(array.nbytes for array in everything.values()) == size + last
    monkeypatch.setattr(memory, "free_ram", lambda: size - 1)
    with pytest.raises(ModelError, match=r"activations of .* tokens needs"):
        inspector.activations("all", "all")


@pytest.mark.parametrize(
    ("layer", "parts", "message"),
    [
        ("2", "residual", "--layer: out of range .got 2"),
        ("", "residual", "--layer: "),
        (None, "residuals", "--parts: not available .got 'residuals'"),
        (None, "", "--parts: not available .got ''"),
        ("1", "logits,final_norm", "--layer: no effect on logits and final_norm"),
    ],
)
def test_unknown_layers_and_parts_are_errors(trained, layer, parts, message):
    inspector = Inspector(model_dir.load(trained), b"What is the king?")
    with pytest.raises(UsageError, match=message) as error:
        inspector.activations(layer, parts)
    assert error.value.hint
