"""The page in headless Chromium: it renders, answers pointer and keys, fits a phone, prints, and asks for nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import made_up
import pytest

from lengthen.report import collect, write_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on the PATH"),
]

HEADLINE = "[data-chart=perplexity]"
CURVES = 8  # four methods, plain and blockwise


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    runs = [made_up.write(folder / name, name) for name in ("alibi", "xpos", "rotary", "sinusoidal")]
    return write_html(collect(runs), folder / "report.html").as_uri()


@pytest.fixture
def page(program: browser.Browser, address: str) -> Iterator[browser.Browser]:
    """The page, freshly opened; whatever a test does, nothing goes wrong in the console and nothing is asked for."""
    program.call("Emulation.setEmulatedMedia", media="", features=[])
    program.size(1100, 900)
    program.call("Page.navigate", url="about:blank")
    program.events.clear()
    program.open(address)
    yield program
    program.settle()
    assert program.troubles() == []
    assert set(program.requests()) <= {address, "data:,"}
    assert address in program.requests()


def count(page: browser.Browser, selector: str) -> Any:
    return page.run(f"document.querySelectorAll({selector!r}).length")


def text(page: browser.Browser, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).textContent"))


def ticks(page: browser.Browser) -> Any:
    """Return the labels along the headline's axis of lengths."""
    code = f"[...document.querySelectorAll('{HEADLINE} > svg text[text-anchor=middle]')].map((one) => one.textContent)"
    return page.run(code)


def plot(page: browser.Browser) -> tuple[float, float, float, float]:
    """Return the place of the headline's drawing on the screen, scrolled into view."""
    page.run(f"document.querySelector('{HEADLINE} > svg').scrollIntoView({{block: 'center'}})")
    code = f"(() => {{ const b = document.querySelector('{HEADLINE} > svg').getBoundingClientRect();"
    left, top, width, height = page.run(code + " return [b.left, b.top, b.width, b.height]; })()")
    return left, top, width, height


def drag(page: browser.Browser) -> None:
    left, top, width, height = plot(page)
    x, y = left + width * 0.3, top + height * 0.2
    page.mouse("mousePressed", x, y, clicks=1, held=True)
    for step in (0.2, 0.6, 1.0):
        page.mouse("mouseMoved", x + width * 0.3 * step, y + height * 0.4 * step, held=True)
    page.mouse("mouseReleased", x + width * 0.3, y + height * 0.4, clicks=1)
    page.settle()


def test_it_renders(page: browser.Browser) -> None:
    assert count(page, f"{HEADLINE} > svg path.curve") == CURVES
    assert count(page, f"{HEADLINE} .legend button") == CURVES
    assert text(page, f"{HEADLINE} .marked") == "trained at 64"
    assert ticks(page) == ["64", "128", "256", "512", "1,024"]
    for chart in ("resolution", "positions", "speed", "recall"):
        assert count(page, f"[data-chart={chart}] > svg path.curve") >= 4
    assert count(page, "[data-maps=reach] figure") == 4
    assert count(page, "[data-maps=reach] rect.cell") == 4 * 16
    assert count(page, "[data-maps=distance] rect.cell") == 4 * 8 * 12


def test_a_legend_entry_hides_its_curve_and_shows_it_again(page: browser.Browser) -> None:
    entry = f"{HEADLINE} .legend button:nth-child(7)"
    assert text(page, entry) == "sinusoidal"
    before = text(page, f"{HEADLINE} > svg")
    page.click(entry)
    assert count(page, f"{HEADLINE} > svg path.curve") == CURVES - 1
    assert count(page, f"{HEADLINE} > svg g[data-series='6']") == 0
    assert page.run(f"document.querySelector('{entry}').getAttribute('aria-pressed')") == "false"
    assert text(page, f"{HEADLINE} > svg") != before  # the axis follows what is shown
    page.run(f"document.querySelector('{entry}').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.settle()
    assert count(page, f"{HEADLINE} > svg path.curve") == CURVES


def test_dragging_zooms_and_a_double_click_resets(page: browser.Browser) -> None:
    before = ticks(page)
    drag(page)
    assert ticks(page) != before
    assert page.run(f"document.querySelector('{HEADLINE} .reset').hidden") is False
    left, top, width, height = plot(page)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, left + width / 2, top + height / 2, clicks=clicks)
    page.settle()
    assert ticks(page) == before
    drag(page)
    assert ticks(page) != before
    page.click(f"{HEADLINE} .reset")
    assert ticks(page) == before


def test_hovering_tells_protocol_tokens_and_error(page: browser.Browser) -> None:
    plot(page)
    point = f"{HEADLINE} > svg g[data-series='6'] path.point:last-of-type"
    page.mouse("mouseMoved", *page.middle(point))
    page.settle()
    said = text(page, "#tip")
    assert page.run("document.getElementById('tip').hidden") is False
    loss = made_up.evaluation("sinusoidal", 1024)["loss"]
    for part in ("sinusoidal", "length 1,024", "nonoverlapping", "65,536 tokens, 37 documents", "step-00002000"):
        assert part in said
    assert re.search(rf"perplexity a token: {math.exp(loss):.1f} ± {math.exp(loss) * 0.02:.1f}", said)
    page.mouse("mouseMoved", 5, 5)
    page.settle()
    assert page.run("document.getElementById('tip').hidden") is True


