"""The HTML page in a browser: what it shows equals the reports."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pages import HOSTILE, MAX_ERROR, sample_attention, sample_heads, sample_page
from tgen.config import SamplingConfig
from tgen.drawing.head_tables import heads_table
from tgen.drawing.terminal_text import label
from tgen.generation.distribution import logits_record, sampling_distribution
from tgen.generation.vocabulary import Vocabulary
from tgen.reports.inspection import AttentionReport

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
ActionChains, By, Keys = selenium.ActionChains, selenium.common.by.By, selenium.Keys


def show(browser: Any, folder: Path, html: str) -> None:
    (folder / "page.html").write_text(html, encoding="utf-8")
    browser.get((folder / "page.html").as_uri())


def titles(browser: Any) -> list[str]:
    """Return the column names of the heads table."""
    return [title.text for title in browser.find_elements(By.CSS_SELECTOR, "#table thead button")]


def column(browser: Any, name: str) -> list[str]:
    """Return the cells of a column of the heads table, from top to bottom, once it is drawn."""
    WebDriverWait(browser, 20).until(lambda _: name in titles(browser))
    selector = f"#table tbody td:nth-child({titles(browser).index(name) + 1})"
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, selector)]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[tuple[Any, list[AttentionReport]]]:
    """Open a page of hostile tokens; afterwards the browser log must be empty."""
    chains = ActionChains(browser)
    chains.w3c_actions.pointer_action.move_to_location(0, 0)  # away from the last test's position
    chains.perform()
    browser.get_log("browser")
    reports = sample_attention(2, 3, len(HOSTILE))
    show(browser, tmp_path, sample_page(HOSTILE, reports))
    yield browser, reports
    assert browser.get_log("browser") == []
    assert browser.title == "a model · tgen inspect"


@pytest.fixture
def read(opened: Any) -> Callable[[], tuple[int, int, int, int]]:
    """Return a function for the shown layer, head, query and key; it compares the weight."""
    browser, reports = opened

    def check() -> tuple[int, int, int, int]:
        shown = browser.execute_script("return {...document.getElementById('weight').dataset}")
        layer, head, query, key = (int(shown[name]) for name in ("layer", "head", "query", "key"))
        (report,) = [r for r in reports if (r.layer, r.head) == (layer, head)]
        assert abs(float(shown["weight"]) - min(report.weights[query, key], 1)) <= MAX_ERROR
        assert shown["masked"] == ("true" if key > query else "false")
        return layer, head, query, key

    return check


def test_clicking_selects_heads_and_tokens(opened, read):
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


def test_cells_before_a_sliding_window_are_masked(browser, tmp_path):
    mask = np.triu(np.ones((16, 16), np.float32), -3)
    reports = [replace(r, weights=r.weights * mask, window=4) for r in sample_attention(1, 2, 16)]
    reports[1] = replace(sample_attention(1, 2, 16)[1], window=None)
    heads = sample_heads(1, 2)
    heads = replace(heads, window_baseline=heads.baseline | {"previous": 0.25})
    show(browser, tmp_path, sample_page(HOSTILE, reports, heads=heads))
    about = browser.find_element(By.ID, "about")
    assert "sliding window: 4 tokens" in about.text
    assert "before its sliding window" in browser.find_element(By.CLASS_NAME, "mask-legend").text
    n_opaque = (
        "const canvas = document.querySelector(\"[data-head='{}'] canvas\");"
        "const {{ data }} = canvas.getContext('2d').getImageData(0, 0, 16, 16);"
        "return data.filter((value, i) => i % 4 === 3 && value).length"
    )
    assert browser.execute_script(n_opaque.format(0)) == 1 + 2 + 3 + 13 * 4
    assert browser.execute_script(n_opaque.format(1)) == 16 * 17 // 2
    canvas = browser.find_element(By.ID, "matrix")
    canvas.send_keys(Keys.HOME)
    weight = browser.find_element(By.ID, "weight")
    assert (weight.get_attribute("data-key"), weight.get_attribute("data-masked")) == (
        "12",
        "false",
    )
    side = canvas.size["width"]
    ActionChains(browser).move_to_element_with_offset(canvas, -side // 4, side // 3).perform()
    assert weight.text == "—"
    assert "it is before the sliding window" in browser.find_element(By.ID, "cell-text").text
    rows = browser.find_elements(By.CSS_SELECTOR, "#table tfoot tr")
    assert [row.find_element(By.TAG_NAME, "th").text for row in rows] == [
        "uniform",
        "uniform, window",
    ]
    assert "0.25" in rows[1].text


def test_pointer_shows_the_cell_under_it(opened, read):
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


def test_arrow_keys_move_the_selection(opened, read):
    browser, _ = opened
    for _ in range(10):  # the matrix is among the first Tab stops
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
    status = browser.find_element(By.ID, "cell-text")
    assert status.get_attribute("aria-live") == "polite"
    assert label(HOSTILE[1]) in status.text


def test_home_end_and_page_keys_move_the_selection(opened, read):
    browser, _ = opened
    canvas = browser.find_element(By.ID, "matrix")
    for key, cell in (
        (Keys.END, (15, 15)),  # the last visible key is the query itself
        (Keys.PAGE_UP, (5, 5)),
        (Keys.HOME, (5, 0)),
        (Keys.PAGE_UP, (0, 0)),
        (Keys.PAGE_DOWN, (10, 0)),
        (Keys.END, (10, 10)),
        (Keys.PAGE_DOWN, (15, 10)),
    ):
        canvas.send_keys(key)
        assert read()[2:] == cell
    canvas.send_keys(Keys.SHIFT, Keys.HOME)
    assert read()[2:] == (15, 10)
    note = browser.find_element(By.ID, "keys").text
    assert all(name in note for name in ("Home", "End", "PgUp", "PgDn"))


def test_small_weights_keep_distinct_digits_and_zero_becomes_a_bound(browser, tmp_path):
    (report,) = sample_attention(1, 1, 16)
    report.weights[15] = 0
    report.weights[15, :5] = 0.93, 0.0012, 0.00041, 0.00002, 0.000004
    show(browser, tmp_path, sample_page(HOSTILE, [report]))
    canvas = browser.find_element(By.ID, "matrix")
    shown = []
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 4):
        canvas.send_keys(key)
        shown.append(browser.find_element(By.ID, "weight").text)
    assert shown == ["0.9300", "0.0012", "0.00041", "0.00002", "< 0.00001"]
    rest = browser.find_element(By.CSS_SELECTOR, "#top .rest").text
    assert rest.split("\n") == ["10 others, total", "< 0.00008"]


@pytest.mark.parametrize("direction", ["from", "to"])
def test_weights_not_listed_are_summed(opened, direction):
    browser, reports = opened
    browser.find_element(By.CSS_SELECTOR, f"input[value='{direction}']").click()
    browser.find_element(By.CSS_SELECTOR, "#strip button[data-token='8']").click()
    weights = reports[0].weights[8, :9] if direction == "from" else reports[0].weights[8:, 8]
    rest = browser.find_element(By.CSS_SELECTOR, "#top .rest").text
    name, value = rest.replace("\u2007", "").split("\n")
    assert name == f"{len(weights) - 6} others, total"
    assert abs(float(value) - np.sort(weights)[:-6].sum()) <= 0.00005 + 3 * MAX_ERROR


def test_clicking_a_column_sorts_the_heads(opened, read):
    browser, reports = opened

    def self_weights() -> list[float]:
        return [float(text) for text in column(browser, "self")]

    title = browser.find_element(By.XPATH, "//table[@id='table']//button[.='self']")
    assert self_weights() != sorted(self_weights(), reverse=True)
    title.click()
    assert self_weights() == sorted(self_weights(), reverse=True)
    title.click()
    assert self_weights() == sorted(self_weights())
    assert len(self_weights()) == len(reports)
    browser.find_element(By.CSS_SELECTOR, "#table tbody tr:last-child button").click()
    assert read()[:2] == (1, 0)


def test_scores_show_their_control_and_sort_by_the_difference(opened):
    browser, _ = opened
    assert column(browser, "duplicate") == ["0.98/0.03"] * 6
    scores = ["0.90/0.85", "0.80/0.68", "0.70/0.51", "0.60/0.34", "0.50/0.17", "0.40/0.00"]
    assert column(browser, "induction") == scores
    browser.find_element(By.XPATH, "//table[@id='table']//button[.='induction']").click()
    assert column(browser, "induction") == scores[::-1]
    shades = browser.execute_script(
        "return [...document.querySelectorAll('#table tbody tr:first-child .share')]"
        ".map((cell) => Number(cell.style.getPropertyValue('--share')))"
    )
    assert np.allclose(shades[-3:-1], [0.95, 0.40])
    uniform = browser.find_elements(By.CSS_SELECTOR, "#table tfoot td")
    assert [cell.text for cell in uniform][-4:] == ["0.06", "0.06", "", ""]


def test_columns_have_the_terminals_names(browser, tmp_path):
    report = sample_heads(2, 3)
    heads = [replace(head, ablation_cost=0.5) for head in report.heads]
    report = replace(report, heads=heads, loss=3.25)
    show(browser, tmp_path, sample_page(HOSTILE, sample_attention(2, 3, 16), heads=report))
    names = "head role Δloss keys dist self prev first duplicate induction text distances"
    assert titles(browser) == names.split()
    terminal = heads_table(report, width=None)[0].plain.split()
    assert set(titles(browser)) == set(terminal)


def test_notes_explain_the_head_metrics(browser, tmp_path):
    report = sample_heads(2, 3)
    show(browser, tmp_path, sample_page(HOSTILE, sample_attention(2, 3, 16), heads=report))
    note = browser.find_element(By.ID, "table-note")
    assert "all queries after the first (9)" in note.text
    assert "2 random texts of 4 tokens" in note.text
    assert "sampled from all 300 tokens" in note.text
    assert "0.25 nats/token more" in note.text
    assert "too small" not in note.text
    assert "no token repeats" not in note.text
    scores = ("duplicate", "induction", "duplicate_control", "induction_control", "text_induction")
    heads = [replace(head, **dict.fromkeys(scores)) for head in report.heads]
    report = replace(report, heads=heads, block_length=0, repeat_gain=None, loss=3.25)
    show(browser, tmp_path, sample_page(HOSTILE, sample_attention(2, 3, 16), heads=report))
    assert not {"duplicate", "induction", "text"} & set(titles(browser))
    note = browser.find_element(By.ID, "table-note")
    assert "random texts" not in note.text
    assert "a sliding window or the vocabulary is too small" in note.text
    assert "no token repeats" in note.text
    assert "3.250 nats/token" in note.text


def test_first_column_explains_that_it_counts_all_queries(opened):
    browser, _ = opened
    about = browser.execute_script(
        "const names = [...document.querySelectorAll('#columns dt')];"
        "return names.find((name) => name.textContent === 'first').nextSibling.textContent"
    )
    assert "over all queries" in about


def test_policy_blocks_scripts_that_are_not_the_pages_own(opened):
    browser, _ = opened
    assert browser.title == "a model · tgen inspect"
    browser.execute_script(
        "const script = document.createElement('script');"
        "script.textContent = \"document.title = 'bad'\"; document.body.append(script);"
    )
    assert browser.title == "a model · tgen inspect"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def next_tokens(size: int, n: int) -> tuple[list[Any], dict[str, Any]]:
    """Return random logits of positions, and the page's data of the last of them."""
    random = np.random.default_rng(3)
    logits = [(random.normal(size=size) * 3).astype(np.float32) for _ in range(n)]
    records = [logits_record(row) for row in logits]
    ids = {i for one in records for i in one.get("ids", range(size))}
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 1.0, "min_p": 0.0}
    labels = {i: label(HOSTILE[i % len(HOSTILE)]) for i in ids}
    first = len(HOSTILE) - n
    return logits, {"first": first, "labels": labels, "positions": records, "settings": settings}


