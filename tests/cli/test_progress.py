"""Progress: plain lines where nobody watches, a bar in a terminal, and words for amounts and times."""

from __future__ import annotations

import io

import pytest

from lengthen.cli import progress as progress_module
from lengthen.cli.progress import amount, describe, duration, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_every_few_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    with show_progress(stream) as progress:
        for second in range(12):
            clock[0] = 100.0 + second
            progress("tokenising", second * 1_000_000, 20_000_000)
            progress("tokenising", second * 1_000_000, 20_000_000)
        progress("writing", 3, 0)
    assert stream.getvalue().splitlines() == [
        "tokenising: 5.0 MB of 20.0 MB (25 %), 5 s, 1.0 MB/s, 15 s left",
        "tokenising: 10.0 MB of 20.0 MB (50 %), 10 s, 1.0 MB/s, 10 s left",
        "tokenising: 11.0 MB of 20.0 MB (55 %), 11 s, 1.0 MB/s, 9 s left",
        "writing: 3 B, 0 s",
    ]


def test_the_last_line_comes_even_if_the_task_fails() -> None:
    def fail(stream: io.StringIO) -> None:
        with show_progress(stream, unit="steps") as progress:
            progress("training", 7, 10)
            raise ValueError("broken")

    stream = io.StringIO()
    with pytest.raises(ValueError, match="broken"):
        fail(stream)
    assert stream.getvalue() == "training: 7 steps of 10 steps (70 %), 0 s\n"


def test_a_bar_in_a_terminal() -> None:
    stream = Terminal()
    with show_progress(stream) as progress:
        for done in range(0, 5_000_001, 1000):
            progress("reading", done, 5_000_000)
        progress("writing", 5, 0)
    shown = stream.getvalue()
    assert "\x1b" in shown
    assert "reading" in shown
    assert "writing" in shown
    assert "5.0/5.0 MB" in shown
    assert len(shown) < 50_000  # not a drawing a call


def test_words() -> None:
    assert [amount(n) for n in (0, 999, 1500, 2.5e6, 3e9)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB"]
    assert amount(12345.6, "steps") == "12,346 steps"
    assert [duration(s) for s in (0.4, 59.4, 59.6, 3599, 3600, 7500)] == [
        *("0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 5 min"),
    ]
    assert describe("x", 10, 0, 2.0) == "x: 10 B, 2 s, 5 B/s"
