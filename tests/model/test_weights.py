"""A model's file: what is saved is loaded, nothing is unpickled, and a save that fails leaves the old file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lengthen import positions
from lengthen.model import Transformer, load, save, weights

Make = Callable[..., Transformer]


def header(path: Path) -> dict[str, Any]:
    """The JSON that a safetensors file opens with, after its length in 8 bytes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + size])
    return found


def with_config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a file again with another config in it."""
    said = json.loads(header(path)["__metadata__"]["lengthen"])
    change(said)
    safetensors.torch.save_file(
        safetensors.torch.load_file(path), path, metadata={"format": "pt", "lengthen": json.dumps(said)}
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in positions.names()),
        ("rotary+alibi", {"pairs": "neighbours"}),
        ("alibi", {"learned": True}),
        ("xpos", {"learned_gamma": True}),
    ],
    ids=str,
)
def test_what_is_saved_is_loaded(make: Make, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"tied": method == "t5", "norm": "rms" if method == "rotary" else "layer"}
    model = make(dtype=torch.float32, positions=method, position_options=options, **changes)
    save(model, tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors")
    assert loaded.config == model.config
    ids = torch.randint(19, (2, 30))
    assert torch.equal(loaded(ids), model(ids))
    loaded(ids, ids).backward()  # it learns on
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_a_checkpoints_folder_is_loaded(make: Make, tmp_path: Path) -> None:
    model = make(dtype=torch.float32)
    save(model, tmp_path / "model.safetensors")
    ids = torch.randint(19, (2, 30))
    assert torch.equal(load(tmp_path)(ids), model(ids))
    assert torch.equal(load(str(tmp_path))(ids), model(ids))
    assert torch.equal(load(tmp_path, "cpu:0")(ids), model(ids))


def test_the_file_needs_nothing_but_safetensors(make: Make, tmp_path: Path) -> None:
    model = make(dtype=torch.float32, tied=False)
    save(model, tmp_path / "a.safetensors")
    said = header(tmp_path / "a.safetensors")
    config = json.loads(said.pop("__metadata__")["lengthen"])
    assert config["layers"] == 2
    assert config["positions"] == "alibi"
    assert {name: part["shape"] for name, part in said.items()} == {
        name: list(weight.shape) for name, weight in model.state_dict().items()
    }
    numbers = sum(4 * weight.numel() for weight in model.state_dict().values())
    data = (tmp_path / "a.safetensors").read_bytes()
    assert len(data) == 8 + int.from_bytes(data[:8], "little") + numbers  # nothing else is in it


def test_nothing_is_unpickled(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    save(make(dtype=torch.float32), tmp_path / "a.safetensors")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load(tmp_path / "a.safetensors")


def test_loading_in_another_process_gives_the_same_bits(make: Make, tmp_path: Path) -> None:
    model = make(dtype=torch.float32, positions="xpos")
    save(model, tmp_path / "a.safetensors")
    program = f"""
import torch
from lengthen.model import load
print(load({str(tmp_path / "a.safetensors")!r})(torch.arange(19)[None]).sum().item().hex())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == model(torch.arange(19)[None]).sum().item().hex()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused_by_name(make: Make, tmp_path: Path, part: float) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match=r"a\.safetensors: expected a whole safetensors file, got one that cannot"):
        load(path)


def test_other_files_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors: expected a model's weights, got no such file"):
        load(tmp_path / "b.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors: expected a model's weights"):
        load(tmp_path)
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(2)}, plain)
    with pytest.raises(ValueError, match=r"plain\.safetensors: expected a model's config in the file's metadata"):
        load(plain)


def test_an_unknown_key_of_the_config_is_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    with_config(path, lambda said: said.update(head_dims=3))
    with pytest.raises(ValueError, match=r"a\.safetensors: unknown key 'model.head_dims'; did you mean '.*head_dim'\?"):
        load(path)
    with_config(path, lambda said: (said.pop("head_dims"), said.update(heads=0)))
    with pytest.raises(ValueError, match=r"model.heads: expected at least 1, got 0"):
        load(path)


@pytest.mark.parametrize("problem", [OSError(28, "disk full"), KeyboardInterrupt()], ids=repr)
def test_a_save_that_fails_leaves_the_old_file(
    make: Make, tmp_path: Path, problem: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    before = path.read_bytes()

    def fail(file: Path, tensors: Any, metadata: Any) -> None:
        file.write_bytes(before[: len(before) // 2])
        raise problem

    monkeypatch.setattr(weights, "write_tensors", fail)
    with pytest.raises(type(problem)) as raised:
        save(make(dtype=torch.float32, layers=3), path)
    if isinstance(problem, OSError):
        assert str(raised.value) == f"[Errno 28] disk full: '{path}'"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_what_safetensors_writes(tmp_path: Path) -> None:
    """Tensors of every dtype, none of them where the next would be unaligned, views and scalars among them."""
    made = torch.arange(42, dtype=torch.float64).view(6, 7)
    dtypes = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    tensors = {str(dtype): made.to(dtype)[:odd] for odd, dtype in zip((1, 3, 5, 6), dtypes, strict=True)}
    tensors |= {"view": made.float().t()[1:], "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    weights.write_tensors(tmp_path / "ours", tensors, {"a": "b"})
    safetensors.torch.save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "theirs")
    ours, theirs = (safetensors.torch.load_file(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)
    assert header(tmp_path / "ours")["__metadata__"] == {"a": "b"}


def test_a_model_does_not_change_with_its_file(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = make(dtype=torch.float32)
    save(model, path)
    loaded, ids = load(path), torch.randint(19, (2, 30))
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place, as nobody should
        file.write(b"\xff" * size)
        assert torch.equal(loaded(ids), model(ids))
        file.truncate(0)
    assert torch.equal(loaded(ids), model(ids))


def test_tensors_that_the_config_does_not_say_are_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    whole, metadata = safetensors.torch.load_file(path), header(path)["__metadata__"]
    norm = whole["norm.weight"]

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        safetensors.torch.save_file(tensors, path, metadata)
        with pytest.raises(
            ValueError, match=rf"a\.safetensors: expected the tensors of the model that its config says.*: {message}$"
        ):
            load(path)

    refused({name: one for name, one in whole.items() if name != "norm.weight"}, "norm.weight is missing")
    refused(whole | {"spare": norm.clone()}, "spare has no place in it")
    refused(whole | {"norm.weight": norm[:-1]}, r"norm.weight: expected shape \[24\], got \[23\]")
    refused(whole | {"norm.weight": norm.int()}, r"norm.weight: expected F32, got I32")
    refused({"b": norm, "c": norm.clone()}, r"embedding.weight is missing; .*; and \d+ more")


def test_a_config_of_more_layers_than_the_file_can_hold_is_refused_at_once(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    with_config(path, lambda said: said.update(layers=10**12))
    with pytest.raises(ValueError, match=r"a\.safetensors: expected the tensors of 1,000,000,000,000 layers"):
        load(path)
    with_config(path, lambda said: said.update(layers=2, vocab_size=None))
    with pytest.raises(ValueError, match=r"model\.vocab_size: expected a number, got none"):
        load(path)


def test_a_second_save_replaces_the_first(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(make(dtype=torch.float32), path)
    save(make(dtype=torch.float32, layers=3), path)
    assert load(path).config.layers == 3
    assert list(tmp_path.iterdir()) == [path]
