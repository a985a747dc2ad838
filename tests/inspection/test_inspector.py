"""Reports equal the model: attention weights, logit lens, attribution, surprisal."""

import math

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.config import RopeScaling
from tgen.errors import ModelError, UsageError
from tgen.inspection import attention as attention_module
from tgen.inspection.attention import (
    AttentionRecorder,
    attention_rollout,
    record_attention,
)
from tgen.inspection.hooks import token_batch
from tgen.inspection.inspector import Inspector
from tgen.inspection.logit_attribution import attribute_logit
from tgen.inspection.logit_lens import logit_lens
from tgen.inspection.model_summary import summarize
from tgen.inspection.position_encoding import position_encoding
from tgen.inspection.predictions import score_text, top_predictions
from tgen.machine import memory
from tgen.model.transformer import Transformer

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()
ALL_HEADS = [(layer, head) for layer in range(2) for head in range(4)]


def matrices(model, ids, selected=ALL_HEADS, **options):
    return [report.weights for report in record_attention(model, ids, selected, **options)[0]]


def test_recording_leaves_the_logits_unchanged_and_selects_layers(family):
    model = make_model(family)
    layers = []
    scale = model.config.score_scale
    recorder = AttentionRecorder(lambda layer, *_: layers.append(layer), scale=scale, layers=[1])
    with torch.no_grad():
        tokens = token_batch(model, [IDS, IDS[::-1]])
        assert torch.equal(model(tokens, recorder=recorder), model(tokens))
    assert layers == [1]
    assert 0 < recorder.kernel_error < 1e-6
    assert 0 < recorder.row_sum_error < 1e-6


def test_mean_and_value_weighted_attention_equal_their_formulas(family):
    model = make_model(family)
    *heads, mean = matrices(model, IDS, [*((1, head) for head in range(4)), (1, None)])
    assert np.allclose(mean, np.mean(heads, axis=0), atol=1e-6)
    (weighted,) = matrices(model, IDS, [(1, 3)], measure="value")
    recorded = {}

    class ValueRecorder:
        def attention(self, layer, *arguments):
            v = arguments[2]
            recorded[layer] = v.repeat_interleave(4 // v.shape[1], dim=1)[0, 3]

    D = model.config.head_dim
    with torch.no_grad():
        model(token_batch(model, [IDS]), recorder=ValueRecorder())
        W_O = model.get_parameter("blocks.1.attention.o_proj.weight")[:, 3 * D : 4 * D]
        if family in ("gemma3", "olmo2"):
            norm = model.get_parameter("blocks.1.attention_output_norm.weight")
            W_O = (norm + (family == "gemma3"))[:, None] * W_O
        norms = (recorded[1] @ W_O.T).norm(dim=-1).numpy()
    contributions = heads[3] * norms
    expected = contributions / contributions.sum(axis=1, keepdims=True)
    assert np.allclose(weighted, expected, atol=1e-5)
    assert np.abs(weighted - heads[3]).max() > 0.01


def test_rollout_equals_its_formula(family):
    model = make_model(family)
    shares = np.eye(len(IDS))
    for layer, report in enumerate(attention_rollout(model, IDS)[0]):
        mean = np.mean(matrices(model, IDS, [(layer, head) for head in range(4)]), axis=0)
        shares = (0.5 * mean + 0.5 * np.eye(len(IDS))) @ shares
        assert np.allclose(report.weights, shares, atol=1e-5)
        assert np.allclose(report.weights.sum(axis=1), 1, atol=1e-5)
        assert (np.triu(report.weights, 1) == 0).all()


def test_surprisal_equals_the_models_log_probabilities(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size, context_length=300)
    data = "What is 日本, naïve? ".encode() * 20
    ids = tokenizer.encode(data)
    assert len(ids) > 130  # scored in chunks
    report = score_text(model, tokenizer, ids)
    with torch.no_grad():
        log_p = model(token_batch(model, [ids]))[0].log_softmax(-1)
    for i in range(1, len(ids)):
        token = report.tokens[i]
        assert token.surprisal == pytest.approx(-float(log_p[i - 1, ids[i]]) / math.log(2), 1e-4)
        assert token.rank == int((log_p[i - 1] > log_p[i - 1, ids[i]]).sum())
        assert token.top_id == int(log_p[i - 1].argmax())
        assert data[token.byte_offset :].startswith(token.text)
    bits = math.fsum(token.surprisal or math.nan for token in report.tokens[1:])
    assert report.bits_per_byte == pytest.approx(bits / (len(data) - len(report.tokens[0].text)))
    assert report.perplexity == pytest.approx(2 ** (bits / (len(ids) - 1)))
    assert report.tokens[0].surprisal is None


def test_predictions_are_the_largest_probabilities(tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]]))[0]
    p = logits.softmax(-1)
    for query in (-1, 1):
        candidates = top_predictions(logits[query], tokenizer, 5)
        assert [c.id for c in candidates] == p[query].topk(5).indices.tolist()
        assert [c.probability for c in candidates] == pytest.approx(
            p[query].topk(5).values.tolist()
        )


