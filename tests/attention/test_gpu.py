"""On a GPU the chunked backend is the reference too, and its gradients repeat."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = ("none", "alibi", "both sides", "table", "decay", "padded", "blockwise")


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Compare with float32 products, not with TF32 ones."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


def make(case: str, dtype: torch.dtype, length: int = 700) -> dict[str, Any]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    wide = torch.promote_types(dtype, torch.float32)
    slopes = alibi_slopes(4).to("cuda", wide)
    values = torch.randn(2, 4, length, dtype=wide, device="cuda")
    options: dict[str, dict[str, Any]] = {
        "none": {"mask": Window(100)},
        "alibi": {"bias": Linear(slopes)},
        "both sides": {"bias": Linear(slopes, slopes.flip(0)), "mask": Bidirectional()},
        "table": {"bias": Table(*values), "mask": Bidirectional()},
        "decay": {"decay": Decay(0.9 + 0.1 * torch.rand(8, dtype=torch.float64, device="cuda"))},
        "padded": {"bias": Table(values[0]), "mask": Causal().padded(torch.tensor([0, 400], device="cuda"))},
        "blockwise": {"bias": Linear(slopes), "mask": Blockwise(64)},
    }
    return {"q": randn(2, 4, length, 8), "k": randn(2, 2, length, 8), "v": randn(2, 2, length, 8)} | options[case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_chunked_is_the_reference(case: str, dtype: torch.dtype, assert_as_defined: Any) -> None:
    call = make(case, dtype)
    assert_as_defined({"mask": Causal()} | call, rest=1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("case", ["alibi", "both sides", "table", "decay"])
def test_gradients_repeat_to_the_bit(case: str, gradients: Any) -> None:
    call = make(case, torch.float32, 1500)
    one, two = gradients(call), gradients(call)
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["chunked", None])
def test_low_precision_inputs_cost_one_rounding(dtype: torch.dtype, backend: str | None) -> None:
    call = make("alibi", dtype) | {"tolerance": 0}
    out = lengthen.attention(**call, backend=backend)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    expected = lengthen.attention(**wide, backend="reference")
    assert out.dtype == dtype
    rounding = 1.01 * torch.finfo(dtype).eps / 2
    allowed = rounding * expected.abs() + 1e-5
    if backend is None:  # the kernels round weights as well
        allowed += rounding * lengthen.attention(**wide | {"v": wide["v"].abs()}, backend="reference")
    assert bool(((out.double() - expected).abs() <= allowed).all())


def test_autocast_changes_nothing(gradients: Any) -> None:
    call = make("alibi", torch.float32)
    expected = gradients(call)
    with torch.autocast("cuda", torch.bfloat16):
        got = gradients(call)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_what_lies_elsewhere_is_refused() -> None:
    call = make("none", torch.float32)
    with pytest.raises(ValueError, match=r"bias\.slopes: expected a tensor on cuda:0 like q, got .* on cpu"):
        lengthen.attention(**call, bias=Linear(torch.ones(4)))
    with pytest.raises(ValueError, match=r"mask\.key_start: expected a tensor on cuda:0 like q, got .* on cpu"):
        lengthen.attention(**call | {"mask": Causal().padded(torch.tensor([3]))})


def test_what_is_not_finite_goes_where_the_reference_lets_it_go() -> None:
    call = make("alibi", torch.float64)
    call["k"][0, 0, 3, 0], call["v"][1, 1, 600, 2] = torch.nan, torch.inf
    got = lengthen.attention(**call, backend="chunked", return_lse=True)
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
