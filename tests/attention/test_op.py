"""The call: what it refuses and in which words, what it fills in, what it returns, and that nothing is not a crash."""

import doctest
import importlib
import math
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes, attention

BACKENDS = pytest.mark.parametrize("backend", [None, "reference", "chunked"])


def inputs(**changes: Any) -> dict[str, Any]:
    """Return a call of 2 sequences, 4 heads on 2 key heads, 5 queries of 7 keys, with some arguments changed."""
    given = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 7, 8), "v": torch.randn(2, 2, 7, 8)}
    return given | changes


META = torch.device("meta")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, r"q: expected a tensor, got \[1\.0\] \(list\)"),
        ({"k": None}, TypeError, r"k: expected a tensor, got None"),
        ({"v": "v"}, TypeError, r"v: expected a tensor, got 'v' \(str\)"),
        ({"q": torch.zeros(4, 5, 8)}, ValueError, r"q: expected \[batch, heads, length, width\], got .*\[4, 5, 8\]"),
        ({"k": torch.zeros(2, 7, 8)}, ValueError, r"k: expected \[batch, heads, length, width\], got .*\[2, 7, 8\]"),
        ({"v": torch.zeros(7, 8)}, ValueError, r"v: expected \[batch, heads, length, width\], got .*\[7, 8\]"),
        (
            {"q": torch.zeros(2, 4, 5, 8, dtype=torch.int64)},
            TypeError,
            r"q: expected float16, bfloat16, float32 or float64, got a torch\.int64",
        ),
        (
            {"k": torch.zeros(2, 2, 7, 8, dtype=torch.complex64)},
            TypeError,
            r"k: expected float16, bfloat16, float32 or float64, got a torch\.complex64",
        ),
        ({"k": torch.zeros(2, 2, 7, 8).half()}, TypeError, r"k: expected torch\.float32 like q, got a torch\.float16"),
        ({"v": torch.zeros(2, 2, 7, 8).double()}, TypeError, r"v: expected torch\.float32 like q, got .*float64"),
        ({"k": torch.zeros(2, 2, 7, 8, device=META)}, ValueError, r"k: expected a tensor on cpu like q, got .*meta"),
        ({"v": torch.zeros(2, 2, 7, 8, device=META)}, ValueError, r"v: expected a tensor on cpu like q, got .*meta"),
        ({"k": torch.zeros(2, 2, 7, 6)}, ValueError, r"k: expected head_dim 8 like q, .*\[2, 2, 7, 6\]"),
        (
            {"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 7, 0)},
            ValueError,
            r"k: expected head_dim 0 like q, at least 1",
        ),
        ({"k": torch.zeros(1, 2, 7, 8)}, ValueError, r"k: expected batch 2 like q, got .*\[1, 2, 7, 8\]"),
        ({"v": torch.zeros(3, 2, 7, 8)}, ValueError, r"v: expected batch 2 like q, got .*\[3, 2, 7, 8\]"),
        ({"v": torch.zeros(2, 2, 6, 8)}, ValueError, r"v: expected heads and length \[2, 7\] like k, got .*6, 8\]"),
        ({"v": torch.zeros(2, 4, 7, 8)}, ValueError, r"v: expected heads and length \[2, 7\] like k, got .*4, 7, 8\]"),
        (
            {"k": torch.zeros(2, 3, 7, 8), "v": torch.zeros(2, 3, 7, 8)},
            ValueError,
            r"k: expected a head count that divides q's 4, got .*\[2, 3, 7, 8\]",
        ),
        (
            {"k": torch.zeros(2, 8, 7, 8), "v": torch.zeros(2, 8, 7, 8)},
            ValueError,
            r"k: expected a head count that divides q's 4, got .*\[2, 8, 7, 8\]",
        ),
        (
            {"k": torch.zeros(2, 0, 7, 8), "v": torch.zeros(2, 0, 7, 8)},
            ValueError,
            r"k: expected a head count that divides q's 4, got .*\[2, 0, 7, 8\]",
        ),
        ({"mask": "causal"}, TypeError, r"mask: expected Causal\(\), Window\(n\), .*, got 'causal' \(str\)"),
        ({"mask": Causal}, TypeError, r"mask: expected Causal\(\), "),
        ({"mask": None}, TypeError, r"mask: expected Causal\(\), .*got None"),
        (
            {"mask": Causal().padded(torch.zeros(3, dtype=torch.int64))},
            ValueError,
            r"mask\.key_start: expected one row for each of 2 sequences, got .*\[3\]",
        ),
        (
            {"mask": Causal().padded(torch.zeros(2, dtype=torch.int64, device=META))},
            ValueError,
            r"mask\.key_start: expected a tensor on cpu like q, got .*meta",
        ),
        ({"scale": math.inf}, TypeError, r"scale: expected a finite number, got inf \(float\)"),
        ({"scale": math.nan}, TypeError, r"scale: expected a finite number, got nan \(float\)"),
        ({"scale": True}, TypeError, r"scale: expected a finite number, got True \(bool\)"),
        ({"scale": torch.tensor(0.5)}, TypeError, r"scale: expected a finite number, got a torch\.float32 tensor"),
        ({"q_start": 2.0}, TypeError, r"q_start: expected a whole number, got 2\.0 \(float\)"),
        ({"q_start": True}, TypeError, r"q_start: expected a whole number, got True \(bool\)"),
        ({"tolerance": -1e-9}, ValueError, r"tolerance: expected a fraction from 0 to below 1, got -1e-09"),
        ({"tolerance": 1}, ValueError, r"tolerance: expected a fraction from 0 to below 1, got 1"),
        ({"tolerance": math.nan}, ValueError, r"tolerance: expected a fraction from 0 to below 1, got nan"),
        ({"tolerance": "0"}, TypeError, r"tolerance: expected a number, got '0' \(str\)"),
        ({"tolerance": False}, TypeError, r"tolerance: expected a number, got False \(bool\)"),
        ({"bias": torch.zeros(4)}, TypeError, r"bias: expected Linear or Table, got a torch\.float32 tensor"),
        ({"bias": Decay(torch.ones(8))}, TypeError, r"bias: expected Linear or Table, got Decay"),
        ({"bias": Linear}, TypeError, r"bias: expected Linear or Table, got <class"),
        (
            {"bias": Linear(torch.ones(2))},
            ValueError,
            r"bias\.slopes: expected one row for each of q's 4 heads, got .*\[2\]",
        ),
        (
            {"bias": Table(torch.ones(8, 7))},
            ValueError,
            r"bias\.values: expected one row for each of q's 4 heads, got .*\[8, 7\]",
        ),
        (
            {"bias": Linear(torch.ones(4, device=META))},
            ValueError,
            r"bias\.slopes: expected a tensor on cpu like q, got .*meta",
        ),
        (
            {"bias": Linear(torch.ones(4), torch.ones(4, device=META))},
            ValueError,
            r"bias\.ahead: expected a tensor on cpu like q, got .*meta",
        ),
        (
            {"bias": Table(torch.ones(4, 7, device=META))},
            ValueError,
            r"bias\.values: expected a tensor on cpu like q, got .*meta",
        ),
        ({"decay": torch.ones(8)}, TypeError, r"decay: expected Decay, got a torch\.float32 tensor"),
        ({"decay": Linear(torch.ones(4))}, TypeError, r"decay: expected Decay, got Linear"),
        ({"decay": Decay(torch.ones(7))}, ValueError, r"decay\.rates: expected \[8\] or \[4, 8\], got .*\[7\]"),
        ({"decay": Decay(torch.ones(2, 8))}, ValueError, r"decay\.rates: expected \[8\] or \[4, 8\], got .*\[2, 8\]"),
        (
            {"decay": Decay(torch.ones(8, device=META))},
            ValueError,
            r"decay\.rates: expected a tensor on cpu like q, got .*meta",
        ),
        (
            {"backend": "chunkd"},
            ValueError,
            r"backend: expected one of reference, native, chunked, triton, got 'chunkd'; did you mean 'chunked'\?",
        ),
        (
            {"ball": torch.ones(2)},
            TypeError,
            r"ball: expected a Ball \(Ball\.around\(k\)\), got a torch\.float32 tensor",
        ),
        ({"backend": "refrence"}, ValueError, r"got 'refrence'; did you mean 'reference'\?"),
        ({"backend": "xyz"}, ValueError, r"backend: expected one of reference, .*, got 'xyz'$"),
        ({"backend": 3}, ValueError, r"backend: expected one of reference, .*, got 3$"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**inputs(**changes))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("is_causal", r"is_causal: not an argument of lengthen\.attention; use mask=Causal\(\), which is the default"),
        ("attn_mask", r"attn_mask: not an argument of lengthen\.attention; use mask= .*bias=Linear\(slopes\) or Table"),
        ("dropout_p", r"dropout_p: not an argument of lengthen\.attention; attention dropout is not offered"),
        ("enable_gqa", r"enable_gqa: not an argument of lengthen\.attention; leave it out: "),
        ("tolerence", r"tolerence: not an argument .*, which takes bias, decay, .*; did you mean 'tolerance'\?"),
        ("key_norm", r"key_norm: not an argument of lengthen\.attention, which takes bias, .*, ball$"),
    ],
)
def test_other_arguments_are_refused_with_what_to_use_instead(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attention(**inputs(), **{name: True})


@BACKENDS
@pytest.mark.parametrize(
    ("mask", "q_start", "behind", "ahead"),
    [
        (Causal(), None, 6, None),  # 5 queries at 2 … 6 of 7 keys
        (Causal(), 20, 24, None),
        (Window(3), None, 2, None),
        (Blockwise(2), None, 3, None),
        (Causal().padded(torch.tensor([4])), None, 2, None),
        (Causal().padded(torch.tensor([4, 2])), None, 4, None),
        (Bidirectional(), None, 6, 4),
        (Bidirectional(), 0, 4, 6),
        (Bidirectional().packed(torch.tensor([[0, 0, 0, 3, 3, 3, 3]])), None, 3, 3),
    ],
)
def test_a_table_reaches_to_the_farthest_distance_seen(
    backend: str | None, mask: Any, q_start: int | None, behind: int, ahead: int | None
) -> None:
    def call(table: Table) -> Tensor:
        return attention(**inputs(), bias=table, mask=mask, q_start=q_start, backend=backend)

    def table(behind: int, ahead: int | None) -> Table:
        return Table(*(torch.randn(4, far + 1) for far in (behind, ahead) if far is not None))

    assert bool(call(table(behind, ahead)).isfinite().all())
    short = rf"bias\.values: expected distances 0 … {behind}, .*, got a table for 0 … {behind - 1}"
    with pytest.raises(ValueError, match=short):
        call(table(behind - 1, ahead))
    if ahead is not None:
        short = rf"bias\.ahead: expected distances 0 … {ahead}, .*, got a table for 0 … {ahead - 1}"
        with pytest.raises(ValueError, match=short):
            call(table(behind, ahead - 1))
        both = max(behind, ahead)  # one table for both sides
        assert bool(call(table(both, None)).isfinite().all())
        with pytest.raises(ValueError, match=rf"bias\.values: expected distances 0 … {both}, "):
            call(table(both - 1, None))


@BACKENDS
def test_what_a_short_table_lacks_is_not_seen(backend: str | None, assert_as_defined: Any) -> None:
    call = inputs(mask=Window(3), bias=Table(torch.randn(4, 3)))
    whole = Table(torch.cat([call["bias"].values, torch.full((4, 4), 1e9)], dim=1))
    torch.testing.assert_close(
        attention(**call, backend=backend),
        attention(**inputs(**call) | {"bias": whole}, backend="reference"),
        rtol=1e-5,
        atol=1e-6,
    )


@BACKENDS
def test_the_defaults(backend: str | None) -> None:
    call = inputs()
    got = attention(**call, backend=backend)
    spelt = attention(
        **call, bias=None, decay=None, mask=Causal(), scale=8**-0.5, q_start=2, tolerance=2**-24, backend=backend
    )
    assert torch.equal(got, spelt)
    other = attention(**call, scale=1.0, backend=backend)
    assert not torch.allclose(got, other, atol=1e-3)


@BACKENDS
def test_a_scale_does_not_scale_the_bias(backend: str | None) -> None:
    bias = Linear(alibi_slopes(4))
    got = attention(**inputs(scale=0), bias=bias, backend=backend)
    call = inputs()
    call["q"].zero_()
    torch.testing.assert_close(
        attention(**call | {"v": torch.ones(2, 2, 7, 8)}, bias=bias, backend=backend), torch.ones_like(got)
    )
    weights = attention(**call | {"v": torch.eye(7, 8).expand(2, 2, -1, -1)}, bias=bias, scale=5.0, backend=backend)
    expected = torch.softmax(-alibi_slopes(4)[:, None] * torch.arange(6, -1, -1), dim=1)
    torch.testing.assert_close(weights[1, :, -1, :7], expected, rtol=1e-5, atol=1e-6)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_returned(backend: str | None, dtype: torch.dtype) -> None:
    call = {name: x.to(dtype) for name, x in inputs(v=torch.randn(2, 2, 7, 3)).items()}
    out = attention(**call, backend=backend)
    pair = attention(**call, return_lse=True, backend=backend)
    assert isinstance(out, Tensor)
    assert isinstance(pair, tuple)
    assert (out.shape, out.dtype) == ((2, 4, 5, 3), dtype)
    assert (pair[0].shape, pair[0].dtype) == ((2, 4, 5, 3), dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (pair[1].shape, pair[1].dtype) == ((2, 4, 5), wide)
    torch.testing.assert_close(pair[0], out, rtol=0, atol=4 * torch.finfo(dtype).eps)


@BACKENDS
@pytest.mark.parametrize("bias", ["none", "linear", "table", "decay"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "width"),
    [(0, 5, 7, 8), (2, 0, 7, 8), (2, 5, 0, 8), (2, 50, 0, 8), (2, 0, 0, 8), (0, 50, 50, 8), (2, 50, 50, 0)],
)
def test_nothing_at_all(backend: str | None, bias: str, batch: int, queries: int, keys: int, width: int) -> None:
    leaves = {
        "q": torch.randn(batch, 4, queries, 8, requires_grad=True),
        "k": torch.randn(batch, 2, keys, 8, requires_grad=True),
        "v": torch.randn(batch, 2, keys, width, requires_grad=True),
    }
    parameter = {"none": None, "linear": torch.ones(4), "table": torch.ones(4, 60), "decay": torch.ones(8)}[bias]
    options: dict[str, Any] = {}
    if parameter is not None:
        leaves["parameter"] = parameter.requires_grad_()
        kind: Any = {"linear": Linear, "table": Table, "decay": Decay}[bias]
        options = {"decay" if bias == "decay" else "bias": kind(parameter)}
    q, k, v = (leaves[name] for name in "qkv")
    for mask in (Causal(), Bidirectional(), Window(3)):
        out, lse = attention(q, k, v, **options, mask=mask, return_lse=True, backend=backend)
        assert out.shape == (batch, 4, queries, width)
        assert lse.shape == (batch, 4, queries)
        assert attention(q, k, v, **options, mask=mask, backend=backend).shape == out.shape
        if not keys:
            assert bool((out == 0).all())
            assert bool((lse == -torch.inf).all())
        loss = out.sum() + lse.where(lse.isfinite(), 0).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            assert grad is None or (grad.shape == leaf.shape and bool(grad.isfinite().all())), name


@BACKENDS
def test_no_sequences_of_a_padded_batch(backend: str | None) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    call = {name: x[:0] for name, x in inputs().items()}
    for bias in (None, Linear(torch.ones(4)), Table(torch.ones(4, 7)), Table(torch.ones(4, 3))):
        got = attention(**call, bias=bias, mask=Window(3).padded(nothing), backend=backend)
        assert got.shape == (0, 4, 5, 8)


def test_the_call_leaves_its_inputs_as_they_are() -> None:
    for backend in (None, "reference", "chunked"):
        call = inputs(bias=Linear(torch.rand(4)))
        before = {name: call[name].clone() for name in "qkv"} | {"slopes": call["bias"].slopes.clone()}
        attention(**call, backend=backend)
        assert all(torch.equal(call[name], before[name]) for name in "qkv")
        assert torch.equal(call["bias"].slopes, before["slopes"])


def examples() -> list[doctest.DocTest]:
    """Return the examples of the package's front page and of everything in the attention layer."""
    package = importlib.import_module("lengthen.attention")
    modules = [importlib.import_module(f"lengthen.attention.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    finder, found = doctest.DocTestFinder(exclude_empty=True, recurse=False), {}
    for module in (lengthen, package, *modules):
        things = {f"{module.__name__}.{name}": x for name, x in vars(module).items() if callable(x)}
        for name, thing in ({module.__name__: module} | things).items():
            if isinstance(getattr(thing, "__doc__", None), str) and ">>>" in thing.__doc__:
                for test in finder.find(thing, name, module=False, globs={}):
                    found.setdefault(test.docstring, test)
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_examples_in_docstrings_are_right(example: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.attempted > 0
    assert not result.failed, "".join(report)


def test_there_are_examples_of_the_call_and_of_reach() -> None:
    shown = [test.docstring for test in examples()]
    assert any("lengthen.attention(q, k, v, bias=" in text for text in shown)
    assert any("lengthen.reach(q, k, " in text for text in shown)
