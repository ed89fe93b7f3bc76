"""How training looks: plain lines, and the picture on a terminal."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lengthen.cli import lines
from lengthen.cli.lines import Clock, Lines, conclusion, introduction
from lengthen.cli.live import BARS, Live, course
from lengthen.config import TrainConfig
from lengthen.model import ModelConfig
from lengthen.training import Config, Outcome
from lengthen.training.events import Start
from lengthen.training.log import Record

Capture = pytest.CaptureFixture[str]


def start(first: int = 0, processes: int = 1, out: str = "runs/x", steps: int = 2000) -> Start:
    model = ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=128, positions="xpos")
    config = Config(model, train=TrainConfig(steps=steps, batch=8))
    return Start(config, Path(out), first, "cpu", processes, 1_234_567, 1_000_000, 2.048)


def step(number: int, loss: float = 2.5, **more: Any) -> Record:
    numbers = {"lr": 6e-4, "grad_norm": 0.8, "tokens": 99, "tokens_per_second": 12345.6, "mfu": None}
    return {"kind": "step", "step": number, "loss": loss, **numbers, **more}


def evaluation(number: int, length: int, perplexity: float) -> Record:
    loss = math.log(perplexity)
    return {"kind": "evaluation", "step": number, "length": length, "loss": loss, "perplexity": perplexity}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    return now


def test_the_first_and_last_words() -> None:
    assert introduction(start()) == (
        "training: 1.2M parameters, xpos, at 128 tokens, on cpu, into runs/x\n"
        "2,000 steps of 1,024 tokens: 2 epochs of 1,000,000 tokens"
    )
    assert introduction(start(first=1500, processes=4)).startswith("resuming after step 1,500: 1.2M parameters")
    assert "on 4 processes (cpu), into" in introduction(start(processes=4))
    path = Path("runs/x/checkpoints/step-00002000")
    assert (
        conclusion(Outcome(2000, True, path, 2.5)) == f"done after 2,000 steps; the model is {path}/model.safetensors"
    )
    stopped = conclusion(Outcome(1200, False, path, 2.5))
    assert stopped == f"stopped after step 1,200, saved as {path}; the same command resumes from there"


def test_time_left(clock: list[float]) -> None:
    found = Clock()
    assert found.left(100, 300) == ""
    clock[0] += 50
    assert found.left(150, 300) == "2 min 30 s left"  # a second a step
    clock[0] += 50
    assert found.left(300, 300) == "0 s left"


def test_lines_every_few_seconds_and_at_the_end(clock: list[float], capsys: Capture) -> None:
    watcher = Lines()
    watcher.started(start(steps=20))
    for number in range(1, 21):
        clock[0] += 1
        watcher.stepped(step(number, loss=3 - number / 10))
    watcher.evaluated(evaluation(20, 256, 8.25))
    watcher.saved(Path("runs/x/checkpoints/step-00000020"), 20)
    watcher.said("something")
    watcher.ended(Outcome(20, True, Path("c"), 1.0))
    watcher.close()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "step 1/20  loss 2.9000  12,346 tokens/s",
        "step 6/20  loss 2.4000  12,346 tokens/s  14 s left",
        "step 11/20  loss 1.9000  12,346 tokens/s  9 s left",
        "step 16/20  loss 1.4000  12,346 tokens/s  4 s left",
        "step 20/20  loss 1.0000  12,346 tokens/s  0 s left",
        "  validation at 256: loss 2.1102, perplexity 8.250",
        "  saved runs/x/checkpoints/step-00000020",
        "something",
        "done after 20 steps; the model is c/model.safetensors",
    ]


def test_lines_on_a_gpu_say_how_much_of_it_is_used(capsys: Capture) -> None:
    watcher = Lines(every=0)
    watcher.stepped(step(1, mfu=0.4567, loss=math.nan))
    assert capsys.readouterr().out == "step 1/0  loss nan  12,346 tokens/s  45.7% MFU\n"


def drawn(watcher: Live) -> str:
    """The picture as it is now, without colours."""
    console = Console(file=io.StringIO(), width=120)
    console.print(watcher._picture())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def shown(terminal: Console) -> str:
    """All that the terminal was sent, without its control codes."""
    assert isinstance(terminal.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.file.getvalue())


def test_a_run_from_start_to_end(terminal: Console, clock: list[float]) -> None:
    watcher = Live(terminal)
    watcher.started(start())
    watcher.evaluating(0, 256, 0.5)
    assert "validation at 256: 50%" in drawn(watcher)
    for length, perplexity in ((128, 250.0), (256, 300.125)):
        watcher.evaluated(evaluation(0, length, perplexity))
    for number in range(1, 101):
        clock[0] += 0.5
        watcher.stepped(step(number, loss=5 - number / 50, mfu=0.25))
    picture = drawn(watcher)
    assert "training" in picture
    assert "100/2,000" in picture
    assert "15 min 50 s left" in picture
    assert "12,346 tokens/s" in picture
    assert "25.0% MFU" in picture
    assert "lr 6.00e-04" in picture
    assert "grad_norm 0.80" in picture
    assert "checkpoint none yet" in picture
    smooth = float(re.search(r"loss (\d\.\d{4})", picture)[1])  # type: ignore[index]
    assert 3.0 < smooth < 3.5, "smoothed, it lags behind"
    assert "█" in picture
    assert "▁" in picture
    watcher.saved(Path("runs/x/checkpoints/step-00000100"), 100)
    assert "checkpoint step-00000100" in drawn(watcher)
    watcher.evaluated(evaluation(100, 128, 20.0))
    watcher.evaluated(evaluation(100, 256, 22.5))
    watcher.said("something to know")
    watcher.ended(Outcome(100, False, Path("runs/x/checkpoints/step-00000100"), 3.0))
    watcher.close()
    said = shown(terminal)
    assert said.startswith("training: 1.2M parameters, xpos, at 128 tokens")
    assert "something to know" in said
    tail = said[said.rindex("validation perplexity") :]
    assert re.search(r"length +step 0 +step 100", tail)
    assert re.search(r"128 +250\.000 +20\.000", tail)
    assert re.search(r"256 \(2×\) +300\.125 +22\.500", tail)
    assert "stopped after step 100, saved as runs/x/checkpoints/step-00000100" in tail
    assert watcher.screen is None


def test_a_perplexity_stands_below_its_own_step(terminal: Console) -> None:
    """Four evaluations are kept; while the fifth is on, the longer lengths still have the first."""
    watcher = Live(terminal)
    watcher.started(start())
    for number in range(5):
        for length in (128, 256) if number < 4 else (128,):
            watcher.evaluated(evaluation(number * 10, length, length + number))
    picture = drawn(watcher)
    watcher.close()
    columns = re.search(r"length +step 10 +step 20 +step 30 +step 40", picture)
    assert columns
    assert re.search(r"128 +129\.000 +130\.000 +131\.000 +132\.000", picture)
    (row,) = re.findall(r"^ *256 \(2×\).*$", picture, flags=re.MULTILINE)
    assert row.split()[2:] == ["257.000", "258.000", "259.000"]
    assert row.rstrip().endswith("259.000")
    heading = next(line for line in picture.splitlines() if "step 10" in line)
    assert row.index("257.000") + len("257.000") == heading.index("step 10") + len("step 10")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_shown(terminal: Console, loss: float) -> None:
    """The loop says what is wrong with it; the picture must not fail before."""
    watcher = Live(terminal)
    watcher.started(start())
    watcher.stepped(step(1))
    watcher.stepped(step(2, loss=loss))
    assert f"loss {loss}" in drawn(watcher)
    watcher.close()


def test_names_with_brackets_are_no_markup(terminal: Console) -> None:
    watcher = Live(terminal)
    watcher.started(start(out="runs/[bold]x[/nothing]"))
    watcher.said("config: ['[red]'] → [/]")
    watcher.ended(Outcome(1, True, Path("runs/[bold]x[/nothing]/step-00000001"), 1.0))
    said = shown(terminal)
    assert "into runs/[bold]x[/nothing]" in said
    assert "config: ['[red]'] → [/]" in said
    assert "the model is runs/[bold]x[/nothing]/step-00000001/model.safetensors" in said


def test_a_long_path_stays_in_one_piece(terminal: Console) -> None:
    path = "runs/" + "a-long-name/" * 12 + "step-00000001"
    watcher = Live(terminal)
    watcher.started(start())
    watcher.ended(Outcome(1, True, Path(path), 1.0))
    assert f"the model is {path}/model.safetensors" in shown(terminal)


def test_a_run_that_was_done_before(terminal: Console) -> None:
    watcher = Live(terminal)
    watcher.said("said before it starts")
    watcher.started(start(first=2000))
    watcher.ended(Outcome(2000, True, Path("c"), None))
    said = shown(terminal)
    assert "2,000/2,000" in said
    assert "done after 2,000 steps" in said


def test_closing_without_a_start(terminal: Console) -> None:
    watcher = Live(terminal)
    watcher.close()
    assert shown(terminal) == ""


def test_the_course_of_numbers() -> None:
    assert course([], 10) == ""
    assert course([3.0], 10) == BARS[0]
    assert course([1.0, 1.0, 1.0], 10) == BARS[0] * 3
    assert course([float(n) for n in range(8)], 8) == BARS
    assert course([float(n) for n in range(7, -1, -1)], 8) == BARS[::-1]
    assert course([0.0, 0.0, 7.0, 7.0], 2) == BARS[0] + BARS[-1]
    assert course([0.0, 2.0, 4.0, 10.0], 2) == BARS[0] + BARS[-1]  # means 1 and 7
    long = course([math.sin(n / 100) for n in range(1000)], 60)
    assert len(long) == 60
    assert {long[0], BARS[0], BARS[-1]} <= set(long)


def test_a_course_with_gaps() -> None:
    """What is not finite is no bar, and hides no other."""
    assert course([0.0, math.nan, 7.0], 3) == f"{BARS[0]} {BARS[-1]}"
    assert course([0.0, 7.0, math.inf], 3) == f"{BARS[0]}{BARS[-1]} "
    assert course([math.nan, math.nan], 2) == "  "
