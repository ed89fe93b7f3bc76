"""The chunked backend as torch sees it: an op that autograd, compilers, export, meta tensors and vmap know."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lengthen import Ball, Bidirectional, Causal, Decay, Linear, Table, Window, alibi_slopes, attention
from lengthen.attention.backends.chunked import op
from lengthen.attention.backends.ops import flat
from lengthen.attention.problem import pose

# Dynamo looks whether a tensor has a gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LENGTH = 40


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Let no test see what another compiled."""
    yield
    torch._dynamo.reset()


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, length, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
    return q, k, v


Options = Callable[[], dict[str, Any]]
CASES: dict[str, Options] = {
    "none": lambda: {"mask": Window(9)},
    "alibi": lambda: {"bias": Linear(alibi_slopes(4))},
    "learned slopes": lambda: {"bias": Linear(alibi_slopes(4).requires_grad_())},
    "two sides": lambda: {"bias": Linear(alibi_slopes(4), alibi_slopes(4).flip(0)), "mask": Bidirectional()},
    "table": lambda: {"bias": Table(torch.randn(4, LENGTH).requires_grad_())},
    "extended table": lambda: {"bias": Table(torch.randn(4, 5).requires_grad_(), extended=True)},
    "decay": lambda: {"decay": Decay((0.9 + 0.1 * torch.rand(8)).requires_grad_())},
    "listed": lambda: {"bias": Linear(alibi_slopes(4)), "mask": Causal().padded(torch.tensor([0, 7]))},
    "places": lambda: {"bias": Linear(alibi_slopes(4)), "q_start": torch.tensor([0, 3])},
}


@pytest.mark.parametrize("case", [*CASES, "ball", "16 bits"])
def test_torch_finds_nothing_wrong_with_the_op(case: str) -> None:
    q, k, v = inputs(torch.bfloat16 if case == "16 bits" else torch.float32, 12)
    more = {
        "ball": {"ball": Ball.around(k), "bias": Linear(alibi_slopes(4))},
        "16 bits": {"bias": Linear(alibi_slopes(4).requires_grad_())},
        "table": {"bias": Table(torch.randn(4, 12).requires_grad_())},
    }
    options = more[case] if case in more else CASES[case]()
    torch.library.opcheck(op.op, flat(pose(q, k, v, **{"mask": Causal()} | options)))


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("case", ["alibi", "table", "decay", "listed"])
@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out: out.square().sum()], ids=["sum", "square"])
def test_a_second_derivative_is_refused(backend: str | None, case: str, loss: Callable[[Tensor], Tensor]) -> None:
    leaves, options = inputs(), CASES[case]()
    if backend is None and case == "table":
        pytest.skip("torch's own attention has one for a learned bias")
    out = attention(*leaves, **options, backend=backend)
    for leaf, grad in zip(leaves, torch.autograd.grad(loss(out), leaves, create_graph=True), strict=True):
        with pytest.raises(RuntimeError, match=r"there is no second derivative|derivative for .* is not implemented"):
            torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("case", ["none", "alibi"])
def test_forward_mode_is_refused(case: str) -> None:
    (q, k, v), options = (x.detach() for x in inputs()), CASES[case]()
    for backend in (None, "chunked"):
        with pytest.raises(NotImplementedError, match=r"no derivative by torch.func|forward AD"):
            torch.func.jvp(lambda x: attention(q, x, v, **options, backend=backend), (k,), (k,))  # noqa: B023
        with (
            forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match=r"no forward-mode derivative|forward AD"),
        ):
            attention(forward_ad.make_dual(q, q), k, v, **options, backend=backend)
    _, tangent = torch.func.jvp(lambda x: attention(q, x, v, **options, backend="reference"), (k,), (k,))
    assert tangent.abs().sum() > 0


def test_the_reference_has_a_second_derivative() -> None:
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = Linear(torch.ones(1).double())
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, bias=bias, backend="reference"), (q, k, v))


def test_the_graph_may_be_used_twice() -> None:
    slopes = torch.tensor([0.5, 0.1, 0.2, 0.3], requires_grad=True)
    out, lse = attention(*inputs(), bias=Linear(slopes), backend="chunked", return_lse=True)
    loss = out.square().sum() + lse.sum()
    (first,) = torch.autograd.grad(loss, slopes, retain_graph=True)
    (second,) = torch.autograd.grad(loss, slopes)
    assert torch.equal(first, second)


