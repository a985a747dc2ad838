"""What a head is said to do is what it does: metrics in closed form, built heads, ablation."""

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.inspection import repeated_sequences
from tgen.inspection.ablation import ablate_heads
from tgen.inspection.attention import batch_of
from tgen.inspection.heads import HeadSums, heads_of
from tgen.inspection.hooks import losses

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def sums_of(matrix, ids, parts=(40,)):
    """HeadSums of one matrix in every layer and head, given in parts."""
    sums, first = HeadSums(make_model("gpt2"), ids), 0
    for layer in range(2):
        first = 0
        for n in parts:
            rows = torch.tensor(matrix[first : first + n, : first + n], dtype=torch.float32)
            sums(layer, first, rows.expand(1, 4, -1, -1))
            first += n
    return {name: sums.mean(name, 1, 2) for name in sums.sums} | {
        "by_distance": (sums.by_distance[1, 2] / sums.n_rows).tolist()
    }


@pytest.mark.parametrize("parts", [(40,), (1, 39), (13, 13, 14)])
def test_metrics_of_known_heads(parts):
    T, ids = 40, [*range(20), *range(20)]
    uniform = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    found = sums_of(uniform, ids, parts)
    assert found["effective_keys"] == pytest.approx(np.arange(2, T + 1).mean(), rel=1e-4)
    assert found["normalised_entropy"] == pytest.approx(1, rel=1e-4)
    assert found["distance"] == pytest.approx(T / 4)
    assert heads_of(make_model("gpt2"), ids, candidates=ids)[0].baseline["text_induction"] == (
        pytest.approx(found["text_induction"], rel=1e-4)
    )
    share = (1 / np.arange(2, T + 1)).mean()
    for name in ("self", "previous", "confidence"):
        assert found[name] == pytest.approx(share, rel=1e-4)
    assert found["first"] == pytest.approx((1 / np.arange(1, T + 1)).mean(), rel=1e-4)
    # 0, 1, 2-3, 4-7, ... tokens back
    wanted = [
        np.mean([max(0, min(high, i + 1) - low) / (i + 1) for i in range(1, T)])
        for low, high in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    ]
    assert found["by_distance"] == pytest.approx(wanted, abs=1e-5)

    def look_back(far):
        matrix = np.zeros((T, T))
        for i in range(T):
            matrix[i, max(0, i - far)] = 1
        return sums_of(matrix, ids, parts)

    assert look_back(0)["self"] == 1
    assert look_back(0)["effective_keys"] == pytest.approx(1)
    assert look_back(1)["previous"] == 1
    assert look_back(1)["self"] == 0
    assert look_back(1)["distance"] == 1
    assert look_back(19)["text_induction"] == 1  # each token came 20 before, and then the next
    assert look_back(20)["text_induction"] == 0
    sink = look_back(T)
    assert sink["first"] == 1
    assert sink["distance"] == pytest.approx(np.arange(1, T).mean())


