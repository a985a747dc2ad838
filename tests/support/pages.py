"""A page of made-up reports, as the tests of the file and those in a browser open it."""

from typing import Any

import numpy as np

from tgen.cli.inspect.page.page import page
from tgen.reports import (
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

CLOSE = 7.7e-6  # half a 65535th, and a little for the float32
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
STILL = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'


def matrices(n_layers: int, n_heads: int, n_tokens: int, *, seed: int = 0) -> list[AttentionReport]:
    """Weights as a softmax has them, with rows that miss 1 by a float32's rounding."""
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
                    weights=weights,
                    measure="attention",
                    why="",
                )
            )
    return reports


def text_of(tokens: list[bytes]) -> TextReport:
    reports = [
        TokenReport(
            index=i,
            id=i,
            text=token,
            start=0,
            surprisal=None if i == 0 else 1.5 * i,
            rank=None if i == 0 else i,
            likeliest=None if i == 0 else 3,
            likeliest_text=tokens[-1 - i],
            likeliest_probability=None if i == 0 else 0.25,
        )
        for i, token in enumerate(tokens)
    ]
    return TextReport(
        tokens=reports, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=1.1
    )


def heads_of(n_layers: int, n_heads: int) -> HeadsReport:
    """Scores of induction fall from head to head, and what is left without their control rises."""
    numbers: dict[str, Any] = dict.fromkeys(
        ("entropy", "effective_keys", "normalised_entropy", "confidence", "distance", "previous",
         "first", "text_induction"), 0.125,
    )  # fmt: skip
    reports = [
        HeadReport(
            layer=layer,
            head=head,
            kv_head=head,
            role="induction" if head else "",
            self=(7 * layer + 3 * head) % 10 / 10,
            duplicate=0.98,
            duplicate_control=0.03,
            induction=0.9 - 0.1 * (layer * n_heads + head),
            induction_control=0.85 - 0.17 * (layer * n_heads + head),
            induction_deviation=None,
            by_distance=[0.5, 0.25, 0.25],
            ablation=None,
            **numbers,
        )
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    return HeadsReport(
        heads=reports,
        baseline=dict.fromkeys(("effective_keys", "distance", "previous", "first"), 0.2)
        | {"self": 0.1, "duplicate": 0.06, "induction": 0.06},
        n_rows=9,
        block_length=4,
        seeds=2,
        drawn_from="all 300",
        same_tokens=True,
        repeat_gain=-0.25,
        loss=None,
    )


def lens_of(tokens: list[bytes]) -> LensReport:
    best = Prediction(id=1, text=tokens[1], probability=0.5, logit=2.0)
    return LensReport(
        layers=["embedding", "layer 0"],
        first=0,
        likeliest=[list(range(len(tokens)))] * 2,
        likeliest_text=[tokens, tokens[::-1]],
        probabilities=np.full((2, len(tokens)), 0.5, dtype=np.float32),
        query=2,
        candidates=[[best], [best]],
        answer=1,
        answer_text=tokens[1],
        ranks=[4, 0],
        answer_probabilities=[0.1, 0.5],
    )


def page_of(tokens: list[bytes], attention: list[AttentionReport], **other: Any) -> str:
    """A page with everything on it, unless told otherwise."""
    n_layers = 1 + max(report.layer for report in attention)
    n_heads = 1 + max(report.head or 0 for report in attention)
    summary = ModelSummary(
        path="models/x",
        family="qwen3",
        fields={"n_layers": n_layers, "n_heads": n_heads, "vocab_size": 300},
        parameters=[],
        n_parameters=1234567,
        n_embedding_parameters=0,
        weight_bytes=0,
        cache_bytes_per_token=0,
        attention_bytes=0,
    )
    given: dict[str, Any] = {
        "name": "a model",
        "summary": summary,
        "text": text_of(tokens),
        "attention": attention,
        "heads": heads_of(n_layers, n_heads),
        "lens": lens_of(tokens),
        "checks": [Check(name="rows sum to 1", value=2e-7, limit=1e-5)],
        "still": STILL,
    }
    return page(**given | other)
