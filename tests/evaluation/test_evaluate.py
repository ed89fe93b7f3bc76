"""A run at many lengths: results kept with how they were made, gone on with, judged; and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lengthen
from lengthen import io
from lengthen.cli.main import main
from lengthen.config import from_table
from lengthen.data import Corpus, prepare
from lengthen.data.checksums import sha256_of
from lengthen.evaluation import Result, evaluate, measure, open_run, protocol, results, verdicts
from lengthen.evaluation.verdict import grouped
from lengthen.model.score import BATCH_TOKENS
from lengthen.training import World, train
from lengthen.training.checkpoint import seal

TINY = {"vocab_size": 258, "layers": 1, "width": 16, "heads": 2, "train_length": 8}


def run(folder: Path, corpus: Corpus, data: dict[str, object] | None = None, **model: object) -> Path:
    table = {
        "data": data or {},
        "model": {**TINY, **model},
        "train": {"steps": 4, "batch": 2},
        "evaluation": {"every": 2, "lengths": [8], "tokens": 64},
        "checkpoint": {"every": 2},
    }
    train(from_table(table, "test"), corpus, folder, World(0, 1, torch.device("cpu")))
    return folder


@pytest.fixture
def trained(corpus: Corpus, folder: Path) -> Path:
    return run(folder / "run", corpus)


def lines(folder: Path) -> list[dict[str, object]]:
    return list(io.read_lines(folder / "evaluation.jsonl", dict))


def test_results_say_how_they_were_made(corpus: Corpus, trained: Path) -> None:
    subject = open_run(trained)
    chosen = [protocol(name, length, 8) for length in (8, 32) for name in ("nonoverlapping", "blockwise")]
    found = evaluate(subject, corpus, chosen, tokens=100)
    assert [(one.length, one.protocol, one.block) for one in found] == [
        (8, "blockwise", 4),
        (8, "nonoverlapping", None),
        (32, "blockwise", 4),
        (32, "nonoverlapping", None),
    ]
    for one, line in zip(found, lines(trained), strict=True):
        assert line == one.record()
        assert (one.tokens, one.documents, one.split) == (100, 2, "validation")
        assert (one.positions, one.train_length, one.step) == ("alibi", 8, 4)
        assert (one.checkpoint, one.data) == ("step-00000004", corpus.fingerprint)
        assert one.perplexity == math.exp(one.loss)
        assert one.tokens_per_second > 0
        assert (one.precision, one.device, one.version, one.peak_bytes) == (
            "float32",
            "cpu",
            lengthen.__version__,
            None,
        )
        assert (one.task, one.document_mask, one.corpus) == ("next tokens", False, str(corpus.directory))
        assert (sum(one.segment_counts), one.per_document, one.position_options) == (100, None, {})
        assert sum(one.segment_losses) == pytest.approx(100 * one.loss, rel=1e-12)
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)  # one block sees all of eight


def test_what_is_there_is_not_measured_again(corpus: Corpus, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = measure.measure

    def spy(*arguments: Any) -> measure.Tally:
        calls.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr("lengthen.evaluation.runs.measure", spy)
    subject, short, long = open_run(trained), protocol("nonoverlapping", 8, 8), protocol("nonoverlapping", 16, 8)
    first = evaluate(subject, corpus, [short], tokens=64)
    both = evaluate(subject, corpus, [short, long], tokens=64)
    assert calls == [short, long]
    assert both[0] == first[0]
    evaluate(subject, corpus, [short], tokens=65)  # other tokens: another measurement
    evaluate(subject, corpus, [short], tokens=64, again=True)
    assert calls == [short, long, short, short]
    path = trained / "evaluation.jsonl"
    path.write_text(path.read_text() + '{"kind": "evalu')  # as a killed process leaves it
    evaluate(subject, corpus, [protocol("window", 8, 8)], tokens=64)
    assert len(lines(trained)) == 5


def test_a_result_is_of_the_weights(corpus: Corpus, folder: Path) -> None:
    """Trained anew in the same folder, to the same step, it is another model, whose results are its own."""
    found = []
    for positions in ("alibi", "none", "alibi"):
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
        subject = open_run(run(folder / "run", corpus, positions=positions))
        (one,) = evaluate(subject, corpus, [protocol("nonoverlapping", 8, 8)], tokens=64)
        found.append((one.positions, one.loss, one.weights))
    assert found[0] == found[2]
    assert found[0][1] != found[1][1]
    assert [line["positions"] for line in lines(folder / "run")] == ["alibi", "none"]  # the third was there


def test_without_a_name_the_corpus_is_the_one_it_was_trained_on(
    corpus: Corpus, trained: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = ["eval", str(trained), "--tokens", "64", "--lengths", "8", "--device", "cpu"]
    assert main(words) == 0
    assert f"{corpus.directory}, split 'validation' ({corpus.fingerprint})" in capsys.readouterr().out
    for key, value, message in (
        ("data", "another", r"--data: .* was trained on a corpus with the fingerprint another, and .* has "),
        ("folder", "gone", r"--data: .* was trained on gone, which is not there any more; name a corpus"),
    ):
        for path in trained.glob("checkpoints/*/state.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
            seal(path.parent)
        assert main(words) == 1
        assert re.search(message, capsys.readouterr().err)


def test_verify_reads_what_is_remembered_as_right(
    corpus: Corpus, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was read once is not read again until it changes, but for --verify."""
    read: list[str] = []

    def spy(path: Path, *more: Any) -> str:
        read.append(path.name)
        return sha256_of(path, *more)

    monkeypatch.setattr("lengthen.data.checksums.sha256_of", spy)
    monkeypatch.setattr("lengthen.data.checksums.SETTLED", -1.0)  # as if the corpus had been there for a while
    words = ["eval", str(trained), "--lengths", "8", "--tokens", "64", "--device", "cpu"]
    counts = []
    for more in ([], [], ["--verify"]):
        read.clear()
        assert main([*words, *more]) == 0
        counts.append(len([name for name in read if name.endswith(".bin")]))
    assert counts[1:] == [0, 4]  # of two splits, a shard and the documents'


