"""Sample reports and a page made from them, for the tests of the HTML page."""

from typing import Any

import numpy as np

from tgen.drawing.page.attention_page import render_page
from tgen.reports.inspection import (
    AttentionReport,
    Check,
    HeadReport,
    HeadsReport,
    LensReport,
    ModelSummary,
    Prediction,
    TextReport,
    TokenReport,
)

MAX_ERROR = 7.7e-6  # half of 1/65535, and float32 rounding
HOSTILE = [
    b"[/x]",
    b"</script><script>document.title='bad'</script>",
    b"<img src=x onerror=\"document.title='bad'\">",
    b"\x1b[31m",
    "\u202e".encode(),
    "\u2028".encode(),
    b"\xe6\x97",
    b":smile:",
    b"\"'`",
    b"\\",
    b"<!--",
    b"&lt;b&gt;",
    b"http://example.org",
    b"\x00",
    " 日本".encode(),
    b".\n",
]
PLAIN = [b" word"] * len(HOSTILE)
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'


def sample_attention(
    n_layers: int, n_heads: int, n_tokens: int, *, seed: int = 0
) -> list[AttentionReport]:
    """Return softmax weights; some rows exceed 1 by a float32 rounding error."""
    random, reports = np.random.default_rng(seed), []
    for layer in range(n_layers):
        for head in range(n_heads):
            scores = np.exp(3 * random.normal(size=(n_tokens, n_tokens))) * np.tri(n_tokens)
            weights = (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
            weights[0, 0] = np.float32(1.00001)
            reports.append(
                AttentionReport(
                    layer=layer,
                    head=head,
                    kv_head=head,
                    window=None,
                    weights=weights,
                    measure="attention",
                )
            )
    return reports


def sample_text(tokens: list[bytes]) -> TextReport:
    reports = [
        TokenReport(
            index=i,
            id=i,
            text=token,
            byte_offset=0,
            surprisal=None if i == 0 else 1.5 * i,
            rank=None if i == 0 else i,
            top_id=None if i == 0 else 3,
            top_text=tokens[-1 - i],
            top_probability=None if i == 0 else 0.25,
        )
        for i, token in enumerate(tokens)
    ]
    return TextReport(
        tokens=reports, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=1.1
    )


def sample_heads(n_layers: int, n_heads: int) -> HeadsReport:
    """Return heads whose induction score falls while its excess over the control rises."""
    numbers: dict[str, Any] = dict.fromkeys(
        ("entropy", "effective_keys", "normalized_entropy", "confidence", "distance", "previous",
         "first", "text_induction"), 0.125,
    )  # fmt: skip
    reports = [
        HeadReport(
            layer=layer,
            head=head,
            kv_head=head,
            window=None,
            role="induction" if head else "",
            self=(7 * layer + 3 * head) % 10 / 10,
            duplicate=0.98,
            duplicate_control=0.03,
            induction=0.9 - 0.1 * (layer * n_heads + head),
            induction_control=0.85 - 0.17 * (layer * n_heads + head),
            induction_std=None,
            distance_histogram=[0.5, 0.25, 0.25],
            ablation_cost=None,
            **numbers,
        )
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    return HeadsReport(
        heads=reports,
        baseline=dict.fromkeys(("effective_keys", "distance", "previous", "first"), 0.2)
        | {"self": 0.1, "duplicate": 0.06, "induction": 0.06},
        window_baseline=None,
        n_queries=9,
        block_length=4,
        n_seeds=2,
        sampled_from="all 300 tokens",
        same_tokens=True,
        repeat_gain=-0.25,
        loss=None,
    )


def sample_lens(tokens: list[bytes]) -> LensReport:
    best = Prediction(id=1, text=tokens[1], probability=0.5, logit=2.0)
    return LensReport(
        layers=["embedding", "layer 0"],
        first=0,
        top_ids=[list(range(len(tokens)))] * 2,
        top_texts=[tokens, tokens[::-1]],
        top_probabilities=np.full((2, len(tokens)), 0.5, dtype=np.float32),
        query=2,
        candidates=[[best], [best]],
        answer=1,
        answer_text=tokens[1],
        answer_ranks=[4, 0],
        answer_probabilities=[0.1, 0.5],
    )


def sample_page(tokens: list[bytes], attention: list[AttentionReport], **changes: Any) -> str:
    """Return a page with all panels; `changes` replace arguments of `render_page`."""
    n_layers = 1 + max(report.layer for report in attention)
    n_heads = 1 + max(report.head or 0 for report in attention)
    summary = ModelSummary(
        path="models/x",
        family="qwen3",
        config={"n_layers": n_layers, "n_heads": n_heads, "vocab_size": 300},
        parameters=[],
        n_parameters=1234567,
        n_embedding_parameters=0,
        weight_bytes=0,
        cache_bytes_per_token=0,
        attention_bytes=0,
    )
    arguments: dict[str, Any] = {
        "name": "a model",
        "summary": summary,
        "text": sample_text(tokens),
        "attention": attention,
        "heads": sample_heads(n_layers, n_heads),
        "lens": sample_lens(tokens),
        "next_tokens": None,
        "checks": [Check(name="attention rows sum to 1", value=2e-7, limit=1e-5)],
        "picture": PICTURE,
    }
    return render_page(**arguments | changes)