def test_only_what_asks_gets_a_gradient() -> None:
    q, k, v = (x.detach() for x in inputs())
    values = torch.randn(4, LENGTH, requires_grad=True)
    attention(q, k, v, bias=Table(values), backend="chunked").square().sum().backward()
    assert values.grad is not None
    assert values.grad.abs().sum() > 0
    assert q.grad is None
    assert k.grad is None
    assert v.grad is None
    assert not attention(q, k, v, bias=Linear(torch.ones(4)), backend="chunked").requires_grad  # and none at all


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_into_one_graph_it_is_the_same(case: str, compiler: str) -> None:
    options, (q, k, v) = CASES[case](), inputs()
    learned = [x for x in (options["bias"].tensors if "bias" in options else ()) if x is not None and x.requires_grad]
    learned += [options["decay"].rates] if "decay" in options else []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v + 1, **options).sin()

    results = []
    for function in (layer, torch.compile(layer, backend=compiler, fullgraph=True)):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, *learned))])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_table_as_short_as_its_window_is_compiled_too() -> None:
    (q, k, v), table = inputs(), Table(torch.randn(4, 9))
    compiled = torch.compile(
        lambda q, k, v, n: attention(q, k, v, bias=table, mask=Window(n)), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v, 9), attention(q, k, v, bias=table, mask=Window(9)))
    with pytest.raises(RuntimeError, match="a query sees past the table's end"):
        compiled(q, k, v, 10)


@pytest.mark.parametrize("length", [40, 1500])
def test_one_graph_serves_all_lengths(length: int) -> None:
    bias = Linear(alibi_slopes(4))
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, bias=bias), backend="eager", fullgraph=True, dynamic=True
    )
    for n in (length, length + 7):
        q, k, v = (x.detach() for x in inputs(torch.float32, n))
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, bias=bias), rtol=0, atol=0)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("bias", [None, Linear(alibi_slopes(4))], ids=["none", "alibi"])
def test_autocast_changes_nothing_under_torch_compile(compiler: str, bias: Any) -> None:
    q, k, v = inputs(torch.float32)
    weight = torch.randn(2, 4, LENGTH, 8)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, bias=bias)

    expected = layer(q, k, v)
    expected_grads = torch.autograd.grad(expected, (q, k, v), weight)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.compile(layer, backend=compiler)(q, k, v)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(got, (q, k, v), weight), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    """ALiBi attention, as a model has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **self.options)


@pytest.mark.parametrize("case", ["alibi", "none", "two sides"])
def test_exported_it_is_the_same(case: str) -> None:
    layer, given = Layer(**CASES[case]()), tuple(x.detach() for x in inputs(torch.float32))
    exported = torch.export.export(layer, given)
    assert "lengthen.chunked" in str(exported.graph)
    torch.testing.assert_close(exported.module()(*given), layer(*given), rtol=0, atol=0)


@pytest.mark.parametrize("length", [64, 600])
def test_exported_once_it_serves_all_lengths(length: int) -> None:
    layer, free = Layer(**CASES["alibi"]()), {2: torch.export.Dim("length", min=2, max=2000)}
    given = tuple(x.detach() for x in inputs(torch.float32, length))
    module = torch.export.export(layer, given, dynamic_shapes=[free] * 3).module()
    for other in (2, 37, 700):
        given = tuple(x.detach() for x in inputs(torch.float32, other))
        torch.testing.assert_close(module(*given), layer(*given))


def test_derivatives_by_torch_func_are_refused() -> None:
    q, k, v = (x.detach() for x in inputs())

    def total(x: Tensor) -> Tensor:
        return attention(x, k, v, bias=Linear(alibi_slopes(4)), backend="chunked").sum()

    with pytest.raises(NotImplementedError, match=r"no derivative by torch.func \(torch.autograd.grad takes it\)"):
        torch.func.grad(total)(q)
    with pytest.raises(NotImplementedError, match=r"no derivative by torch.func"):
        torch.func.jvp(torch.vmap(total), (q[None],), (q[None],))


@pytest.mark.parametrize("case", [*CASES, "short table"])
def test_meta_tensors_say_what_would_come(case: str) -> None:
    with torch.device("meta"):
        options = CASES[case]() if case in CASES else {"bias": Table(torch.randn(4, 9)), "mask": Window(9)}
        q, k, v = inputs(torch.bfloat16)
    with torch.no_grad():
        assert attention(q, k, v, **options).shape == (2, 4, LENGTH, 8)
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (2, 4, LENGTH, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, LENGTH), torch.float32)
    for leaf, grad in zip((q, k, v), torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)), strict=True):
        assert (grad.shape, grad.dtype, grad.device.type) == (leaf.shape, leaf.dtype, "meta")


@pytest.mark.parametrize("backend", ["chunked", "reference", None])
@pytest.mark.parametrize("case", ["none", "alibi", "decay", "listed"])
def test_mapped_over_another_dimension_it_is_each_by_itself(backend: str | None, case: str) -> None:
    options = CASES[case]()
    many = [torch.stack(part).detach().requires_grad_() for part in zip(*(inputs() for _ in range(3)), strict=True)]
    got = torch.func.vmap(lambda q, k, v: attention(q, k, v, **options, backend=backend))(*many)
    alone = torch.stack([attention(*(x[n] for x in many), **options, backend="reference") for n in range(3)])
    torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-10)
    grads, expected = (torch.autograd.grad(out.square().sum(), many) for out in (got, alone))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