@pytest.mark.parametrize("state", ["{}", '{"step": "x"}', '{"step": 4, "data": 3}'])
def test_a_damaged_state_is_named(trained: Path, state: str) -> None:
    for path in trained.glob("checkpoints/*/state.json"):
        path.write_text(state)
    with pytest.raises((TypeError, ValueError), match=r"state.json: (step|data): expected"):
        open_run(trained)


def test_weights_of_another_model_are_named(trained: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in trained.glob("checkpoints/*/model.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())[1:]}
            metadata = file.metadata()
        save_file(tensors, path, metadata)
        seal(path.parent)
    with pytest.raises(ValueError, match=r"expected the tensors of the model that its config says, got others"):
        open_run(trained)


def test_an_encoder_is_scored_as_it_is_validated(corpus: Corpus, folder: Path) -> None:
    """On masked tokens, the same ones at every length and in every call; while training, by the same loop."""
    subject = open_run(run(folder / "run", corpus, kind="encoder"))
    found = evaluate(subject, corpus, [protocol("nonoverlapping", length, 8) for length in (8, 16)], tokens=64)
    assert {one.task for one in found} == {"masked tokens"}
    assert 0 < found[0].tokens == found[1].tokens < 32
    assert found[0].segment_counts == found[1].segment_counts
    (validated,) = [line for line in metrics(folder / "run") if line["kind"] == "evaluation" and line["step"] == 4]
    assert (validated["loss"], validated["tokens"]) == (pytest.approx(found[0].loss, rel=1e-6), found[0].tokens)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_documents_that_were_trained_apart_are_scored_apart(corpus: Corpus, folder: Path) -> None:
    losses = {}
    for apart in (False, True):
        out = run(folder / str(apart), corpus, data={"document_mask": apart})
        (one,) = evaluate(open_run(out), corpus, [protocol("nonoverlapping", 8, 8)])
        borders = len(corpus["validation"].documents) - 2 if apart else 0
        assert (one.document_mask, one.tokens) == (apart, one.targets - borders)
        (first,) = evaluate(open_run(out), corpus, [protocol("nonoverlapping", 8, 8)], tokens=64)
        validated = [line for line in metrics(out) if line["kind"] == "evaluation"][-1]
        assert validated["loss"] == pytest.approx(first.loss, rel=1e-6)
        losses[apart] = one.loss
    assert losses[False] != losses[True]


def test_a_method_is_changed_after_training(corpus: Corpus, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(folder / "run", corpus, positions="rotary")
    words = ["eval", str(out), "--lengths", "8,64", "--tokens", "64", "--device", "cpu"]
    assert main(words) == 0
    assert main([*words, "--positions.scaling", "yarn", "--positions.factor=8"]) == 0
    assert "rotary (scaling yarn, factor 8), trained at 8" in capsys.readouterr().out
    found = [(line["position_options"], line["length"], line["loss"]) for line in lines(out)]
    options = {"scaling": "yarn", "factor": 8}
    assert [(one[0], one[1]) for one in found] == [({}, 8), ({}, 64), (options, 8), (options, 64)]
    assert found[1][2] != found[3][2]
    # The same options in another order are the same measurement.
    assert main([*words, "--positions.factor", "8", "--positions.scaling", "yarn"]) == 0
    assert len(lines(out)) == len(found)
    assert main([*words, "--positions.scaling", "none"]) == 0  # the default: what it was trained with
    assert len(lines(out)) == len(found)
    for more, message in (
        (["--positions.scalling", "yarn"], "unknown option 'scalling'; did you mean 'scaling'"),
        (["--positions.scaling"], "--positions.scaling: expected a value, got none"),
    ):
        assert main([*words, *more]) == 1
        assert message in capsys.readouterr().err
    learned = run(folder / "t5", corpus, positions="t5")
    assert main(["eval", str(learned), "--device", "cpu", "--positions.buckets", "16"]) == 1
    assert "expected the tensors of the model that its config says" in capsys.readouterr().err


def test_the_same_tokens_are_scored_at_every_length(corpus: Corpus, trained: Path) -> None:
    subject, there = open_run(trained), len(corpus["validation"]) - 1
    chosen = [protocol("nonoverlapping", length, 8) for length in (8, 120, there)]
    assert {one.tokens for one in evaluate(subject, corpus, chosen, tokens=50)} == {there}
    assert {one.tokens for one in evaluate(subject, corpus, chosen[:2], tokens=50)} == {120}


def test_the_last_and_the_best_checkpoint_and_one_by_its_folder(corpus: Corpus, trained: Path) -> None:
    assert open_run(trained).checkpoint.step == 4
    whole = {path.name: json.loads((path / "state.json").read_text()) for path in (trained / "checkpoints").iterdir()}
    best = min(whole, key=lambda name: whole[name]["validation"])
    assert open_run(trained, "best").checkpoint.path.name == best
    one = open_run(trained / "checkpoints" / "step-00000002")
    assert (one.checkpoint.step, one.folder) == (2, trained)


def result(**changes: object) -> Result:
    base = Result(
        weights="w", position_options={}, data="d", split="validation", document_mask=False, protocol="nonoverlapping",
        length=64, stride=64, block=None, per_document=None, targets=20, precision="float32", positions="alibi",
        train_length=64, task="next tokens", checkpoint="step-1", step=1, corpus="data", tokens=20, documents=1,
        loss=2.0, segment_losses=[20.0, 20.0], segment_counts=[10, 10], unigram=3.0, perplexity_per_word=3.0,
        bits_per_byte=1.0, tokens_per_second=1.0, seconds=1.0, peak_bytes=None, device="cpu", version="0",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _append(folder: Path, first: int) -> None:
    for step in range(first, first + 50):
        results.append(folder, result(weights=str(step)))


def test_two_at_once_leave_whole_lines(folder: Path) -> None:
    (folder / "evaluation.jsonl").write_text('{"kind": "evalu')  # as a killed process leaves it
    others = [threading.Thread(target=_append, args=(folder, first)) for first in (0, 100, 200)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert len(lines(folder)) == len(results.read(folder)) == 150


def test_two_that_want_the_same_measure_it_once(corpus: Corpus, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and takes what the first has found; another length is measured meanwhile."""
    calls: list[Any] = []
    begun, waiting, real = threading.Event(), threading.Event(), measure.measure

    def slow(*arguments: Any) -> measure.Tally:
        calls.append(arguments[3].length)
        if arguments[3].length == 8:
            begun.set()
            assert waiting.wait(60)
        return real(*arguments)

    monkeypatch.setattr("lengthen.evaluation.runs.measure", slow)
    found: dict[str, list[Result]] = {}

    def ask(name: str, length: int, tell: Any = lambda *about: None) -> None:
        found[name] = evaluate(open_run(trained), corpus, [protocol("nonoverlapping", length, 8)], tokens=64, tell=tell)

    first = threading.Thread(target=ask, args=("first", 8))
    first.start()
    assert begun.wait(60)
    ask("another", 16)
    told: list[Any] = []
    ask("second", 8, lambda one, done, total: (told.append((done, total)), waiting.set()))
    first.join()
    assert calls == [8, 16]
    assert told == [(0, 64)]
    assert found["first"] == found["second"]
    assert len(lines(trained)) == 2
    assert not list(trained.glob(".measuring*"))


def test_an_evaluation_that_was_killed_goes_on_where_it_was(
    corpus: Corpus, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was measured in between: each measurement has a file of its own for what is done of it."""
    monkeypatch.setattr(measure, "SAVE_SECONDS", -1.0)
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 8)
    subject, one = open_run(trained), protocol("nonoverlapping", 8, 8)

    class StoppedError(Exception):
        pass

    def stop(how: object, done: int, total: int) -> None:
        if done >= 32:
            raise StoppedError

    with pytest.raises(StoppedError):
        evaluate(subject, corpus, [one], tokens=64, tell=stop)
    evaluate(subject, corpus, [protocol("nonoverlapping", 16, 8)], tokens=64)
    seen: list[int] = []
    (found,) = evaluate(subject, corpus, [one], tokens=64, tell=lambda how, done, total: seen.append(done))
    assert seen[0] == 32, "and not 8"
    (again,) = evaluate(subject, corpus, [one], tokens=64, again=True)
    assert (found.loss, found.segment_losses) == (again.loss, again.segment_losses)


def test_a_line_that_is_no_result_is_named(folder: Path) -> None:
    path = folder / "evaluation.jsonl"
    path.write_text(json.dumps(result().record()).replace('"length"', '"lenght"') + "\n")
    with pytest.raises(ValueError, match=r"evaluation.jsonl, line 1: unknown key 'lenght'; did you mean 'length'"):
        results.read(folder)


def test_the_command_ends_with_a_table_and_a_verdict(
    corpus: Corpus, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(trained), "--data", str(corpus.directory), "--tokens", "64", "--device", "cpu"]
    assert main([*words, "--lengths", "8,16", "--protocol", "nonoverlapping,sliding", "--stride", "4"]) == 0
    said = capsys.readouterr().out
    assert "alibi, trained at 8; read in float32 on cpu\n" in said
    assert f"{corpus.directory}, split 'validation' ({corpus.fingerprint})" in said
    assert "the same 64 tokens" in said
    assert [line.split()[2] for line in said.splitlines() if line.startswith(("     8", "    16"))]
    assert "sliding, stride 4" in said
    assert "nonoverlapping: holds to" in said
    assert "sliding, stride 4: holds to" in said
    assert main([*words, "--lengths", "16,32", "--protocol", "sliding"]) == 0
    none = "sliding: no verdict, as perplexity at the training length of 8 is not measured; add it to --lengths\n"
    assert capsys.readouterr().out.endswith(f"\n\n{none}")
    assert main([*words]) == 0  # the usual lengths, as far as the text goes
    assert {one.length for one in results.read(trained).values()} == {8, 16, 32, 64, 128, 256}


def test_a_verdict_is_over_one_stride() -> None:
    """Half the length at each, as by default, or the same at each; not one of these beside the other."""
    strides = [(8, 4), (16, 4), (16, 8), (32, 4)]
    found = [result(protocol="sliding", length=length, stride=stride, train_length=8) for length, stride in strides]
    groups = {name: [one.stride for one in group] for name, group in grouped(found).items()}
    assert groups == {"sliding, stride 4": [4, 4, 4], "sliding": [8]}
    assert list(grouped([found[0], found[2]])) == ["sliding"]
    assert list(verdicts(found)) == ["sliding, stride 4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lengths", "99999"],
            "lengths: 99,999 is longer than the text: split 'validation' .* has 3[0-9]+ tokens",
        ),
        (["--protocol", "sliding", "--stride", "0"], "stride: expected at least 1, got 0"),
        (["--lengths", "8,0"], r"--lengths: expected at least one number, each at least 1, got \[8, 0\]"),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--split", "test"], "split: .* has 'train', 'validation', got 'test'"),
    ],
)
def test_what_cannot_be_is_refused(
    corpus: Corpus, trained: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained), "--data", str(corpus.directory), "--device", "cpu", *words]) == 1
    said = capsys.readouterr().err
    assert re.search(message, said), said


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_an_unknown_precision_is_named(corpus: Corpus, trained: Path, precision: str) -> None:
    asked = [protocol("nonoverlapping", 8, 16)]
    with pytest.raises(ValueError, match=f"precision: expected 'auto' or 'float32' or 'bfloat16', got '{precision}'"):
        evaluate(open_run(trained), corpus, asked, precision=precision)


