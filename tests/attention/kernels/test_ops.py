"""The registered ops and the call before them: torch's own checks, torch.compile, what is refused, strides."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import lengthen
from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window
from lengthen.attention import Mask, kernels
from lengthen.attention.kernels.ops import attend, unwatched

Call = dict[str, Any]


@pytest.fixture
def compiler() -> Any:
    """Forget what torch.compile knows, before a test and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def op_args(case: str, qkv: Callable[..., Call]) -> tuple[Any, ...]:
    """Return the op's arguments: q, k, v, two of the bias, two of the mask, rates, key_norm; then numbers."""
    call = qkv(1, 2, 20, 16, keys=24, key_heads=1, value_dim=24)
    q, k, v = (call[name].requires_grad_() for name in "qkv")
    slopes, ahead = (torch.tensor(x, requires_grad=True) for x in ([1.0, 0.2], [0.2, 1.0]))
    norm = torch.full((1, 1), 9.0)
    values = torch.randn(2, 30, requires_grad=True)
    listed = [x.to(torch.int32) for x in Causal().padded(torch.tensor([3])).interval(20, 24, 4, q.device)]
    none = (None, None)
    numbers = (0.25, 4, 1e-4, 0, -1)
    return {
        "both sides": (q, k, v, slopes, ahead, *none, None, None, 3, 0, True, True, *numbers),
        "norm given": (q, k, v, slopes.detach(), None, *none, None, norm, 1, 8, True, False, *numbers),
        "table": (q, k, v, values, None, *listed, None, None, 4, 0, False, False, *numbers),
        "two tables": (q, k, v, values, values.detach().flip(1), *none, None, None, 3, 0, False, True, *numbers),
    }[case]


@pytest.mark.parametrize("case", ["both sides", "norm given", "table", "two tables"])
def test_torch_finds_nothing_wrong_with_the_op(case: str, qkv: Callable[..., Call]) -> None:
    torch.library.opcheck(attend, op_args(case, qkv))


@pytest.mark.parametrize(
    ("mask", "bias"),
    [(Window(12), "none"), (Bidirectional(), "linear"), (Causal(), "table")],
    ids=["window", "full, linear", "causal, table"],
)
def test_compiled_into_one_graph_it_is_the_same(
    mask: Any, bias: str, qkv: Callable[..., Call], bias_of: Callable[..., Any], compiler: None
) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, parameter: Tensor | None) -> Tensor:
        of = None if parameter is None else Linear(parameter) if parameter.dim() == 1 else Table(parameter)
        out, lse = kernels.attention(2 * q, k, v, of, None, mask, 0.25, k.shape[2] - q.shape[2], 0.0)
        return out.sin() * lse.unsqueeze(-1)

    call = qkv(1, 2, 20, 16, keys=30)
    given = bias_of(bias, call | {"mask": mask})
    leaves = [call[name].requires_grad_() for name in "qkv"]
    parameter = None if given is None else given.tensors[0].requires_grad_()
    leaves += [] if parameter is None else [parameter]
    graphs = CompileCounterWithBackend("aot_eager")
    found = []
    for function in (layer, torch.compile(layer, backend=graphs, fullgraph=True)):
        out = function(call["q"], call["k"], call["v"], parameter)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert graphs.frame_count == 1
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


def test_one_graph_serves_all_lengths(qkv: Callable[..., Call], compiler: None) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return kernels.attention(q, k, v, Linear(slopes), None, Causal(), 0.25, k.shape[2] - q.shape[2], 1e-6)[0]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    slopes = torch.tensor([1.0, 0.3], requires_grad=True)

    def step(queries: int, keys: int) -> None:
        call = qkv(1, 2, queries, 16, keys=keys)
        q, k, v = (call[name] for name in "qkv")
        got, expected = compiled(q, k, v, slopes), layer(q, k, v, slopes)
        assert torch.equal(got, expected)
        for ours, theirs in zip(*(torch.autograd.grad(x.sum(), slopes) for x in (got, expected)), strict=True):
            assert torch.equal(ours, theirs)

    step(40, 40)
    step(40, 50)  # fewer queries than keys may be another graph
    with torch._dynamo.config.patch(error_on_recompile=True):
        for queries, keys in ((48, 48), (35, 60)):
            step(queries, keys)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch calls the op once for each