def test_lens_ends_at_the_models_logits_and_contributions_sum_to_a_logit(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    ids = IDS[:20]
    if family == "classic":
        with pytest.raises(UsageError, match="classic"):
            logit_lens(model, tokenizer, ids, query=3)
        return
    with torch.no_grad():
        logits = model(token_batch(model, [ids]))[0]
    lens = logit_lens(model, tokenizer, ids, query=7)
    assert lens.top_ids[-1] == logits.argmax(dim=-1).tolist()
    assert lens.answer_ranks[-1] == 0
    assert lens.answer_probabilities[-1] == pytest.approx(float(logits[7].softmax(-1).max()), 1e-5)
    # The lens after layer 0 equals a model of one layer.
    short = make_model(family, vocab_size=tokenizer.vocab_size, n_layers=2)
    del short.blocks[1]
    with torch.no_grad():
        assert lens.top_ids[1] == short(token_batch(short, [ids]))[0].argmax(dim=-1).tolist()
    for target in (None, [17]):
        attribution = attribute_logit(model, tokenizer, ids, query=7, target=target)
        assert attribution.targets == (target or [int(logits[7].argmax())])
        total = sum(part.logit for part in attribution.contributions)
        assert total == pytest.approx(float(logits[7, attribution.targets[0]]), abs=1e-5)
        assert attribution.difference < 1e-5
    # Without its output projection a head contributes nothing.
    part = next(p for p in attribution.contributions if (p.layer, p.head) == (1, 2))
    with torch.no_grad():
        W_O = model.blocks[1].attention.o_proj.weight
        W_O[:, 2 * model.config.head_dim : 3 * model.config.head_dim] = 0
    ablated = attribute_logit(model, tokenizer, ids, query=7, target=[17])
    assert next(p for p in ablated.contributions if (p.layer, p.head) == (1, 2)).logit == 0
    assert abs(part.logit) > 1e-3


def test_position_encoding_equals_the_models(family):
    model = make_model(family)
    reports = position_encoding(model)
    kinds = {"sinusoidal": ["sinusoidal"], "learned": ["similarity", "learned"]}
    rotary = ["rotary", "rotary_local"] if family == "gemma3" else ["rotary"]
    assert [r.kind for r in reports] == kinds.get(model.config.position, rotary)
    values = reports[-1].values
    if family == "classic":
        assert np.array_equal(values, model.sinusoid.numpy())
        assert values[3, 0] == pytest.approx(math.sin(3), abs=1e-6)
    elif family in ("gpt2", "gpt_neo"):
        assert np.array_equal(values, model.position_embedding.weight.detach().numpy())
        assert np.allclose(np.diag(reports[0].values), 1, atol=1e-5)
    else:
        assert np.array_equal(reports[0].values, model.cos.numpy())
        parts = {"gpt_neox": " (4 of 8 dimensions are rotated)", "smollm3": " in layer 0",
                 "phi3": " (6 of 8 dimensions are rotated)", "gemma3": " in layer 1"}  # fmt: skip
        assert reports[0].title.endswith("of dimensions" + parts.get(family, ""))
    if family == "gemma3":
        assert np.array_equal(values, model.local_cos.numpy())
        assert reports[1].title.endswith(" in layer 0")


def test_positions_have_no_scaling_factor_and_need_a_layer_with_them():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context_length=16, attention_factor=1.3)
    (report,) = position_encoding(make_model("llama", rope_scaling=scaling))
    assert report.values[0].tolist() == [1] * 4
    assert np.abs(report.values).max() <= 1
    with pytest.raises(UsageError, match="no layer of this model has a position encoding"):
        position_encoding(make_model("smollm3", rope_layers=(False, False)))


def test_inspector_refuses_a_text_that_does_not_fit_unless_tail_is_given(model_directory):
    bundle = model_dir.load(model_directory)
    for text, message in [(b"", "empty"), (b"word " * 100, "context is 48")]:
        with pytest.raises(UsageError, match=message):
            Inspector(bundle, text)
    inspector = Inspector(bundle, b"word " * 100, tail=True)
    assert len(inspector.ids) == 48
    assert inspector.ids == bundle.tokenizer.encode(b"word " * 100)[-48:]
    for target, message in [(b"", "empty"), ("é日".encode(), "tokens")]:
        with pytest.raises(UsageError, match=message):
            inspector.logit_attribution(target=target)


def test_most_focused_head_has_the_largest_weights_on_other_tokens():
    model = make_model("gpt2", context_length=64)
    focused = attention_module.most_focused_head(model, IDS, [0, 1])
    scores = {}
    for head, weights in zip(ALL_HEADS, matrices(model, IDS), strict=True):
        scores[head] = sum(weights[i, 1:i].max(initial=0) for i in range(len(IDS)))
    assert focused == max(scores, key=scores.get)
    assert attention_module.most_focused_head(model, [1], [1]) == (1, 0)


def test_summary_counts_all_parameters(model_directory):
    bundle = model_dir.load(model_directory)
    summary = summarize(bundle)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    assert summary.n_parameters == sum(p.numel() for p in model.parameters())
    assert summary.weight_bytes == 4 * summary.n_parameters
    assert {dtype for *_, dtype in summary.parameters} == {"float32"}


def test_positions_of_a_long_context_are_limited(monkeypatch):
    monkeypatch.setattr("tgen.inspection.position_encoding._MAX_POSITIONS", 8)
    for family in ("classic", "gpt2", "llama"):
        for report in position_encoding(make_model(family)):
            assert len(report.rows) == len(report.values) == 8
            assert report.title.endswith(", the first 8 positions")


def test_matrices_that_do_not_fit_into_ram_are_refused_with_numbers(trained, monkeypatch):
    inspector = Inspector(model_dir.load(trained), b"What is the king?")
    n = len(inspector.ids)
    monkeypatch.setattr(memory, "free_ram", lambda: 8 * n * n)
    inspector.attention([(0, 0), (0, 1)])
    computations = (
        lambda: inspector.attention([(0, 0), (0, 1), (1, 0)]),
        inspector.rollout,
        inspector.verify,
    )
    for compute in computations:
        with pytest.raises(ModelError, match=r"needs .* but only .* is available") as error:
            compute()
        assert "--layer" in error.value.hint
