from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Causal, Decay, Linear, Table, Window, merge

DOUBLE = torch.float64


def partial(q: Tensor, k: Tensor, v: Tensor, at: slice, q_start: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return attention over some of the keys: queries keep their distance to them."""
    return lengthen.attention(
        q, k[:, :, at], v[:, :, at], q_start=q_start - at.start, return_lse=True, backend="chunked", **options
    )


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parts_of_the_keys_make_the_whole(data: st.DataObject, small_runs: Callable[..., Any]) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    queries, keys = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 30))
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=4)))
    q_start = data.draw(st.integers(-3, keys + 3))
    mask = data.draw(st.sampled_from([Causal(), Bidirectional(), Window(7)]))
    shapes = {"q": (2, 4, queries, 3), "k": (2, 2, keys, 3), "v": (2, 2, keys, 5), "slopes": (4,), "rates": (3,)}
    leaves = {name: torch.rand(shape, dtype=DOUBLE).requires_grad_() for name, shape in shapes.items()}
    leaves["values"] = torch.randn(4, 70, dtype=DOUBLE, requires_grad=True)
    options: dict[str, Any] = {"mask": mask} | data.draw(
        st.sampled_from(
            [
                {},
                {"bias": Linear(leaves["slopes"])},
                {"bias": Table(leaves["values"])},
                {"decay": Decay(leaves["rates"])},
                {"bias": Linear(leaves["slopes"]), "decay": Decay(leaves["rates"])},
            ]
        )
    )
    q, k, v = (leaves[name] for name in "qkv")
    pieces = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, keys], strict=True)]
    with small_runs(TILE=64, ROWS=4, GRAIN=32, UNIT=2):
        out, lse = reduce(merge, (partial(q, k, v, piece, q_start, **options) for piece in pieces))
        weights = torch.randn_like(out), torch.randn_like(lse)
        got = gradients(out, lse, weights, leaves)
    whole = lengthen.attention(q, k, v, q_start=q_start, return_lse=True, backend="reference", **options)
    torch.testing.assert_close(out, whole[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, whole[1], rtol=1e-10, atol=1e-10)
    for name, expected in gradients(*whole, weights, leaves).items():
        torch.testing.assert_close(
            got[name], expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def gradients(out: Tensor, lse: Tensor, weights: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = (out * weights[0]).sum() + (lse.where(lse.isfinite(), 0) * weights[1]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: grad for (name, _), grad in zip(leaves.items(), found, strict=True) if grad is not None}


def test_a_part_that_saw_nothing_leaves_the_other_as_it_is() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    some = lengthen.attention(q, k, v, return_lse=True)
    nothing = torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf)
    for out, lse in (merge(some, nothing), merge(nothing, some)):
        assert torch.equal(out, some[0])
        assert torch.equal(lse, some[1])
    out, lse = merge(nothing, nothing)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(5)], ids=["causal", "both", "window"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_padded_parts_make_the_whole(mask: Any, backend: str) -> None:
    # Of two sequences, 2 and 5 keys are padding on the left and 1 and 0 on the right; the keys are cut in three.
    q, k, v = torch.randn(3, 2, 2, 12, 4, dtype=DOUBLE)
    start, end = torch.tensor([2, 5]), torch.tensor([11, 12])
    whole = lengthen.attention(q, k, v, mask=mask.padded(start, end), return_lse=True, backend="reference")
    parts = []
    for lo, hi in ((0, 4), (4, 9), (9, 12)):
        here = mask.padded((start - lo).clamp(min=0), (end - lo).clamp(min=0))
        parts.append(
            lengthen.attention(
                q, k[:, :, lo:hi], v[:, :, lo:hi], q_start=-lo, mask=here, return_lse=True, backend=backend
            )
        )
    out, lse = reduce(merge, parts)
    for b in range(2):
        real = slice(int(start[b]), int(end[b]))
        torch.testing.assert_close(out[b, :, real], whole[0][b, :, real], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse[b, :, real], whole[1][b, :, real], rtol=1e-10, atol=1e-10)


def test_what_no_part_saw_does_not_spoil_a_gradient() -> None:
    # The first two queries are padding, to both halves of the keys.
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 4, dtype=DOUBLE).unbind())
    near = lengthen.attention(q, k[:, :, 4:], v[:, :, 4:], q_start=-4, return_lse=True)
    far = lengthen.attention(
        q, k[:, :, :4], v[:, :, :4], q_start=0, mask=Causal().padded(torch.tensor([2])), return_lse=True
    )
    out, lse = merge(near, far)
    assert bool((lse[:, :, :2] == -torch.inf).all())
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    whole = lengthen.attention(q, k, v, mask=Causal().padded(torch.tensor([2])), backend="reference")
    expected = torch.autograd.grad(whole.square().sum(), (q, k, v))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_stay(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).to(dtype)
    parts = [partial(q, k, v, piece, 0) for piece in (slice(0, 25), slice(25, 40))]
    out, lse = merge(*parts)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    whole = lengthen.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), whole[0], rtol=0, atol=3 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), whole[1], rtol=0, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 1000.0)
    merged = merge((out, lse), (3 * out, lse))
    assert merged[0].flatten().tolist() == pytest.approx([2.0, 2.0], rel=1e-4)
    torch.testing.assert_close(merged[1], lse + torch.log(torch.tensor(2.0)))


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (OUT, (OUT, LSE), TypeError, r"a: expected the pair \(out, lse\) of attention\(\.\.\., return_lse=True\)"),
        ((OUT, LSE), OUT, TypeError, r"b: expected the pair \(out, lse\)"),
        ((OUT, LSE), (OUT, LSE, LSE), TypeError, r"b: expected the pair \(out, lse\)"),
        ((OUT, LSE), None, TypeError, r"b: expected the pair \(out, lse\).*got None"),
        (
            (OUT, LSE[:, :1]),
            (OUT, LSE),
            ValueError,
            r"a: expected lse of out's shape without .*\[1, 2, 3\], got .*\[1, 1, 3\]",
        ),
        ((OUT, LSE), (OUT, OUT), ValueError, r"b: expected lse of out's shape .*\[1, 2, 3\], got .*\[1, 2, 3, 4\]"),
        (
            (OUT, LSE),
            (OUT[..., :3], LSE),
            ValueError,
            r"b: expected out like a's, a torch\.float32 .*\[1, 2, 3, 4\].*\[1, 2, 3, 3\]",
        ),
        (
            (OUT, LSE),
            (OUT.double(), LSE),
            ValueError,
            r"b: expected out like a's, a torch\.float32 .*got a torch\.float64",
        ),
    ],
)
def test_what_comes_in_is_checked(a: Any, b: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge(a, b)
