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

from lengthen.report import Report, collect, write_html
from lengthen.report.charts import figures, shown
from lengthen.report.page import html
from lengthen.report.sections import verdict


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


def points(report: Report, section: str = "perplexity", place: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a figure."""
    chart = figures(report)[section][place].panels[0].to_dict()
    return list(chart["datasets"][chart["data"]["name"]])


def test_nothing_is_loaded_from_anywhere(report: Report, tmp_path: Path) -> None:
    text = write_html(report, tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    for tag, attributes in page.found:
        assert "src" not in attributes, (tag, attributes)
        if tag == "a":
            assert str(attributes["href"]).startswith(("https://arxiv.org/abs/", "#"))
        elif "href" in attributes:
            assert (tag, attributes["href"]) == ("link", "data:,")
    policy = str(next(a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy"))
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert len(text) < 1_800_000


def test_the_same_runs_give_the_same_page(report: Report) -> None:
    assert html(report) == html(report)


def test_every_section_is_there_with_n_and_how_it_was_made(report: Report) -> None:
    text = html(report)
    page = Elements(text)
    names = [
        "perplexity",
        "resolution",
        "positions",
        "reach",
        "distance",
        "induction",
        "longppl",
        "tasks",
        "depths",
        "speed",
        "runs",
        "papers",
    ]
    assert [a["id"] for tag, a in page.found if tag == "section"] == names
    assert [a["href"] for tag, a in page.found if tag == "a"][: len(names)] == [f"#{name}" for name in names]
    assert [a["data-chart"] for tag, a in page.found if tag == "figure"] == names[:10]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == 10
    assert all(caption.startswith("n = ") for caption in captions)
    assert sum(tag == "table" for tag, _ in page.found) == text.count("<div class=scroll")  # each folded, and scrolls
    for kind, caption in zip(names[1:7], captions[1:7], strict=True):
        made = (
            f"Made by <code>lengthen analyse RUN --what {kind}</code>: checkpoint step-00002000, data 9f86d081884c7d65"
        )
        assert caption.endswith(f"{made}{', device cpu, precision float32, lengthen 0.1.0' * (kind == 'induction')}.")
    assert captions[5].startswith("n = 40 / 24 / 16 sequences per point. Bars are one standard error.<br>")
    made = "Made by <code>lengthen eval RUN</code>: checkpoint step-00002000, data 9f86d081884c7d65, device cpu, "
    assert captions[0].endswith(made + "precision float32, lengthen 0.1.0.")


def test_induction_is_drawn_at_the_length_that_is_read(report: Report) -> None:
    rows = [row for row in points(report, "induction") if row["label"] == "alibi"]
    assert [(row["x"], row["repeated"]) for row in rows] == [(64, "32"), (128, "64"), (256, "128")]
    assert rows[0]["low"] == pytest.approx(rows[0]["y"] - 0.05)


def test_it_opens_with_the_answer(report: Report) -> None:
    page = Elements(html(report)).words
    said = {run.label: verdict([curve for curve in report.curves if curve.run is run]) for run in report.runs}
    assert said["alibi"].startswith("holds to 16 × (perplexity 4.953 at 64, −11 % ± 0.9 at 1,024); blockwise 32 holds")
    assert said["rotary"].startswith("fails past 1 × (perplexity 4.953 at 64, +73 % ± ")
    assert all(words in page for words in said.values())
    assert page.index(said["sinusoidal"]) < page.index("4 layers × 144 wide × 4 heads; trained for 2,000 steps")
    assert page.index("Measured 20") < page.index("How well each model predicts")


def test_blockwise_rescues(one: Callable[..., Report]) -> None:
    lines = [evaluation("rotary", n) for n in (64, 128)]
    same = {"loss": 1.6, "perplexity": None, "segment_losses": [48000.0, 56857.6]}
    lines += [evaluation("rotary", n, protocol="blockwise", block=32, **same) for n in (128, 256)]
    assert "; blockwise 32 rescues it, to 4 × (4.953)." in verdict(one(*lines).curves)
    assert verdict(one(evaluation("alibi", 64), name="b").curves).startswith("was measured at 64 tokens alone")
    assert verdict(one(evaluation("alibi", 64, loss=None), name="c").curves) == "has no finite loss."


def test_the_table_has_the_numbers_of_the_figure(report: Report) -> None:
    text, rows = html(report), points(report)
    for curve in report.curves:
        drawn = [one["y"] for one in rows if one["label"] == curve.label]
        assert drawn == [one.perplexity for one in curve.records]
        cells = re.search(rf"<tr><th scope=row>{re.escape(curve.label)}<td>(.*?)(?:<tr>|</table>)", text)
        assert cells is not None
        written = [cell for cell in cells.group(1).split("<td>") if cell][: len(drawn)]
        for value, cell in zip(drawn, written, strict=True):
            assert float(cell.split(" (")[0]) == pytest.approx(value, rel=1e-3)


def test_papers_are_beside_as_ratios_to_the_training_length(report: Report) -> None:
    found = figures(report)["perplexity"]
    place = next(i for i, figure in enumerate(found) if figure.name == "perplexity_relative")
    rows = points(report, place=place)
    assert {one["y"] for one in rows if one["x"] == 1} == {1.0}
    rotary = [(one["x"], one["y"]) for one in rows if one["label"] == "LEX: rotary @ 1,024"]
    assert rotary[-1] == (4, pytest.approx(294.45 / 25.52))
    assert sum(figure.name == "perplexity_relative" for figure in found) == 7


def test_without_a_value_at_the_training_length_there_is_no_ratio(one: Callable[..., Report]) -> None:
    names = [figure.name for figure in figures(one(evaluation("alibi", 128)))["perplexity"]]
    assert "perplexity" in names
    assert "perplexity_relative" not in names


def test_a_section_without_numbers_is_left_out(tmp_path: Path) -> None:
    page = Elements(html(collect([write(tmp_path / "run", full=False)])))
    assert "perplexity" in {a.get("id") for _, a in page.found}
    assert not {"resolution", "positions", "reach", "distance", "induction", "longppl", "tasks"} & {
        a.get("id") for _, a in page.found
    }


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\ud800"
    lines = [evaluation(evil, n, checkpoint=evil, data=evil, device=evil, split=evil) for n in LENGTHS]
    lines += [evaluation(evil, 64, protocol=evil)]
    folder = write(tmp_path / "a&b <i>", lines=lines)
    (folder / "config.toml").unlink()
    analysis = json.loads((folder / "analysis" / "reach.json").read_text(encoding="utf-8"))
    analysis |= {"checkpoint": evil, "data": evil}
    (folder / "analysis" / "reach.json").write_text(json.dumps(analysis))
    (tmp_path / evil[:8].replace("/", "")).mkdir()
    report = collect([folder, tmp_path / evil[:8].replace("/", "")])
    text = write_html(report, tmp_path / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    assert [tag for tag, _ in page.found if tag in ("img", "script", "i")] == ["script", "script"]
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    assert "alert(1)" in json.dumps(data(text)["perplexity"])


def test_what_is_not_finite_is_said_and_is_no_number(one: Callable[..., Report]) -> None:
    lines = [
        evaluation("alibi", 64),
        evaluation("alibi", 128, loss=800.0, perplexity=math.inf, segment_losses=[]),
        evaluation("alibi", 256, loss=math.nan, perplexity=math.nan, segment_counts=[], tokens_per_second=math.inf),
        evaluation("alibi", 512, loss=None, perplexity=None, peak_bytes=None, documents=None),
    ]
    report = one(*lines)
    text = html(report)
    assert data(text)
    assert [row["y"] is None for row in points(report)] == [False, True, True]
    assert re.search(r"<th scope=row>alibi<td>4.953<td>∞ \(not finite\)<td>n.a. \(not finite\)<td>n.a.", text)


def test_other_texts_are_warned_of(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b", "xpos", lines=[evaluation("xpos", 64, data="other")])
    assert "class=warning" in html(collect([one, two]))
    assert "class=warning" not in html(collect([one]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "n.a."), (math.nan, "n.a."), (math.inf, "∞"), (-math.inf, "−∞"), (5, "5"), (65536, "65,536")),
        *((4.9530, "4.953"), (18.4, "18.40"), (123456.7, "123,457"), (0.00123, "0.001230"), (1e30, "1.000e30")),
    ],
)
def test_numbers_for_reading(value: Any, text: str) -> None:
    assert shown(value) == text


REAL = ("loss", "unigram", "perplexity", "perplexity_per_word", "bits_per_byte", "tokens_per_second", "peak_bytes")
NUMBERS = st.none() | st.floats() | st.integers(-(10**12), 10**12)


@settings(max_examples=10, deadline=None)
@given(values=st.fixed_dictionaries(dict.fromkeys(REAL, NUMBERS)), length=st.integers(1, 2**40))
def test_no_number_breaks_the_page(tmp_path_factory: Any, values: dict[str, Any], length: int) -> None:
    lines = [evaluation("alibi", 64), evaluation("alibi", length, **values), evaluation("alibi", 128, **values)]
    folder = write(tmp_path_factory.mktemp("runs") / "run", lines=lines)
    rows = {
        "resolution": [
            {"length": length, "blockwise": False, "block": None, "resolution": values["loss"], "layers": [0.5]}
        ],
        "positions": [{"length": length, "positions": [length], "loss": [values["loss"]], "count": [3]}],
        "reach": [{"length": length, "reach": [[values["loss"]]], "fraction": [[values["unigram"]]]}],
        "distance": [{"length": length, "distances": [0], "weight": [[[values["loss"]]]]}],
        "induction": [
            {"length": length, "sequences": 9, "first": 1.0, "second": 2.0, "difference": values["loss"]}
            | {"standard_error": values["unigram"], "previous": [values["perplexity"]], "induction": [0.5]}
        ],
        "longppl": [
            {"length": length, "candidates": 9, "key_tokens": 3, "long_ppl": values["loss"], "perplexity": 2.0}
            | {"standard_error": values["unigram"], "soft_long_ppl": values["perplexity"]}
        ],
    }
    for kind, some in rows.items():
        (folder / "analysis" / f"{kind}.json").write_text(json.dumps({"rows": some}))
    assert data(html(collect([folder])))["perplexity"]
