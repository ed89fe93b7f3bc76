"""Chunked attention is the reference, tile by tile: forward, lse and every gradient, whatever the shapes of tiles.

One long file, since all of it draws from the same calls and cuts them into the same small tiles.
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes

Call = dict[str, Any]
Check = Callable[..., None]
SMALL: dict[str, Any] = {
    "TILE": 512,
    "ROWS": 8,
    "TALL": 24,
    "NEAR": 4,
    "FEW": 0,
    "FAR": 16,
    "USUAL_REACH": 2.0,
    "AGAIN": 2,
    "STEP": 5,
}


def qkv(batch: int, heads: int, queries: int, width: int, dtype: torch.dtype = torch.float64, **other: int) -> Call:
    keys, key_heads = other.get("keys", queries), other.get("key_heads", heads)
    return {
        "q": torch.randn(batch, heads, queries, width).to(dtype),
        "k": torch.randn(batch, key_heads, keys, width).to(dtype),
        "v": torch.randn(batch, key_heads, keys, other.get("value_width", width)).to(dtype),
    }


def draw_mask(
    data: st.DataObject, documents: Callable[..., st.SearchStrategy[Tensor]], batch: int, keys: int, inside: bool
) -> Any:
    mask: Any = data.draw(
        st.one_of(
            st.just(Causal()),
            st.just(Bidirectional()),
            st.builds(Window, st.integers(1, 40)),
            st.builds(Blockwise, st.integers(1, 20)),
        )
    )
    if inside and data.draw(st.integers(0, 3)) == 3:
        mask = mask.packed(data.draw(documents(data.draw(st.sampled_from([1, batch])), keys)))
    if data.draw(st.integers(0, 3)) == 3:
        rows = data.draw(st.sampled_from([1, batch]))
        mask = mask.padded(torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(rows)]))
    return mask


def draw_call(
    data: st.DataObject, documents: Callable[..., st.SearchStrategy[Tensor]], table_for: Callable[..., Table]
) -> Call:
    """Draw any call at all: shapes, where the queries stand, bias, decay, mask, scale."""
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    batch, key_heads, group = data.draw(st.sampled_from([(1, 1, 1), (1, 3, 1), (2, 1, 2), (3, 1, 1), (2, 2, 2)]))
    heads, width = key_heads * group, data.draw(st.integers(1, 6))
    queries = data.draw(st.integers(1, 70), label="queries")
    keys = data.draw(st.one_of(st.just(queries), st.integers(1, 70)), label="keys")
    value_width = data.draw(st.one_of(st.just(width), st.integers(1, 6)))
    call = qkv(batch, heads, queries, width, keys=keys, key_heads=key_heads, value_width=value_width)
    anywhere = st.integers(-queries - 3, keys + 3)
    q_start = data.draw(st.one_of(st.none(), st.none(), anywhere, st.integers(keys + 290, keys + 400)), label="q_start")
    stands = keys - queries if q_start is None else q_start
    mask = draw_mask(data, documents, batch, keys, stands >= 0 and stands + queries <= keys)
    call |= {"mask": mask, "q_start": q_start}
    call["scale"] = data.draw(st.sampled_from([None, None, 0.3, -1.0, 0.0]), label="scale")
    call["tolerance"] = data.draw(st.sampled_from([None, 0, 1e-15]), label="tolerance")
    bias, ahead = data.draw(st.sampled_from(["none", "linear", "table"])), data.draw(st.booleans())
    if bias == "linear":
        slopes = 2.0 ** -torch.linspace(0.5, 7, 2 * heads, dtype=torch.float64)[torch.randperm(2 * heads)]
        call["bias"] = Linear(slopes[:heads], slopes[heads:] if ahead else None)
    elif bias == "table":
        call["bias"] = table_for(call, ahead, spare=data.draw(st.integers(0, 3)))
    if data.draw(st.integers(0, 2)) == 2:
        lowest = data.draw(st.sampled_from([0.99, 0.7, 0.1]), label="lowest rate")
        shape = data.draw(st.sampled_from([(width,), (heads, width)]))
        rates = lowest + (1 - lowest) * torch.rand(shape, dtype=torch.float64)
        call["decay"] = Decay(rates.where(torch.rand(shape) < 0.8, 1.0))
    return call


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_is_the_reference_for_any_call_and_any_tiles(
    data: st.DataObject,
    constants: st.SearchStrategy[dict[str, float]],
    small_tiles: Callable[..., AbstractContextManager[None]],
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Table],
    assert_as_defined: Check,
) -> None:
    call = draw_call(data, documents, table_for)
    with small_tiles(**data.draw(constants, label="constants")):
        assert_as_defined(call)


def test_small_constants_do_make_many_tiles(
    small_tiles: Callable[..., AbstractContextManager[None]], recorded: Callable[[], AbstractContextManager[list[Any]]]
) -> None:
    call = qkv(2, 4, 70, 4)
    slopes = torch.tensor([1.0, 0.5, 2**-6, 2**-7], dtype=torch.float64)
    with small_tiles(**SMALL), recorded() as reads:
        lengthen.attention(**call, bias=Linear(slopes), backend="chunked")
    heads = [(heads.start, heads.stop) for _, heads, _, _, _ in reads]
    assert {(0, 2), (2, 4), (2, 3), (3, 4)} <= set(heads)  # steep and flat apart, together near, alone far
    assert {8, 24} <= {rows.stop - rows.start for _, _, rows, _, _ in reads}  # short blocks and tall ones
    assert len(reads) > 20
    assert len({batch.start for batch, *_ in reads}) == 2


CASES = {
    "alibi, grouped": lambda: qkv(1, 4, 700, 8, key_heads=2) | {"bias": Linear(alibi_slopes(4).double())},
    "alibi, padded": lambda: (
        qkv(2, 2, 1100, 4)
        | {"bias": Linear(torch.tensor([0.5, 0.01]).double()), "mask": Causal().padded(torch.tensor([0, 1040]))}
    ),
    "both sides of their own": lambda: (
        qkv(1, 2, 1500, 4)
        | {"bias": Linear(*torch.tensor([[0.3, 0.02], [0.01, 0.7]]).double()), "mask": Bidirectional()}
    ),
    "table": lambda: qkv(1, 2, 1500, 4, value_width=3) | {"bias": Table(torch.randn(2, 1500).double())},
    "two tables, decay": lambda: (
        qkv(1, 2, 700, 4)
        | {
            "bias": Table(*torch.randn(2, 2, 700).double()),
            "decay": Decay(torch.tensor([0.9, 0.99, 0.999, 1.0]).double()),
            "mask": Bidirectional(),
        }
    ),
    "window": lambda: qkv(2, 1, 1100, 4) | {"mask": Window(300).padded(torch.tensor([700, 3]))},
    "blockwise, decay of each head": lambda: (
        qkv(1, 2, 1100, 3) | {"decay": Decay(0.9 + 0.1 * torch.rand(2, 3).double()), "mask": Blockwise(256)}
    ),
    "packed, queries in the middle": lambda: (
        qkv(1, 2, 700, 4, keys=1500)
        | {
            "q_start": 500,
            "bias": Linear(torch.tensor([0.1, 0.002]).double()),
            "mask": Bidirectional().packed((torch.arange(1500) // 610 * 610).unsqueeze(0)),
        }
    ),
    "more queries than keys": lambda: qkv(1, 2, 700, 4, keys=100) | {"bias": Linear(alibi_slopes(2).double())},
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_reference_at_its_own_constants(case: str, assert_as_defined: Check) -> None:
    assert_as_defined(CASES[case]())


@pytest.mark.parametrize("bias", [None, "table"])
@pytest.mark.parametrize("padding", [255, 256, 257, 600, 699])
def test_padding_longer_than_a_block_of_rows(padding: int, bias: str | None, assert_as_defined: Check) -> None:
    call = qkv(1, 1, 700, 4) | {"mask": Causal().padded(torch.tensor([padding]))}
    assert_as_defined(call | {"bias": Table(torch.randn(1, 700).double()) if bias else None})


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
def test_decays_that_fall_by_decades_a_step(mask: Any, assert_as_defined: Check) -> None:
    rates = torch.tensor([1e-12, 1e-3, 0.5, 1.0], dtype=torch.float64)
    assert_as_defined(qkv(1, 2, 20, 4) | {"decay": Decay(rates), "mask": mask})


@pytest.mark.parametrize("mask", [Window(64), Blockwise(64)], ids=["window", "blockwise"])
def test_decay_is_right_at_any_position(mask: Any) -> None:
    # The factors of q and k, taken from the sequence's start, leave float32 at about 36,000: ζ^(−n/512).
    rates = ((torch.arange(4) / 4 + 0.4) / 1.4).double() ** (1 / 512)
    q, k, v = torch.randn(3, 1, 1, 50_048, 4)
    whole = lengthen.attention(q, k, v, decay=Decay(rates), mask=mask, backend="chunked")
    tail = slice(50_048 - 256, None)
    alone = lengthen.attention(
        *(x[:, :, tail].double() for x in (q, k, v)), decay=Decay(rates), mask=mask, backend="reference"
    )
    torch.testing.assert_close(whole[:, :, -128:].double(), alone[:, :, -128:], rtol=0, atol=3e-6)


@pytest.mark.parametrize("case", ["all", "near", "every second", "far"])
@pytest.mark.parametrize("value_width", [4, 3])
def test_a_table_may_hide_distances(case: str, value_width: int, small_tiles: Any) -> None:
    values = torch.randn(2, 60, dtype=torch.float64)
    hidden = {"all": slice(None), "near": slice(0, 20), "every second": slice(0, None, 2), "far": slice(20, None)}
    values[:, hidden[case]] = -torch.inf
    call = qkv(1, 2, 60, 4, value_width=value_width) | {"bias": Table(values)}
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    with small_tiles(**SMALL):
        small = lengthen.attention(**call, backend="chunked", return_lse=True)
    large = lengthen.attention(**call, backend="chunked", return_lse=True)
    for got in (small, large):
        torch.testing.assert_close(got[0], expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-10, atol=1e-10)


BIASES: dict[str, Callable[[int, int], Any]] = {
    "none": lambda heads, length: None,
    "linear": lambda heads, length: Linear(alibi_slopes(heads)),
    "table": lambda heads, length: Table(torch.randn(heads, length)),
}
EACH_BIAS = pytest.mark.parametrize("bias", BIASES)


@EACH_BIAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", [False, True])
def test_low_precision_inputs_cost_one_rounding(
    bias: str, dtype: torch.dtype, decay: bool, gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(1, 2, 300, 8, dtype, key_heads=1) | {"bias": BIASES[bias](2, 300), "tolerance": 0}
    if decay:
        call["decay"] = Decay(0.99 + 0.01 * torch.rand(8))
    got, expected = gradients(call), gradients(call, "reference", dtype=torch.float64)
    rounding = torch.finfo(dtype).eps / 2
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    torch.testing.assert_close(got["out"].double(), expected["out"], rtol=1.01 * rounding, atol=2e-6)
    torch.testing.assert_close(got["lse"].double(), expected["lse"], rtol=0, atol=1e-5)
    for name in expected.keys() - {"out", "lse"}:
        assert got[name].dtype == (dtype if name in ("dq", "dk", "dv") else torch.float32)
        # The backward is given the output as rounded, and that is felt in every gradient.
        allowed = max(8 * rounding, 5e-6) * expected[name].abs().max().item()
        torch.testing.assert_close(got[name].double(), expected[name], rtol=0, atol=allowed, msg=name)


@pytest.mark.parametrize("mask", [Causal(), Bidirectional()], ids=["causal", "both"])
@pytest.mark.parametrize("kind", ["linear", "table"])
def test_gradients_repeat_to_the_bit(kind: str, mask: Any, gradients: Callable[..., dict[str, Tensor]]) -> None:
    call = qkv(2, 4, 1000, 8, torch.float32, key_heads=2)
    tables = torch.rand(2, 4, 1000)
    call |= {"bias": Linear(*tables[..., 0] / 20) if kind == "linear" else Table(*tables), "mask": mask}
    one, two = gradients(call), gradients(call)
    assert len(one) == 7
    for name in one:
        assert torch.equal(one[name], two[name]), name


@EACH_BIAS
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_autocast_changes_nothing(
    bias: str, decay: bool, value_width: int, backend: str, gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(1, 4, 100, 8, torch.float32, value_width=value_width) | {"bias": BIASES[bias](4, 100)}
    call["decay"] = Decay(torch.full((8,), 0.99)) if decay else None
    expected = gradients(call, backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(call, backend)
    if backend == "reference":  # its backward is torch's own, and runs as autocast has it
        got, expected = ({name: x[name] for name in ("out", "lse")} for x in (got, expected))
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@EACH_BIAS
def test_autocast_does_not_reach_torchs_own_attention(bias: str) -> None:
    call = qkv(1, 4, 100, 8, torch.float32) | {"bias": BIASES[bias](4, 100)}
    expected = lengthen.attention(**call, backend="native")
    with torch.autocast("cpu", torch.bfloat16):
        got = lengthen.attention(**call, backend="native")
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_a_second_derivative_is_refused() -> None:
    call = qkv(1, 2, 50, 4)
    q = call.pop("q").requires_grad_()
    out = lengthen.attention(q, **call, backend="chunked")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_graph_may_be_used_twice() -> None:
    call, slopes = qkv(1, 2, 50, 4), torch.tensor([0.5, 0.1], requires_grad=True)
    out, lse = lengthen.attention(**call, bias=Linear(slopes), backend="chunked", return_lse=True)
    loss = out.square().sum() + lse.sum()
    (first,) = torch.autograd.grad(loss, slopes, retain_graph=True)
    (second,) = torch.autograd.grad(loss, slopes)
    assert torch.equal(first, second)


def test_only_what_asks_gets_a_gradient() -> None:
    call = qkv(1, 2, 50, 4)
    values = torch.randn(2, 50, requires_grad=True)
    lengthen.attention(**call, bias=Table(values), backend="chunked").square().sum().backward()
    assert values.grad is not None
    assert values.grad.abs().sum() > 0
    assert all(call[name].grad is None for name in "qkv")
    lengthen.attention(**call, bias=Linear(torch.ones(2)), backend="chunked")  # and none at all


def test_inputs_need_not_be_contiguous(assert_as_defined: Check) -> None:
    q, k, v = torch.randn(3, 2, 90, 4, 6, dtype=torch.float64).transpose(2, 3)  # [B, L, H, D], as projections give it
    strided = {"q": q, "k": k[:, :1].expand(-1, 2, -1, -1), "v": v[:, ::2]}
    slopes = torch.rand(8, dtype=torch.float64)[::2]
    tables = torch.randn(90, 4, dtype=torch.float64).mT
    for bias in (Linear(slopes), Table(tables), None):
        assert_as_defined(strided | {"bias": bias})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("length", [40, 600])
def test_compiled_around_it_is_the_same(length: int) -> None:
    def layer(x: Tensor, slopes: Tensor) -> Tensor:
        out = lengthen.attention(2 * x, x, x + 1, bias=Linear(slopes), mask=Causal().padded(torch.tensor([3])))
        return out.sin()

    grads, outs = [], []
    x = torch.randn(1, 2, length, 8)
    for function in (layer, torch.compile(layer, backend="eager")):
        slopes = torch.tensor([0.5, 0.01], requires_grad=True)
        outs.append(function(x, slopes))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), slopes)[0])
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(17),
        Blockwise(16),
        Causal().padded(torch.tensor([55, 20])),
        Bidirectional().packed(torch.arange(120).unsqueeze(0) // 30 * 30),
    ],
    ids=["causal", "window", "blockwise", "padded", "packed"],
)
@pytest.mark.parametrize("bias", ["linear", "table", "decay"])
def test_keys_outside_the_interval_are_never_touched(
    mask: Any, bias: str, small_tiles: Any, recorded: Any, gradients: Any
) -> None:
    call = qkv(2, 2, 120, 4) | {"mask": mask, "tolerance": 0}
    given = {"linear": Linear(torch.ones(2).double()), "table": Table(torch.randn(2, 120).double())}
    call |= {"decay": Decay(torch.full((4,), 0.5).double())} if bias == "decay" else {"bias": given[bias]}
    first, last = mask.interval(120, 120, 0, torch.device("cpu"))
    first, last = first.expand(2, -1), last.expand(2, -1)
    with small_tiles(**SMALL), recorded() as reads:
        gradients(call)
    assert len(reads) > 20
    for batch, _, rows, lo, hi in reads:
        start = rows.start // SMALL["TALL"] * SMALL["TALL"]  # short blocks of rows read with the tall one they are of
        here = (batch, slice(start, start + SMALL["TALL"]))
        seen = first[here] <= last[here]
        assert lo >= first[here][seen].min()
        assert hi - 1 <= last[here][seen].max()


@pytest.mark.parametrize("length", range(80, 92))
def test_nothing_is_read_past_the_last_key(length: int, small_tiles: Any, recorded: Any) -> None:
    # Where reach ends depends on the length by fractions of a key; over these lengths it passes the last key.
    call = qkv(1, 1, length, 2) | {"bias": Linear(torch.tensor([0.5])), "mask": Bidirectional()}
    call["q"].zero_()
    with small_tiles(**SMALL), recorded() as reads:
        lengthen.attention(**call, backend="chunked")
    assert max(hi for *_, hi in reads) == length
    assert min(lo for *_, lo, _ in reads) == 0


# Bias (none, ALiBi, T5-like, xPos) × mask: what a cache must give, token by token or many at once.
METHODS: dict[str, Callable[[], Call]] = {
    "none": lambda: {},
    "linear": lambda: {"bias": Linear(alibi_slopes(4).double())},
    "table": lambda: {"bias": Table(torch.randn(4, 61).double())},
    "decay": lambda: {"decay": Decay(0.8 + 0.2 * torch.rand(8).double())},
}
MASKS: dict[str, Callable[[int], Any]] = {
    "causal": lambda keys: Causal(),
    "window": lambda keys: Window(9),
    "blockwise": lambda keys: Blockwise(8),
    "padded": lambda keys: Causal().padded(torch.tensor([0, 23])),
    "padded blockwise": lambda keys: Blockwise(8).padded(torch.tensor([5, 30])),
    "packed": lambda keys: Window(20).packed(torch.arange(keys).unsqueeze(0) // 25 * 25),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [1, 3, 17])
def test_reading_with_a_cache_is_reading_the_whole(method: str, mask: str, step: int, small_tiles: Any) -> None:
    call, options = qkv(2, 4, 61, 8, key_heads=2), METHODS[method]()
    q, k, v = call["q"], call["k"], call["v"]
    whole = lengthen.attention(q, k, v, **options, mask=MASKS[mask](61), backend="reference")
    for backend in (None, "chunked"):
        parts = []
        with small_tiles(**SMALL):
            for i in range(0, 61, step):
                end = min(i + step, 61)
                seen = {"k": k[:, :, :end], "v": v[:, :, :end], "mask": MASKS[mask](end)}
                parts.append(lengthen.attention(q[:, :, i:end], **seen, **options, backend=backend))
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [1, 3, 17])
def test_both_sides_in_parts_are_the_whole(method: str, step: int, small_tiles: Any) -> None:
    call, options = qkv(2, 4, 61, 8, key_heads=2), METHODS[method]()
    q = call.pop("q")
    whole = lengthen.attention(q, **call, **options, mask=Bidirectional(), backend="reference")
    for backend in (None, "chunked"):
        with small_tiles(**SMALL):
            parts = [
                lengthen.attention(part, **call, **options, mask=Bidirectional(), q_start=i * step, backend=backend)
                for i, part in enumerate(q.split(step, dim=2))
            ]
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-10, atol=1e-10)


# What runs in a process of its own, so that the peak is its calls': it prints the growth in MiB over a small call.
PEAK = """
import resource, sys, torch, lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window

