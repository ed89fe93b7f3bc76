"""The harness' three kinds of requests against plain loops, and its own command on a task of this machine's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm-eval")

from lm_eval.api.instance import Instance

from lengthen import Transformer
from lengthen.config import from_table
from lengthen.data import Corpus, prepare
from lengthen.evaluation import open_run
from lengthen.interop.export import export
from lengthen.interop.lm_eval import LengthenLM
from lengthen.interop.subjects import open_model
from lengthen.training import World, train

TEXT = "A fox and 12 crows sat on a wall. It is 300 years old. "
PAIRS = [("A fox", " and 12"), ("", "A fox"), ("A fox and 12 crows sat on a wall ", "xyz"), ("crows", " sat on a")]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text("\0".join(f"{n} {TEXT * 9}" for n in range(20)), encoding="utf-8")
    how: dict[str, Any] = {"tokenizer": request.param, "vocab_size": None if request.param == "bytes" else 300}
    return prepare(folder / "text.txt", folder / "corpus", separator="\0", validation=0.2, workers=1, **how)


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    size = {"vocab_size": corpus.vocab_size, "layers": 1, "width": 32, "heads": 2, "train_length": 32}
    table = {"model": size, "train": {"steps": 40, "batch": 8}, "evaluation": {"every": 0}, "optimizer": {"lr": 0.01}}
    train(from_table(table, "test"), corpus, out, World(0, 1, torch.device("cpu")))
    return out


@pytest.fixture
def model(run: Path) -> Transformer:
    return open_run(run).model.eval()


def ask(kind: Any, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


@torch.no_grad()
def log_probabilities(model: Transformer, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]))[0].log_softmax(-1)


def scored(model: Transformer, before: list[int], after: list[int]) -> tuple[float, bool]:
    """One token at a time: no batch, no padding. Of all tokens the last 33 count, of which 32 are read."""
    total, greedy, before = 0.0, True, (before + after)[-33 : -len(after)]
    for place, token in enumerate(after):
        row = log_probabilities(model, before + after[:place])[-1]
        total += float(row[token])
        greedy = greedy and int(row.argmax()) == token
    return total, greedy


@pytest.mark.parametrize("batch", [1, 3, "auto"])
def test_loglikelihood(run: Path, model: Transformer, corpus: Corpus, batch: int | str) -> None:
    encode, end = corpus.tokenizer.encode, corpus.end_id
    found = LengthenLM(str(run), batch_size=batch, device="cpu").loglikelihood(ask("loglikelihood", *PAIRS))
    for (context, continuation), one in zip(PAIRS, found, strict=True):
        before = encode(context.rstrip()) or [end or 0]
        whole = encode(context + continuation)
        after = whole[len(before) :] if context else whole
        total, greedy = scored(model, before, after)
        assert one == (pytest.approx(total, abs=1e-4), greedy)


def test_a_greedy_continuation_is_called_so(run: Path, model: Transformer, corpus: Corpus) -> None:
    lm = LengthenLM(str(run), device="cpu")
    before = corpus.tokenizer.encode("A fox")
    after = model.generate([before], 6).tokens[0]
    assert lm._loglikelihood_tokens([(None, before, after)])[0][1]
    assert not lm._loglikelihood_tokens([(None, before, [*after[:-1], after[-1] ^ 1])])[0][1]


def test_a_long_context_loses_its_beginning(run: Path, model: Transformer) -> None:
    lm = LengthenLM(str(run), device="cpu", max_length=16)
    ids = [1 + n % 90 for n in range(60)]
    found = lm._loglikelihood_tokens([(None, ids[:-4], [7, 8])])[0][0]
    inputs = [*ids[:-4], 7, 8][-17:-1]  # 16 are read, 7 among them; 8 is not
    row = log_probabilities(model, inputs)[-2:]
    assert found == pytest.approx(float(row[0, 7] + row[1, 8]), abs=1e-4)
    with pytest.raises(ValueError, match=r"^max_length: expected a context, and continuations of 1 to 16 tokens"):
        lm._loglikelihood_tokens([(None, [1], [2] * 17)])


@pytest.mark.parametrize("text", ["A fox", TEXT, TEXT * 5])
def test_rolling(run: Path, model: Transformer, corpus: Corpus, text: str) -> None:
    """Every token once; the last window ends with the text, and is as long as it may be."""
    found = LengthenLM(str(run), device="cpu").loglikelihood_rolling(ask("loglikelihood_rolling", (text,), ("x",)))
    ids = corpus.tokenizer.encode(text)
    total, done, before = 0.0, 0, [corpus.end_id or 0, *ids]
    while done < len(ids):
        stop = min(done + 32, len(ids))
        start = max(0, stop - 32)
        rows = log_probabilities(model, before[start:stop])
        total += sum(float(rows[place - start, ids[place]]) for place in range(done, stop))
        done = stop
    assert found[0] == pytest.approx(total, abs=1e-3)


def test_generate_until(run: Path, model: Transformer, corpus: Corpus) -> None:
    lm = LengthenLM(str(run), device="cpu", batch_size=2)
    how = {"until": [".", "\n\n"], "max_gen_toks": 12}
    contexts = ["A fox", "A fox and 12 crows sat on a wall. It is 300 years old. A", "", "crows sat"]
    other = [("A fox", {"until": "ows", "max_gen_toks": 9}), ("It", {"max_gen_toks": 5})]
    found = lm.generate_until(ask("generate_until", *((one, how) for one in contexts), *other))
    for (context, asked), text in zip([*((one, how) for one in contexts), *other], found, strict=True):
        ids = corpus.tokenizer.encode(context)[asked["max_gen_toks"] - 32 :] or [corpus.end_id or 0]
        stops = asked.get("until", [])
        written: list[int] = []
        while len(written) < asked["max_gen_toks"]:
            token = int(log_probabilities(model, ids + written)[-1].argmax())
            if token == corpus.end_id:
                break
            written.append(token)
        plain = corpus.tokenizer.decode(written)
        for stop in [stops] if isinstance(stops, str) else stops:
            plain = plain.split(stop)[0]
        assert text == plain


@pytest.mark.parametrize("begin", [None, "<|mask|>"], ids=["", "a token to begin with"])
def test_the_harness_own_model_of_the_exported_folder_says_the_same(
    run: Path, corpus: Corpus, tmp_path: Path, begin: str | None
) -> None:
    pytest.importorskip("accelerate", reason="the harness needs it for models of transformers: pip install accelerate")
    from lm_eval.models.huggingface import HFLM

    import lengthen.interop.huggingface  # noqa: F401 (registers the architecture)

    folder = export(open_model(run), tmp_path / "out", architecture="lengthen").folder
    if begin is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": begin}))
    how: dict[str, Any] = {"max_length": 32, "batch_size": 3, "device": "cpu"}
    theirs, ours = HFLM(str(folder), dtype="float32", **how), LengthenLM(str(folder), **how)
    for mine, other in zip(*(lm.loglikelihood(ask("loglikelihood", *PAIRS)) for lm in (ours, theirs)), strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-4), other[1])
    rolled = [lm.loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT * 3,))) for lm in (ours, theirs)]
    assert rolled[0] == pytest.approx(rolled[1], abs=1e-3)
    asked = ("A fox", {"until": ["."], "max_gen_toks": 8, "do_sample": False})
    assert len({lm.generate_until(ask("generate_until", asked))[0] for lm in (ours, theirs)}) == 1


def test_the_harness_own_models_are_known_too() -> None:
    """In a process of its own: here other tests may have loaded them."""
    code = "import lengthen.interop.lm_eval; from lm_eval.api.registry import get_model; print(get_model('dummy'))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "DummyLM" in ended.stdout, ended.stderr


def test_sampling_has_a_seed_of_its_own_for_each_request(run: Path) -> None:
    lm = LengthenLM(str(run), device="cpu")
    how = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 20}
    first = lm.generate_until(ask("generate_until", *[("A fox", how)] * 3))
    assert len(set(first)) == 3
    assert lm.generate_until(ask("generate_until", *[("A fox", how)] * 3)) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_lenght": 3}, r"^model_args: expected path, data, …, or positions.NAME, got 'max_lenght'"),
        ({"max_gen_toks": 0}, r"^max_gen_toks: expected at least 1"),
        ({"data": "nowhere"}, r"^--data: expected the corpus"),
    ],
)
def test_what_is_refused(run: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LengthenLM(str(run), device="cpu", **change)


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
metric_list:
  - metric: {metric}
"""