def test_vmap_calls_it_for_each(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 10, 16)

    def layer(q: Tensor) -> Tensor:
        return lengthen.attention(q, call["k"], call["v"], backend="triton")

    several = torch.randn(2, 1, 1, 10, 16)
    assert torch.equal(torch.func.vmap(layer)(several), torch.stack([layer(q) for q in several]))


def test_a_plain_call_is_unwatched() -> None:
    x = torch.zeros(3)
    assert unwatched(x, x)
    assert not unwatched(x, torch.nn.Parameter(x))
    assert torch.func.vmap(lambda y: y * unwatched(y))(x + 1).sum() == 0


def test_a_mode_of_torch_s_sees_the_op(qkv: Callable[..., Call]) -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    few, many = qkv(1, 1, 1, 16, keys=20), qkv(1, 1, 20, 16)
    with Mode():
        watched = [lengthen.attention(**call, backend="triton") for call in (few, many)]
    assert [name for name in seen if name.startswith("lengthen")] == [
        "lengthen.decode.default",
        "lengthen.attend.default",
    ]
    for out, call in zip(watched, (few, many), strict=True):
        assert torch.equal(out, lengthen.attention(**call, backend="triton"))


def test_a_decay_is_the_same_for_a_mode_that_looks_on(qkv: Callable[..., Call]) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    def results() -> tuple[Tensor, ...]:
        leaves = [call[name].detach().clone().requires_grad_() for name in "qkv"]
        out = lengthen.attention(*leaves, decay=decay, backend="triton")
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    call = qkv(1, 2, 40, 16, key_heads=1)
    for shape in ((16,), (2, 16)):
        decay = Decay(torch.linspace(0.9, 1, 16, dtype=torch.float64).expand(shape).contiguous())
        plain = results()
        with Mode():
            watched = results()
        for one, other in zip(plain, watched, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_forward_derivatives_are_refused(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 1, 10, 16)

    def layer(q: Tensor) -> Tensor:
        return lengthen.attention(q, call["k"], call["v"], backend="triton")

    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(layer, (call["q"],), (torch.ones_like(call["q"]),))


def test_autocast_changes_nothing(qkv: Callable[..., Call], gradients: Callable[..., dict[str, Tensor]]) -> None:
    call = qkv(1, 2, 40, 16) | {"bias": Linear(torch.tensor([0.5, 0.1]))}
    expected = gradients(call, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(call, "triton")
    for name in expected:
        assert got[name].dtype == expected[name].dtype
        assert torch.equal(got[name], expected[name]), name


def test_one_s_own_mask_is_not_for_them(qkv: Callable[..., Call]) -> None:
    class Around(Mask):
        def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
            return position - 3, position + 3

    class Near(Causal):
        def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
            return position - 3, position

    for mask in (Around(), Near()):
        with pytest.raises(ValueError, match="'triton' cannot do this call: they know no mask of one's own"):
            lengthen.attention(**qkv(1, 2, 10, 16), mask=mask, backend="triton")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({name: torch.zeros(1, 2, 10, 16).double() for name in "qkv"}, "they compute in float32 at most"),
        ({name: torch.zeros(1, 2, 10, 300) for name in "qkv"}, "head_dim and value width may be 256 at most"),
        ({"v": torch.zeros(1, 2, 10, 257)}, "head_dim and value width may be 256 at most"),
        ({"decay": Decay(torch.full((16,), 0.5))}, "the decay is too fast for them"),
        ({"decay": Decay(torch.ones(16, requires_grad=True))}, "they have no gradient for the decay's rates"),
        ({"decay": Decay(torch.ones(16)), "mask": Bidirectional()}, "they know no decay for keys ahead of the query"),
        (
            {"decay": Decay(torch.ones(16)), "bias": Table(torch.zeros(2, 10, requires_grad=True))},
            "they have no gradient for a table beside a decay",
        ),
        ({name: torch.zeros(0, 2, 10, 16) for name in "qkv"}, "there is nothing to read"),
    ],
    ids=["float64", "head_dim", "value width", "fast", "rates", "ahead", "table and decay", "nothing"],
)
def test_what_they_cannot_do_is_refused_with_the_reason(change: Call, reason: str, qkv: Callable[..., Call]) -> None:
    with pytest.raises(ValueError, match=f"backend: 'triton' cannot do this call: {reason}"):
        lengthen.attention(**qkv(1, 2, 10, 16) | change, backend="triton")
    if "decay" not in change:
        with pytest.raises(ValueError, match=f"q: not for the kernels: {reason}"):
            kernels.spans(**qkv(1, 2, 10, 16) | change)


