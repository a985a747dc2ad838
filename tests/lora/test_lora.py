"""Adapters on a frozen transformer: gradients, memory, types, and what stays as it is."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from support.models import make_model
from tgen.checkpoint.dtypes import to_bfloat16, to_float32
from tgen.lora import layers
from tgen.lora.layers import FrozenLinear, LowRankLinear, Rows, frozen_transformer
from tgen.lora.matrices import Pair, adapter_layout, new_shapes, parameter_shapes, sample_a
from tgen.lora.merging import merge_pairs
from tgen.model.transformer import Transformer
from tgen.training.loss import DeviceBatch, loss_sum

FAMILIES = ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "classic", "gemma3"]


def adapted(family="llama", *, narrow=False, targets="all", dropout=0.0, **values):
    """Return a frozen model with an adapter whose B is not zero, its arrays, and the pairs."""
    model = make_model(family, **values)
    arrays: dict[str, Any] = model.to_arrays()
    if narrow:
        arrays = {n: to_bfloat16(a) if a.ndim == 2 else a for n, a in arrays.items()}
    frozen = frozen_transformer(model.config, arrays, dropout=dropout)
    layout = adapter_layout(model.config)
    shapes = new_shapes(model.config, 4, 32.0, targets)
    layers.attach(frozen, layout, shapes, seed=1)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in frozen.named_parameters():
            if ".b." in name:
                parameter.normal_(std=0.02)
    return frozen, arrays, layers.pairs_of(frozen, layout, shapes)


def batch(n_tokens=12):
    torch.manual_seed(2)
    tokens = torch.randint(300, (2, n_tokens + 1))
    documents = torch.tensor([[0] * 5 + [1] * (n_tokens - 5), [0] * n_tokens], dtype=torch.int32)
    return DeviceBatch(tokens, None, documents)


def loss_and_gradients(model):
    loss = loss_sum(model, batch(), "float32")
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_gradients_are_those_of_the_changed_matrix():
    torch.manual_seed(0)
    weight, bias = torch.randn(10, 6).double(), torch.randn(10).double()
    a = torch.randn(5, 6).double().requires_grad_()
    bs = [torch.randn(n, r).double().requires_grad_() for n, r in ((4, 2), (3, 3))]
    x = torch.randn(2, 7, 6).double().requires_grad_()
    parts = [Rows(1, 4, 2, 0.5), Rows(6, 3, 3, 2.0)]
    parameters = [torch.nn.Parameter(p.detach()) for p in (a, *bs)]
    linear = LowRankLinear(FrozenLinear(weight, bias), parts, parameters[0], parameters[1:])
    changed = weight.clone()
    changed[1:5] = changed[1:5] + 0.5 * bs[0] @ a[:2]
    changed[6:9] = changed[6:9] + 2.0 * bs[1] @ a[2:]
    expected = F.linear(x, changed, bias)
    other = x.detach().requires_grad_()
    out = linear(other)
    factors = torch.randn_like(out)
    (expected * factors).sum().backward()
    (out * factors).sum().backward()
    assert torch.allclose(out, expected, atol=1e-12)
    for one, right in zip([other, *parameters], [x, a, *bs], strict=True):
        assert torch.allclose(one.grad, right.grad, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(linear(other), expected, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapted_logits_are_those_of_the_merged_model(family):
    model, arrays, pairs = adapted(family)
    merged = Transformer.from_arrays(model.config, merge_pairs(model.config, arrays, pairs))
    tokens = batch().tokens
    base = Transformer.from_arrays(model.config, arrays)
    with torch.no_grad():
        logits = model.eval()(tokens)
        assert torch.allclose(logits, merged(tokens), atol=1e-5)
        assert not torch.allclose(logits, base(tokens), atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_knows_its_shapes(family):
    model = make_model(family)
    arrays = model.to_arrays()
    layout, shapes = adapter_layout(model.config), new_shapes(model.config, 4, 32.0, "all")
    frozen = frozen_transformer(model.config, arrays)
    tokens = batch().tokens
    with torch.no_grad():
        before = frozen(tokens)
        layers.attach(frozen, layout, shapes, seed=1)
        assert torch.equal(frozen(tokens), before)
        assert torch.allclose(before, model(tokens), atol=1e-6)
    found = {name: tuple(p.shape) for name, p in frozen.named_parameters()}
    assert parameter_shapes(layout, shapes) == found


def test_pairs_survive_being_read_and_loaded():
    for family in FAMILIES:
        model, arrays, pairs = adapted(family)
        layout = adapter_layout(model.config)
        shapes = new_shapes(model.config, 4, 32.0, "all")
        other = frozen_transformer(model.config, arrays)
        layers.attach(other, layout, shapes, seed=7)
        layers.load_pairs(other, layout, pairs)
        for name, pair in layers.pairs_of(other, layout, shapes).items():
            assert np.array_equal(pair.a, pairs[name].a)
            assert np.array_equal(pair.b, pairs[name].b)


def test_a_pair_depends_on_seed_and_name_alone():
    everything = adapted()[2]
    attention = adapted(targets="attention")[2]
    assert attention.keys() < everything.keys()
    for name, pair in attention.items():
        assert np.array_equal(pair.a, everything[name].a)
    (n_rank, n_in) = pair.a.shape
    assert np.abs(pair.a).max() <= n_in**-0.5
    assert not np.array_equal(sample_a(name, n_rank, n_in, 1), sample_a(name, n_rank, n_in, 2))
    assert not np.array_equal(sample_a("a", n_rank, n_in, 1), sample_a("b", n_rank, n_in, 1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_bfloat16_base_computes_what_its_widened_values_compute(family):
    narrow, arrays, _ = adapted(family, narrow=True)
    assert narrow.token_embedding.weight.dtype == torch.bfloat16
    wide = frozen_transformer(narrow.config, {n: to_float32(a) for n, a in arrays.items()})
    layout, shapes = adapter_layout(narrow.config), new_shapes(narrow.config, 4, 32.0, "all")
    layers.attach(wide, layout, shapes, seed=1)
    layers.load_pairs(wide, layout, layers.pairs_of(narrow, layout, shapes))
    for one, other in zip(loss_and_gradients(narrow), loss_and_gradients(wide), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "classic"])
def test_checkpointed_blocks_have_the_same_gradients(family, dropout):
    def gradients(*, on):
        model, *_ = adapted(family, dropout=dropout)
        model.train().activation_checkpointing = on
        model.dropout.generators = [torch.Generator().manual_seed(i) for i in range(2)]
        return loss_and_gradients(model)

    for one, other in zip(gradients(on=True), gradients(on=False), strict=True):
        assert torch.equal(one, other)


def test_activation_checkpointing_stores_less():
    def stored_bytes(*, on):
        model, *_ = adapted(n_layers=6)
        model.activation_checkpointing = on
        base = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        stored = {}

        def store(tensor):
            if tensor.untyped_storage().data_ptr() not in base:
                stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            model.hidden_states(batch().tokens)
        return sum(stored.values())

    assert stored_bytes(on=True) < stored_bytes(on=False) / 5


def test_the_base_has_no_gradients_and_keeps_its_bits():
    model, arrays, _ = adapted(narrow=True)
    before = {name: array.copy() for name, array in arrays.items()}
    names = {name for name, _ in model.named_parameters()}
    assert all(name.endswith(".a") or ".b." in name for name in names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_and_gradients(model)
        optimizer.step()
    assert all(buffer.grad is None for buffer in model.buffers())
    for name, array in arrays.items():
        assert np.array_equal(array, before[name])
    assert model.token_embedding.weight.data_ptr() == arrays["token_embedding.weight"].ctypes.data


def test_merging_keeps_other_matrices_and_the_original():
    model, arrays, pairs = adapted(narrow=True)
    name, pair = next(iter(pairs.items()))
    before = {key: array.copy() for key, array in arrays.items()}
    merged = merge_pairs(model.config, arrays, {name: Pair(pair.a, pair.b, pair.scale)})
    changed = [key for key in arrays if merged[key] is not arrays[key]]
    assert changed == ["blocks.0.attention.qkv_proj.weight"]
    assert all(np.array_equal(arrays[key], before[key]) for key in arrays)
