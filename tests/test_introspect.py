"""What is seen inside a model is what it does: weights, lens, attribution, metrics, checks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_model
from tgen.checkpoint import directory
from tgen.errors import UsageError
from tgen.introspect import attention as attention_module
from tgen.introspect import lens as lens_module
from tgen.introspect import verify as verify_module
from tgen.introspect import why as why_module
from tgen.introspect.ablation import ablate_heads
from tgen.introspect.attention import AttentionRecorder, attention_of, batch_of, rollout
from tgen.introspect.heads import HeadSums, heads_of
from tgen.introspect.lens import lens_of
from tgen.introspect.look import Look
from tgen.introspect.passing import losses, residuals
from tgen.introspect.positions import positions_of
from tgen.introspect.predictions import next_tokens, text_of
from tgen.introspect.selection import numbers, window
from tgen.introspect.summary import summarise
from tgen.introspect.verify import verify
from tgen.introspect.why import why_of
from tgen.model.transformer import Transformer

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()
EVERYWHERE = [(layer, head) for layer in range(2) for head in range(4)]


def matrices(model, ids, places=EVERYWHERE, **options):
    return [report.weights for report in attention_of(model, ids, places, **options)[0]]


def test_weights_equal_those_of_transformers(model_directory, monkeypatch):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory, attn_implementation="eager"
    ).eval()
    bundle = directory.load(model_directory)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS]), output_attentions=True).attentions
    for queries in (128, 7):  # at a time
        monkeypatch.setattr(attention_module, "_QUERIES", queries)
        for (layer, head), found in zip(EVERYWHERE, matrices(model, IDS), strict=True):
            assert np.abs(found - wanted[layer][0, head].numpy()).max() <= 1e-6
            assert np.abs(found.sum(axis=1) - 1).max() <= 1e-5
            assert (np.triu(found, 1) == 0).all()


def test_recording_changes_nothing_and_takes_only_the_layers_asked_for(family):
    model = make_model(family)
    seen = []
    recorder = AttentionRecorder(lambda layer, *_: seen.append(layer), layers=[1])
    with torch.no_grad():
        tokens = batch_of(model, [IDS, IDS[::-1]])
        assert torch.equal(model(tokens, recorder=recorder), model(tokens))
    assert seen == [1]
    assert 0 < recorder.difference < 1e-6
    assert 0 < recorder.row_error < 1e-6


def test_the_mean_is_that_of_the_heads_and_values_change_shares(family):
    model = make_model(family)
    *heads, mean = matrices(model, IDS, [*((1, head) for head in range(4)), (1, None)])
    assert np.allclose(mean, np.mean(heads, axis=0), atol=1e-6)
    (weighed,) = matrices(model, IDS, [(1, 3)], measure="value")
    # What a key adds to the layer's output, from the parts themselves.
    caught = {}

    class Values:
        def attention(self, layer, *passed):
            v = passed[2]
            caught[layer] = v.repeat_interleave(4 // v.shape[1], dim=1)[0, 3]

    with torch.no_grad():
        model(batch_of(model, [IDS]), recorder=Values())
        W_O = model.blocks[1].attention.o_proj.weight[:, 24:32]
        lengths = (caught[1] @ W_O.T).norm(dim=-1).numpy()
    wanted = heads[3] * lengths
    assert np.allclose(weighed, wanted / wanted.sum(axis=1, keepdims=True), atol=1e-5)
    assert np.abs(weighed - heads[3]).max() > 0.01


def test_rollout_is_its_formula(family):
    model = make_model(family)
    rolled = np.eye(len(IDS))
    for layer, report in enumerate(rollout(model, IDS)[0]):
        mean = np.mean(matrices(model, IDS, [(layer, head) for head in range(4)]), axis=0)
        rolled = (0.5 * mean + 0.5 * np.eye(len(IDS))) @ rolled
        assert np.allclose(report.weights, rolled, atol=1e-5)
        assert np.allclose(report.weights.sum(axis=1), 1, atol=1e-5)
        assert (np.triu(report.weights, 1) == 0).all()


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


def test_surprisal_is_the_models_own(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size, context_length=300)
    data = "What is 日本, naïve? ".encode() * 20
    ids = tokenizer.encode(data)
    assert len(ids) > 130  # scored in parts
    report = text_of(model, tokenizer, ids)
    with torch.no_grad():
        log_p = model(batch_of(model, [ids]))[0].log_softmax(-1)
    for i in range(1, len(ids)):
        token = report.tokens[i]
        assert token.surprisal == pytest.approx(-float(log_p[i - 1, ids[i]]) / math.log(2), 1e-4)
        assert token.rank == int((log_p[i - 1] > log_p[i - 1, ids[i]]).sum())
        assert token.likeliest == int(log_p[i - 1].argmax())
        assert data[token.start :].startswith(token.text)
    bits = sum(token.surprisal for token in report.tokens[1:])
    assert report.bits_per_byte == pytest.approx(bits / (len(data) - len(report.tokens[0].text)))
    assert report.perplexity == pytest.approx(2 ** (bits / (len(ids) - 1)))
    assert report.tokens[0].surprisal is None


def test_predictions_are_the_largest_probabilities(tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        p = model(torch.tensor([[1, 2, 3]]))[0].softmax(-1)
    for query in (-1, 1):
        found = next_tokens(model, tokenizer, [1, 2, 3], query=query, top=5)
        assert [c.id for c in found] == p[query].topk(5).indices.tolist()
        assert [c.probability for c in found] == pytest.approx(p[query].topk(5).values.tolist())


def test_the_lens_ends_at_the_model_and_parts_sum_to_a_logit(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    ids = IDS[:20]
    if family == "classic":
        for view in (lens_of, why_of):
            with pytest.raises(UsageError, match="classic"):
                view(model, tokenizer, ids, query=3)
        return
    with torch.no_grad():
        logits = model(batch_of(model, [ids]))[0]
    lens = lens_of(model, tokenizer, ids, query=7)
    assert lens.likeliest[-1] == logits.argmax(dim=-1).tolist()
    assert lens.ranks[-1] == 0
    assert lens.answer_probabilities[-1] == pytest.approx(float(logits[7].softmax(-1).max()), 1e-5)
    # After the first layer: a model that has no other.
    short = make_model(family, vocab_size=tokenizer.vocab_size, n_layers=2)
    del short.blocks[1]
    with torch.no_grad():
        assert lens.likeliest[1] == short(batch_of(short, [ids]))[0].argmax(dim=-1).tolist()
    for target in (None, 17):
        why = why_of(model, tokenizer, ids, query=7, target=target)
        assert why.target == (int(logits[7].argmax()) if target is None else 17)
        total = sum(part.logit for part in why.parts)
        assert total == pytest.approx(float(logits[7, why.target]), abs=1e-3)
        assert why.difference < 1e-3
    # A head's part is what the logit loses without it, if the norm's scale stays.
    part = next(p for p in why.parts if (p.layer, p.head) == (1, 2))
    with torch.no_grad():
        W_O = model.blocks[1].attention.o_proj.weight
        W_O[:, 16:24] = 0
    maimed = why_of(model, tokenizer, ids, query=7, target=17)
    assert next(p for p in maimed.parts if (p.layer, p.head) == (1, 2)).logit == 0
    assert abs(part.logit) > 1e-3


def test_positions_are_the_models_own(family):
    model = make_model(family)
    reports = positions_of(model)
    kinds = {"sinusoidal": ["sinusoidal"], "learned": ["similarity", "learned"]}
    assert [r.kind for r in reports] == kinds.get(model.config.position, ["rotary"])
    values = reports[-1].values
    if family == "classic":
        assert np.array_equal(values, model.sinusoid.numpy())
        assert values[3, 0] == pytest.approx(math.sin(3), abs=1e-6)
    elif family == "gpt2":
        assert np.array_equal(values, model.position_embedding.weight.detach().numpy())
        assert np.allclose(np.diag(reports[0].values), 1, atol=1e-5)
    else:
        assert np.array_equal(values, model.cos.numpy())


def test_everything_holds_for_every_family(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    for ids in (IDS, IDS[:9], IDS[:1]):
        checks = verify(model, tokenizer, ids)
        assert len(checks) == (7 if family == "classic" else 9)
        assert all(check.holds for check in checks), checks


def test_each_check_finds_what_it_is_for(tokenizer, monkeypatch):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)

    def failing(of=model):
        return {check.name.split(":")[0] for check in verify(of, tokenizer, IDS) if not check.holds}

    weights = {
        "weights times values are the fused kernel's result",
        "weights are the kernel's own",
        "logits with these weights in the kernel's place",
    }
    assert not failing()
    honest = AttentionRecorder.attention
    for wrong in (  # warmer, another position's keys, another group's keys
        lambda self, la, q, k, v, mixed: honest(self, la, q * 1.01, k, v, mixed),
        lambda self, la, q, k, v, mixed: honest(self, la, q, k.roll(1, dims=2), v, mixed),
        lambda self, la, q, k, v, mixed: honest(self, la, q, k.flip(1), v, mixed),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(AttentionRecorder, "attention", wrong)
            assert failing() == weights
    attend = torch.nn.functional.scaled_dot_product_attention

    def looks_ahead(q, k, v, **options):
        return attend(q, k, v, **options | {"is_causal": False})

    def negative(*arguments, **options):
        return -attend(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(verify_module.F, "scaled_dot_product_attention", looks_ahead)
        assert failing() >= weights | {"the future's weight", "causality"}
        patch.setattr(verify_module.F, "scaled_dot_product_attention", negative)
        assert "weights below 0" in failing()
    softmax = torch.Tensor.softmax
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim) * 1.001)
        assert failing() >= weights | {"rows sum to 1"}
    with monkeypatch.context() as patch:
        patch.setattr(lens_module, "residuals", lambda *a: (residuals(*a)[0][:1] * 3, None))
        assert failing() == {"the lens's last layer is the model"}
    norm = why_module._through_norm
    with monkeypatch.context() as patch:
        patch.setattr(why_module, "_through_norm", lambda *a: (norm(*a)[0] * 1.01, None))
        assert failing() == {"the parts of a logit sum to it"}
    broken = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        broken.blocks[0].attention.qkv_proj.weight[0, 0] = math.nan
    assert failing(broken) >= weights | {"rows sum to 1"}


def test_a_look_takes_a_text_that_fits_or_its_tail(model_directory):
    bundle = directory.load(model_directory)
    for text, why in [(b"", "empty"), (b"word " * 100, "context 48")]:
        with pytest.raises(UsageError, match=why):
            Look(bundle, text)
    look = Look(bundle, b"word " * 100, tail=True)
    assert len(look.ids) == 48
    assert look.ids == bundle.tokenizer.encode(b"word " * 100)[-48:]
    for view in (look.predictions, look.lens if not look.config.post_norm else look.predictions):
        with pytest.raises(UsageError, match="--query"):
            view(query=48)
    with pytest.raises(UsageError, match="--target"):
        look.why(target=b"")


def test_the_telling_head_looks_at_others():
    model = make_model("gpt2", context_length=64)
    chosen = attention_module.telling_head(model, IDS, [0, 1])
    scores = {}
    for place, weights in zip(EVERYWHERE, matrices(model, IDS), strict=True):
        scores[place] = sum(weights[i, 1:i].max(initial=0) for i in range(len(IDS)))
    assert chosen == max(scores, key=scores.get)
    assert attention_module.telling_head(model, [1], [1]) == (1, 0)


def test_the_summary_counts_everything(model_directory):
    bundle = directory.load(model_directory)
    summary = summarise(bundle)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    assert summary.n_parameters == sum(p.numel() for p in model.parameters())
    assert summary.weight_bytes == 4 * summary.n_parameters
    assert {stored for *_, stored in summary.parameters} == {"float32"}


@given(st.lists(st.integers(-12, 11), min_size=1, max_size=6))
def test_numbers_are_read_back(chosen):
    wanted = list(dict.fromkeys(i % 12 for i in chosen))
    assert numbers("--layer", ",".join(map(str, chosen)), 12) == wanted


def test_ranges_and_windows():
    assert numbers("--layer", "0,2-4", 6) == [0, 2, 3, 4]
    assert numbers("--layer", "-2--1", 6) == [4, 5]
    assert numbers("--head", "all", 3) == [0, 1, 2]
    assert list(window("--query", "2:5", 9)) == [2, 3, 4]
    assert list(window("--query", ":", 3)) == [0, 1, 2]
    assert list(window("--query", "-2:", 9)) == [7, 8]
    assert list(window("--query", "-1", 9)) == [8]
    for wrong in ("9", "-10", "", "a", "5:5", "1e3", "--", "1.5", "3:2", "9" * 30):
        with pytest.raises(UsageError, match="--query"):
            window("--query", wrong, 9)
    for wrong in ("4-2", "0-9", "", ",", "x", "0;1"):
        with pytest.raises(UsageError, match="--layer"):
            numbers("--layer", wrong, 6)
