"""The HTML page as a file: packed weights, content security policy, escaping of tokens."""

import base64
import hashlib
import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from support.pages import (
    HOSTILE,
    MAX_ERROR,
    PICTURE,
    PLAIN,
    sample_attention,
    sample_page,
    sample_text,
)
from tgen.drawing.page.attention_page import packed_bytes
from tgen.drawing.terminal_text import label
from tgen.reports.inspection import Check


class ParsedPage(HTMLParser):
    """The elements of a page, and the text after each start tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.closed = True
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        self.closed = False

    def handle_endtag(self, _: str) -> None:
        self.closed = True

    def handle_data(self, data: str) -> None:
        if not self.closed:
            self.texts[-1] += data

    def all(self, tag: str, **attributes: str) -> list[str]:
        """Return the texts of the elements with this tag and these attributes."""
        return [
            text
            for (name, actual), text in zip(self.elements, self.texts, strict=True)
            if name == tag and all(actual.get(key) == value for key, value in attributes.items())
        ]

    @property
    def data(self) -> dict[str, Any]:
        (text,) = self.all("script", id="data")
        return json.loads(text)


def unpack(parsed: ParsedPage, name: str, n_tokens: int) -> np.ndarray[Any, Any]:
    (packed,) = parsed.all("script", id=name, type="application/octet-stream")
    weights = np.zeros((n_tokens, n_tokens))
    values = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<u2")
    weights[np.tril_indices(n_tokens)] = values / 65535
    return weights


def test_weights_survive_packing():
    reports = sample_attention(2, 3, 17)
    reports[4] = replace(reports[4], head=None)
    parsed = ParsedPage(sample_page(PLAIN, reports))
    for report in reports:
        name = f"w-{report.layer}-{'mean' if report.head is None else report.head}"
        weights = unpack(parsed, name, 17)
        assert np.abs(weights - np.minimum(report.weights, 1)).max() <= MAX_ERROR
    assert [m["id"] for m in parsed.data["matrices"]].count("w-1-mean") == 1


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 16])
def test_packed_bytes_equals_the_size_in_the_page(n_tokens):
    parsed = ParsedPage(sample_page([b"x"] * max(n_tokens, 3), sample_attention(2, 2, n_tokens)))
    packed = parsed.all("script", type="application/octet-stream")
    assert sum(map(len, packed)) == packed_bytes(4, n_tokens)


def test_page_of_144_heads_is_below_4_mb_and_takes_below_5_seconds():
    reports = sample_attention(12, 12, 128)
    start = time.process_time()
    html = sample_page([b" token"] * 128, reports)
    assert time.process_time() - start < 5
    assert packed_bytes(144, 128) < len(html.encode()) < 4_000_000


def test_hostile_tokens_add_no_elements():
    reports = sample_attention(1, 2, len(HOSTILE))
    html = sample_page(HOSTILE, reports)
    parsed, plain = ParsedPage(html), ParsedPage(sample_page(PLAIN, reports))
    assert [(tag, list(attributes)) for tag, attributes in parsed.elements] == [
        (tag, list(attributes)) for tag, attributes in plain.elements
    ]
    for character in "\x1b\x00\u202e\u2028\ufffd":
        assert character not in html
    data = parsed.data
    labels = [label(token) for token in HOSTILE]
    assert [token["label"] for token in data["tokens"]] == labels
    assert data["lens"]["top"] == [labels, labels[::-1]]
    assert parsed.all("b", **{"class": "token"}) == [labels[1]]
    (text,) = parsed.all("script", id="data")
    assert not set("<>&") & set(text)


def test_model_name_is_escaped():
    html = sample_page(PLAIN, sample_attention(1, 1, 16), name="<b>a</b>\x1b\u202e\udc80")
    assert ParsedPage(html).all("h1") == ["<b>a</b>\ufffd\ufffd\ufffd "]
    assert "<b>a" not in html
    html.encode()


def test_page_contains_no_address():
    html = sample_page(HOSTILE, sample_attention(2, 2, len(HOSTILE)))
    assert not re.search(r"https?:|//[\w-]+\.", html)
    assert ParsedPage(html).data["tokens"][12]["label"] == "http://example.org"
    for _, attributes in ParsedPage(html).elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:")


def test_noscript_picture_is_the_given_svg():
    parsed = ParsedPage(sample_page(PLAIN, sample_attention(1, 1, 16)))
    (image,) = [attributes for tag, attributes in parsed.elements if tag == "img"]
    kind, _, packed = (image["src"] or "").partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(packed).decode() == PICTURE


def test_policy_allows_only_the_pages_own_scripts_and_style():
    parsed = ParsedPage(sample_page(PLAIN, sample_attention(1, 1, 16)))
    (policy,) = [
        attributes["content"] or ""
        for _, attributes in parsed.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    scripts = [
        text
        for (tag, attributes), text in zip(parsed.elements, parsed.texts, strict=True)
        if tag == "script" and "type" not in attributes
    ]
    source_hash = lambda text: (  # noqa: E731
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
    assert scripts
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [source_hash(script) for script in scripts]
    assert rules["style-src"] == [source_hash(style) for style in parsed.all("style")]
    assert not any(set(attributes) & {"style", "onclick"} for _, attributes in parsed.elements)
    assert "innerHTML" not in "".join(scripts)


def test_panels_without_data_are_omitted():
    attention = sample_attention(1, 2, 16)
    ids = lambda html: {attributes.get("id") for _, attributes in ParsedPage(html).elements}  # noqa: E731
    panels = {"table", "lens", "surprisal"}
    assert panels <= ids(sample_page(PLAIN, attention))
    assert not panels & ids(
        sample_page(
            PLAIN,
            sample_attention(1, 2, 1),
            heads=None,
            lens=None,
            checks=[],
            text=replace(
                sample_text([b"x"]), nats_per_token=None, perplexity=None, bits_per_byte=None
            ),
        )
    )


def test_failed_checks_are_shown():
    checks = [
        Check(name="attention rows sum to 1", value=2e-7, limit=1e-5),
        Check(name="causality", value=0.25, limit=0.0, note="<i>"),
    ]
    html = sample_page(PLAIN, sample_attention(1, 1, 16), checks=checks)
    assert ParsedPage(html).all("span", **{"class": "limit"}) == ["2.0e-07 ≤ 1e-05", "2.5e-01 > 0"]
    assert len(ParsedPage(html).all("li", **{"class": "failed"})) == 1
