"""Attribution to earlier tokens: parts sum to the logit, absence equals a run without the token."""

import math

import pytest
import torch

from support.models import make_model
from tgen.inspection.hooks import model_blocks, token_batch
from tgen.inspection.logit_attribution import attribute_logit
from tgen.model.transformer import RMSNorm

IDS = torch.randint(1, 100, (30,), generator=torch.Generator().manual_seed(5)).tolist()
TARGET = [17, 3, 40]


def compute_logits(model, ids):
    with torch.no_grad():
        return model(token_batch(model, [ids]))[0].double()


def expected_score(model, ids, target):
    logits = compute_logits(model, [*ids, *target[:-1]])[len(ids) - 1 :]
    rows = range(len(target))
    log_p = logits.log_softmax(-1)
    return float(logits[rows, target].sum()), float(log_p[rows, target].sum())


@pytest.mark.parametrize("double", [False, True])
def test_parts_sum_to_the_logit(family, tokenizer, double):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model = model.double() if double else model
    for query, target in [(29, [17]), (7, TARGET), (0, TARGET)]:
        report = attribute_logit(model, tokenizer, IDS, query=query, target=target)
        logit, log_probability = expected_score(model, IDS[: query + 1], target)
        assert report.logit == pytest.approx(logit, abs=1e-9 if double else 1e-4)
        assert report.log_probability == pytest.approx(
            log_probability, abs=1e-9 if double else 1e-4
        )
        assert [one.id for one in report.tokens] == [*IDS[: query + 1], *target[:-1]]
        if family == "classic":
            assert (report.contributions, report.embedding, report.difference) == ([], None, None)
            assert all(one.logit is None for one in report.tokens)
            continue
        by_token = report.embedding + report.feed_forward + report.biases
        by_token += math.fsum(one.logit or 0.0 for one in report.tokens)
        by_component = sum(part.logit for part in report.contributions)
        for total in (by_token, by_component):
            assert abs(total - logit) <= (1e-9 if double else 1e-4)
        assert report.difference <= (1e-9 if double else 1e-4)


class Recorder:
    """The queries, keys, values and masks of each layer."""

    def __init__(self):
        self.layers = []

    def attention(self, _, q, k, v, mask, __):
        self.layers.append((q[0], k[0], v[0], mask))


@torch.no_grad()
def test_a_token_has_the_part_of_its_weighted_values(family, tokenizer):
    if family == "classic":
        return
    model = make_model(family, vocab_size=tokenizer.vocab_size).double()
    report = attribute_logit(model, tokenizer, IDS, query=29, target=[17])
    recorder, norms, config, token = Recorder(), {}, model.config, 20
    for block in model.blocks:
        if block.normalizes_outputs:
            block.attention_output_norm.register_forward_hook(
                lambda norm, arguments, _: norms.update({norm: arguments[0][0, 29]})
            )
    model.final_norm.register_forward_hook(
        lambda norm, arguments, _: norms.update({norm: arguments[0][0, 29]})
    )
    model(token_batch(model, [IDS]), recorder=recorder)
    stream = torch.zeros(config.d_model).double()  # what the token adds through attention
    for block, (q, k, v, mask) in zip(model_blocks(model), recorder.layers, strict=True):
        attention, size = block.attention, config.head_dim
        bias = attention.qkv_proj.bias
        value_bias = torch.zeros(v.shape[0] * size) if bias is None else bias[-v.shape[0] * size :]
        out = []
        for head in range(config.n_heads):
            of_head = head // (config.n_heads // config.n_kv_heads)
            scores = config.score_scale * k[of_head] @ q[head, 29]
            if mask is not None:
                scores[~mask[29]] = -torch.inf
            own = value_bias[of_head * size : (of_head + 1) * size]
            out.append(scores.softmax(0)[token] * (v[of_head, token] - own))
        added = attention.o_proj.weight @ torch.cat(out)
        if block.normalizes_outputs:
            added = through_norm(block.attention_output_norm, norms, added)
        stream += added * block.residual_scale
    logit = through_norm(model.final_norm, norms, stream) @ model.output_weight[17]
    assert report.tokens[token].logit == pytest.approx(float(logit), abs=1e-9)
    assert any(abs(one.logit) > 1e-3 for one in report.tokens)


def through_norm(norm, inputs, part):
    """Return a part of the norm's output, with its mean and scale at the whole input."""
    x = inputs[norm]
    if isinstance(norm, RMSNorm):
        return part * norm.scale / (x.square().mean() + norm.eps).sqrt()
    return (part - part.mean()) * norm.scale / (x.var(unbiased=False) + norm.eps).sqrt()


def test_absence_equals_a_run_without_the_token(family, tokenizer, monkeypatch):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    for batch_tokens in (4096, 40):
        monkeypatch.setattr("tgen.inspection.token_ablation._BATCH_TOKENS", batch_tokens)
        report = attribute_logit(model, tokenizer, IDS, query=9, target=TARGET)
        for one in report.tokens[:10]:
            ids = [i for position, i in enumerate(IDS[:10]) if position != one.position]
            logit, log_probability = expected_score(model, ids, TARGET)
            assert one.logit_without == pytest.approx(logit, abs=1e-4)
            assert one.log_probability_without == pytest.approx(log_probability, abs=1e-4)
        assert [one.logit_without for one in report.tokens[10:]] == [None, None]


def test_selected_tokens_are_left_out_with_progress(tokenizer):
    model, fractions = make_model("llama", vocab_size=tokenizer.vocab_size), []
    report = attribute_logit(
        model, tokenizer, IDS, query=9, left_out=range(3, 5), progress=fractions.append
    )
    run = [one.position for one in report.tokens if one.logit_without is not None]
    assert (run, fractions) == ([3, 4], [1.0])
    alone = attribute_logit(model, tokenizer, IDS, query=0)
    assert [one.logit_without for one in alone.tokens] == [None]


def test_texts_without_a_token_share_the_tokens_before_it(tokenizer):
    model, computed = make_model("llama", vocab_size=tokenizer.vocab_size), []
    model.token_embedding.register_forward_hook(lambda _, inputs, __: computed.append(*inputs))
    attribute_logit(model, tokenizer, IDS, query=9, target=[17], left_out=range(6, 10))
    assert [tuple(tokens.shape) for tokens in computed] == [(1, 10), (1, 6), (4, 3)]


def test_tokens_before_the_window_have_no_part(tokenizer):
    model = make_model("mistral", vocab_size=tokenizer.vocab_size, sliding_window=9)
    report = attribute_logit(model, tokenizer, IDS, query=29)
    assert [one.logit == 0 for one in report.tokens] == [True] * 21 + [False] * 9
