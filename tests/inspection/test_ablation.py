"""Ablation equals the model without its heads, and transformers' model with hooks."""

import pytest
import torch

from support.models import make_model
from support.transformers_models import hook_theirs
from tgen.checkpoint import model_dir
from tgen.errors import UsageError
from tgen.inspection.ablation import ablate_groups, ablate_heads, parse_groups
from tgen.inspection.hooks import hooks_removed, token_batch, token_losses
from tgen.model.transformer import Transformer

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()
GROUPS = "0.1+0.3+1.2,0.attention+1.0-1,1.feed_forward,1,all.-1"
MEMBERS: dict[str, list[tuple[str, int, list[int] | None]]] = {  # part, layer, heads
    "0.1+0.3+1.2": [("heads", 0, [1, 3]), ("heads", 1, [2])],
    "0.attention+1.0-1": [("attention", 0, None), ("heads", 1, [0, 1])],
    "1.feed_forward": [("feed_forward", 1, None)],
    "1": [("attention", 1, None), ("feed_forward", 1, None)],
    "all.-1": [("heads", 0, [3]), ("heads", 1, [3])],
}


def test_ablation_equals_the_model_without_the_head(family):
    model = make_model(family)
    D = model.config.head_dim
    ablation = ablate_heads(model, IDS, "zero")
    with torch.no_grad():
        x = model.hidden_states(token_batch(model, [IDS]))
        loss = float(token_losses(model, x, IDS).mean())
        assert ablation.loss == pytest.approx(loss, abs=1e-5)
        for layer, head in [(0, 1), (1, 3)]:
            ablated = make_model(family)
            ablated.blocks[layer].attention.o_proj.weight[:, head * D : head * D + D] = 0
            x = ablated.hidden_states(token_batch(ablated, [IDS]))
            cost = float(token_losses(ablated, x, IDS).mean())
            assert ablation.costs[layer][head] == pytest.approx(cost - loss, abs=1e-5)
            nothing = ablate_heads(ablated, IDS, "zero")  # a head without output
            assert nothing.costs[layer][head] == 0
            assert nothing.loss == pytest.approx(cost, abs=1e-6)
    assert ablate_heads(model, IDS, "mean").costs != ablation.costs
    again = float(token_losses(model, model.hidden_states(token_batch(model, [IDS])), IDS).mean())
    assert again == pytest.approx(loss)  # the hooks are removed


@pytest.mark.parametrize("family", ["classic", "gpt2", "qwen3", "gemma3"], indirect=True)
@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_groups_equal_hooks_in_transformers(model_directory, kind):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_directory).eval()
    bundle = model_dir.load(model_directory)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    groups = parse_groups(GROUPS, bundle.config)
    report = ablate_groups(model, bundle.tokenizer, IDS, groups, kind, top=300)
    assert [one.group for one in report.groups] == list(MEMBERS)
    means, tokens = {}, torch.tensor([IDS])

    @torch.no_grad()
    def run():
        out = theirs(tokens, labels=tokens)
        return float(out.loss), out.logits[0, -1].log_softmax(-1)

    def keep(part, layer):
        return lambda x: means.update({(part, layer): x.mean(dim=1)})

    def replace(part, layer, heads):
        def edit(x):
            x = x.clone()
            for head in heads or [slice(None)]:
                x[:, :, head] = means[part, layer][:, head] if kind == "mean" else 0
            return x

        return edit

    places = [(part, layer) for part in ("heads", "attention", "feed_forward") for layer in (0, 1)]
    with hooks_removed(*(hook_theirs(theirs, *at, keep(*at)) for at in places)):
        loss, log_p = run()
    assert report.loss == pytest.approx(loss, abs=1e-5)
    for one in report.groups:
        hooks = (hook_theirs(theirs, *at[:2], replace(*at)) for at in MEMBERS[one.group])
        with hooks_removed(*hooks):
            ablated, log_q = run()
        assert one.loss == pytest.approx(ablated, abs=1e-5)
        assert one.cost == pytest.approx(ablated - loss, abs=1e-5)
        assert abs(one.cost) > 1e-4
        expected = float((log_p.exp() * (log_p - log_q)).sum())
        assert one.divergence == pytest.approx(expected, abs=1e-5)
        probabilities = torch.zeros(len(log_q))
        probabilities[[p.id for p in one.predictions]] = torch.tensor(
            [p.probability for p in one.predictions]
        )
        assert (probabilities - log_q.exp()).abs().max() < 1e-5


def test_default_groups_are_the_parts_of_each_layer():
    groups = parse_groups(None, make_model("gpt2").config)
    names = ["0.attention", "0.feed_forward", "1.attention", "1.feed_forward"]
    assert list(groups) == names
    assert groups["1.attention"] == [("attention", 1, None)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("2", "--group: out of range .got 2, expected -2 to 1"),
        ("0.4", "--group: out of range .got 4, expected -4 to 3"),
        ("0.values", "--group: not layers or heads .got '0.values'"),
        ("", "--group: not layers or heads .got ''"),
        ("0+", "--group: not layers or heads .got ''"),
    ],
)
def test_unknown_heads_and_layers_are_errors(spec, message):
    with pytest.raises(UsageError, match=message) as error:
        parse_groups(spec, make_model("gpt2").config)
    assert error.value.hint


def test_ablation_needs_two_tokens(tokenizer):
    model = make_model("gpt2")
    for ablate in (
        lambda: ablate_heads(model, IDS[:1], "zero"),
        lambda: ablate_groups(model, tokenizer, IDS[:1], {}, "zero", top=1),
    ):
        with pytest.raises(UsageError, match="at least 2 tokens"):
            ablate()
