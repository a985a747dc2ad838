"""The interactive page in a real browser: what it reads out is compared with the matrix."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pages import CLOSE, HOSTILE, heads_of, matrices, page_of
from tgen.cli.inspect.tables.heads import heads_view
from tgen.cli.render.token_labels import label
from tgen.reports import AttentionReport

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
ActionChains, By, Keys = selenium.ActionChains, selenium.common.by.By, selenium.Keys


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium, quite by itself."""
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
    with selenium.Chrome(options=options, service=selenium.ChromeService(driver)) as chrome:
        yield chrome


def show(browser: Any, folder: Path, html: str) -> None:
    (folder / "page.html").write_text(html, encoding="utf-8")
    browser.get((folder / "page.html").as_uri())


def titles(browser: Any) -> list[str]:
    """The columns of the table of heads."""
    return [title.text for title in browser.find_elements(By.CSS_SELECTOR, "#table thead button")]


def column(browser: Any, name: str) -> list[str]:
    """What the table of heads shows under a title, from top to bottom, once it is drawn."""
    WebDriverWait(browser, 20).until(lambda _: name in titles(browser))
    place = f"#table tbody td:nth-child({titles(browser).index(name) + 1})"
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, place)]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[tuple[Any, list[AttentionReport]]]:
    """A page of hostile tokens; whatever is done with it, nothing may be reported afterwards."""
    chains = ActionChains(browser)
    chains.w3c_actions.pointer_action.move_to_location(0, 0)  # not where the last test left it
    chains.perform()
    browser.get_log("browser")
    reports = matrices(2, 3, len(HOSTILE))
    show(browser, tmp_path, page_of(HOSTILE, reports))
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


def test_a_browser_leaps_to_a_rows_ends_and_over_ten_queries(opened, read):
    browser, _ = opened
    canvas = browser.find_element(By.ID, "matrix")
    for key, place in (
        (Keys.END, (15, 15)),  # the last key in sight is the query itself
        (Keys.PAGE_UP, (5, 5)),
        (Keys.HOME, (5, 0)),
        (Keys.PAGE_UP, (0, 0)),
        (Keys.PAGE_DOWN, (10, 0)),
        (Keys.END, (10, 10)),
        (Keys.PAGE_DOWN, (15, 10)),
    ):
        canvas.send_keys(key)
        assert read()[2:] == place
    canvas.send_keys(Keys.SHIFT, Keys.HOME)
    assert read()[2:] == (15, 10)
    note = browser.find_element(By.ID, "keys").text
    assert all(name in note for name in ("Home", "End", "PgUp", "PgDn"))


def test_a_browser_tells_small_weights_apart_and_none_from_nothing(browser, tmp_path):
    (report,) = matrices(1, 1, 16)
    report.weights[15] = 0
    report.weights[15, :5] = 0.93, 0.0012, 0.00041, 0.00002, 0.000004
    show(browser, tmp_path, page_of(HOSTILE, [report]))
    canvas = browser.find_element(By.ID, "matrix")
    said = []
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 4):
        canvas.send_keys(key)
        said.append(browser.find_element(By.ID, "weight").text)
    assert said == ["0.9300", "0.0012", "0.00041", "0.00002", "< 0.00001"]
    rest = browser.find_element(By.CSS_SELECTOR, "#top .rest").text
    assert rest.split("\n") == ["10 others, together", "< 0.00008"]


@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_browser_sums_up_what_is_not_listed(opened, direction):
    browser, reports = opened
    browser.find_element(By.CSS_SELECTOR, f"input[value='{direction}']").click()
    browser.find_element(By.CSS_SELECTOR, "#strip button[data-token='8']").click()
    weights = reports[0].weights[8, :9] if direction == "from" else reports[0].weights[8:, 8]
    rest = browser.find_element(By.CSS_SELECTOR, "#top .rest").text
    name, value = rest.replace("\u2007", "").split("\n")
    assert name == f"{len(weights) - 6} others, together"
    assert abs(float(value) - np.sort(weights)[:-6].sum()) <= 0.00005 + 3 * CLOSE


def test_a_browser_sorts_the_heads(opened, read):
    browser, reports = opened

    def selves() -> list[float]:
        return [float(said) for said in column(browser, "self")]

    title = browser.find_element(By.XPATH, "//table[@id='table']//button[.='self']")
    assert selves() != sorted(selves(), reverse=True)
    title.click()
    assert selves() == sorted(selves(), reverse=True)
    title.click()
    assert selves() == sorted(selves())
    assert len(selves()) == len(reports)
    browser.find_element(By.CSS_SELECTOR, "#table tbody tr:last-child button").click()
    assert read()[:2] == (1, 0)


def test_a_browser_shows_a_score_beside_its_control_and_goes_by_the_difference(opened):
    browser, _ = opened
    assert column(browser, "dup") == ["0.98/0.03"] * 6
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


def test_a_browser_names_the_columns_as_the_terminal_does(browser, tmp_path):
    report = heads_of(2, 3)
    heads = [replace(head, ablation=0.5) for head in report.heads]
    report = replace(report, heads=heads, loss=3.25)
    show(browser, tmp_path, page_of(HOSTILE, matrices(2, 3, 16), heads=report))
    names = "head role cost keys back self prev first dup induction text near>far"
    assert titles(browser) == names.split()
    terminal = heads_view(report, width=None)[0].plain.split()
    assert set(titles(browser)) == set(terminal)


def test_a_browser_says_what_the_heads_numbers_were_taken_of(browser, tmp_path):
    report = heads_of(2, 3)
    show(browser, tmp_path, page_of(HOSTILE, matrices(2, 3, 16), heads=report))
    note = browser.find_element(By.ID, "table-note")
    assert "9 queries" in note.text
    assert "2 × 4 random tokens" in note.text
    assert "drawn from all 300" in note.text
    assert "0.25 nats a token more" in note.text
    assert "too small" not in note.text
    assert "no token came twice" not in note.text
    scores = ("duplicate", "induction", "duplicate_control", "induction_control", "text_induction")
    heads = [replace(head, **dict.fromkeys(scores)) for head in report.heads]
    report = replace(report, heads=heads, block_length=0, repeat_gain=None, loss=3.25)
    show(browser, tmp_path, page_of(HOSTILE, matrices(2, 3, 16), heads=report))
    assert not {"dup", "induction", "text"} & set(titles(browser))
    note = browser.find_element(By.ID, "table-note")
    assert "random tokens" not in note.text
    assert "the context or the vocabulary is too small" in note.text
    assert "no token came twice" in note.text
    assert "3.250 nats a token" in note.text


def test_a_browser_explains_that_every_query_counts_for_the_first_token(opened):
    browser, _ = opened
    about = browser.execute_script(
        "const names = [...document.querySelectorAll('#columns dt')];"
        "return names.find((name) => name.textContent === 'first').nextSibling.textContent"
    )
    assert "first query counts too" in about


def test_a_browser_runs_the_pages_own_scripts_and_no_other(opened):
    browser, _ = opened
    assert browser.title == "a model · tgen inspect"
    browser.execute_script(
        "const script = document.createElement('script');"
        "script.textContent = \"document.title = 'bad'\"; document.body.append(script);"
    )
    assert browser.title == "a model · tgen inspect"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
