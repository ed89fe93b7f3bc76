"""The verbs on folders of Hugging Face: eval, analyse, generate, report; and texts in a corpus' place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from theirs import make, saved

import lengthen
from lengthen.cli.main import main
from lengthen.data.tokenizer import train
from lengthen.evaluation import results
from lengthen.interop.subjects import open_model
from lengthen.report.collect import collect

Capture = pytest.CaptureFixture[str]
TEXT = "The fox looked at the grapes. They were sour, said the fox, and went its way. " * 120
VOCABULARY = 280


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json, trained on the text."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    train([TEXT], VOCABULARY, path)
    return path


@pytest.fixture
def folder(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a BLOOM with its tokenizer, and work beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(TEXT)
    return with_words(saved(make("Bloom", vocab_size=VOCABULARY), tmp_path / "bloom", seq_length=64), words)


def with_words(folder: Path, words: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(words.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return folder


EVAL = ["--data", "book.txt", "--lengths", "64,128", "--tokens", "256", "--device", "cpu"]


def test_eval_of_a_text(folder: Path, capsys: Capture) -> None:
    assert main(["eval", str(folder), *EVAL]) == 0
    said = capsys.readouterr().out
    assert "bloom: alibi, trained at 64" in said
    assert "trained on" not in said
    first, second = results.read(folder).values()
    assert (first.length, second.length, first.split, first.tokens) == (64, 128, "train", 256)
    model, tokenizer = (
        lengthen.load(folder),
        transformers.PreTrainedTokenizerFast(tokenizer_file="bloom/tokenizer.json"),
    )
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:257])
    losses = model.losses(ids[:-1].view(4, 64), ids[1:].view(4, 64))
    assert first.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    weights = first.weights
    assert main(["eval", str(folder), *EVAL]) == 0  # nothing is measured, or prepared, again
    assert len(results.read(folder)) == 2
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-05", "2e-05"))
    assert open_model(folder).weights != weights
    assert [curve.run.train_length for curve in collect([folder]).curves] == [64]


def test_eval_without_data_reads_pythons_source(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[Any] = []

    def prepare(source: Any, out: Path, **options: Any) -> Any:
        asked.append((source, options["tokenizer"], options["end_token"], options["validation"]))
        from lengthen.data import prepare

        return prepare("book.txt", out, **options | {"validation": 0.5})

    monkeypatch.setattr("lengthen.cli.corpus.prepare", prepare)
    assert main(["eval", str(folder), "--lengths", "64", "--tokens", "64", "--device", "cpu"]) == 0
    assert asked == [(None, folder / "tokenizer.json", "<|end|>", None)]
    assert "the source of Python’s standard library" in capsys.readouterr().out
    assert [one.split for one in results.read(folder).values()] == ["validation"]


def test_analyses(folder: Path, capsys: Capture) -> None:
    more = ["--data", "book.txt", "--tokens", "128", "--lengths", "64", "--device", "cpu"]
    assert main(["analyse", str(folder), "--what", "resolution,reach", *more]) == 0
    assert (folder / "analysis" / "reach.json").is_file()


@pytest.mark.parametrize("name", ["Bloom", "Llama"])
def test_generate_writes_what_theirs_does(
    folder: Path, words: Path, capsys: Capture, tmp_path: Path, name: str
) -> None:
    theirs = make(name, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    place = with_words(saved(theirs, tmp_path / "other"), words)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(words))
    ids = torch.tensor([tokenizer("The fox")["input_ids"]])
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    options = ["--prompt", "The fox", "--tokens", "12", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", str(place), *options]) == 0
    new = [token for token in expected[0, ids.shape[1] :].tolist() if token != 0]
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(new).rstrip("\n")


def test_another_architecture_is_evaluated_by_its_own_forward(
    folder: Path, words: Path, tmp_path: Path, capsys: Capture
) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": 64}
    theirs = transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=VOCABULARY, **sizes)).eval()
    place = with_words(saved(theirs, tmp_path / "gptj"), words)
    (place / "code.py").write_text("raise SystemExit('this ran')")
    assert main(["eval", str(place), *EVAL]) == 1  # which this one cannot beyond its 64 positions
    assert "--lengths: gptj (transformers) fails at 128 tokens, beyond the 64" in capsys.readouterr().err
    assert main(["eval", str(place), *EVAL, "--lengths", "64"]) == 0
    said = capsys.readouterr().out
    assert "read by transformers itself: " in said
    assert "model_type: expected one of bloom" in said
    assert "gptj (transformers), trained at 64" in said
    (first,) = results.read(place).values()
    ids = torch.tensor(transformers.PreTrainedTokenizerFast(tokenizer_file=str(words))(TEXT)["input_ids"][:257])
    with torch.no_grad():
        logits = theirs(ids[:-1].view(4, 64)).logits
    assert first.loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item(), rel=1e-5
    )
    assert main(["generate", str(place), "--prompt", "a", "--device", "cpu"]) == 1  # which is for ours alone
    assert "model_type: expected one of" in capsys.readouterr().err
    (place / "config.json").write_text('{"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "code.Model"}}')
    assert main(["eval", str(place), *EVAL]) == 1
    assert "got 'novel'; and transformers itself says: " in capsys.readouterr().err


def test_no_length_that_a_learned_table_has(folder: Path, words: Path, tmp_path: Path, capsys: Capture) -> None:
    place = with_words(saved(make("GPT2", vocab_size=VOCABULARY, n_positions=32), tmp_path / "gpt2"), words)
    for more in ([], ["--task", "passkey"]):
        assert main(["eval", str(place), *EVAL, *more]) == 1
        assert "--lengths: expected one of at most 32 tokens, got 64, 128" in capsys.readouterr().err


def test_a_text_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A run reads a text in a corpus' place too, with its own tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(TEXT)
    assert main(["prepare", "book.txt", "-o", "shards"]) == 0
    sizes = ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.train_length", "16"]
    steps = ["--train.steps", "2", "--train.batch", "2", "--evaluation.every", "0", "--device", "cpu", "--plain"]
    assert main(["train", "tiny", "--data", "shards", "--out", "run", *sizes, *steps]) == 0
    assert main(["eval", "run", "--data", "book.txt", "--lengths", "16", "--tokens", "64", "--device", "cpu"]) == 0
    assert "which is not what it was trained on" in capsys.readouterr().out
    (one,) = results.read(Path("run")).values()
    assert one.split == "train"
    assert lengthen.load("run").config == open_model("run").model.config


def test_a_model_of_the_hub_has_its_results_in_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is a cache that others share."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(folder))
    assert main(["eval", "somebody/bloom", *EVAL]) == 0
    assert len(results.read(Path("runs/somebody--bloom"))) == 2
    assert not (folder / "evaluation.jsonl").exists()


def test_without_a_tokenizer(folder: Path, capsys: Capture) -> None:
    (folder / "tokenizer.json").unlink()
    assert main(["eval", str(folder), *EVAL]) == 1
    assert "--data: expected token shards, since " in capsys.readouterr().err
    assert main(["generate", str(folder), "--device", "cpu"]) == 1
    assert "--data" in capsys.readouterr().err
