"""The interactive page of `tgen inspect --html`: one file, no network, nothing run but its own.

Weights are packed by head: the lower triangle row by row, as whole 65535ths in 16 bits, base64.
All else is one JSON. Tokens are data there, and the page's scripts put them in as text only; the
policy names those scripts and the style sheet by their hashes, so that nothing else would run.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from tgen.cli.render.colormap import RAMP
from tgen.cli.render.token_labels import label
from tgen.reports import (
    AttentionReport,
    Check,
    HeadsReport,
    LensReport,
    ModelSummary,
    TextReport,
    TokenReport,
)

_WHOLE = 65535  # a weight of 1
_STYLE = "page.css"
_SCRIPTS = ("data.js", "matrix.js", "tables.js", "page.js")  # in this order
# What could end a script element or a line of one.
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_bytes(n_matrices: int, n_tokens: int) -> int:
    """Bytes that the packed weights of so many heads take in the page."""
    return n_matrices * 4 * -(-n_tokens * (n_tokens + 1) // 3)


def page(
    *,
    name: str,
    summary: ModelSummary,
    text: TextReport,
    attention: Sequence[AttentionReport],
    heads: HeadsReport | None,
    lens: LensReport | None,
    checks: Sequence[Check],
    still: str,
) -> str:
    """The whole document. `attention` are matrices over the tokens of `text`, of one measure; the
    page opens with the first of them, or the first that says why it is shown.

    `still` is an SVG picture for where there are no scripts.
    """
    (measure,) = {report.measure for report in attention}
    loader = PackageLoader("tgen.cli.inspect.page", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style, *scripts = (_source(environment, loader, file) for file in (_STYLE, *_SCRIPTS))
    data = {
        "ramp": RAMP,
        "measure": measure,
        "matrices": [_matrix(report) for report in attention],
        "tokens": [_token(token) for token in text.tokens],
        "vocabulary": summary.fields["vocab_size"],
        "heads": None if heads is None else asdict(heads),
        "lens": None if lens is None else _lens(lens),
    }
    return environment.get_template("page.html.j2").render(
        policy=_policy(style, scripts),
        style=style,
        scripts=scripts,
        name="".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name),
        facts=_facts(summary, text, attention),
        measure=measure,
        checks=checks,
        costs=_costs(text),
        blind=math.log2(summary.fields["vocab_size"]),
        predicted=any(token.surprisal is not None for token in text.tokens),
        with_heads=heads is not None,
        with_lens=lens is not None,
        lens_answer=None if lens is None else label(lens.answer_text),
        lens_query=None if lens is None else lens.query,
        weights=[(_id(report), _packed(report)) for report in attention],
        data=_json(data),
        still=base64.b64encode(still.encode()).decode(),
    )


def _source(environment: Environment, loader: PackageLoader, file: str) -> str:
    """A file as the browser will see it: the hash is taken of its lines as it reads them."""
    return loader.get_source(environment, file)[0].replace("\r\n", "\n")


def _json(data: dict[str, Any]) -> str:
    """JSON that is nothing but JSON wherever it stands."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_ESCAPED)
    # An address in the inspected text is none of the page's: who searches it shall find no other.
    return text.replace("/", "\\/").replace("http", "\\u0068ttp")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """The Content-Security-Policy: no address at all, and only what is named by its hash."""
    hashes = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _id(report: AttentionReport) -> str:
    return f"w-{report.layer}-{'mean' if report.head is None else report.head}"


def _packed(report: AttentionReport) -> str:
    seen = report.weights[np.tril_indices(len(report.weights))].astype(np.float64)
    # A row's sum may miss 1 by a rounding; past the whole the 16 bits would begin at 0 again.
    parts = np.rint(np.clip(seen, 0, 1) * _WHOLE).astype("<u2")
    return base64.b64encode(parts.tobytes()).decode()


def _matrix(report: AttentionReport) -> dict[str, Any]:
    return {
        "id": _id(report),
        "layer": report.layer,
        "head": report.head,
        "kv_head": report.kv_head,
        "why": report.why,
    }


def _token(token: TokenReport) -> dict[str, Any]:
    return {
        "label": label(token.text),
        "surprisal": token.surprisal,
        "rank": token.rank,
        "likeliest": None if token.likeliest_text is None else label(token.likeliest_text),
        "probability": token.likeliest_probability,
    }


def _lens(lens: LensReport) -> dict[str, Any]:
    return {
        "layers": lens.layers,
        "first": lens.first,
        "likeliest": [[label(token) for token in row] for row in lens.likeliest_text],
        "probabilities": np.asarray(lens.probabilities, dtype=np.float64).tolist(),
        "query": lens.query,
        "ranks": lens.ranks,
        "answer_probabilities": lens.answer_probabilities,
    }


def _facts(
    summary: ModelSummary, text: TextReport, attention: Sequence[AttentionReport]
) -> list[str]:
    n_layers, n_heads = summary.fields["n_layers"], summary.fields["n_heads"]
    facts = [
        summary.family,
        f"{summary.n_parameters:,} parameters",
        f"{n_layers} layers × {n_heads} heads",
        f"{len(text.tokens):,} token{'s' * (len(text.tokens) != 1)}",
    ]
    if all(report.head is None for report in attention):
        facts.append("means over a layer's heads")
    elif len(attention) < n_layers * n_heads:
        facts.append(f"{len(attention)} of the heads here")
    return facts


def _costs(text: TextReport) -> str:
    """What the text costs, in a line."""
    values = (
        (text.nats_per_token, "{:.3f} nats a token"),
        (text.perplexity, "perplexity {:,.2f}"),
        (text.bits_per_byte, "{:.3f} bits per byte"),
    )
    return " · ".join(form.format(value) for value, form in values if value is not None)
