"""The kernels as torch sees them: ops that autograd and compilers know; and what they refuse, with the reason."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window
from lengthen.attention.backends import chunked, triton
from lengthen.attention.backends.ops import flat
from lengthen.attention.op import pick
from lengthen.attention.problem import pose

Call = dict[str, Any]
Draw = Callable[..., Call]
SLOPES = torch.tensor([1.0, 0.2])


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget what torch.compile knows, before a test and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


OPTIONS: dict[str, Callable[[], Call]] = {
    "window": lambda: {"mask": Window(8)},
    "both sides": lambda: {"bias": Linear(SLOPES.clone().requires_grad_(), SLOPES.flip(0)), "mask": Bidirectional()},
    "table": lambda: {"bias": Table(torch.randn(2, 24).requires_grad_()), "mask": Causal().padded(torch.tensor([3]))},
    "extended": lambda: {"bias": Table(torch.randn(2, 5).requires_grad_(), extended=True)},
    "16 bits": lambda: {"bias": Linear(SLOPES.clone().requires_grad_())},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_torch_finds_nothing_wrong_with_the_op(case: str, draw: Draw) -> None:
    dtype = torch.float16 if case == "16 bits" else torch.float32
    call = draw(1, 2, 17, keys=20, key_heads=1, value_dim=24, dtype=dtype)
    call |= {name: call[name].requires_grad_() for name in "qkv"}
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    problem = pose(**call | OPTIONS[case]())
    torch.library.opcheck(triton.attend_op.op, flat(problem), test_utils=checks[: 4 if case == "both sides" else 3])


def test_one_graph_serves_all_lengths(draw: Draw, compiler: None) -> None:
    slopes = SLOPES.clone().requires_grad_()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lengthen.attention(q, k, v, bias=Linear(slopes), backend="triton").sin()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)

    def step(queries: int, keys: int) -> None:
        call = draw(1, 2, queries, keys=keys)
        outs = [function(*(call[name] for name in "qkv")) for function in (compiled, layer)]
        grads = [torch.autograd.grad(out.sum(), slopes)[0] for out in outs]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(grads[0], grads[1])

    step(20, 20)
    step(20, 26)  # fewer queries than keys may be another graph
    with torch._dynamo.config.patch(error_on_recompile=True):
        step(23, 23)
        step(18, 30)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({name: torch.zeros(1, 2, 10, 16).double() for name in "qkv"}, "the kernels compute in float32 at most"),
        ({"v": torch.zeros(1, 2, 10, 257)}, "head_dim and value width may be 256 at most in the kernels"),
        ({"q_start": 1 << 29}, "the kernels count positions to 536870912, and q_start is 536870912"),
        ({name: torch.zeros(0, 2, 10, 16) for name in "qkv"}, "there is nothing to read"),
        ({"decay": Decay(torch.full((16,), 0.5))}, "the decay is too fast for the kernels"),
        ({"decay": Decay(torch.ones(16, requires_grad=True))}, "the kernels have no gradient for the decay's rates"),
        ({"decay": Decay(torch.ones(16)), "mask": Bidirectional()}, "the kernels know no decay for keys ahead"),
        ({"decay": Decay(torch.ones(16)), "q_start": torch.tensor([0])}, "the kernels know no decay for sequences"),
        (
            {"decay": Decay(torch.ones(16)), "bias": Table(torch.zeros(2, 10, requires_grad=True))},
            "the kernels have no gradient for a table beside a decay",
        ),
    ],
    ids=lambda x: x.replace("the kernels ", "") if isinstance(x, str) else "",
)
def test_what_they_cannot_do_is_refused_with_the_reason(change: Call, reason: str, draw: Draw) -> None:
    with pytest.raises(ValueError, match=f"backend: 'triton' cannot do this call: {reason}"):
        lengthen.attention(**draw(1, 2, 10) | change, backend="triton")


def test_on_a_cpu_the_call_picks_them_only_when_asked(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw(1, 2, 40) | {"bias": Linear(SLOPES)}
    problem = pose(**call)
    assert pick(problem) is chunked
    assert pick(problem, "triton") is triton
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(ValueError, match="cannot do this call: the kernels run on an NVIDIA GPU, and q is on cpu"):
        lengthen.attention(**call, backend="triton")
