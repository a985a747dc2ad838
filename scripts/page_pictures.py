"""Draw the pictures of the live page: a text of the shipped model at three widths."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from versus.chromium import open_chromium  # noqa: E402
from versus.serving.live_page import serving  # noqa: E402

MODEL = ROOT / "models" / "shakespeare"
# Name: width, height, tab, and the elements that it waits for.
PICTURES = {
    "live": (1440, 1120, "attend", "#looks li"),
    "live_inside": (768, 1800, "inside", "#inside[aria-busy=false] #why-tokens td"),
    "live_narrow": (360, 1800, "choose", "#bars li"),
}


def main() -> None:
    """Write docs/pictures/live*.png."""
    with (
        tempfile.TemporaryDirectory() as profile,
        serving(MODEL) as url,
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