def test_without_the_interpreter_they_are_not_for_a_cpu(
    qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="cannot do this call: they run on an NVIDIA GPU, and q is on cpu"):
        lengthen.attention(**qkv(1, 2, 10, 16), backend="triton")


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (3.0, TypeError, r"key_norm: expected a tensor, got 3\.0"),
        (
            torch.ones(1, 2).double(),
            ValueError,
            r"key_norm: expected a torch\.float32 tensor of shape \[1, 2\], got .*64",
        ),
        (torch.ones(1, 4), ValueError, r"key_norm: expected a torch\.float32 tensor of shape \[1, 2\], got .*\[1, 4\]"),
        (torch.ones(1, 2, device="meta"), ValueError, r"key_norm: expected a tensor on cpu like q, got .*meta"),
    ],
)
@pytest.mark.parametrize("backend", ["triton", None])
def test_a_key_norm_that_does_not_fit_is_refused(
    norm: Any, error: type[Exception], message: str, backend: str | None, qkv: Callable[..., Call]
) -> None:
    with pytest.raises(error, match=message):
        lengthen.attention(**qkv(1, 4, 10, 16, key_heads=2), key_norm=norm, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "chunked", "native", None])
def test_other_backends_take_a_key_norm_and_do_not_need_it(backend: str | None, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 10, 16)
    norm = call["k"].norm(dim=-1).amax(dim=-1)
    got = lengthen.attention(**call, key_norm=norm, backend=backend)
    assert torch.equal(got, lengthen.attention(**call, backend=backend))


def as_projections_give_it() -> list[Tensor]:
    return [x.transpose(1, 2) for x in torch.randn(3, 2, 24, 2, 16)]  # [B, L, H, D]


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "transposed": as_projections_give_it,
    "of one product": lambda: list(torch.randn(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)),
    "features apart": lambda: list(torch.randn(3, 2, 2, 16, 24).mT),
    "shared keys": lambda: [torch.randn(2, 2, 24, 16), *torch.randn(2, 2, 1, 24, 16).expand(-1, -1, 2, -1, -1)],
    "parts of rows": lambda: list(torch.randn(3, 2, 2, 24, 32)[..., 5:21]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_inputs_make_no_difference(layout: str) -> None:
    call: Call = dict(zip("qkv", LAYOUTS[layout](), strict=True))
    dense = {name: x.contiguous() for name, x in call.items()}
    assert any(not call[name].is_contiguous() for name in "qkv")
    ours, theirs = (lengthen.attention(**x, mask=Window(9), backend="triton") for x in (call, dense))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    bias = Linear(torch.tensor([0.5, 0.1]))
    leaves = [[x[name].detach().requires_grad_() for name in "qkv"] for x in (call, dense)]
    grads = []
    for q, k, v in leaves:
        out, lse = lengthen.attention(q, k, v, bias=bias, backend="triton", return_lse=True)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)))
    for name, strided, usual in zip("qkv", *grads, strict=True):
        torch.testing.assert_close(strided, usual, rtol=0, atol=2e-6, msg=f"d{name}")


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "full"])
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_strides_of_a_bias_make_no_difference(kind: str, mask: Any, qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 40, 16) | {"mask": mask, "backend": "triton"}
    if kind == "slopes":
        parts = [torch.tensor([0.5, 9.0, 0.1, 9.0])[::2], torch.tensor([2.0]).expand(2)]
    else:
        parts = [torch.randn(40, 2).mT, torch.randn(2, 80)[:, ::2]]
    make: Any = Linear if kind == "slopes" else Table
    for given in (parts, parts[:1], parts[1:]):
        got = lengthen.attention(**call, bias=make(*given))
        expected = lengthen.attention(**call, bias=make(*(x.contiguous() for x in given)))
        assert torch.equal(got, expected)