@pytest.mark.parametrize("size", [300, 20_000])
def test_sliders_show_the_probabilities_of_the_samplers(browser, tmp_path, size):
    logits, data = next_tokens(size, 4)
    browser.get_log("browser")
    show(browser, tmp_path, sample_page(HOSTILE, sample_attention(1, 1, 16), next_tokens=data))
    move = (
        "const input = document.getElementById(arguments[0]);"
        "input.value = arguments[1]; input.dispatchEvent(new Event('input'))"
    )
    read_rows = (
        "return [...document.querySelectorAll('#next tbody tr')].map((row) =>"
        "[Number(row.dataset.id),"
        "...[...row.querySelectorAll('td[data-share]')].map((cell) => Number(cell.dataset.share)),"
        "row.children[2].textContent])"
    )
    settings = dict(data["settings"])
    for name, position, value in [
        ("temperature", "1.25", 1.25),
        ("top_p", "0.8", 0.8),
        ("min_p", "0.05", 0.05),
        ("top_k", "3", 3),
        ("temperature", "0", 0.0),
    ]:
        browser.execute_script(move, name, position)
        settings[name] = value
        assert browser.find_element(By.CSS_SELECTOR, f"output[for={name}]").text == f"{value:g}"
        expected = sampling_distribution(logits[-1], [0], SamplingConfig(**settings), Vocabulary())
        by_id = {one.id: one for one in expected.candidates}
        rows = browser.execute_script(read_rows)
        assert len(rows) == 12
        for i, model, sampled, text in rows:
            assert abs(model - by_id[i].probability) <= 1e-3
            assert abs(sampled - by_id[i].final) <= 1e-3
            cut = by_id[i].removed_by.replace("_", "-")
            assert text.startswith(f"cut by {cut}") == bool(cut)
        steps = browser.find_element(By.ID, "next-steps").text.splitlines()
        assert [line.split()[0].replace("-", "_") for line in steps] == [
            step.sampler for step in expected.steps
        ]
    assert browser.get_log("browser") == []
    assert browser.title == "a model · tgen inspect"


def test_sliders_follow_the_selected_position(browser, tmp_path):
    logits, data = next_tokens(300, 4)
    show(browser, tmp_path, sample_page(HOSTILE, sample_attention(1, 1, 16), next_tokens=data))
    chip = browser.find_element(By.CSS_SELECTOR, "#strip button[data-token='13']")
    chip.click()
    best = browser.find_element(By.CSS_SELECTOR, "#next tbody tr").get_attribute("data-id")
    assert int(best) == int(logits[1].argmax())
    browser.find_element(By.CSS_SELECTOR, "#strip button[data-token='11']").click()
    assert "the positions from 12 on" in browser.find_element(By.ID, "next-about").text
    assert not browser.find_element(By.ID, "sliders").is_displayed()
    slider = browser.find_element(By.ID, "temperature")
    chip.click()
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.find_element(By.CSS_SELECTOR, "output[for=temperature]").text == "0.81"
    assert slider.get_attribute("aria-valuetext") == "0.81"