def test_missing_runs_checkpoints_and_tokenizers(
    corpus: Corpus, trained: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError, match="expected a run's folder, got no such folder"):
        open_run(folder / "nowhere")
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty: expected a run with a checkpoint, got none"):
        open_run(folder / "empty")
    (folder / "t.txt").write_text("one two three four five six seven eight nine ten " * 40)
    other = prepare(folder / "t.txt", folder / "bpe", tokenizer="bpe", vocab_size=258, validation=0)
    with pytest.raises(ValueError, match="was made with another tokenizer"):
        evaluate(open_run(trained), other, [protocol("nonoverlapping", 8, 8)], split="train")
    next((folder / "bpe").glob("tokenizer.*.json")).unlink()
    assert main(["eval", str(trained), "--data", str(folder / "bpe"), "--device", "cpu"]) == 1
    assert "tokenizer" in capsys.readouterr().err


def test_a_model_that_cannot_be_stretched_is_not(
    corpus: Corpus, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(folder / "learned", corpus, positions="learned")
    assert main(["eval", str(out), "--data", str(corpus.directory), "--tokens", "64", "--device", "cpu"]) == 0
    assert "left out: 16, 32, 64, 128, 256: the model learned a vector for each position" in capsys.readouterr().out
    assert {one.length for one in results.read(out).values()} == {8}


LONG = """
import resource, torch
from lengthen import ModelConfig, Transformer
model = Transformer(ModelConfig(258, layers=2, width=64, heads=4, train_length=64, positions="alibi")).eval()
ids = torch.randint(258, (1, 131_073))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.no_grad():
    losses = model.losses(ids[:, :-1], ids[:, 1:])
assert losses.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_131_072_tokens_in_one_pass_in_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # megabytes; one matrix of scores of one head would be 69,000