def test_a_gradient_may_come_with_any_strides(qkv: Callable[..., Call]) -> None:
    call = qkv(1, 2, 40, 16)
    leaves = [call[name].requires_grad_() for name in "qkv"]
    d_out, d_lse = torch.randn(1, 2, 16, 40).mT, torch.randn(1, 40, 2).mT
    grads = []
    for pair in ((d_out, d_lse), (d_out.contiguous(), d_lse.contiguous()), (torch.ones(()), torch.ones(()))):
        out, lse = lengthen.attention(**call, backend="triton", return_lse=True)
        grads.append(torch.autograd.grad((out, lse), leaves, (pair[0].expand_as(out), pair[1].expand_as(lse))))
    for ours, theirs in zip(*grads[:2], strict=True):
        assert torch.equal(ours, theirs)
    out, lse = lengthen.attention(**call, backend="reference", return_lse=True)
    for ours, theirs in zip(grads[2], torch.autograd.grad(out.sum() + lse.sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_out_has_its_heads_in_memory_as_the_queries_have_them(qkv: Callable[..., Call]) -> None:
    call = qkv(2, 3, 20, 16, value_dim=24)
    assert lengthen.attention(**call, backend="triton").is_contiguous()
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert lengthen.attention(**call, backend="triton").transpose(1, 2).is_contiguous()


def test_on_a_cpu_the_call_does_not_pick_them(qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("picked")

    monkeypatch.setattr(kernels, "attention", refuse)
    for bias in (None, Linear(torch.tensor([0.5, 0.1])), Table(torch.randn(2, 40))):
        lengthen.attention(**qkv(1, 2, 40, 16), bias=bias)
        lengthen.attention(**qkv(1, 2, 40, 16), bias=bias, return_lse=True)
    with pytest.raises(AssertionError, match="picked"):
        lengthen.attention(**qkv(1, 2, 40, 16), backend="triton")


@pytest.mark.parametrize("queries", [1, 20], ids=["decoded", "many"])
def test_a_grid_holds_a_batch_of_any_size(
    queries: int, qkv: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: dict[str, tuple[int, int, int]] = {}

    def launch(self: Any, grid: tuple[int, int, int], *_: Any, **__: Any) -> None:
        grids[self.kernel.__name__] = grid

    monkeypatch.setattr(importlib.import_module("lengthen.attention.kernels.launcher").Launcher, "__call__", launch)
    batch = 70_000
    call = qkv(batch, 2, queries, 1, keys=20) | {"bias": Linear(torch.tensor([0.5, 0.1]))}
    q, k, v = (call[name].requires_grad_(queries > 1) for name in "qkv")
    out = lengthen.attention(**call, backend="triton")
    if queries > 1:
        torch.autograd.grad(out.sum(), [q, k, v])
    expected = {"split", "join"} if queries == 1 else {"ball", "forward", "repair", "of_queries", "of_keys"}
    assert set(grids) == expected
    assert all(grid[0] >= batch or name == "repair" for name, grid in grids.items())
    assert all(max(grid[1:]) <= 65_535 for grid in grids.values())
