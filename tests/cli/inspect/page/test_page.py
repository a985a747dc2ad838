"""The interactive page as a file: its weights, its policy, and tokens that are nothing but data."""

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

from support.pages import CLOSE, HOSTILE, PLAIN, STILL, matrices, page_of, text_of
from tgen.cli.inspect.page.page import page_bytes
from tgen.cli.render.token_labels import label
from tgen.reports import Check


class Parsed(HTMLParser):
    """The elements of a page, and the text that directly follows each one's tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.ended = True
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        self.ended = False

    def handle_endtag(self, _: str) -> None:
        self.ended = True

    def handle_data(self, data: str) -> None:
        if not self.ended:
            self.texts[-1] += data

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of the elements of a kind."""
        return [
            text
            for (name, found), text in zip(self.elements, self.texts, strict=True)
            if name == tag and all(found.get(key) == value for key, value in attributes.items())
        ]

    @property
    def data(self) -> dict[str, Any]:
        (text,) = self.all("script", id="data")
        return json.loads(text)


def unpacked(parsed: Parsed, name: str, n_tokens: int) -> np.ndarray[Any, Any]:
    (packed,) = parsed.all("script", id=name, type="application/octet-stream")
    weights = np.zeros((n_tokens, n_tokens))
    parts = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<u2")
    weights[np.tril_indices(n_tokens)] = parts / 65535
    return weights


def test_the_weights_come_out_of_the_page_again():
    reports = matrices(2, 3, 17)
    reports[4] = replace(reports[4], head=None)
    parsed = Parsed(page_of(PLAIN, reports))
    for report in reports:
        name = f"w-{report.layer}-{'mean' if report.head is None else report.head}"
        found = unpacked(parsed, name, 17)
        assert np.abs(found - np.minimum(report.weights, 1)).max() <= CLOSE
    assert [m["id"] for m in parsed.data["matrices"]].count("w-1-mean") == 1


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 16])
def test_what_the_weights_will_take_is_known_before(n_tokens):
    parsed = Parsed(page_of([b"x"] * max(n_tokens, 3), matrices(2, 2, n_tokens)))
    packed = parsed.all("script", type="application/octet-stream")
    assert sum(map(len, packed)) == page_bytes(4, n_tokens)


def test_twelve_layers_of_twelve_heads_are_small_and_quick():
    reports = matrices(12, 12, 128)
    start = time.monotonic()
    html = page_of([b" token"] * 128, reports)
    assert time.monotonic() - start < 5
    assert page_bytes(144, 128) < len(html.encode()) < 4_000_000


def test_tokens_are_data_and_nothing_else():
    reports = matrices(1, 2, len(HOSTILE))
    html = page_of(HOSTILE, reports)
    parsed, plain = Parsed(html), Parsed(page_of(PLAIN, reports))
    assert [(tag, list(found)) for tag, found in parsed.elements] == [
        (tag, list(found)) for tag, found in plain.elements
    ]
    for character in "\x1b\x00\u202e\u2028\ufffd":
        assert character not in html
    data = parsed.data
    labels = [label(token) for token in HOSTILE]
    assert [token["label"] for token in data["tokens"]] == labels
    assert data["lens"]["likeliest"] == [labels, labels[::-1]]
    assert parsed.all("b", **{"class": "token"}) == [labels[1]]
    (text,) = parsed.all("script", id="data")
    assert not set("<>&") & set(text)


def test_a_models_name_is_a_name():
    html = page_of(PLAIN, matrices(1, 1, 16), name="<b>a</b>\x1b\u202e\udc80")
    assert Parsed(html).all("h1") == ["<b>a</b>\ufffd\ufffd\ufffd "]
    assert "<b>a" not in html
    html.encode()


def test_there_is_no_address_in_the_page():
    html = page_of(HOSTILE, matrices(2, 2, len(HOSTILE)))
    assert not re.search(r"https?:|//[\w-]+\.", html)
    assert Parsed(html).data["tokens"][12]["label"] == "http://example.org"
    for _, found in Parsed(html).elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (found.get(name) or "data:").startswith("data:")


def test_the_picture_for_no_script_is_whole():
    (image,) = [found for tag, found in Parsed(page_of(PLAIN, matrices(1, 1, 16))).elements
                if tag == "img"]  # fmt: skip
    kind, _, packed = (image["src"] or "").partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(packed).decode() == STILL


def test_the_policy_names_the_pages_own_scripts_and_style_alone():
    parsed = Parsed(page_of(PLAIN, matrices(1, 1, 16)))
    (policy,) = [
        found["content"] or ""
        for _, found in parsed.elements
        if found.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    scripts = [
        text
        for (tag, found), text in zip(parsed.elements, parsed.texts, strict=True)
        if tag == "script" and "type" not in found
    ]
    hashed = lambda text: (  # noqa: E731
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )
    assert len(scripts) == 4
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [hashed(script) for script in scripts]
    assert rules["style-src"] == [hashed(style) for style in parsed.all("style")]
    assert not any(set(found) & {"style", "onclick"} for _, found in parsed.elements)
    assert "innerHTML" not in "".join(scripts)


def test_panels_without_data_are_left_out():
    attention = matrices(1, 2, 16)
    ids = lambda html: {found.get("id") for _, found in Parsed(html).elements}  # noqa: E731
    panels = {"table", "lens", "surprisal"}
    assert panels <= ids(page_of(PLAIN, attention))
    assert not panels & ids(
        page_of(
            PLAIN,
            matrices(1, 2, 1),
            heads=None,
            lens=None,
            checks=[],
            text=replace(text_of([b"x"]), nats_per_token=None, perplexity=None, bits_per_byte=None),
        )
    )


def test_what_does_not_hold_is_said():
    checks = [
        Check(name="rows sum to 1", value=2e-7, limit=1e-5),
        Check(name="the future", value=0.25, limit=0.0, note="<i>"),
    ]
    html = page_of(PLAIN, matrices(1, 1, 16), checks=checks)
    assert Parsed(html).all("span", **{"class": "limit"}) == ["2.0e-07 ≤ 1e-05", "2.5e-01 > 0"]
    assert len(Parsed(html).all("li", **{"class": "fails"})) == 1
