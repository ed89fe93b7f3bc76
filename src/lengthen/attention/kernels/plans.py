"""A call like one before is launched as that one was, without working anything out again.

For short calls the CPU takes longer to check arguments and to cut the work than the GPU takes to do it. What decides
over that is a handful of facts (`key`): shapes, strides, the mask, the numbers. The second time that the same facts are
seen, the launches are written down, and from the third on they are made again with the new tensors in the old ones'
places. Only calls with ALiBi that want no gradient are kept; without a bias, torch's own attention is called anyway.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lengthen.attention.biases import Decay, Linear
from lengthen.attention.kernels.ops import unwatched
from lengthen.attention.masks import Blockwise, Causal, Mask, Window

MOST = 512  # keys that are kept: when there are more, all are forgotten
LARGEST = 1 << 18  # numbers, 1 MB, that a call makes for itself: one with more keeps the GPU busy for long enough
FILLED, FEW_ZEROS = 1 << 18, 1 << 14  # numbers that are filled with 0 at once, and bytes of them for one call at most
ALIGNED = 16  # bytes: what pointers are compiled for
HALF = (torch.bfloat16, torch.float16)  # float32 is computed as a setting of torch's says
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

NUMBERS = (type(None), int, float)  # what a number of a call may be
# The masks that say all by a number.
SIZES: dict[Any, Callable[[Any], int]] = {Causal: lambda _: 0, Window: lambda m: m.size, Blockwise: lambda m: m.block}

Key = tuple[Any, ...]


class Launch(NamedTuple):
    """A launch as it was made, for one like it."""

    run: Any
    grid: tuple[int, int, int]
    handles: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


class Notes(threading.local):
    """What is written down of a call while someone wants to know: its launches, and what was made for them alone."""

    launches: list[Launch] | None = None  # None: nobody does, or they cannot be made again
    made: list[Tensor]


notes = Notes()


def make(like: Tensor, numbers: int) -> Tensor:
    """Return room for so many numbers in float32, for the launches of one call."""
    made = like.new_empty(numbers, dtype=torch.float32)
    if notes.launches is not None:
        notes.made.append(made)
    return made


def key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Linear,
    decay: Decay | None,
    mask: Mask,
    scale: float | None,
    q_start: int | None,
    tolerance: float | None,
    return_lse: bool,
    backend: str | None,
    key_norm: Tensor | None,
) -> Key | None:
    """Return all that decides over a call's launches but its data; None where there is more to it.

    Nothing is checked yet: a call that is refused is never kept, so whatever is found was found to be right before.
    """
    if bias.ahead is not None or decay is not None or not unwatched(q, k, v):
        return None
    slopes, dtype, device, kind = bias.slopes, q.dtype, q.device, type(mask)
    if dtype not in HALF or slopes.dtype != torch.float32 or not slopes.is_contiguous():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or slopes.requires_grad):
        return None
    if _current_device() != device.index or getattr(forward_ad, "_current_level", -1) >= 0:
        return None
    if kind not in SIZES or mask.key_start is not None or mask.document_starts is not None:
        return None
    if type(scale) not in NUMBERS or type(tolerance) not in NUMBERS or type(q_start) not in NUMBERS[:2]:
        return None
    if backend is not None and backend != "triton":
        return None
    strides = q.stride(), k.stride(), v.stride()
    if not strides[0][-1:] == strides[1][-1:] == strides[2][-1:] == (1,):
        return None
    pointers = q.data_ptr() | k.data_ptr() | v.data_ptr() | slopes.data_ptr()
    norm = None
    if key_norm is not None:
        if type(key_norm) is not Tensor or not key_norm.is_contiguous():
            return None
        norm = key_norm.shape, key_norm.dtype, key_norm.device
        pointers |= key_norm.data_ptr()
    if pointers % ALIGNED:
        return None
    return (
        q.shape,
        k.shape,
        v.shape,
        strides,
        dtype,
        k.dtype,
        v.dtype,
        device,
        k.device,
        v.device,
        slopes.shape,
        slopes.device,
        kind,
        SIZES[kind](mask),
        norm,
        not return_lse,
        backend,
        scale,
        q_start,
        tolerance,
    )


class Zeros:
    """Memory of one stream that is 0, each part handed out once: one fill for many calls.

    It is for the launches that come next on that stream. A CUDA graph, which is replayed, would find it used, and must
    have its own. (Should two threads get the same part, the later call would only read more than it needs.)
    """

    def __init__(self, like: Tensor) -> None:
        self.memory = like.new_zeros(FILLED, dtype=torch.float32)
        self.next, self.end = self.memory.data_ptr(), self.memory.data_ptr() + 4 * FILLED


def zeros(like: Tensor, device: int, stream: int, size: int) -> int:
    """Return where so many bytes are 0 for the next launches on a stream; size is a multiple of `ALIGNED`."""
    some = _zeros.get((device, stream))
    if some is None or some.next + size > some.end:
        some = _zeros[device, stream] = Zeros(like)
    place = some.next
    some.next = place + size
    return place


_zeros: dict[tuple[int, int], Zeros] = {}


class Plan:
    """The launches of one call, for tensors that are like its."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        made: Sequence[Tensor],
        launches: Sequence[Launch],
        zeroed: bool,
    ) -> None:
        """Take up a call's launches; a tensor that is none of these is a KeyError, since its content might matter.

        Args:
            inputs: what a plan is called with, each another tensor.
            out: what it returns, and lse.
            made: what was made for the launches alone.
            launches: as they were made.
            zeroed: whether the last of `made` must be 0 at first.
        """
        from lengthen.attention.kernels.launcher import watched

        self.watched = watched
        self.shape, self.strides, self.rows = out.shape, out.stride(), lse.shape
        self.device = out.get_device()
        places = {id(x): number for number, x in enumerate((*inputs, out, lse, *made))}
        sizes = [-(-x.numel() * x.element_size() // ALIGNED) * ALIGNED for x in (lse, *made)]  # bytes
        self.zeros = sizes.pop() if zeroed else 0
        self.room = sum(sizes) // 4  # numbers: lse and what was made, one after the other
        self.offsets = list(itertools.accumulate(sizes[:-1], initial=0))
        self.launches = [
            (one.run, one.grid, one.handles, operator.itemgetter(*[places[id(x)] for x in one.tensors]), one.numbers)
            for one in launches
        ]

    def __call__(self, q: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Launch for these inputs; return out, and the room that begins with lse."""
        out = q.new_empty_strided(self.shape, self.strides)
        room = q.new_empty(self.room, dtype=torch.float32)
        start = room.data_ptr()
        pointers = [x.data_ptr() for x in inputs]
        pointers += [out.data_ptr(), *[start + offset for offset in self.offsets]]
        stream = _current_stream(self.device)
        if self.zeros and (_capturing() or self.zeros > FEW_ZEROS):
            own = q.new_zeros(self.zeros // 4, dtype=torch.float32)  # until all is launched
            pointers.append(own.data_ptr())
        elif self.zeros:
            pointers.append(zeros(q, self.device, stream, self.zeros))
        for run, grid, handles, chosen, numbers in self.launches:
            run(*grid, stream, *handles, *chosen(pointers), *numbers)
        return out, room


_kept: dict[Key, Plan | Literal[False] | None] = {}  # None: seen once; False: not to be kept


def inputs_of(q: Tensor, k: Tensor, v: Tensor, bias: Linear, key_norm: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors of a call in a plan's order."""
    return (q, k, v, bias.slopes) if key_norm is None else (q, k, v, bias.slopes, key_norm)


def again(
    key: Key, q: Tensor, k: Tensor, v: Tensor, bias: Linear, key_norm: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return out, or out and lse, if there is a plan for such a call."""
    plan = _kept.get(key)
    if not plan or plan.watched():
        return None
    out, room = plan(q, inputs_of(q, k, v, bias, key_norm))
    return (out, room[: plan.rows.numel()].view(plan.rows)) if return_lse else out


def due(key: Key) -> bool:
    """Return whether a call's launches should be written down: it is the second of its kind."""
    known = _kept.get(key, _kept)  # itself: never seen
    if known is not _kept:
        return known is None
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[key] = None
    return False


def keep(
    key: Key, run: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...], inputs: Sequence[Tensor], zeroed: bool
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call, and keep its launches if they can be made again.

    `run` returns out, lse and what else it made; `zeroed` says whether the last of that must be 0 at first.
    """
    notes.launches, notes.made = [], []
    try:
        out, lse, *others = run(*arguments)
        launches, made = notes.launches, [*notes.made, *others]
    finally:
        notes.launches, notes.made = None, []
    if launches is not None:  # None: something had to be compiled first, and the next call will do
        one_each = len({id(x) for x in inputs}) == len(inputs)
        small = sum(x.numel() for x in (lse, *made)) <= LARGEST
        _kept[key] = Plan(inputs, out, lse, made, launches, zeroed) if one_each and small else False
    return out, lse
