"""Models out: what `transformers` opens, alone or with our classes, computes the same; and back in, equal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from theirs import make, saved

import lengthen.interop.huggingface  # it registers our classes
from lengthen import ModelConfig, Transformer
from lengthen.cli.main import main
from lengthen.config import Config
from lengthen.data import Corpus, prepare
from lengthen.data.tokenizer import Tokenizer
from lengthen.evaluation import Subject
from lengthen.interop import byte_tokenizer
from lengthen.interop.export import choose, export
from lengthen.interop.subjects import open_model, tokenizer_of
from lengthen.model import save
from lengthen.training.checkpoint import Checkpoint, State

Capture = pytest.CaptureFixture[str]
TEXT = "The fox looked at the grapes; «sour» they were, said the fox — 🦊 — and went its way.\n" * 60
# By itself: a new process in which `import lengthen` fails.
ALONE = """
import sys, json, torch
sys.modules["lengthen"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
out, *folders = sys.argv[1:]
said = {}
for folder in folders:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The fox — 🦊", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(torch.arange(60).view(2, 30)).logits
    new = model.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    text = tokenizer.decode(new[0, ids.shape[1]:])
    said[folder] = {"class": type(model).__name__, "ids": ids[0].tolist(), "logits": logits.tolist(), "text": text}
json.dump(said, open(out, "w"))
"""
LLAMA = {"norm": "rms", "activation": "swiglu", "biases": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default rotary": ("GPTNeoXForCausalLM", {"positions": "rotary"}),
    "bloom": ("BloomForCausalLM", {"embedding_norm": True}),
    "mpt": ("MptForCausalLM", {"biases": False, "activation": "gelu", "clip_qkv": 0.4, "scale_embeddings": False}),
    "llama, neighbours, yarn": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            **{"positions": "rotary", "key_heads": 2, "tied": False},
            "position_options": {"pairs": "neighbours", "scaling": "yarn", "factor": 4.0},
        },
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "positions": "rotary", "window": 9}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "positions": "rotary", "qk_norm": True, "head_dim": 12}),
    "learned": ("GPT2LMHeadModel", {"positions": "learned"}),
}
OWN: dict[str, dict[str, Any]] = {
    "default": {},
    "xpos": {"positions": "xpos", **LLAMA},
    "t5, untied, parallel": {"positions": "t5", "tied": False, "block": "parallel", "key_heads": 2},
    "learned slopes": {"position_options": {"learned": True}, "window": 11},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    return prepare(folder / "text.txt", folder / "shards", tokenizer="bpe", vocab_size=300).directory


def subject_of(folder: Path, options: dict[str, Any], shards: Path | None = None) -> Subject:
    """Return a model with every weight drawn, as a run has it; of bytes, or with the tokenizer of a corpus."""
    folder.mkdir(exist_ok=True)
    corpus = None if shards is None else Corpus.open(shards)
    sizes = {"layers": 2, "width": 32, "heads": 4, "train_length": 48, "vocab_size": 300 if corpus else 258}
    config = ModelConfig(**sizes | options)
    torch.manual_seed(1)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save(model, folder / "model.safetensors")
    state = State(0, "", str(shards), corpus.tokenizer_name) if corpus else State(0, "", None, "bytes")
    return Subject(model, Checkpoint(folder, state, {}), folder, Config(config))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[str, Any]:
    """Return each case: the model, the folder that it was exported to, and what transformers made of that, alone."""
    place = tmp_path_factory.mktemp("alone")
    found: dict[str, Any] = {}
    for number, (name, (_, options)) in enumerate(CASES.items()):
        subject = subject_of(place / f"run{number}", options, shards if name == "llama, neighbours, yarn" else None)
        found[name] = subject, export(subject, place / f"out{number}")
    words = [
        sys.executable,
        "-I",
        "-c",
        ALONE,
        str(place / "said.json"),
        *(str(one.folder) for _, one in found.values()),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads((place / "said.json").read_text())
    return {name: (subject, one, said[str(one.folder)]) for name, (subject, one) in found.items()}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (kind, _) in CASES.items()], ids=CASES)
@torch.no_grad()
def test_transformers_alone_computes_the_same(alone: dict[str, Any], name: str, kind: str) -> None:
    subject, made, said = alone[name]
    model, ids = subject.model, torch.arange(60).view(2, 30)
    assert said["class"] == made.architecture == kind
    torch.testing.assert_close(torch.tensor(said["logits"]), model(ids), rtol=1e-5, atol=1e-5)
    again = open_model(made.folder)
    torch.testing.assert_close(again.model(ids), model(ids), rtol=1e-6, atol=1e-6)
    assert again.model.config.train_length == 48
    tokenizer = tokenizer_of(again)
    assert tokenizer is not None
    assert tokenizer.encode("The fox — 🦊") == said["ids"]
    for one in (model, again.model):
        (new,) = one.generate([said["ids"]], 20, stop=[tokenizer.end_id]).tokens
        assert tokenizer.decode(new) == said["text"].removesuffix("<|end|>")


@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_the_rest_open_with_our_classes(tmp_path: Path, options: dict[str, Any]) -> None:
    subject, out = subject_of(tmp_path / "run", options), tmp_path / "out"
    model = subject.model
    assert export(subject, out).architecture == "LengthenForCausalLM"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(theirs).__name__ == "LengthenForCausalLM"
    ids = torch.randint(256, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=0, atol=0)
        assert torch.equal(lengthen.load(out)(ids), model(ids))
    assert theirs(ids, labels=ids).loss.item() == pytest.approx(model(ids[:, :-1], ids[:, 1:]).item(), rel=1e-5)
    more = {"max_new_tokens": 12, "pad_token_id": 257, "eos_token_id": 256}
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    padded, real = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]]), torch.ones(2, 5, dtype=torch.long)
    real[1, :3] = 0
    found = theirs.generate(padded, attention_mask=real, do_sample=False, **more)[:, 5:]
    expected = model.generate(prompts, 12, stop=[256]).tokens
    assert [row[: len(new)] for row, new in zip(found.tolist(), expected, strict=True)] == expected
    slow = theirs.generate(padded, attention_mask=real, do_sample=False, use_cache=False, **more)[:, 5:]
    assert torch.equal(slow, found)
    beams = [theirs.generate(padded, attention_mask=real, num_beams=3, use_cache=c, **more) for c in (True, False)]
    assert torch.equal(*beams)
    theirs.save_pretrained(tmp_path / "again")
    assert torch.equal(lengthen.load(tmp_path / "again")(ids), lengthen.load(out)(ids))


def test_what_our_classes_do_not_do() -> None:
    from lengthen.interop.huggingface import LengthenConfig, LengthenForCausalLM

    model, ids = LengthenForCausalLM(LengthenConfig()).eval(), torch.randint(258, (2, 6))
    with pytest.raises(TypeError, match="expected no output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="expected each row's ones in one run"):
        model(ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]] * 2))
    with pytest.raises(ValueError, match="position_ids: expected positions counted"):
        model(ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(6).flip(0)[None])
    right = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(model(ids, attention_mask=right).logits[1, :4], model(ids[1:, :4]).logits[0])
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 258)
    (logits,) = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)


def test_a_run_by_the_verb(tmp_path: Path, capsys: Capture) -> None:
    """A run goes out with what was measured of it, is not written over by mistake, and says the same afterwards."""
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(tmp_path / "text.txt", tmp_path / "shards")
    folder, out, data = str(tmp_path / "run"), tmp_path / "out", ["--data", str(tmp_path / "shards")]
    sizes = {"layers": 1, "width": 32, "heads": 4, "train_length": 48, "positions": "rotary"}
    flags = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
    steps = ["--train.steps", "2", "--train.batch", "2", "--evaluation.every", "0", "--device", "cpu", "--plain"]
    assert main(["train", "tiny", *flags, *steps, *data, "--out", folder]) == 0
    assert main(["export", folder, str(out)]) == 0
    assert "out: GPTNeoXForCausalLM" in capsys.readouterr().out
    assert "Not measured" in (out / "README.md").read_text()
    assert main(["eval", folder, "--lengths", "48,96", "--tokens", "96", "--device", "cpu"]) == 0
    for more in (["--tokens", "97"], ["--tokens", "96", "--positions.base", "500"]):
        assert main(["eval", folder, "--lengths", "48,96", "--device", "cpu", *more]) == 0
    assert main(["export", folder, str(out)]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert main(["export", folder, folder, "--force"]) == 1
    assert "expected another folder than the model's own" in capsys.readouterr().err
    assert main(["export", folder, str(tmp_path / "shards"), "--force"]) == 1
    assert "expected a folder with config.json, which alone is replaced" in capsys.readouterr().err
    (out / "old").write_text("")
    assert main(["export", folder, str(out), "--force"]) == 0
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert card.count("| 96 | 2 | nonoverlapping | ") == 2, "not of the method changed"
    assert re.findall("the same ([0-9]+) tokens", card) == ["96", "97"]
    assert card.count("nonoverlapping: holds to") + card.count("nonoverlapping: no verdict") == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    texts = []
    for place in (folder, str(out)):
        capsys.readouterr()
        assert (
            main(["generate", place, "--prompt", "fox", "--tokens", "9", "--temperature", "0", "--device", "cpu"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["export", folder, str(tmp_path / "own"), "--architecture", "lengthen"]) == 0
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "lengthen"


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("lengthen.interop.export.card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(subject_of(tmp_path / "run", {}), out)
    assert list(out.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_architecture_that_cannot_hold_it_says_why(tmp_path: Path, capsys: Capture) -> None:
    config = ModelConfig(vocab_size=258, layers=2, width=32, heads=4, train_length=16)
    with pytest.raises(ValueError, match=r"architecture: bloom cannot hold this model: .*embedding_norm: False → True"):
        choose(config, "bloom")
    with pytest.raises(ValueError, match=r"expected one of bloom, .*, got 'blom'; did you mean 'bloom'"):
        choose(config, "blom")
    _, reasons = choose(config)
    assert "positions: 'alibi' → 'rotary'" in reasons["llama"]
    assert {"activation: 'gelu_tanh' → 'gelu'", "biases: True → False"} <= set(reasons["mpt"])
    other = ModelConfig(**{**vars(config), "biases": False, "activation": "gelu"})
    assert choose(other)[0].model_type == "mpt"
    slopes = {"slopes": [0.5, 0.25, 0.1, 0.01]}  # which transformers has no key for, or none that it obeys
    assert choose(ModelConfig(**{**vars(other), "position_options": slopes}))[0].model_type == "lengthen"
    with pytest.raises(ValueError, match="model: expected a decoder, got an encoder"):
        export(subject_of(tmp_path / "run", {"kind": "encoder"}), tmp_path / "out")


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "Bloom", "Mpt", "GPT2", "Falcon"])
def test_a_folder_of_theirs_comes_out_as_it_went_in(tmp_path: Path, name: str) -> None:
    theirs, ids = make(name), torch.randint(67, (1, 20))
    made = export(open_model(saved(theirs, tmp_path / "in")), tmp_path / "out")
    assert made.architecture == type(theirs).__name__
    assert made.notes == ["no tokenizer: the model has none that is known here"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():  # GPT-2's GELU is written by another name, which computes it in another order
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5 if name == "GPT2" else 0)


def test_what_a_folder_of_theirs_says_of_its_tokens_stays(tmp_path: Path) -> None:
    """Where a text ends, how tokens are drawn, and how a chat is written."""
    ids = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    folder = saved(make("Llama"), tmp_path / "in", **ids)
    files = {
        "generation_config.json": json.dumps({**ids, "temperature": 0.6}),
        "tokenizer_config.json": json.dumps({"eos_token": "<|end|>"}),
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    byte_tokenizer.write(folder / "tokenizer.json")
    out = export(open_model(folder), tmp_path / "out").folder
    assert {name: json.loads((out / "config.json").read_text())[name] for name in ids} == ids
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [4, 5]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    (folder / "generation_config.json").unlink()
    again = export(open_model(folder), tmp_path / "again").folder
    assert json.loads((again / "generation_config.json").read_text()) == ids


def test_bytes_as_a_tokenizer_json(tmp_path: Path) -> None:
    byte_tokenizer.write(tmp_path / "tokenizer.json")
    ours, theirs = Tokenizer(), Tokenizer(tmp_path / "tokenizer.json", "json")
    assert (theirs.vocab_size, theirs.end_id, theirs.mask_id) == (258, 256, 257)
    for text in ("", "plain", " two  spaces\n\ttab\r\n", "«déjà vu» — 🦊 日本語 \x00\x7f\xad", "<|end|>", TEXT):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode(range(0x80)) == ours.decode(range(0x80))
