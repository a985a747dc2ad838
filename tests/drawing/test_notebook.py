"""The page in a notebook's output: heads are clickable, and nothing is fetched."""

from html.parser import HTMLParser

import pytest

import tgen
from tgen.errors import UsageError

By = pytest.importorskip("selenium.webdriver.common.by", reason="selenium is not installed").By
# What nbconvert writes around the output of a cell.
NOTEBOOK = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>Notebook</title></head><body>
<div class="jp-OutputArea-output" data-mime-type="text/html">{}</div></body></html>"""


@pytest.fixture
def page(trained):
    return tgen.load(trained, threads=1).inspect("What is the king?")


def test_notebook_shows_the_document_of_the_command(page, inspect):
    document = inspect("--html", "-").stdout.decode()
    frames = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: frames.append((tag, dict(attrs)))
    parser.feed(page._repr_html_())
    ((tag, attributes),) = frames
    assert (tag, attributes["srcdoc"]) == ("iframe", document)
    assert attributes["sandbox"] == "allow-scripts"
    assert page.html == document
    assert len(repr(page)) < 100


def test_heads_are_clickable_in_a_notebook_without_the_network(page, browser, tmp_path):
    (tmp_path / "notebook.html").write_text(NOTEBOOK.format(page._repr_html_()), encoding="utf-8")
    browser.get_log("browser")
    browser.get((tmp_path / "notebook.html").as_uri())
    browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
    try:
        for layer, head in ((0, 1), (1, 0)):
            selector = f"button[data-layer='{layer}'][data-head='{head}']"
            browser.find_element(By.CSS_SELECTOR, selector).click()
            weight = browser.find_element(By.ID, "weight")
            shown = [weight.get_attribute(f"data-{name}") for name in ("layer", "head")]
            assert shown == [str(layer), str(head)]
        assert browser.execute_script("return window.origin") == "null"  # not the notebook's
        fetched = browser.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        assert [url for url in fetched if not url.startswith("data:")] == []
    finally:
        browser.switch_to.default_content()
    assert browser.get_log("browser") == []


def test_options_select_heads(trained):
    model = tgen.load(trained, threads=1)
    page = model.inspect("What is the king?", layer="-1", head="0")
    assert page.html.count('type="application/octet-stream"') == 1
    with pytest.raises(UsageError, match="measure: invalid value"):
        model.inspect("a b", measure="values")
    with pytest.raises(UsageError, match="text: invalid value 5"):
        model.inspect(5)
    with pytest.raises(UsageError, match="layer: invalid value 0"):
        model.inspect("a b", layer=0)
    with pytest.raises(UsageError, match="the prompt is empty"):
        model.inspect("")
