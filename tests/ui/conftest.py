"""A browser for tests: the system's Chromium, without a window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.tools import require

SCREENSHOTS = "PARALLEL3D_SCREENSHOTS"
"""Names the folder that pictures of the documentation go to, such as docs/images."""
_WINDOW = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module: while it is there, its thread has an event loop, in which no asynchronous test could run."""
    require("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a window of its own. A test fails where a script did."""
    errors: list[str] = []
    contexts = []

    def open_page(url: str, **options) -> Page:
        context = browser.new_context(**{"viewport": _WINDOW, "reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures go: nowhere that lasts, unless asked for."""
    return Path(os.environ.get(SCREENSHOTS) or tmp_path)
