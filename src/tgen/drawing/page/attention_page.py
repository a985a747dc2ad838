"""The interactive page of `tgen inspect --html`: one file, no network access; also in notebooks.

Attention weights are packed per head: the lower triangle row by row, as 16-bit multiples of
1/65535, in base64. All other data is one JSON object. Tokens are part of it, and the page's scripts
insert them as text only. The content security policy allows the page's own scripts and style sheet
by their hashes, and nothing else.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from tgen.config import SamplingConfig
from tgen.drawing.colormap import RAMP
from tgen.drawing.head_tables import COLUMN_MEANINGS, head_notes
from tgen.drawing.heat_map import AUTO_SELECTED, attention_map
from tgen.drawing.heat_map_files import svg
from tgen.drawing.terminal_text import label
from tgen.drawing.view_options import SLIDERS, ViewOptions
from tgen.errors import UsageError
from tgen.generation.distribution import logits_record
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import make_vocabulary
from tgen.reports.inspection import (
    AttentionReport,
    Check,
    HeadsReport,
    LensReport,
    Matrix,
    ModelSummary,
    TextReport,
)
from tgen.reports.number_format import count

_SCALE = 65535  # stands for a weight of 1
_STYLE = "page.css"
# In this order. `samplers.js` is a module elsewhere.
_SCRIPTS = (
    *("dom.js", "weights.js", "thumbnails.js", "data.js", "matrix.js", "tables.js", "lens.js"),
    *("samplers.js", "sliders.js", "next_token.js", "page.js"),
)
# Characters that could end a script element or one of its lines.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
_MAX_NEXT_BYTES = 6 * 10**6  # bytes of logits: those of the last positions
_MAX_PAGE_BYTES = 24 * 10**6  # bytes of weights: a browser opens the page without delay


def packed_bytes(n_matrices: int, n_tokens: int) -> int:
    """Return the size of the packed weights in the page."""
    return n_matrices * 4 * -(-n_tokens * (n_tokens + 1) // 3)


def render_page(
    *,
    name: str,
    summary: ModelSummary,
    text: TextReport,
    attention: Sequence[AttentionReport],
    heads: HeadsReport | None,
    lens: LensReport | None,
    next_tokens: dict[str, Any] | None,
    checks: Sequence[Check],
    picture: str,
) -> str:
    """Return the HTML document.

    `attention`: matrices over the tokens of `text`, all of one measure. The page opens with the
    auto-selected one, or with the first. `next_tokens`: see `next_token_data`.
    `picture`: the SVG for browsers without scripts.
    """
    (measure,) = {report.measure for report in attention}
    loader = PackageLoader("tgen.drawing.page", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    # The hashes are those of the sources as the browser reads them, without \r.
    style, *scripts = (
        loader.get_source(environment, file)[0].replace("\r\n", "\n").replace("\nexport ", "\n")
        for file in (_STYLE, *_SCRIPTS)
    )
    data = {
        "ramp": RAMP,
        "measure": measure,
        "matrices": [_matrix_data(report) for report in attention],
        "tokens": _token_data(text),
        "vocabulary": summary.config["vocab_size"],
        "heads": None if heads is None else asdict(heads) | {"notes": head_notes(heads)},
        "meanings": COLUMN_MEANINGS,
        "lens": None if lens is None else lens_data(lens),
        "next": next_tokens,
    }
    return environment.get_template("page.html.j2").render(
        page=data,
        policy=_content_policy(style, scripts),
        style=style,
        scripts=scripts,
        name="".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name),
        facts=_facts(summary, text, attention),
        checks=checks,
        loss=_loss_line(text),
        uniform_bits=math.log2(summary.config["vocab_size"]),
        has_surprisal=any(token.surprisal is not None for token in text.tokens),
        has_window=any(report.window is not None for report in attention),
        weights=[(_element_id(report), pack_weights(report.weights)) for report in attention],
        data=_script_json(data),
        picture=base64.b64encode(picture.encode()).decode(),
    )


def _script_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot end its script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_ESCAPES)
    # Addresses in the inspected text are escaped too: a search of the page finds no address.
    return text.replace("/", "\\/").replace("http", "\\u0068ttp")


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    hashes = " ".join(map(_source_hash, scripts))
    return (
        f"default-src 'none'; img-src data:; style-src {_source_hash(style)}; "
        f"script-src {hashes}; base-uri 'none'; form-action 'none'"
    )


def _source_hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _element_id(report: AttentionReport) -> str:
    return f"w-{report.layer}-{'mean' if report.head is None else report.head}"


def pack_weights(weights: Matrix) -> str:
    """Return the lower triangle of a matrix (T, T), row by row, for `unpack` of `weights.js`."""
    triangle = weights[np.tril_indices(len(weights))].astype(np.float64)
    # Rounding may put a weight above 1, which would overflow 16 bits.
    packed = np.rint(triangle.clip(0, 1) * _SCALE).astype("<u2")
    return base64.b64encode(packed.tobytes()).decode()


def _matrix_data(report: AttentionReport) -> dict[str, Any]:
    names = ("layer", "head", "kv_head", "window", "selection")
    return {"id": _element_id(report)} | {name: getattr(report, name) for name in names}


def _token_data(text: TextReport) -> list[dict[str, Any]]:
    return [
        {
            "label": label(token.text),
            "surprisal": token.surprisal,
            "rank": token.rank,
            "top": None if token.top_text is None else label(token.top_text),
            "top_probability": token.top_probability,
        }
        for token in text.tokens
    ]


def lens_data(lens: LensReport) -> dict[str, Any]:
    """Return the table of `lens.js`."""
    names = ("layers", "first", "query", "answer_ranks", "answer_probabilities")
    return {name: getattr(lens, name) for name in names} | {
        "top": [[label(token) for token in layer] for layer in lens.top_texts],
        "top_probabilities": np.asarray(lens.top_probabilities, dtype=np.float64).tolist(),
        "answer": label(lens.answer_text),
    }


def next_token_data(inspector: Inspector, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logits of the next token after each position, the last ones if the text is long,
    the labels of the tokens, and the settings of the sliders at first."""
    vocabulary, n = make_vocabulary(inspector.bundle), len(inspector.ids)
    records: list[dict[str, Any]] = []
    n_bytes = 0
    for row in inspector.logits_backward():
        records.append(logits_record(vocabulary.only_tokens(row[None])[0]))
        n_bytes += len(json.dumps(records[-1]))
        if n_bytes > _MAX_NEXT_BYTES:
            break
    size = inspector.config.vocab_size
    ids = {i for one in records for i in one.get("ids", ())} or range(size)
    labels = {i: label(inspector.tokenizer.token_bytes(i)) or f"#{i}" for i in ids}
    config = SamplingConfig(**{**inspector.sampling_defaults, **sampling})
    return {
        "first": n - len(records),
        "labels": labels,
        "positions": records[::-1],
        "settings": {name: getattr(config, name) for name in SLIDERS},
    }


