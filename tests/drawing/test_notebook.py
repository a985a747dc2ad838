"""The page in a notebook's output: heads are clickable, and nothing is fetched."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import tgen
from tgen.checkpoint import model_dir
from tgen.drawing.view_options import View
from tgen.errors import UsageError
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import make_vocabulary

By = pytest.importorskip("selenium.webdriver.common.by", reason="selenium is not installed").By
# What nbconvert writes around the output of a cell.
NOTEBOOK = """<!DOCTYPE html><html><head><meta charset="utf-8"><title>Notebook</title></head><body>
<div class="jp-OutputArea-output" data-mime-type="text/html">{}</div></body></html>"""


@pytest.fixture(scope="module")
def model(trained):
    return tgen.load(trained, threads=1)


@pytest.fixture
def page(model):
    return model.inspect("What is the king?")


@pytest.fixture(scope="module")
def inspector(trained):
    return Inspector(model_dir.load(trained), b"What is the king?")


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


@pytest.mark.parametrize("view", sorted(set(View) - {View.training, View.sources}))
def test_every_view_has_data_text_and_html(model, inspect, view):
    options = {"patch": "What is the king!", "contrast": "b"} if view == View.patch else {}
    shown = model.inspect("What is the king?", view=view, **options)
    flags = [f"--{name}={value}" for name, value in options.items()]
    selected = ["--layer=all", "--head=all"] if view == "attention" else []
    record = json.loads(inspect(f"--view={view}", *selected, *flags, "--json").stdout)
    assert shown.data["ids"] == [token["id"] for token in record["text"]]
    assert b"".join(shown.data["text"]) == b"What is the king?"
    value = shown.data[view.value]
    assert len(value) == len(record[view])
    if isinstance(value, dict):
        assert value.keys() == record[view].keys()
    if view in ("attention", "rollout"):
        assert all(one["weights"].shape == 2 * (len(record["text"]),) for one in value)
    html = shown._repr_html_()
    assert html.startswith("<iframe" if view == "attention" else "<")
    assert "<script" not in html
    assert str(shown)
    assert "\x1b" not in str(shown) + html


def test_sources_are_those_of_the_command(model, inspect):
    text = "What is the king? " * 100  # longer than the context
    shown = model.inspect(text, view="sources", top=2)
    record = json.loads(inspect("--view=sources", "--top=2", "--json", prompt=text).stdout)
    (passage, _), listed = shown.data["sources"]["passages"], record["passages"]
    assert passage["text"].decode() == listed[0]["text"]
    assert passage["places"] == [
        place | {name: place[name].encode() for name in ("before", "after")}
        for place in listed[0]["places"]
    ]
    assert listed[0]["text"] in str(shown)
    assert "<pre" in shown._repr_html_()


def test_data_are_the_numbers_of_the_reports(model, inspector):
    weights = model.inspect("What is the king?").data["attention"][1]["weights"]
    [report] = inspector.attention([(0, 1)])
    assert np.array_equal(weights, report.weights)
    why = model.inspect("What is the king?", view="why", target="king", keys="2:4").data["why"]
    assert sum(one["logit_without"] is not None for one in why["tokens"]) == 2
    sampled = model.inspect("What is the king?", view="predict", top_p=0.5, top=3).data["predict"]
    assert sum(one["final"] for one in sampled["candidates"]) <= 1 + 1e-9
    assert [step.sampler for step in sampled["steps"]] == ["top_k", "top_p", "temperature"]
    printed = str(model.inspect("What is the king?", view="tokens"))
    assert "bits: surprisal" in printed
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_sliders_of_the_page_start_at_the_given_settings(model, inspect, inspector):
    flags = ["--temperature", "0.5", "--top-k", "7"]
    document = inspect("--html", "-", *flags).stdout.decode()
    assert model.inspect("What is the king?", temperature=0.5, top_k=7).html == document
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', document)
    data = json.loads(text)["next"]
    assert data["settings"] == {"temperature": 0.5, "top_k": 7, "top_p": 1.0, "min_p": 0.0}
    assert (data["first"], len(data["positions"])) == (0, len(inspector.ids))
    logits = make_vocabulary(inspector.bundle).only_tokens(inspector.next_logits()[None])[0]
    assert data["positions"][-1]["highest"] == pytest.approx(logits.max(), abs=1e-5)
    with pytest.raises(UsageError, match="typical_p: no effect on this view"):
        model.inspect("What is the king?", typical_p=0.5)


def test_hostile_text_stays_text(model):
    text = "</pre><script>a</script>\x1b[3m"
    for view in ("tokens", "predict", "why", "rollout"):
        html = model.inspect(text, view=view)._repr_html_()
        assert "<script" not in html
        assert "\x1b" not in html


def test_positions_and_the_model_need_no_text(model):
    assert model.inspect(view="positions").data["positions"][0]["values"].shape[1] > 1
    assert list(model.inspect(view="model").data) == ["model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(view="nothing"), "view: invalid value 'nothing'"),
        (dict(view="training"), "view: invalid value 'training'"),
        (dict(view="tokens", temperature=1.0), "temperature: no effect on this view"),
        (dict(query="1"), "query: no effect on the page"),
        (dict(view="predict", quary="1"), "unknown option quary"),
        (dict(view="predict", top_p=3), "top_p: invalid value 3"),
        (dict(view="lens", query="9:"), "query: 9: is empty"),
        (dict(text=None), "text: invalid value None"),
    ],
)
def test_bad_options_are_errors(model, options, message):
    with pytest.raises(UsageError, match=message):
        model.inspect(**{"text": "What is"} | options)


def test_options_select_heads(model):
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