@pytest.mark.slow
def test_the_command(run: Path, model: Transformer, corpus: Corpus, tmp_path: Path) -> None:
    """Two tasks of one file, offline: the command's numbers are those of a plain loop."""
    rows = [
        {"question": "A fox", "choices": [" and 12 crows", " or 7"], "answer": 0, "text": TEXT * 2},
        {"question": "It is", "choices": [" crows", " 300 years"], "answer": 1, "text": TEXT},
        {"question": "sat on", "choices": [" a wall", " 300 walls"], "answer": 1, "text": "A fox."},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make: Callable[..., str] = lambda **values: TASK.format(data=data, **values)  # noqa: E731
    choices = 'doc_to_choice: choices\ntarget_delimiter: ""'
    (tmp_path / "pick.yaml").write_text(
        make(name="pick", kind="multiple_choice", target="{{answer}}", more=choices, metric="acc")
    )
    (tmp_path / "roll.yaml").write_text(
        make(name="roll", kind="loglikelihood_rolling", target="{{text}}", more="", metric="byte_perplexity")
    )
    words = ["run", "--model", "lengthen", "--model_args", f"path={run}", "--tasks", "pick,roll", "--device", "cpu"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--batch_size", "2"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    ended = subprocess.run(
        [sys.executable, "-m", "lengthen.interop.lm_eval", *words],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(path.read_text())["results"]
    encode, right, total = corpus.tokenizer.encode, 0, 0.0
    for row in rows:
        question = encode(str(row["question"]))
        both = [encode(f"{row['question']}{choice}") for choice in row["choices"]]  # type: ignore[attr-defined]
        likely = [scored(model, question, one[len(question) :])[0] for one in both]
        right += likely.index(max(likely)) == row["answer"]
        ids = encode(str(row["text"]))
        for start in range(0, len(ids), 32):
            stop = min(start + 32, len(ids))
            begin = max(0, stop - 32)
            inputs = [corpus.end_id or 0, *ids][begin:stop]
            rows_of = log_probabilities(model, inputs)
            total += sum(float(rows_of[place - begin, ids[place]]) for place in range(start, stop))
    size = sum(len(str(row["text"]).encode()) for row in rows)
    assert results["pick"]["acc,none"] == pytest.approx(right / len(rows))
    assert results["roll"]["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-4)
