"""The page in a browser: text arrives, numbers and curves with it, it can be stopped, and errors are shown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running, Start, waited

from lengthen import Transformer

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to look at the page with")


@pytest.fixture(scope="module")
def running(start: Start, model: Transformer) -> Running:
    return start(model, context=100_000)


@pytest.fixture(scope="module")
def page(running: Running) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 900})
        page.problems = []
        page.on("pageerror", lambda problem: page.problems.append(str(problem)))
        page.goto(f"http://127.0.0.1:{running.port}/")
        yield page
        browser.close()


def test_text_arrives_with_its_numbers_until_it_is_stopped(page: Any, running: Running) -> None:
    page.fill("#prompt", "<b>the sea")
    page.fill("#max_tokens", "90000")
    page.fill("#temperature", "0")  # drawn tokens may be the end token, after a few of them
    page.click("#go")
    assert waited(lambda: page.evaluate("speeds.length > 1 && sizes.length > 1"))
    assert page.inner_text("#model") == "tiny"
    assert page.inner_text("#text").startswith("<b>the sea")
    assert page.locator("#text b").count() == 0
    assert page.locator("#speeds path").get_attribute("d").startswith("M")
    assert "B" in page.inner_text("#size")
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # nothing is wider than a phone
    page.click("#go")
    assert waited(lambda: page.inner_text("#said").startswith("Stopped after "))
    assert waited(lambda: not running.engine.batches)
    assert page.problems == []


def test_errors_are_shown(page: Any) -> None:
    page.evaluate("at('max_tokens').removeAttribute('max')")
    page.fill("#max_tokens", "100000")
    page.click("#go")
    assert waited(lambda: page.locator("#said.bad").count() == 1)
    assert "max_tokens: expected prompt and new tokens of at most 100,000 together" in page.inner_text("#said")
    page.fill("#max_tokens", "3")
    page.click("#go")
    assert waited(lambda: page.inner_text("#said").startswith("3 tokens in "))
    assert page.locator("#said.bad").count() == 0
