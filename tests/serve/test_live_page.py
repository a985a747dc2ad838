"""The live page in a browser: what it shows equals what the commands and reports say."""

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.command import tgen
from support.servers import ServerProcess, serving
from tgen.checkpoint.model_dir import load
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, SamplingConfig
from tgen.drawing.terminal_text import label
from tgen.engine.base import reset
from tgen.generation.distribution import sampling_distribution
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import LoadedModel, open_model

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
By = selenium.common.by.By

SHIPPED, TEXT, TOP = shipped_model(), "What is", 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(SHIPPED) as process:
        yield process


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return open_model(SHIPPED, EngineOptions(device="cpu", threads=1))


class Page:
    """The page of a server, in a browser."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, fragment: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get_log("browser")
        self.browser.get(f"{self.url}/{fragment}")

    def find(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, is_done: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 900, poll_frequency=0.05).until(lambda _: is_done())

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def write(self, text: str, *, seed: int, n: int = 40) -> None:
        """Type a text and wait for its continuation."""
        self.fill(seed=seed, n=n)
        self.find("prompt").clear()
        self.find("prompt").send_keys(text)
        self.find("continue").click()
        self.wait_for_end()

    def fill(self, *, seed: int, n: int) -> None:
        """Type a seed and a number of tokens, once the page is ready."""
        self.wait(self.find("main").is_displayed)
        for name, value in (("seed", seed), ("max-tokens", n)):
            self.find(name).clear()
            self.find(name).send_keys(str(value))

    def wait_for_end(self) -> None:
        self.wait(lambda: not self.find("stop").is_enabled() and self.find("command").text)

    def command(self) -> list[str]:
        """Return the arguments of the shown command, split by a shell."""
        script = self.find("command").get_property("textContent").removeprefix("tgen ")
        printed = f"printf '%s\\0' {script}"
        out = subprocess.run(["bash", "-c", printed], capture_output=True, check=True).stdout
        return [word.decode() for word in out.split(b"\0")[:-1]]

    def generated(self) -> bytes:
        """Return the generated text: the labels show it."""
        labels = self.run(
            "return [...document.querySelectorAll('#text .chip:not(.prompt)')]"
            ".map((chip) => chip.textContent)"
        )
        marks = str.maketrans({"·": " ", "⏎": "\n"})
        return "".join(labels).translate(marks).encode()

    def set_slider(self, name: str, value: float) -> None:
        self.run(
            "const [name, value] = arguments;"
            "const input = document.getElementById(name); input.value = value;"
            "input.dispatchEvent(new Event('input'));",
            name,
            value,
        )

    def shows_bars(self, sampling: dict[str, Any], position: int) -> bool:
        """Return whether the bars are those of the values at a position."""
        shown = self.run("return {...document.getElementById('bars').dataset}")
        values = json.loads(shown.get("sampling", "{}"))
        return values | sampling == values and shown.get("position") == str(position)

    def bars(self) -> dict[int, float]:
        """Return the shown probabilities by token id."""
        rows = self.run(
            "return [...document.querySelectorAll('#bars li')]"
            ".map((row) => [row.dataset.id, row.dataset.final])"
        )
        return {int(i): float(final) for i, final in rows}


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Page]:
    """Open the page; afterwards there must be no error, and no request to anywhere else."""
    opened = Page(browser, server.url)
    opened.open()
    yield opened
    assert browser.get_log("browser") == []
    requests = opened.run("return performance.getEntries().map((entry) => entry.name)")
    assert all(name.startswith(server.url) for name in requests if "://" in name)


def repeat(page: Page) -> bytes:
    """Return the text of the shown command."""
    command = page.command()
    assert command[:2] == ["generate", "--model"]
    return tgen("generate", "-m", SHIPPED, *command[3:], "--quiet", "--threads", 1).stdout


def test_a_text_streams_and_its_command_repeats_it(page: Page) -> None:
    page.write(TEXT, seed=3)
    assert page.generated().strip() == repeat(page).strip()
    chips = page.all("#text .chip")
    assert len(chips) == 42
    assert "40 tokens" in page.find("status").text


def test_the_command_repeats_prompts_that_a_shell_could_change(page: Page, tmp_path: Path) -> None:
    page.fill(seed=3, n=12)
    for prompt in ("-", "a\0b", "\0", "\ufeffWhat", "it's\té\n", "\x1b[1m\\"):
        page.find("new").click()
        page.run("document.getElementById('prompt').value = arguments[0]", prompt)
        page.find("continue").click()
        page.wait_for_end()
        script = "tgen() { printf '%s\\0' \"$@\" >arguments; cat >stdin; }; "
        script += page.find("command").get_property("textContent")
        subprocess.run(["bash", "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, check=True)
        words = (tmp_path / "arguments").read_bytes().decode().split("\0")[:-1]
        stdin = (tmp_path / "stdin").read_bytes()
        folder = SHIPPED.parent.parent  # where --model finds it
        done = tgen(*words, "--quiet", "--threads", 1, stdin=stdin, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert page.generated().strip() == done.stdout.strip(), prompt


def test_a_branch_of_a_chat_keeps_its_control_tokens(browser: Any, chat_model: Path) -> None:
    with serving(chat_model) as server:
        page = Page(browser, server.url)
        page.open()
        page.fill(seed=3, n=8)

        def say(text: str, *, n_branches: int) -> None:
            page.find("prompt").send_keys(text)
            page.find("continue").click()
            page.wait(lambda: len(page.all(".branch")) == n_branches)
            page.wait(lambda: not page.find("stop").is_enabled())

        say("What is", n_branches=1)
        say("Why", n_branches=2)
        prompt = [chip.text for chip in page.all("#text .chip.prompt")]
        assert prompt.count("<|im_start|>") >= 4
        page.all("#text .chip:not(.prompt)")[2].click()
        page.all("#alternatives button:not([disabled])")[0].click()
        page.wait(lambda: len(page.all(".branch")) == 3)
        page.wait(lambda: not page.find("stop").is_enabled())
        assert [chip.text for chip in page.all("#text .chip.prompt")][: len(prompt)] == prompt
        roles = [item.get_attribute("className") for item in page.all("#messages li")]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert browser.get_log("browser") == []


def test_a_text_that_the_model_has_ended_starts_again(browser: Any, chat_model: Path) -> None:
    with serving(chat_model) as server:
        page = Page(browser, server.url)
        page.open()
        page.fill(seed=19, n=20)
        page.run("document.querySelector('[name=mode][value=text]').click()")
        page.set_slider("top_k", 0)
        page.set_slider("temperature", 1)
        page.find("prompt").send_keys(" ")
        page.find("continue").click()
        page.wait_for_end()
        assert "the text ended" in page.find("status").text
        before = page.generated()
        page.find("continue").click()
        page.wait(lambda: len(page.all(".branch")) == 2)
        page.wait(lambda: not page.find("stop").is_enabled())
        assert page.generated() == before
        assert [branch.text for branch in page.all(".branch")] == ["blank text seed 19"] * 2


def test_the_command_names_the_dtype_of_the_server(browser: Any) -> None:
    with serving(SHIPPED, "--dtype", "int4") as server:
        page = Page(browser, server.url)
        page.open()
        page.write(TEXT, seed=3)
        assert page.command()[-2:] == ["--dtype", "int4"]
        assert page.generated().strip() == repeat(page).strip()


def test_numbers_out_of_range_start_nothing(page: Page) -> None:
    page.wait(page.find("main").is_displayed)
    for name, value in (("max-tokens", "0"), ("max-tokens", "2.5"), ("seed", "9007199254740993")):
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)
        page.find("continue").click()
        assert page.find("status").text == ""
        assert page.all(".branch") == []


def test_a_click_on_an_alternative_branches_and_the_command_repeats_the_branch(page: Page) -> None:
    page.write(TEXT, seed=3)
    page.all("#text .chip")[7].click()
    page.all("#alternatives button:not([disabled])")[1].click()
    page.wait(lambda: len(page.all(".branch")) == 2)
    page.wait_for_end()
    assert page.generated().strip() == repeat(page).strip()
    first, second = page.all(".branch")
    assert second.get_attribute("aria-pressed") == "true"
    before = page.generated()
    first.click()
    assert page.generated() != before
    page.all(".branch")[1].click()
    assert page.generated() == before


def test_stop_keeps_what_there_is_and_its_command_repeats_it(browser: Any) -> None:
    with serving(SHIPPED, "--request-timeout", 86_000) as slow:
        page = Page(browser, slow.url)
        page.open()
        page.fill(seed=5, n=500)
        page.run(
            "new MutationObserver(() => { if (document.querySelectorAll('#text .chip').length > 5)"
            " document.getElementById('stop').click(); })"
            ".observe(document.getElementById('text'), { childList: true });"
        )
        page.find("continue").click()
        page.wait_for_end()
        assert page.find("status").text == "stopped"
        assert len(page.all("#text .chip")) < 502
        assert page.generated().strip() == repeat(page).strip()
        slow.wait_until_free()


def test_bars_equal_the_probabilities_of_the_samplers(page: Page, model: LoadedModel) -> None:
    page.write(TEXT, seed=3, n=3)
    page.all("#text .chip")[1].click()
    ids = model.encode(TEXT)
    with model.borrow_engine() as engine:
        reset(engine, 1)
        (logits,) = engine.extend([ids])
    sampling: dict[str, Any] = {}
    for change in (
        {"min_p": 0.2},
        {"min_p": 0, "top_k": 5},
        {"temperature": 0.5, "top_k": 0, "top_p": 0.7},
    ):
        sampling |= change
        for name, value in change.items():
            page.set_slider(name, value)
        page.wait(partial(page.shows_bars, sampling, len(ids)))
        bars = page.bars()
        config = SamplingConfig(**model.defaults | sampling)
        report = sampling_distribution(logits, ids, config, model.vocabulary)
        expected = {one.id: one.final for one in report.candidates}
        assert len(bars) == TOP
        assert max(abs(bars[i] - expected[i]) for i in bars) < 1e-3
        assert len(page.all("#bars .cut")) == sum(value == 0 for value in bars.values())


def test_bars_wait_for_the_logits_of_their_position(page: Page) -> None:
    page.write(TEXT, seed=3, n=3)
    page.all("#text .chip")[1].click()
    page.wait(lambda: page.shows_bars({}, 2))
    position = page.run(
        "document.querySelectorAll('#text .chip')[3].click();"
        "document.getElementById('top_k').dispatchEvent(new Event('input'));"
        "return document.getElementById('bars').dataset.position"
    )
    assert position == "2"


def test_attention_equals_the_inspector(page: Page) -> None:
    page.write(TEXT, seed=3, n=12)
    page.find("tab-attend").click()
    page.wait(lambda: page.all("#looks li") and page.all("#thumbnails button"))
    page.all("#thumbnails button")[8].click()  # layer 1, head 2
    page.wait(lambda: page.find("attend-about").text == "Layer 1, head 2")
    looks = page.run(
        "return [...document.querySelectorAll('#looks li')]"
        ".map((row) => [Number(row.dataset.key), Number(row.dataset.weight)])"
    )
    inspector = Inspector(load(SHIPPED), TEXT.encode() + repeat(page).rstrip(b"\n"))
    (report,) = inspector.attention([(1, 2)])
    assert len(looks) == 8
    for key, weight in looks:
        assert abs(report.weights[-1, key] - weight) < 1e-4
    weights = [weight for _, weight in looks]
    assert weights == sorted(weights, reverse=True)


def test_arrow_keys_move_the_query_of_the_matrix(page: Page) -> None:
    page.write(TEXT, seed=3, n=5)
    page.find("tab-attend").click()
    page.wait(lambda: page.all("#looks li"))
    assert "(6)" in page.find("title-looks").text
    page.find("matrix").send_keys("\ue013")  # up
    page.wait(lambda: "(5)" in page.find("title-looks").text)


def test_parts_sum_to_the_logit_and_the_lens_ends_with_the_prediction(page: Page) -> None:
    page.write(TEXT, seed=3, n=12)
    page.find("tab-inside").click()
    page.wait(lambda: page.all("#inside[aria-busy=false] #why-tokens td"))
    sums = page.run("return {...document.getElementById('why-parts').dataset}")
    assert abs(float(sums["total"]) - float(sums["logit"])) < 1e-4
    assert len(page.all("#lens tbody tr")) == 6  # the embedding and the layers
    text = TEXT.encode() + repeat(page).rstrip(b"\n")
    (best, *_) = Inspector(load(SHIPPED), text).predictions(top=1)
    last_layer = page.all("#lens tbody tr")[-1].find_elements(By.TAG_NAME, "td")
    assert last_layer[-1].text == label(best.text)


# Gives the page the first events of a text, and the others once the test calls `release`.
HOLD_TEXT = """
const original = window.fetch;
const released = new Promise((resolve) => { window.release = resolve; });
window.fetch = async (path, options) => {
  const answer = await original(path, options);
  if (path !== 'tgen/generate') return answer;
  let text = '';
  const oneByOne = new TransformStream({
    async transform(piece, controller) {
      text += piece;
      const events = text.split('\\n\\n');
      text = events.pop();
      for (const event of events) {
        if (/"finish":\\s*"/.test(event)) await released;
        controller.enqueue(`${event}\\n\\n`);
      }
    },
  });
  const body = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(oneByOne)
    .pipeThrough(new TextEncoderStream());
  return new Response(body, { status: answer.status, headers: answer.headers });
};
"""


def test_attention_follows_a_text_while_it_is_written(browser: Any, server: ServerProcess) -> None:
    page = Page(browser, server.url)
    page.open()
    page.write(TEXT, seed=5, n=1)
    page.find("tab-attend").click()
    page.wait(lambda: page.all("#looks li"))
    page.find("new").click()
    assert page.all("#looks li") == []
    page.run(HOLD_TEXT)
    page.fill(seed=5, n=20)
    page.find("prompt").send_keys(TEXT)
    page.find("continue").click()
    page.wait(lambda: page.all("#looks li"))
    assert page.find("stop").is_enabled()
    page.run("window.release()")
    page.wait_for_end()


def test_sources_of_a_clicked_phrase_are_shown_with_their_place(
    browser: Any, indexed_model: Path
) -> None:
    with serving(indexed_model) as server:
        page = Page(browser, server.url)
        page.open()
        page.write("So a rare line", seed=3, n=2)
        page.all("#text .chip")[0].click()
        phrase = page.find("phrase").get_property("value")
        assert phrase.startswith("So a rare")
        page.find("tab-sources").click()
        page.find("phrase").submit()
        page.wait(lambda: page.all("#passages mark"))
        passages = [passage.text.strip() for passage in page.all("#passages q")]
        assert passages == ["rare"]  # the longest of whole words
        assert [place.text for place in page.all("#passages b")][:1] == ["verses.txt:2"]
        assert browser.get_log("browser") == []


PANELS = [
    *("choose-about", "bars", "bars-rest", "attend-about", "thumbnails", "title-looks", "looks"),
    *("inside-about", "lens", "title-why", "why-tokens", "why-parts", "sources-about"),
]


def test_a_new_text_leaves_nothing_of_the_one_before(page: Page) -> None:
    def shown() -> str:
        script = "return arguments[0].map((id) => document.getElementById(id).textContent).join('')"
        text: str = page.run(script, PANELS)
        return text

    page.write(TEXT, seed=3, n=5)
    page.find("tab-attend").click()
    page.wait(lambda: page.all("#looks li") and page.all("#thumbnails button"))
    page.find("tab-inside").click()
    page.wait(lambda: page.all("#why-tokens td"))
    assert all(part in shown() for part in ("Candidates after", "looks at", "Why"))
    page.find("new").click()
    assert shown() == ""
    assert not page.find("matrix").is_displayed()
    page.write(TEXT, seed=4, n=5)
    page.run(
        "document.getElementById('tab-attend').click(); document.getElementById('new').click()"
    )
    page.write(TEXT, seed=4, n=3)  # answers to the views of the text before would be here by now
    page.find("new").click()
    assert shown() == ""


def test_the_chart_has_a_point_per_length(page: Page) -> None:
    page.write(TEXT, seed=3, n=5)
    page.find("tab-time").click()
    page.find("measure").click()
    points = page.wait(lambda: page.find("chart").get_attribute("data-points"))
    assert [point["length"] for point in json.loads(points)] == [16, 32, 64, 128, 256, 512]


def test_a_narrow_window_does_not_scroll_sideways(page: Page) -> None:
    page.write(TEXT, seed=3, n=60)
    size = page.browser.get_window_size()
    try:
        for width in (360, 768):
            page.browser.set_window_size(width, 900)
            for tab in ("attend", "inside", "sources", "time", "choose"):
                page.find(f"tab-{tab}").click()
                assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    finally:
        page.browser.set_window_size(size["width"], size["height"])


def test_the_key_comes_from_the_form_or_from_the_fragment_which_is_cleared(browser: Any) -> None:
    with serving(SHIPPED, key="secret") as server:
        page = Page(browser, server.url)
        page.open("#key=secret&text=What")
        page.wait(lambda: page.all("#text .chip"))
        assert page.run("return location.href") == f"{server.url}/"
        page.open()
        page.wait(page.find("key-form").is_displayed)
        page.find("key").send_keys("secret\n")
        page.wait(page.find("main").is_displayed)
        assert "secret" not in page.run("return document.cookie + document.body.innerHTML")
