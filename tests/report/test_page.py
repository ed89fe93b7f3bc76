"""The page as text: it holds everything, loads nothing, and no text from a file becomes a part of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import LENGTHS, evaluation, write

from lengthen.report import Report, Run, collect, write_html
from lengthen.report.collect import REAL
from lengthen.report.page import html
from lengthen.report.sections import command
from lengthen.report.series import amount, shown


class Elements(HTMLParser):
    """All start tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] not in ("script", "style"):
            self.words += data


def data(text: str) -> dict[str, Any]:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert block is not None

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return dict(json.loads(block.group(1), parse_constant=refuse))


def test_nothing_is_loaded_from_anywhere(report: Report, tmp_path: Path) -> None:
    text = write_html(report, tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    for tag, attributes in page.found:
        assert "src" not in attributes, (tag, attributes)
        if tag == "a":
            assert str(attributes["href"]).startswith("https://arxiv.org/abs/")
        elif "href" in attributes:
            assert (tag, attributes["href"]) == ("link", "data:,")
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", text)
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert {address for address in addresses if "arxiv.org" not in address} == {"http://www.w3.org/2000/svg"}


def test_every_section_is_there_with_how_it_was_made(report: Report, runs: list[Path]) -> None:
    page = Elements(html(report))
    ids = {str(a["id"]) for tag, a in page.found if tag == "section"}
    names = ("perplexity", "runs", "resolution", "positions", "reach", "distance", "recall", "speed", "every", "papers")
    assert ids == {f"s-{name}" for name in names}
    assert sum(a.get("class") == "how" for _, a in page.found) == 7
    said = f"lengthen eval {runs[0]} --protocol nonoverlapping --lengths 64,128,256,512,1024 --tokens 65536"
    assert said in page.words
    block = f"lengthen analyse {runs[1]} --what resolution --lengths 64,128,256 --blockwise --block 32 --data DATA"
    assert block in page.words
    assert "65,536 tokens a length; data 9f86d081884c7d65, validation; checkpoint step-00002000; on cpu" in page.words


def test_the_table_has_the_numbers_of_the_figure(report: Report) -> None:
    text = html(report)
    chart = next(chart for chart in data(text)["charts"] if chart["id"] == "perplexity")
    own = [series for series in chart["series"] if not series["group"]]
    assert [series["label"] for series in own] == [curve.label for curve in report.curves]
    for series, curve in zip(own, report.curves, strict=True):
        values = [point["y"]["perplexity"][0] for point in series["points"]]
        assert values == [record["perplexity"] for record in curve.records]
        cells = re.search(rf"<tr><th scope=row>{re.escape(series['label'])}</th><td>64</td>(.*?)</tr>", text)
        assert cells is not None
        written = [cell for cell in re.findall("<td>(.*?)</td>", cells.group(1)) if cell]
        for record, cell in zip(curve.records, written, strict=True):
            assert float(cell.split(" ± ")[0]) == pytest.approx(record["perplexity"], rel=1e-3)
            assert float(cell.split(" ± ")[1]) == pytest.approx(record["perplexity"] * 0.02, rel=0.05)


def test_ratios_are_to_the_training_length(report: Report) -> None:
    chart = data(html(report))["charts"][0]
    for series in chart["series"]:
        for point in series["points"]:
            if point["rx"] == 1:
                assert point["y"]["relative"][0] == 1
    assert sum(series["group"] is not None for series in chart["series"]) > 20
    rotary = next(s for s in chart["series"] if s["label"] == "LEX: rotary @ 1,024")
    assert [(p["rx"], round(p["y"]["relative"][0], 3)) for p in rotary["points"]][-1] == (4, round(294.45 / 25.52, 3))


def test_a_bare_run_says_what_would_make_the_rest(tmp_path: Path) -> None:
    text = html(collect([write(tmp_path / "run", full=False)]))
    page = Elements(text)
    assert "s-reach" not in {a.get("id") for _, a in page.found}
    assert "Not measured" in page.words
    for kind in ("resolution", "positions", "reach", "distance"):
        assert f"lengthen analyse {tmp_path / 'run'} --what {kind} --data DATA" in page.words
    rotary = Elements(html(collect([write(tmp_path / "rotary", "rotary", full=False)])))
    assert "--what distance" in rotary.words
    assert "--what reach" not in rotary.words  # nothing bounds its reach


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\ud800"
    lines = [evaluation(evil, n, checkpoint=evil, data=evil, device=evil, split=evil) for n in LENGTHS]
    lines += [evaluation(evil, 64, protocol=evil, command=evil)]
    folder = write(tmp_path / "a&b <i>", lines=lines)
    (folder / "config.toml").unlink()
    analysis = json.loads((folder / "analysis" / "reach.json").read_text(encoding="utf-8"))
    analysis |= {"checkpoint": evil, "data": evil, "command": evil}
    (folder / "analysis" / "reach.json").write_text(json.dumps(analysis))
    text = write_html(collect([folder]), tmp_path / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    assert [tag for tag, _ in page.found if tag in ("img", "script", "i")] == ["script", "script"]
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    assert "alert(1)" in data(text)["charts"][0]["series"][0]["label"]


def test_what_is_not_finite_is_said_and_is_no_number(one: Callable[..., Report]) -> None:
    lines = [
        evaluation("alibi", 64),
        evaluation("alibi", 128, loss=800.0, perplexity=math.inf, loss_se=None),
        evaluation("alibi", 256, loss=math.nan, perplexity=math.nan, loss_se=math.nan, tokens_per_second=math.inf),
        evaluation("alibi", 512, loss=None, perplexity=None, peak_bytes=None, documents=None),
    ]
    text = html(one(*lines))
    points = data(text)["charts"][0]["series"][0]["points"]
    assert [point["n"].get("perplexity") for point in points] == [None, "∞", "n.a.", None]
    assert ["perplexity" in point["y"] for point in points] == [True, False, False, False]
    row = re.search(r"<tr><th scope=row>alibi</th><td>64</td>(.*?)</tr>", text)
    assert row is not None
    assert re.findall("<td>(.*?)</td>", row.group(1))[1:] == ["∞", "n.a.", "n.a."]


def test_without_a_value_at_the_training_length_there_is_no_ratio(one: Callable[..., Report]) -> None:
    points = data(html(one(evaluation("alibi", 128))))["charts"][0]["series"][0]["points"]
    assert "relative" not in points[0]["y"]


def test_other_texts_are_warned_of(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b", "xpos", lines=[evaluation("xpos", 64, data="other")])
    assert "class=warning" in html(collect([one, two]))
    assert "class=warning" not in html(collect([one]))


def test_many_curves_are_not_all_shown_at_first(tmp_path: Path) -> None:
    lines = [
        evaluation("alibi", n, protocol=name, stride=8, block=block)
        for n in (64, 128)
        for name, block in (("nonoverlapping", None), ("sliding", None), ("window", 64), ("blockwise", 32))
    ]
    folders = [write(tmp_path / str(i), lines=lines, full=False) for i in range(4)]
    series = [one for one in data(html(collect(folders)))["charts"][0]["series"] if not one["group"]]
    assert {one["protocol"] for one in series if one["shown"]} == {"nonoverlapping", "blockwise"}
    assert len(series) == 16


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "n.a."), (math.nan, "n.a."), (math.inf, "∞"), (-math.inf, "−∞"), (5, "5"), (65536, "65,536")),
        *(
            (4.9530, "4.953"),
            (18.4, "18.40"),
            (123456.7, "123,457"),
            (8699.4, "8,699"),
            (0.00123, "0.001230"),
            (1e30, "1.000e30"),
        ),
    ],
)
def test_numbers_for_reading(value: Any, text: str) -> None:
    assert shown(value) == text


