"""What is seen inside a model is what it does: weights, lens, attribution, surprisal."""

import math

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.errors import UsageError
from tgen.inspection import attention as attention_module
from tgen.inspection.attention import AttentionRecorder, attention_of, batch_of, rollout
from tgen.inspection.inspector import Inspector
from tgen.inspection.logit_attribution import why_of
from tgen.inspection.logit_lens import lens_of
from tgen.inspection.model_summary import summarize
from tgen.inspection.positions import positions_of
from tgen.inspection.predictions import next_tokens, text_of
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
    bundle = model_dir.load(model_directory)
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


def test_a_look_takes_a_text_that_fits_or_its_tail(model_directory):
    bundle = model_dir.load(model_directory)
    for text, why in [(b"", "empty"), (b"word " * 100, "context 48")]:
        with pytest.raises(UsageError, match=why):
            Inspector(bundle, text)
    look = Inspector(bundle, b"word " * 100, tail=True)
    assert len(look.ids) == 48
    assert look.ids == bundle.tokenizer.encode(b"word " * 100)[-48:]
    for target, why in [(b"", "empty"), ("é日".encode(), "tokens")]:
        with pytest.raises(UsageError, match=why):
            look.why(target=target)


def test_the_telling_head_looks_at_others():
    model = make_model("gpt2", context_length=64)
    chosen = attention_module.most_focused_head(model, IDS, [0, 1])
    scores = {}
    for place, weights in zip(EVERYWHERE, matrices(model, IDS), strict=True):
        scores[place] = sum(weights[i, 1:i].max(initial=0) for i in range(len(IDS)))
    assert chosen == max(scores, key=scores.get)
    assert attention_module.most_focused_head(model, [1], [1]) == (1, 0)


def test_the_summary_counts_everything(model_directory):
    bundle = model_dir.load(model_directory)
    summary = summarize(bundle)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    assert summary.n_parameters == sum(p.numel() for p in model.parameters())
    assert summary.weight_bytes == 4 * summary.n_parameters
    assert {stored for *_, stored in summary.parameters} == {"float32"}
