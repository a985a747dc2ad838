"""Head metrics: closed forms, hand-built heads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.inspection import heads
from tgen.inspection.heads import HeadMetricSums, measure_heads

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def metrics_of(matrix, ids, chunks=(40,)):
    """Return the metrics of one matrix used for every head, added in chunks."""
    sums, first = HeadMetricSums([None, None], 4, ids), 0
    for layer in range(2):
        first = 0
        for n in chunks:
            rows = torch.tensor(matrix[first : first + n, : first + n], dtype=torch.float32)
            sums(layer, first, rows.expand(1, 4, -1, -1))
            first += n
    return {name: sums.mean(name, 1, 2) for name in sums.sums} | {
        "by_distance": (sums.by_distance[1, 2] / sums.n_queries).tolist()
    }


@pytest.mark.parametrize("chunks", [(40,), (1, 39), (13, 13, 14)])
def test_metrics_equal_their_closed_forms(chunks):
    T, ids = 40, [*range(20), *range(20)]
    uniform = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    metrics = metrics_of(uniform, ids, chunks)
    assert metrics["effective_keys"] == pytest.approx(np.arange(2, T + 1).mean(), rel=1e-4)
    assert metrics["normalized_entropy"] == pytest.approx(1, rel=1e-4)
    assert metrics["distance"] == pytest.approx(T / 4)
    assert measure_heads(make_model("gpt2"), ids, candidates=ids)[0].baseline["text_induction"] == (
        pytest.approx(metrics["text_induction"], rel=1e-4)
    )
    share = (1 / np.arange(2, T + 1)).mean()
    for name in ("self", "previous", "confidence"):
        assert metrics[name] == pytest.approx(share, rel=1e-4)
    assert metrics["first"] == pytest.approx((1 / np.arange(1, T + 1)).mean(), rel=1e-4)
    # 0, 1, 2-3, 4-7, ... tokens back
    expected = [
        np.mean([max(0, min(high, i + 1) - low) / (i + 1) for i in range(1, T)])
        for low, high in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    ]
    assert metrics["by_distance"] == pytest.approx(expected, abs=1e-5)

    def look_back(far):
        matrix = np.zeros((T, T))
        for i in range(T):
            matrix[i, max(0, i - far)] = 1
        return metrics_of(matrix, ids, chunks)

    assert look_back(0)["self"] == 1
    assert look_back(0)["effective_keys"] == pytest.approx(1)
    assert look_back(1)["previous"] == 1
    assert look_back(1)["self"] == 0
    assert look_back(1)["distance"] == 1
    assert look_back(19)["text_induction"] == 1  # each token occurred 20 positions before
    assert look_back(20)["text_induction"] == 0
    sink = look_back(T)
    assert sink["first"] == 1
    assert sink["distance"] == pytest.approx(np.arange(1, T).mean())


V, P = 16, 40  # tokens, positions


def hand_built_model():
    """Layer 0 copies the previous token; layer 1 attends where that copy equals the query."""
    C = V + P + V  # the token, its position, the previous token
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
        v[:V, :V] = torch.eye(V)
        first.o_proj.weight[V + P :, :V] = torch.eye(V)
        q, k, _ = second.qkv_proj.weight.view(3, C, C)
        q[:V, :V] = 10 * torch.eye(V)
        k[:V, V + P :] = 10 * torch.eye(V)
    attend_back(model, 1)
    return model


@torch.no_grad()
def attend_back(model, distance):
    """Let layer 0 attend `distance` positions back: its keys are shifted by as many."""
    _, k, _ = model.blocks[0].attention.qkv_proj.weight.view(3, model.config.d_model, -1)
    k[:P, V : V + P] = 10 * torch.eye(P).roll(distance, dims=0)
    k[:distance, V : V + P] = 0


def test_hand_built_induction_head_has_its_role():
    model = hand_built_model()
    report, _ = measure_heads(model, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], candidates=range(V))
    previous, induction = report.heads
    assert previous.previous > 0.99
    assert previous.role == "previous"
    assert previous.induction < 0.01
    assert induction.induction > 0.9
    assert induction.induction_control < 3 * report.baseline["induction"]
    assert induction.role == "induction"
    assert induction.duplicate < 0.1
    assert report.block_length == V


def test_prefix_before_both_blocks_only_shifts_positions():
    report, _ = measure_heads(hand_built_model(), [3, 1, 4], candidates=range(1, V), prefix=[0])
    assert report.heads[1].induction > 0.9
    assert report.heads[1].duplicate < 0.1


def test_head_that_always_attends_equally_far_back_is_no_induction_head():
    model = hand_built_model()
    attend_back(model, V - 1)
    positional, _ = measure_heads(model, [3, 1, 4], candidates=range(V))[0].heads
    assert positional.induction > 0.99
    assert positional.induction_control > 0.99  # as high as its score
    assert positional.role != "induction"


def test_control_of_few_tokens_reorders_them():
    for n in (4, 7, 31):
        for seed in range(20):
            other = heads._derange(list(range(n)), seed=seed)
            assert sorted(other) == list(range(n))
            assert all(token != i for i, token in enumerate(other))
    model = make_model("llama", context_length=32)
    few = measure_heads(model, IDS[:9], candidates=range(16))[0]
    many = measure_heads(model, IDS[:9], candidates=range(32))[0]
    assert (few.same_tokens, many.same_tokens) == (True, False)


@torch.no_grad()
def reverse_heads(model):
    """Reverse the order of the 4 heads of layer 1, which does not change the output."""
    attention, D = model.blocks[1].attention, model.config.head_dim
    order = torch.tensor([3, 2, 1, 0])
    reversed_weight = attention.qkv_proj.weight.view(3, 4, D, -1)[:, order].flatten(0, 2)
    attention.qkv_proj.weight.copy_(reversed_weight)
    vectors = [attention.qkv_proj.bias]
    if model.config.qk_norm_over_heads:
        vectors += [attention.q_norm.weight, attention.k_norm.weight]
    for vector in vectors:
        if vector is not None:
            vector.copy_(vector.view(-1, 4, D)[:, order].flatten())
    W_O = attention.o_proj.weight
    W_O.copy_(W_O.view(-1, 4, D)[:, order].flatten(1))


def test_reversing_the_heads_reverses_their_metrics(family):
    model = make_model(family, n_kv_heads=4)
    report, _ = measure_heads(model, IDS, candidates=range(1, 300), prefix=[0])
    reverse_heads(model)
    again, _ = measure_heads(model, IDS, candidates=range(1, 300), prefix=[0])
    names = ("entropy", "self", "previous", "first", "distance", "duplicate", "induction")
    for head in range(4):
        before, after = report.heads[4 + head], again.heads[4 + 3 - head]
        for name in names:
            assert getattr(before, name) == pytest.approx(getattr(after, name), abs=1e-5)
    assert len({round(h.distance, 3) for h in report.heads}) == 8


@pytest.mark.parametrize("window", [1, 2, 9])
def test_uniform_attention_in_a_window_is_the_baseline(window):
    model = make_model("gpt_neo", sliding_window=window, sliding_layers=(False, True))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv_proj.weight.zero_()
    text = [*IDS, *IDS[:8]]
    report, _ = measure_heads(model, text, candidates=range(1, 300))
    measured = {"duplicate", "induction"} if window == 9 else set()
    for head in report.heads:
        baseline = report.baseline_of(head)
        assert head.window == (window if head.layer else None)
        assert head.role == ""
        assert {"previous", "self", "first"} < baseline.keys()
        assert measured <= baseline.keys()
        for name, value in baseline.items():
            assert getattr(head, name) == pytest.approx(value, abs=1e-6), name
    windowed = report.window_baseline
    assert windowed is not None
    assert report.baseline["first"] > windowed["first"]
    n_visible = [min(t + 1, window) for t in range(1, len(text))]
    assert windowed["effective_keys"] == pytest.approx(np.mean(n_visible), rel=1e-4)
    assert windowed["normalized_entropy"] == pytest.approx(float(window > 1), rel=1e-4)
    # Each token that repeats occurred 40 positions before, outside the window.
    assert [head.text_induction is None for head in report.heads] == [False] * 4 + [True] * 4
    assert report.block_length == (8 if window == 9 else 0)


def test_a_window_that_hides_no_key_changes_no_metric():
    heads = []
    no_layer = {"sliding_window": 9, "sliding_layers": (False, False)}
    for values in ({"sliding_window": 48}, {"sliding_window": None}, no_layer):
        model = make_model("gpt_neo", **values)
        report, _ = measure_heads(model, IDS, candidates=range(1, 300))
        assert report.window_baseline is None
        heads.append([replace(head, window=None) for head in report.heads])
    assert heads[0] == heads[1] == heads[2]