def test_amounts_for_reading() -> None:
    assert [amount(n) for n in (None, 12, 3400, 123456789, 15.3e9)] == ["n.a.", "12 B", "3.4 kB", "123 MB", "15.3 GB"]


def test_a_stride_that_goes_with_the_length_is_in_the_command(one: Callable[..., Report]) -> None:
    halves = one(*[evaluation("alibi", n, protocol="sliding", stride=n // 2) for n in (64, 128)], name="a")
    assert command(halves.curves[0]).endswith("--lengths 64,128 --tokens 65536 --data DATA")
    fixed = one(*[evaluation("alibi", n, protocol="sliding", stride=16) for n in (64, 128)], name="b")
    assert "--lengths 64,128 --stride 16" in command(fixed.curves[0])
    quarters = one(*[evaluation("alibi", n, protocol="sliding", stride=n // 4) for n in (64, 128)], name="c")
    first, second = command(quarters.curves[0]).split(" && ")
    assert "--lengths 64 --stride 16" in first
    assert "--lengths 128 --stride 32" in second


NUMBERS = st.none() | st.floats() | st.integers(-(10**12), 10**12)


@settings(max_examples=60)
@given(values=st.fixed_dictionaries(dict.fromkeys(REAL, NUMBERS)), length=st.integers(1, 2**40))
def test_no_number_breaks_the_page(values: dict[str, Any], length: int) -> None:
    lines = [evaluation("alibi", 64), evaluation("alibi", length, **values), evaluation("alibi", 128, **values)]
    analyses = {
        "resolution": {"rows": [{"length": length, "resolution": values["loss"], "layers": [values["loss_se"]]}]},
        "positions": {"rows": [{"length": length, "positions": [length], "loss": [values["loss"]]}]},
        "reach": {"rows": [{"length": length, "reach": [[values["loss"]]]}]},
        "distance": {"rows": [{"length": length, "distances": [0], "weight": [[[values["loss"]]]]}]},
        "recall": {"rows": [{"distance": length, "accuracy": values["loss"], "trials": 3}]},
    }
    report = Report([Run("run", "alibi", 64, "alibi", evaluations=lines, analyses=analyses)])
    assert data(html(report))["charts"]
