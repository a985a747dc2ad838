"""The interactive page: what is in the file, and what a real browser makes of it."""

import base64
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tgen.cli.views.labels import label
from tgen.cli.views.page import page, page_bytes
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
    numbers: dict[str, Any] = dict.fromkeys(
        ("entropy", "effective_keys", "normalised_entropy", "confidence", "distance", "previous",
         "first", "duplicate", "duplicate_control", "induction", "induction_control"), 0.125,
    )  # fmt: skip
    reports = [
        HeadReport(
            layer=layer,
            head=head,
            kv_head=head,
            role="induction" if head else "",
            self=(7 * layer + 3 * head) % 10 / 10,
            text_induction=None,
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
        baseline={"self": 0.1},
        n_rows=9,
        block_length=4,
        seeds=2,
        repeat_gain=None,
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium, quite by itself."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("NO BROWSER: the page is only tested as a file; apt install chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,900",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with selenium.Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[tuple[Any, list[AttentionReport]]]:
    """A page of hostile tokens; whatever is done with it, nothing may be reported afterwards."""
    from selenium.webdriver import ActionChains

    chains = ActionChains(browser)
    chains.w3c_actions.pointer_action.move_to_location(0, 0)  # not where the last test left it
    chains.perform()
    browser.get_log("browser")
    reports = matrices(2, 3, len(HOSTILE))
    (tmp_path / "page.html").write_text(page_of(HOSTILE, reports), encoding="utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    yield browser, reports
    assert browser.get_log("browser") == []
    assert browser.title == "a model · tgen inspect"


@pytest.fixture
def read(opened: Any) -> Callable[[], tuple[int, int, int, int]]:
    """What the page reads out, after comparing it with the matrix."""
    browser, reports = opened

    def check() -> tuple[int, int, int, int]:
        said = browser.execute_script("return {...document.getElementById('weight').dataset}")
        where = [int(said[name]) for name in ("layer", "head", "query", "key")]
        layer, head, query, key = where
        (report,) = [r for r in reports if (r.layer, r.head) == (layer, head)]
        assert abs(float(said["weight"]) - min(report.weights[query, key], 1)) <= CLOSE
        assert said["masked"] == ("true" if key > query else "false")
        return layer, head, query, key

    return check


def test_a_browser_shows_a_head_and_what_a_token_looks_at(opened, read):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    browser, reports = opened
    assert read() == (0, 0, 15, int(reports[0].weights[15].argmax()))
    browser.find_element(By.CSS_SELECTOR, "button[data-layer='1'][data-head='2']").click()
    weights = reports[5].weights
    assert read()[:2] == (1, 2)
    chip = browser.find_element(By.CSS_SELECTOR, "#strip button[data-token='7']")
    ActionChains(browser).move_to_element(chip).perform()
    assert read() == (1, 2, 7, int(weights[7].argmax()))
    chip.click()
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert read()[2] == 7
    browser.find_element(By.CSS_SELECTOR, "input[value='to']").click()
    ActionChains(browser).move_to_element(chip).perform()
    assert read() == (1, 2, 7 + int(weights[7:, 7].argmax()), 7)
    chips = browser.execute_script(
        "return [...document.querySelectorAll('#strip button')].map((chip) => chip.textContent)"
    )
    assert chips == [label(token) for token in HOSTILE]


def test_a_browser_reads_the_cell_under_the_pointer(opened, read):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    browser, _ = opened
    canvas = browser.find_element(By.ID, "matrix")
    side = canvas.size["width"]
    seen = set()
    for across, down in ((-0.2, 0.3), (0.0, 0.4), (0.2, 0.45), (0.4, -0.2), (0.1, 0.1)):
        ActionChains(browser).move_to_element_with_offset(
            canvas, int(across * side), int(down * side)
        ).perform()
        _, _, query, key = read()
        assert np.sign(query - key) == np.sign(down - across)
        seen.add((query, key))
        shown = browser.find_element(By.ID, "weight").text
        assert (shown == "—") == (key > query)
    assert len(seen) == 5
    assert any(key > query for query, key in seen)


def test_a_browser_follows_the_keyboard(opened, read):
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.by import By

    browser, _ = opened
    for _ in range(10):  # everything is reached by Tab: radio buttons and tables come later
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element.get_attribute("id") == "matrix":
            break
    canvas = browser.switch_to.active_element
    assert canvas.get_attribute("id") == "matrix"
    layer, head, query, key = read()
    canvas.send_keys(Keys.ARROW_UP)
    assert read() == (layer, head, query - 1, min(key, query - 1))
    canvas.send_keys(Keys.HOME)
    for _ in range(20):
        canvas.send_keys(Keys.ARROW_LEFT)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert read() == (layer, head, query - 1, 1)
    canvas.send_keys(Keys.SHIFT, Keys.ARROW_DOWN)
    canvas.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT)
    assert read() == (layer + 1, head + 1, query - 1, 1)
    chosen = browser.find_elements(By.CSS_SELECTOR, "#thumbnails [aria-pressed='true']")
    assert [chip.get_attribute("data-head") for chip in chosen] == [str(head + 1)]
    chosen[0].send_keys(Keys.ARROW_LEFT)
    assert read()[:2] == (layer + 1, head)
    said = browser.find_element(By.ID, "reading")
    assert said.get_attribute("aria-live") == "polite"
    assert label(HOSTILE[1]) in said.text


def test_a_browser_sorts_the_heads(opened, read):
    from selenium.webdriver.common.by import By

    browser, reports = opened

    def column() -> list[float]:
        cells = browser.find_elements(By.CSS_SELECTOR, "#table tbody td:nth-child(6)")
        return [float(cell.text) for cell in cells]

    title = browser.find_element(By.XPATH, "//table[@id='table']//button[.='self']")
    assert column() != sorted(column(), reverse=True)
    title.click()
    assert column() == sorted(column(), reverse=True)
    title.click()
    assert column() == sorted(column())
    assert len(column()) == len(reports)
    browser.find_element(By.CSS_SELECTOR, "#table tbody tr:last-child button").click()
    assert read()[:2] == (1, 0)


def test_a_browser_runs_the_pages_own_scripts_and_no_other(opened):
    browser, _ = opened
    assert browser.title == "a model · tgen inspect"
    browser.execute_script(
        "const script = document.createElement('script');"
        "script.textContent = \"document.title = 'bad'\"; document.body.append(script);"
    )
    assert browser.title == "a model · tgen inspect"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
