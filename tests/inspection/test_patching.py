"""Activation patching equals hooks in transformers' model, and TransformerLens."""

import numpy as np
import pytest
import torch

from support.models import make_model
from support.transformers_models import hook_theirs
from tgen.checkpoint import model_dir
from tgen.config.index_ranges import PATCHED_PARTS
from tgen.errors import UsageError
from tgen.inspection import patching
from tgen.inspection.hooks import hooks_removed
from tgen.inspection.inspector import Inspector
from tgen.inspection.patching import patch_activations
from tgen.model.transformer import Transformer

IDS, OTHER = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(5)).tolist()
OTHER[:2] = IDS[:2]
FAMILIES = ["classic", "gpt2", "qwen3", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_scores_equal_hooks_in_transformers(model_directory, monkeypatch):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_directory).eval()
    bundle = model_dir.load(model_directory)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    monkeypatch.setattr(patching, "_BATCH_TOKENS", 4 * len(IDS))  # several batches per layer
    reports = patch_activations(model, bundle.tokenizer, IDS, OTHER, PATCHED_PARTS)
    sources = {}

    @torch.no_grad()
    def logits(ids):
        return theirs(torch.tensor([ids])).logits[0, -1].double()

    def keep(part, layer):
        return lambda x: sources.update({(part, layer): x})

    def patch(part, layer, site):
        def edit(x):
            x = x.clone()
            where = (slice(None), slice(None), site) if part == "heads" else (slice(None), site)
            x[where] = sources[part, layer][where]
            return x

        return edit

    places = [(part, layer) for part in PATCHED_PARTS for layer in (0, 1)]
    with hooks_removed(*(hook_theirs(theirs, *place, keep(*place)) for place in places)):
        clean = logits(IDS)
    corrupted = logits(OTHER)
    target, contrast = int(clean.argmax()), int(corrupted.argmax())
    differences = [float(one[target] - one[contrast]) for one in (clean, corrupted)]
    for report in reports:
        assert (report.target, report.contrast) == (target, contrast)
        assert [report.difference, report.other_difference] == pytest.approx(differences, abs=1e-5)
        for (layer, site), score in np.ndenumerate(report.scores):
            edit = patch(report.part, layer, site)
            with hooks_removed(hook_theirs(theirs, report.part, layer, edit)):
                patched = logits(OTHER)
            share = float(patched[target] - patched[contrast]) - differences[1]
            assert score == pytest.approx(share / (differences[0] - differences[1]), abs=1e-5)
    residual, *others = (report.scores for report in reports)
    assert residual.shape == (2, 9)
    assert others[-1].shape == (2, 4)
    assert all(np.abs(scores).max() > 0.01 for scores in others)


def test_the_position_that_differs_restores_the_answer(tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    other = [*IDS[:3], 5, *IDS[4:]]
    (report,) = patch_activations(model, tokenizer, IDS, other, ["residual"], target=7, contrast=8)
    assert report.scores[0].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0, 0, 0], abs=1e-5)
    assert abs(report.scores[1, -1]) > 0.01  # moved to the last position
    assert report.difference != pytest.approx(report.other_difference)


def test_prompts_and_tokens_that_cannot_be_compared_are_errors(trained):
    inspector = Inspector(model_dir.load(trained), b"What is the king?")
    n = len(inspector.ids)
    for other, options, message in (
        (b"What", {}, f"--patch has 1 token, the prompt {n}"),
        (b"What is the king?", {"target": b"a", "contrast": b"b"}, "logit difference"),
        (b"What is the king?", {}, "the same token"),
        (b"What is the king.", {"target": b"naive naive"}, "--target: 'naive naive' has"),
        (b"What is the king.", {"contrast": b""}, "--contrast: '' has 0 tokens"),
        (b"What is the king.", {"parts": "residual,logits"}, "--parts: not available"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            inspector.patching(other, **options)
        assert error.value.hint


def test_the_end_of_long_prompts_is_patched(trained):
    bundle = model_dir.load(trained)
    text, other = (b"What is the king? " * 20 + end for end in (b"?", b"!"))
    long = Inspector(bundle, text, tail=True)
    assert long.n_skipped
    (report,) = long.patching(other, contrast=b"b")
    assert report.other_ids == long.tokenizer.encode(other)[-len(long.ids) :]
    assert report.scores.shape == (2, len(long.ids))


def test_the_answer_after_an_earlier_position_depends_on_the_text_up_to_it(trained):
    bundle = model_dir.load(trained)
    options = {"target": b"a", "contrast": b"b"}
    (report,) = Inspector(bundle, b"What is the king?").patching(
        b"Tis is the king?", query=4, **options
    )
    (short,) = Inspector(bundle, b"What is th").patching(b"Tis is th", **options)
    assert report.scores.shape == (2, 5)
    assert report.scores == pytest.approx(short.scores, abs=1e-4)
