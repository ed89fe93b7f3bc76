"""The page in headless Chromium: it draws, answers pointer, finger and keys, fits a phone, prints, asks for nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import made_up
import pytest

from lengthen.report import collect, write_html

playwright = pytest.importorskip("playwright.sync_api")
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH")]

HEADLINE = "[data-chart=perplexity]"
LINES = f"{HEADLINE} .mark-line.role-mark path"
POINTS = f"{HEADLINE} .mark-symbol.role-mark path"
TIP = "#vg-tooltip-element.visible"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        program = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield program
        program.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    runs = [made_up.write(folder / name, name) for name in ("alibi", "xpos", "rotary", "sinusoidal")]
    return write_html(collect(runs), folder / "report.html").as_uri()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Open the page, drawn; whatever a test does, the console stays empty and nothing is asked for."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def make(path: str = address, **options: Any) -> Any:
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path)
        count = page.locator("figure[data-chart]").count()
        page.wait_for_function(
            f"() => document.querySelectorAll('figure .plot > div:first-child svg').length === {count}"
        )
        return page

    yield make
    assert said == []
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert sum(url.startswith("file:") for url in asked) == len(contexts)
    for context in contexts:
        context.close()


def test_it_draws(visit: Open) -> None:
    page = visit()
    assert page.locator(LINES).count() == 8  # four methods, plain and blockwise
    assert page.locator(POINTS).count() == 4 * (5 + 4)
    names = page.locator(f"{HEADLINE} .mark-text.role-mark text").all_text_contents()
    assert {"alibi", "rotary · blockwise 32", "trained at 64"} <= set(names)
    assert page.locator("[data-chart=reach] .plot > div").count() == 4
    assert page.locator("[data-chart=distance] .plot > div:first-child .mark-rect.role-mark path").count() == 8 * 12
    assert page.locator("details[open]").count() == 0


def test_names_do_not_overlap_and_stay_inside(visit: Open) -> None:
    for width in (1280, 390):
        page = visit(viewport={"width": width, "height": 900})
        boxes = [one.bounding_box() for one in page.locator(f"{HEADLINE} .mark-text.role-mark text").all()]
        assert all(box["x"] + box["width"] <= width for box in boxes)
        tops = sorted(box["y"] for box in boxes)
        assert min(b - a for a, b in pairwise(tops)) > 10
        names = page.locator(f"{HEADLINE} .mark-text.role-mark text").all_text_contents()
        assert "sinusoidal · blockwise 32" in names  # whole, on a phone too
        assert not any("…" in name for name in names)


def test_maps_fill_a_phone(visit: Open) -> None:
    page = visit(viewport={"width": 390, "height": 844})
    boxes = [one.bounding_box() for one in page.locator("[data-chart=distance] svg").all()]
    assert all(320 < box["width"] <= 390 for box in boxes)


def test_pointing_tells_values_and_a_click_singles_out(visit: Open) -> None:
    page = visit()
    page.locator(POINTS).last.hover()
    said = page.locator(TIP).inner_text()
    assert "undefined" not in said
    for part in ("curve", "sinusoidal · blockwise 32", "1,024", "65,536 tokens, 37 documents", "step-00002000"):
        assert part in said
    page.locator(POINTS).last.click()
    faded = f"[...document.querySelectorAll('{LINES}')].filter((one) => one.getAttribute('opacity') < 1).length"
    page.wait_for_function(f"() => {faded} === 7")
    page.locator(POINTS).last.dblclick()
    page.wait_for_function(f"() => {faded} === 0")


def test_keys_go_from_point_to_point_and_from_curve_to_curve(visit: Open) -> None:
    page = visit()
    page.locator(f"{HEADLINE} svg").focus()
    page.keyboard.press("ArrowRight")
    assert "alibi" in page.locator(TIP).inner_text()
    assert "64" in page.locator(TIP).inner_text()
    page.keyboard.press("ArrowRight")
    assert "128" in page.locator(TIP).inner_text()
    page.keyboard.press("ArrowDown")
    assert "alibi · blockwise 32" in page.locator(TIP).inner_text()


def test_other_measures_and_the_papers_can_be_chosen(visit: Open) -> None:
    page = visit()
    titles = f"{HEADLINE} .role-title-text"
    page.select_option(f"{HEADLINE} select", label="bits per byte")
    page.wait_for_function(f"() => document.querySelector('{titles}').textContent === 'bits per byte'")
    page.select_option(f"{HEADLINE} select", index=3)
    page.wait_for_function(f"() => document.querySelectorAll('{LINES}').length > 15")
    assert "LEX: rotary @ 1,024" in page.locator(f"{HEADLINE} .mark-text.role-mark text").all_text_contents()
    page.locator(POINTS).last.dispatch_event("pointermove")
    said = page.locator(TIP).inner_text()
    assert "LEX: " in said
    assert "undefined" not in said


def test_light_and_dark(visit: Open) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(color_scheme=scheme) for scheme in ("light", "dark"))
    assert (light.evaluate(colour), dark.evaluate(colour)) == ("rgb(255, 255, 255)", "rgb(20, 24, 28)")
    light.click("#theme")
    dark.click("#theme")
    assert (light.evaluate(colour), dark.evaluate(colour)) == ("rgb(20, 24, 28)", "rgb(255, 255, 255)")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_need_not_scroll_sideways_and_a_tap_tells(visit: Open, width: int) -> None:
    page = visit(viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True)
    for opened in ("true", "false"):
        page.evaluate(f"for (const one of document.querySelectorAll('details')) one.open = {opened}")
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator(POINTS).nth(2).scroll_into_view_if_needed()
    page.locator(POINTS).nth(2).tap()
    assert "65,536 tokens" in page.locator(TIP).inner_text()
    box = page.locator(TIP).bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= width
    table = page.locator("details:has(.scroll) >> nth=0")
    table.locator("summary").click()
    assert table.locator(".scroll").evaluate("(one) => one.scrollWidth > one.clientWidth")


def test_it_prints_in_ink(visit: Open) -> None:
    page = visit(color_scheme="dark")
    assert page.pdf().startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_bad_numbers_odd_names_and_many_runs(visit: Open, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(2)>"
    lines = [made_up.evaluation(evil, 64), made_up.evaluation(evil, 128, loss=math.inf, perplexity=math.inf)]
    lines.append(made_up.evaluation(evil, 256, loss=math.nan, perplexity=math.nan))
    lines.append(made_up.evaluation(evil, 512, loss=None, perplexity=None, tokens_per_second=None))
    runs = [made_up.write(tmp_path / "odd", lines=lines, full=False)]
    runs += [made_up.write(tmp_path / f"{n}" / "same", "alibi", full=False) for n in range(20)]
    page = visit(write_html(collect(runs), tmp_path / "odd.html").as_uri(), viewport={"width": 390, "height": 844})
    assert page.locator(POINTS).count() == 1 + 20 * 5
    page.locator(f"{HEADLINE} svg").focus()
    page.keyboard.press("ArrowRight")
    assert evil in page.locator(TIP).inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "NaN" not in page.locator("body").inner_text()
