"""A browser for the tests of the pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from versus.chromium import open_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a headless Chromium."""
    pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    try:
        with open_chromium(tmp_path_factory.mktemp("profile")) as opened:
            yield opened
    except FileNotFoundError as error:
        pytest.skip(f"NO BROWSER: the pages are only tested as files; {error}")