def train(length, heads, width, mask, kind, *shape):
    q, k, v = (torch.randn(1, heads, length, width).requires_grad_() for _ in range(3))
    bias = kind((torch.ones(heads, *shape) / 2).requires_grad_())
    out = lengthen.attention(q, k, v, bias=bias, mask=mask, backend="chunked")
    out.backward(torch.ones_like(out))
    assert all(x.grad.isfinite().all() for x in (q, k, v, bias.tensors[0]))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

train(300, 1, 8, Causal(), Linear)
before = peak()
{calls}
print(peak() - before)
"""


def peak_growth(*calls: str) -> float:
    script = PEAK.format(calls="\n".join(f"train({call})" for call in calls))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_memory_grows_with_length_and_not_its_square() -> None:
    growth = peak_growth(
        "50_000, 2, 16, Window(64), Table, 64",
        "50_000, 2, 16, Blockwise(64), Linear",
        "50_000, 2, 16, Causal(), Linear",
        "50_000, 2, 16, Bidirectional(), Linear",
    )
    # q, k, v, the output and their gradients are 6 MiB each; a head's scores would be 10 GiB.
    assert growth < 256, f"{growth:.0f} MiB"


@pytest.mark.slow
def test_a_t5_bias_can_be_trained_at_16384() -> None:
    # The paper ran out of memory at 13,512: heads × length² in float32 alone is 8 GiB here.
    growth = peak_growth("16_384, 8, 64, Causal(), Table, 16_384")
    print(f"peak growth {growth:.0f} MiB")
    assert growth < 2048, f"{growth:.0f} MiB"
