"""Measure the frames of the live page with a long text, in a headless Chromium.

    python -m versus.serving.live_page

A random model streams --tokens tokens; then the arrow keys move over the tokens with each view
open, and a slider moves. A frame counts from one callback of requestAnimationFrame to the next, so
an idle page has frames of 16.7 ms. Server and browser share the CPUs.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from versus import harness
from versus.chromium import open_chromium
from versus.decode.model_shapes import write_model

_WATCH = """
window.frames_ms = [];
let last = performance.now();
const tick = (now) => { frames_ms.push(now - last); last = now; requestAnimationFrame(tick); };
requestAnimationFrame(tick);
"""
_VIEWS = {"choose": "#bars li", "attend": "#looks li", "inside": "#inside[aria-busy=false] td"}


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Yield the address of a server."""
    command = [sys.executable, "-m", "tgen", "serve", "-m", str(model), "--port", "0"]
    with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        found = re.search(rb"http://\S+", process.stderr.readline())
        assert found is not None
        try:
            yield found[0].decode()
        finally:
            process.terminate()


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            context = options.tokens + 100
            write_model(options.shape, Path(folder, "model"), context_length=context)
            with serving(Path(folder, "model")) as url, open_chromium(Path(folder, "x")) as browser:
                frames = watch(browser, url, options)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        harness.skip("the live page", str(error))
        return
    rows = [["frames, ms", "median", "99%", "longest", "over 50 ms"]]
    for name, values in frames.items():
        ordered = sorted(values)
        late = sum(value > 50 for value in values) / len(values)
        numbers = statistics.median(values), ordered[len(ordered) * 99 // 100], ordered[-1]
        rows.append([name, *(f"{number:.1f}" for number in numbers), f"{late:.1%}"])
    print(harness.format_table(rows))
    harness.save(options, {"tokens": options.tokens, "frames": frames})


def watch(browser: Any, url: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds of the frames of each activity."""
    from selenium.webdriver import Keys
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, 600)
    frames: dict[str, list[float]] = {}

    def find(name: str) -> Any:
        return browser.find_element(By.ID, name)

    def take(name: str) -> None:
        frames[name] = browser.execute_script("return frames_ms.splice(0)")[1:]

    def write(name: str) -> None:
        find("continue").click()
        wait.until(lambda _: find("command").text and not find("stop").is_enabled())
        take(name)

    browser.get(url)
    wait.until(lambda _: find("main").is_displayed())
    find("max-tokens").clear()
    find("max-tokens").send_keys(str(options.tokens))
    browser.execute_script(_WATCH)
    write("streaming")
    for view, shown in _VIEWS.items():
        find(f"tab-{view}").click()
        wait.until(lambda _, shown=shown: browser.find_elements(By.CSS_SELECTOR, shown))
        browser.execute_script("frames_ms.length = 0")
        chip = browser.find_elements(By.CSS_SELECTOR, "#text .chip.selected")[0]
        for _ in range(options.moves):
            chip.send_keys(Keys.ARROW_LEFT)
            chip = browser.switch_to.active_element
        take(f"moving with {view}")
    find("tab-choose").click()
    for _ in range(options.moves):
        find("top_k").send_keys(Keys.ARROW_RIGHT)
    take("moving a slider")
    find("new").click()
    find("tab-attend").click()
    write("streaming with attend")
    return frames


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "live_page.json")
    parser.add_argument("--shape", default="12M")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--moves", type=int, default=20, help="key presses per view")
    quick = {"shape": "tiny", "tokens": 40, "moves": 2}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