def test_a_built_induction_head_is_found_and_the_control_tells_it_from_a_positional_one():
    """Layer 0 copies the token before; layer 1 looks where that copy is the query's own token."""
    V, P = 16, 40
    C = V + P + V  # the token, its position, the token before
    shape = {"n_layers": 2, "d_model": C, "n_heads": 1, "d_ff": 8, "context_length": P}
    model = make_model("gpt2", vocab_size=V, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1 if "norm.weight" in name else 0)
        model.token_embedding.weight[:, :V] = torch.eye(V)
        model.position_embedding.weight[:, V : V + P] = torch.eye(P)
        first, second = (block.attention for block in model.blocks)
        q, k, v = first.qkv_proj.weight.view(3, C, C)
        q[:P, V : V + P] = 10 * torch.eye(P)
        k[1:P, V : V + P - 1] = 10 * torch.eye(P - 1)  # a key stands one further
        v[:V, :V] = torch.eye(V)
        first.o_proj.weight[V + P :, :V] = torch.eye(V)
        q, k, _ = second.qkv_proj.weight.view(3, C, C)
        q[:V, :V] = 10 * torch.eye(V)
        k[:V, V + P :] = 10 * torch.eye(V)
    report, _ = heads_of(model, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], candidates=range(V))
    before, induction = report.heads
    assert before.previous > 0.99
    assert before.role == "previous"
    assert before.induction < 0.01
    assert induction.induction > 0.9
    assert induction.induction_control < 3 * report.baseline["induction"]
    assert induction.role == "induction"
    assert induction.duplicate < 0.1
    assert report.block_length == V
    # Something in front of both blocks moves nothing but the places.
    shifted = heads_of(model, [3, 1, 4], candidates=range(1, V), start=[0])[0].heads[1]
    assert shifted.induction > 0.9
    assert shifted.duplicate < 0.1
    # One that always looks as far back scores as well, and so does its control.
    with torch.no_grad():
        far = report.block_length - 1
        q, k, _ = first.qkv_proj.weight.view(3, C, C)
        k[:P, V : V + P] = 0
        k[far:P, V : V + P - far] = 10 * torch.eye(P - far)
    (positional, _) = heads_of(model, [3, 1, 4], candidates=range(V))[0].heads
    assert positional.induction > 0.99
    assert positional.induction_control > 0.99
    assert positional.role != "induction"


def test_the_control_of_few_tokens_has_the_same_ones_elsewhere():
    for n in (4, 7, 31):
        for seed in range(20):
            other = repeated_sequences._elsewhere(list(range(n)), seed=seed)
            assert sorted(other) == list(range(n))
            assert all(token != i for i, token in enumerate(other))
    model = make_model("llama", context_length=32)
    few = heads_of(model, IDS[:9], candidates=range(16))[0]
    many = heads_of(model, IDS[:9], candidates=range(32))[0]
    assert (few.same_tokens, many.same_tokens) == (True, False)


def test_heads_are_told_apart(family):
    """Heads whose order is turned around have their numbers turned around."""
    model = make_model(family, n_kv_heads=4)
    report, _ = heads_of(model, IDS, candidates=range(1, 300), start=[0])
    attention = model.blocks[1].attention
    order = torch.tensor([3, 2, 1, 0])
    with torch.no_grad():
        turned = attention.qkv_proj.weight.view(3, 4, 8, -1)[:, order].flatten(0, 2)
        attention.qkv_proj.weight.copy_(turned)
        if attention.qkv_proj.bias is not None:
            attention.qkv_proj.bias.copy_(attention.qkv_proj.bias.view(3, 4, 8)[:, order].flatten())
        W_O = attention.o_proj.weight
        W_O.copy_(W_O.view(-1, 4, 8)[:, order].flatten(1))
    again, _ = heads_of(model, IDS, candidates=range(1, 300), start=[0])
    names = ("entropy", "self", "previous", "first", "distance", "duplicate", "induction")
    for head in range(4):
        before, after = report.heads[4 + head], again.heads[4 + 3 - head]
        for name in names:
            assert getattr(before, name) == pytest.approx(getattr(after, name), abs=1e-5)
    assert len({round(h.distance, 3) for h in report.heads}) == 8


def test_ablation_is_the_model_without_the_head(family):
    model = make_model(family)
    found = ablate_heads(model, IDS, "zero")
    with torch.no_grad():
        whole = float(losses(model, model.hidden(batch_of(model, [IDS])), IDS).mean())
        assert found.loss == pytest.approx(whole, abs=1e-5)
        for layer, head in [(0, 1), (1, 3)]:
            maimed = make_model(family)
            maimed.blocks[layer].attention.o_proj.weight[:, head * 8 : head * 8 + 8] = 0
            cost = float(losses(maimed, maimed.hidden(batch_of(maimed, [IDS])), IDS).mean())
            assert found.cost[layer][head] == pytest.approx(cost - whole, abs=1e-5)
    assert ablate_heads(model, IDS, "mean").cost != found.cost
    again = float(losses(model, model.hidden(batch_of(model, [IDS])), IDS).mean())
    assert again == pytest.approx(whole)  # the hooks are gone