def _facts(
    summary: ModelSummary, text: TextReport, attention: Sequence[AttentionReport]
) -> list[str]:
    n_layers, n_heads = summary.config["n_layers"], summary.config["n_heads"]
    facts = [
        summary.family,
        f"{summary.n_parameters:,} parameters",
        f"layers × heads: {n_layers} × {n_heads}",
        count(len(text.tokens), "token"),
    ]
    if all(report.head is None for report in attention):
        facts.append("means over the heads of each layer")
    elif len(attention) < n_layers * n_heads:
        facts.append(f"{len(attention)} of these heads shown")
    return facts


def _loss_line(text: TextReport) -> str:
    values = (
        (text.nats_per_token, "{:.3f} nats per token"),
        (text.perplexity, "perplexity {:,.2f}"),
        (text.bits_per_byte, "{:.3f} bits per byte"),
    )
    return " · ".join(form.format(value) for value, form in values if value is not None)


class AttentionPage(NamedTuple):
    """The page as an HTML document, and the attention weights that it shows."""

    html: str
    attention: list[AttentionReport]


def attention_page(
    inspector: Inspector,
    options: ViewOptions,
    progress: Callable[[float], None] = lambda _: None,
) -> AttentionPage:
    """Return the page of the selected heads, by default all.

    Raises UsageError if its weights would be too large for a browser, and as
    `Inspector.select_heads` does.
    """
    selected = inspector.select_heads(options.layer, options.head, default="all")
    size = packed_bytes(len(selected), len(inspector.ids))
    if size > _MAX_PAGE_BYTES:
        raise UsageError(
            f"the page would have {size / 1e6:,.0f} MB of attention weights "
            f"(limit {_MAX_PAGE_BYTES / 1e6:.0f} MB)",
            "select fewer layers and heads, or shorten the text",
        )
    heads = None
    if len(inspector.ids) > 1 and options.head != "mean":
        heads = inspector.heads(ablate=options.ablate, progress=progress, selected=selected)
    focused = inspector.most_focused_head(sorted({layer for layer, _ in selected}))
    start = focused if focused in selected else selected[0]  # what the page shows first
    attention = [
        replace(one, selection=AUTO_SELECTED) if (one.layer, one.head) == start == focused else one
        for one in inspector.attention(selected, measure=options.measure)
    ]
    picture = attention_map(attention[selected.index(start)], inspector.tokens, scale=options.scale)
    html = render_page(
        name=inspector.bundle.path.name,
        summary=inspector.summary,
        text=inspector.text,
        attention=attention,
        heads=heads,
        lens=None if inspector.config.post_norm else inspector.logit_lens(),
        next_tokens=next_token_data(inspector, options.sampling),
        checks=inspector.checks,
        picture=svg(picture),
    )
    return AttentionPage(html, attention)