def test_keys_read_points_and_zoom(page: browser.Browser) -> None:
    page.run(f"document.querySelector('{HEADLINE} > svg').focus()")
    page.key("ArrowRight")
    assert "length 64" in text(page, "#tip")
    page.key("ArrowRight")
    page.key("ArrowDown")
    assert "alibi · blockwise 32" in text(page, "#tip")
    before = ticks(page)
    page.key("+")
    assert ticks(page) != before
    page.key("0")
    assert ticks(page) == before


def test_measures_scale_and_papers(page: browser.Browser) -> None:
    title = f"{HEADLINE} > svg text.title"
    pick = f"(() => {{ const p = document.querySelector('{HEADLINE} .measure'); p.value = 'bits_per_byte';"
    page.run(pick + " p.dispatchEvent(new Event('change')); })()")
    assert text(page, title) == "bits a byte"
    page.click(f"{HEADLINE} .papers")
    assert text(page, title) == "perplexity ÷ that at the training length"
    assert count(page, f"{HEADLINE} > svg g.paper") == 11
    assert "×1" in ticks(page)
    curve = f"document.querySelector('{HEADLINE} > svg path.curve').getAttribute('d')"
    before = page.run(curve)
    page.click(f"{HEADLINE} .log")
    assert page.run(curve) != before
    page.click(f"{HEADLINE} .others button")
    assert count(page, f"{HEADLINE} > svg g.paper") == 10
    page.click(f"{HEADLINE} .papers")
    assert count(page, f"{HEADLINE} > svg g.paper") == 0
    assert text(page, title) == "perplexity a token"


def test_error_bars_can_be_left_out(page: browser.Browser) -> None:
    assert count(page, f"{HEADLINE} > svg line.band") == 4 * 5 + 4 * 4
    page.click(f"{HEADLINE} .bars")
    assert count(page, f"{HEADLINE} > svg line.band") == 0
    assert count(page, "[data-chart=positions] .bars") == 0  # which has none


def test_light_and_dark(page: browser.Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.click("#theme")
    dark = page.run(colour)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 24, 28)")
    page.click("#theme")
    assert page.run(colour) == light
    page.run("delete document.documentElement.dataset.theme")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.settle()
    assert page.run(colour) == dark
    page.click("#theme")
    assert page.run(colour) == light


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_need_not_scroll_sideways(page: browser.Browser, width: int) -> None:
    page.size(width, 844, mobile=True)
    page.click(f"{HEADLINE} .papers")
    for details in ("open", ""):
        page.run(f"for (const one of document.querySelectorAll('details')) one.open = {'true' if details else 'false'}")
        page.settle()
        assert page.run("document.documentElement.scrollWidth") == width
    assert page.run(f"document.querySelector('{HEADLINE} > svg').getBoundingClientRect().width") <= width
    size = f"document.querySelector('{HEADLINE} > svg').getBoundingClientRect().width / "
    assert page.run(size + f"document.querySelector('{HEADLINE} > svg').viewBox.baseVal.width") == pytest.approx(1)


def test_it_prints_in_ink_with_how_numbers_were_made(page: browser.Browser) -> None:
    page.click("#theme")
    opened = "window.opened = document.querySelectorAll('details.how[open]').length"
    page.run(f"addEventListener('beforeprint', () => {{ {opened} }})")
    paper = page.pdf()
    assert paper.startswith(b"%PDF")
    assert page.run("window.opened") == 7
    assert count(page, "details.how[open]") == 0
    page.call("Emulation.setEmulatedMedia", media="print")
    page.settle()
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.querySelector('#theme')).display") == "none"


def test_bad_numbers_and_odd_names(program: browser.Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(2)>"
    lines = [made_up.evaluation(evil, 64), made_up.evaluation(evil, 128, loss=math.inf, perplexity=math.inf)]
    lines.append(made_up.evaluation(evil, 256, loss=math.nan, perplexity=math.nan))
    lines.append(made_up.evaluation(evil, 512, loss=None, perplexity=None, tokens_per_second=None))
    folder = made_up.write(tmp_path / "run", lines=lines, full=False)
    program.events.clear()
    program.open(write_html(collect([folder]), tmp_path / "odd.html").as_uri())
    assert count(program, f"{HEADLINE} > svg path.curve") == 1
    notes = f"[...document.querySelectorAll('{HEADLINE} > svg text.note')].map((one) => one.textContent)"
    assert program.run(notes) == ["∞", "n.a."]
    assert count(program, "img") == 0
    for option in program.run(f"[...document.querySelectorAll('{HEADLINE} .measure option')].map((one) => one.value)"):
        pick = f"(() => {{ const p = document.querySelector('{HEADLINE} .measure'); p.value = '{option}';"
        program.run(pick + " p.dispatchEvent(new Event('change')); })()")
    assert program.run("document.body.innerHTML.includes('NaN')") is False
    assert program.troubles() == []
