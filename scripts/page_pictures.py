"""Draw the pictures of the live page: a text of the shipped model at three widths."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from versus.chromium import open_chromium  # noqa: E402

MODEL = ROOT / "models" / "shakespeare"
# Name: width, height, tab, and the elements that it waits for.
PICTURES = {
    "live": (1440, 1120, "attend", "#looks li"),
    "live_inside": (768, 1800, "inside", "#why-tokens td"),
    "live_narrow": (360, 1800, "choose", "#bars li"),
}


@contextmanager
def serving() -> Iterator[str]:
    """Yield the address of a server with the shipped model."""
    command = [sys.executable, "-m", "tgen", "serve", "-m", str(MODEL), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        yield found[0]
        process.terminate()


def main() -> None:
    """Write docs/pictures/live*.png."""
    with (
        tempfile.TemporaryDirectory() as profile,
        serving() as url,
        open_chromium(Path(profile)) as browser,
    ):
        wait = WebDriverWait(browser, 60)
        browser.get(url)
        find = lambda name: browser.find_element(By.ID, name)  # noqa: E731
        wait.until(lambda _: find("main").is_displayed())
        for name, value in (("seed", "3"), ("max-tokens", "40")):
            find(name).clear()
            find(name).send_keys(value)
        find("continue").click()
        wait.until(lambda _: find("command").text)
        for name, (width, height, tab, shown) in PICTURES.items():
            browser.set_window_size(width, height)
            find(f"tab-{tab}").click()
            wait.until(lambda _, shown=shown: browser.find_elements(By.CSS_SELECTOR, shown))
            browser.execute_script("scrollTo(0, 0)")
            browser.save_screenshot(str(ROOT / "docs" / "pictures" / f"{name}.png"))


if __name__ == "__main__":
    main()
