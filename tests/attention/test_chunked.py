"""Chunked attention is the reference, run by run: forward, lse and every gradient, whatever the sizes of runs."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lengthen
from lengthen import Bidirectional, Blockwise, Causal, Decay, Linear, Table, Window, alibi_slopes
from lengthen.attention import Mask

Call = dict[str, Any]
Check = Callable[..., None]
Context = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Around(Mask):
    """Each query sees `size` keys on either side, and itself."""

    size: int

    def span(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return position - self.size, position + self.size


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
            st.builds(Around, st.integers(0, 20)),
        )
    )
    if inside and data.draw(st.integers(0, 3)) == 3:
        mask = mask.packed(data.draw(documents(data.draw(st.sampled_from([1, batch])), keys)))
    padded = data.draw(st.sampled_from([(), (), ("key_start",), ("key_end",), ("key_start", "key_end")]))
    rows = data.draw(st.sampled_from([1, batch]))
    return mask.padded(
        **{name: torch.tensor([data.draw(st.integers(0, keys + 2)) for _ in range(rows)]) for name in padded}
    )


def draw_start(data: st.DataObject, batch: int, queries: int, keys: int) -> tuple[Any, bool]:
    """Draw where queries stand, a number or one for each sequence, and say whether that is among the keys."""
    anywhere = st.one_of(st.integers(-queries - 3, keys + 3), st.integers(keys + 290, keys + 400))
    kinds = ["numbers", "number"] if queries > keys else ["none", "none", "number", "numbers"]
    kind = data.draw(st.sampled_from(kinds), label="kind of q_start")
    if kind == "none":
        return None, True
    starts = [data.draw(anywhere) for _ in range(1 if kind == "number" else data.draw(st.sampled_from([1, batch])))]
    inside = all(start >= 0 and start + queries <= keys for start in starts)
    return (starts[0] if kind == "number" else torch.tensor(starts)), inside


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
    q_start, inside = draw_start(data, batch, queries, keys)
    call |= {"mask": draw_mask(data, documents, batch, keys, inside), "q_start": q_start}
    call["scale"] = data.draw(st.sampled_from([None, None, 0.3, -1.0, 0.0]), label="scale")
    call["tolerance"] = data.draw(st.sampled_from([None, 0, 1e-15]), label="tolerance")
    bias, ahead = data.draw(st.sampled_from(["none", "linear", "table", "extended"])), data.draw(st.booleans())
    if bias == "linear":
        slopes = 2.0 ** -torch.linspace(0.5, 7, 2 * heads, dtype=torch.float64)[torch.randperm(2 * heads)]
        call["bias"] = Linear(slopes[:heads], slopes[heads:] if ahead else None)
    elif bias == "table":
        call["bias"] = table_for(call, ahead, spare=data.draw(st.integers(0, 3)))
    elif bias == "extended":
        ends = [data.draw(st.integers(1, 80)) for _ in range(1 + ahead)]
        call["bias"] = Table(*(torch.randn(heads, end, dtype=torch.float64) for end in ends), extended=True)  # type: ignore[misc]
    if data.draw(st.integers(0, 2)) == 2:
        lowest = data.draw(st.sampled_from([0.99, 0.7, 0.1]), label="lowest rate")
        shape = data.draw(st.sampled_from([(width,), (heads, width)]))
        rates = lowest + (1 - lowest) * torch.rand(shape, dtype=torch.float64)
        call["decay"] = Decay(rates.where(torch.rand(shape) < 0.8, 1.0))
    return call


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_is_the_reference_for_any_call_and_any_runs(
    data: st.DataObject,
    constants: st.SearchStrategy[dict[str, float]],
    small_runs: Context,
    documents: Callable[..., st.SearchStrategy[Tensor]],
    table_for: Callable[..., Table],
    assert_as_defined: Check,
) -> None:
    call = draw_call(data, documents, table_for)
    with small_runs(**data.draw(constants, label="constants")):
        assert_as_defined(call)


def test_small_constants_do_make_many_runs(small_runs: Context, recorded: Context) -> None:
    call = qkv(2, 4, 70, 4)
    slopes = torch.tensor([1.0, 0.5, 2**-6, 2**-7], dtype=torch.float64)
    with small_runs(), recorded() as read:
        lengthen.attention(**call, bias=Linear(slopes), backend="chunked")
    assert len({(run.heads.start, run.heads.stop) for run in read}) > 1  # steep and flat heads apart
    assert any(run.step and run.blocks > 1 for run in read)  # windows that move with their blocks
    assert any(not run.step and run.rows > 8 for run in read)  # a tall block
    assert len(read) > 10
    assert len({run.batch.start for run in read}) == 2
    with small_runs(TILE=64), recorded() as split:
        lengthen.attention(**call, mask=Window(30), backend="chunked")
    with small_runs(), recorded() as whole:
        lengthen.attention(**call, mask=Window(30), backend="chunked")
    assert len(split) > 2 * len(whole)  # masks that are too large are cut


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
    "more queries than keys": lambda: (
        qkv(1, 2, 700, 4, keys=100) | {"bias": Linear(alibi_slopes(2).double()), "q_start": -600}
    ),
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
def test_a_table_may_hide_distances(case: str, value_width: int, small_runs: Context) -> None:
    values = torch.randn(2, 60, dtype=torch.float64)
    hidden = {"all": slice(None), "near": slice(0, 20), "every second": slice(0, None, 2), "far": slice(20, None)}
    values[:, hidden[case]] = -torch.inf
    call = qkv(1, 2, 60, 4, value_width=value_width) | {"bias": Table(values)}
    expected = lengthen.attention(**call, backend="reference", return_lse=True)
    with small_runs():
        small = lengthen.attention(**call, backend="chunked", return_lse=True)
    large = lengthen.attention(**call, backend="chunked", return_lse=True)
    for got in (small, large):
        torch.testing.assert_close(got[0], expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("kind", ["none", "linear", "table", "decay"])
def test_autocast_changes_nothing(
    kind: str, value_width: int, backend: str, gradients: Callable[..., dict[str, Tensor]]
) -> None:
    call = qkv(1, 4, 100, 8, torch.float32, value_width=value_width)
    call |= {
        "none": {},
        "linear": {"bias": Linear(alibi_slopes(4))},
        "table": {"bias": Table(torch.randn(4, 100))},
        "decay": {"decay": Decay(torch.full((8,), 0.99))},
    }[kind]
    expected = gradients(call, backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(call, backend)
    if backend == "reference":  # its backward is torch's own, and runs as autocast has it
        got, expected = ({name: x[name] for name in ("out", "lse")} for x in (got, expected))
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(17),
        Blockwise(16),
        Around(9),
        Causal().padded(torch.tensor([55, 20])),
        Bidirectional().padded(torch.tensor([55, 20]), torch.tensor([100, 120])),
        Bidirectional().packed(torch.arange(120).unsqueeze(0) // 30 * 30),
    ],
    ids=["causal", "window", "blockwise", "around", "padded", "both ends", "packed"],
)
@pytest.mark.parametrize("bias", ["linear", "table", "decay"])
def test_without_waste_no_key_outside_a_block_s_intervals_is_read(
    mask: Any, bias: str, small_runs: Context, recorded: Context, gradients: Any
) -> None:
    call = qkv(2, 2, 120, 4) | {"mask": mask, "tolerance": 0}
    given = {"linear": Linear(torch.ones(2).double()), "table": Table(torch.randn(2, 120).double())}
    call |= {"decay": Decay(torch.full((4,), 0.5).double())} if bias == "decay" else {"bias": given[bias]}
    first, last = (x.expand(2, -1) for x in mask.interval(120, 120, 0, torch.device("cpu")))
    with small_runs(WASTE=1.0, GRAIN=0, TOGETHER=0), recorded() as read:
        gradients(call)
    assert len(read) > 8
    for run in read:
        for block in range(run.blocks):
            start, lo = run.start + block * run.rows, run.lo + block * run.step
            here = (run.batch, slice(start // 8 * 8, start // 8 * 8 + 8))
            seen = first[here] <= last[here]
            assert lo >= first[here][seen].min()
            assert lo + run.width - 1 <= last[here][seen].max()


def test_a_window_reads_a_band(recorded: Context, scores_read: Callable[..., int]) -> None:
    call = qkv(1, 1, 8192, 4, torch.float32)
    with recorded() as read:
        lengthen.attention(**call, mask=Window(64), backend="chunked")
    assert len(read) <= 3  # one large call for most of it
    assert scores_read(read) <= 1.2 * 8192 * (256 + 64)


@pytest.mark.parametrize("length", range(80, 92))
def test_nothing_is_read_past_the_last_key(length: int, small_runs: Context, spans: Callable[..., Tensor]) -> None:
    # Where reach ends depends on the length by fractions of a key; over these lengths it passes the last key.
    call = qkv(1, 1, length, 2) | {"bias": Linear(torch.tensor([0.5])), "mask": Bidirectional()}
    call["q"].zero_()
    with small_runs():
        lo, hi = spans(call)
    assert (int(lo.min()), int(hi.max())) == (0, length)


# What runs in a process of its own, so that the peak is its calls': it prints the growth in MiB over a small call.
PEAK = """
import resource, sys, torch, lengthen
from lengthen import Bidirectional, Blockwise, Causal, Linear, Table, Window

def train(length, mask, kind, *shape):
    q, k, v = (torch.randn(1, 1, length, 16).requires_grad_() for _ in range(3))
    bias = kind((torch.ones(1, *shape) / 2).requires_grad_())
    out = lengthen.attention(q, k, v, bias=bias, mask=mask, backend="chunked")
    out.backward(torch.ones_like(out))
    assert all(x.grad.isfinite().all() for x in (q, k, v, bias.tensors[0]))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

train(300, Causal(), Linear)
before = peak()
train(40_000, Window(64), Table, 64)
train(40_000, Blockwise(64), Linear)
train(40_000, Causal(), Linear)
train(40_000, Bidirectional(), Linear)
train(16_384, Causal(), Table, 16_384)
print(peak() - before)
"""


def test_memory_grows_with_length_and_not_its_square() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    # q, k, v, the output and their gradients are 3 MiB each. Scores would be 6 GiB, and with a table that is flat and
    # so reads everything (T5's own paper ran out of memory at 13,512) 1 GiB.
    assert float(done.stdout) < 400, f"{done.stdout} MiB"
