"""Looking inside and measuring: what is shown is what the model has."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from conftest import make_model, tgen
from tgen.benchmark.kv_cache import compare, default_lengths, measure
from tgen.benchmark.statistics import timing
from tgen.checkpoint import directory
from tgen.cli.views.attention import attention_table, mask_picture
from tgen.cli.views.tokens import label
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.introspect.attention import head_attention
from tgen.introspect.predictions import next_tokens
from tgen.introspect.summary import summarise
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer
from tgen.reports import LengthReport, TrialReport


def test_weights_equal_those_of_transformers(model_directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory, attn_implementation="eager"
    ).eval()
    bundle = directory.load(model_directory)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    ids = list(range(20))
    with torch.no_grad():
        attentions = theirs(torch.tensor([ids]), output_attentions=True).attentions
    for layer in range(2):
        for head in range(4):
            report = head_attention(model, ids, layer=layer, head=head)
            for i, row in enumerate(report.weights):
                assert (
                    np.abs(np.array(row) - attentions[layer][0, head, i, : i + 1].numpy()).max()
                    < 1e-6
                )
                assert sum(row) == pytest.approx(1, abs=1e-5)


def test_layers_and_heads_count_from_both_ends_and_texts_must_fit(family):
    model = make_model(family)
    last = head_attention(model, [1, 2, 3], layer=-1, head=-1)
    assert (last.layer, last.head) == (1, 3)
    for wrong in ({"layer": 2}, {"layer": -3}, {"head": 4}):
        with pytest.raises(UsageError):
            head_attention(model, [1, 2], **wrong)
    with pytest.raises(UsageError, match="49 tokens, the model's context 48"):
        head_attention(model, [1] * 49)
    with pytest.raises(UsageError, match="empty"):
        head_attention(model, [])


def test_predictions_are_the_largest_probabilities(tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    found = next_tokens(model, tokenizer, [1, 2, 3], top=5)
    with torch.no_grad():
        p = model(torch.tensor([[1, 2, 3]]))[0, -1].softmax(-1)
    assert [c.id for c in found] == p.topk(5).indices.tolist()
    assert [c.probability for c in found] == pytest.approx(p.topk(5).values.tolist())


def test_the_summary_counts_everything(model_directory):
    bundle = directory.load(model_directory)
    summary = summarise(bundle)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    assert summary.n_parameters == sum(p.numel() for p in model.parameters())
    assert summary.weight_bytes == 4 * summary.n_parameters


HOSTILE = [
    b"[/x]",
    b"[red]",
    b":smile:",
    b"\x1b[31m",
    "\u202e".encode(),
    "\u2028".encode(),
    b"\xe6\x97",
    "日本".encode(),
    "\u0301".encode(),
    b"\0",
    b"",
    b"\n",
    b" \t\r",
]


def test_every_token_has_a_printable_label():
    for token in HOSTILE:
        shown = label(token)
        assert shown
        assert shown.isprintable()
    assert label(b" the\n") == "·the⏎"
    assert label(b"\xe6\x97") == "‹E6 97›"
    assert label("日本語".encode(), width=5) == "日本…"


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_table_shows_hostile_tokens_and_its_numbers(width):
    model = make_model("qwen3")
    report = head_attention(model, list(range(len(HOSTILE))), layer=0, head=1)
    table, caption = attention_table(report, HOSTILE, width=width)
    console = Console(
        width=width,
        record=True,
        file=io.StringIO(),
        color_system="truecolor",
        force_terminal=True,
    )
    console.print(table)
    text = console.export_text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert f"{report.weights[-1][-1] * 100:.0f}" in text.splitlines()[-1]
    assert ("fit here" in caption) == (width < 80)


def test_the_mask_is_a_lower_triangle():
    assert mask_picture(3) == "■ · ·\n■ ■ ·\n■ ■ ■"
    assert "first 32 of 50" in mask_picture(50)


def test_timings_of_every_length_and_the_verdict(family):
    engine = TorchEngine(make_model(family))
    text = list(range(48))
    reports = list(measure(engine, text, default_lengths(48), trials=3, uncached=True))
    assert [r.trial for r in reports if isinstance(r, TrialReport)] == [0, 1, 2, 3]
    lengths = [r for r in reports if isinstance(r, LengthReport)]
    assert [r.length for r in lengths] == [16, 32, 47]
    for r in lengths:
        assert r.cache_bytes == r.length * engine.model.config.cache_bytes_per_token
        keys = KVCache(engine.model.config, 1, device=engine.device, dtype=torch.float32)
        keys.extend(64)  # storage for exactly 64 tokens
        stored = sum(t.untyped_storage().nbytes() for t in keys.keys + keys.values)
        assert r.cache_bytes == r.length * stored / 64
        assert r.uncached is not None
        assert len(r.prefill.seconds) == len(r.cached.seconds) == len(r.uncached.seconds) == 3
        assert r.speedup == r.uncached.median / r.cached.median
    verdict = compare(engine, text[:12], 100)
    assert verdict.tokens == 36  # to the end of the context
    assert verdict.identical
    assert verdict.max_logit_difference < 1e-4


def test_a_cache_that_changes_the_text_is_found_out():
    engine = TorchEngine(make_model("qwen3"))
    honest = engine.extend

    def forgetful(tokens, **options):
        (logits,) = honest(tokens, **options)
        return np.roll(logits, 1 if engine.lengths[0] == 20 and len(tokens[0]) == 1 else 0)[None]

    engine.extend = forgetful
    verdict = compare(engine, list(range(12)), 30)
    assert not verdict.identical
    assert verdict.first_difference == 8
    assert verdict.gap is not None
    assert verdict.gap > 0


def test_lengths_that_do_not_fit_are_refused():
    engine = TorchEngine(make_model("qwen3"))
    for lengths, trials in [([48], 1), ([0], 1), ([4], 0)]:
        with pytest.raises(UsageError):
            list(measure(engine, list(range(48)), lengths, trials=trials, uncached=False))
    assert default_lengths(2) == [1]


def test_statistics():
    t = timing([1, 2, 3, 4, 100])
    assert (t.median, t.low) == (3, pytest.approx(1.4))


def test_the_commands_print_what_the_functions_say(trained):
    shown = json.loads(
        tgen("inspect", "-m", trained, "-p", "What is", "--layer", 0, "--json").stdout
    )
    bundle = directory.load(trained)
    ids = bundle.tokenizer.encode(b"What is")
    assert [t["id"] for t in shown["tokens"]] == ids
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    assert np.allclose(
        shown["attention"]["weights"][-1],
        head_attention(model, ids, layer=0).weights[-1],
        atol=1e-6,
    )
    table = tgen("inspect", "-m", trained, "-p", "What is").stdout.decode()
    assert "next token" in table
    assert "■ ·" in table
    assert "\x1b" not in table
    measured = json.loads(tgen("bench", "--kv-cache", "-m", trained, "-r", 2, "--json").stdout)
    assert measured["verdict"]["identical"] is True
    assert measured["cache_bytes_per_token"] == bundle.config.cache_bytes_per_token
    plain = tgen("bench", "-m", trained, "-r", 2, "-l", 8).stdout.decode()
    assert "cached ms" in plain
    assert "verdict" not in plain
