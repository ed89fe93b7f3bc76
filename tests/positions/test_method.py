import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthen.attention import Bidirectional, Causal, Decay, Linear, Table, attention
from lengthen.positions import PositionMethod, build, names
from lengthen.positions.method import check_positions

SIZES = {"heads": 4, "head_dim": 8, "width": 32}
REQUIRED: dict[str, dict[str, Any]] = {"learned": {"max_length": 64}}
PLACES = {
    "alibi": ("bias",),
    "kerple": ("bias",),
    "learned": ("embed",),
    "none": (),
    "rotary": ("rotate",),
    "sandwich": ("bias",),
    "sinusoidal": ("embed",),
    "t5": ("bias",),
    "xpos": ("rotate", "decay"),
}
LEARNED = [
    ("alibi", {"learned": True}),
    ("alibi", {"learned": True, "sides": "separate"}),
    ("kerple", {"kind": "log"}),
    ("kerple", {"kind": "power"}),
    ("kerple", {"sides": "separate"}),
    ("learned", {"max_length": 64}),
    ("t5", {}),
    ("t5", {"bidirectional": True}),
    ("xpos", {"learned_gamma": True}),
]


def make(name: str, **options: Any) -> PositionMethod:
    return build(name, **SIZES, **{**REQUIRED.get(name, {}), **options})


def wide_tensors(method: PositionMethod, max_distance: int = 40) -> list[Tensor]:
    bias, decay = method.bias(max_distance), method.decay()
    found = [] if bias is None else [tensor for tensor in bias.tensors if tensor is not None]
    return found if decay is None else [*found, decay.rates]


def test_the_base_class_changes_nothing() -> None:
    method = PositionMethod(**SIZES)
    x, positions = torch.randn(2, 5, 32), torch.arange(5)
    assert method.embed(x, positions) is x
    assert method.rotate(x, positions) is x
    assert method.decay() is None
    assert method.bias(4) is None
    assert method.places == ()
    assert not list(method.state_dict())
    assert method.name == "PositionMethod"


@pytest.mark.parametrize("name", PLACES)
def test_places_are_those_the_class_overrides(name: str) -> None:
    assert make(name).places == PLACES[name]


def test_a_method_of_ones_own_has_its_class_name_and_its_places() -> None:
    class Mine(PositionMethod):
        def bias(self, max_distance: int) -> Table:
            return Table(torch.zeros(self.heads, max_distance + 1))

    class Named(Mine):
        name = "mine"

    assert (Mine.name, Named.name) == ("Mine", "mine")
    assert Mine(**SIZES).places == ("bias",) == Named(**SIZES).places


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("size", ["heads", "head_dim", "width"])
def test_sizes_are_checked(name: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"{size}: expected at least 1, got 0"):
        build(name, **{**SIZES, size: 0}, **REQUIRED.get(name, {}))
    with pytest.raises(TypeError, match=f"{size}: expected a whole number, got 8.0"):
        build(name, **{**SIZES, size: 8.0}, **REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", names())
def test_results_keep_the_dtype_and_shape_of_x(name: str) -> None:
    method, positions = make(name), torch.arange(6)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, q = torch.randn(2, 6, 32).to(dtype), torch.randn(2, 2, 6, 8).to(dtype)
        for given, result in ((x, method.embed(x, positions)), (q, method.rotate(q, positions))):
            assert result.dtype == dtype
            assert result.shape == given.shape


@pytest.mark.parametrize("name", names())
def test_positions_of_each_sequence_are_its_own(name: str) -> None:
    method = make(name)
    x, q = torch.randn(2, 6, 32), torch.randn(2, 3, 6, 8)
    positions = torch.stack((torch.arange(6), torch.arange(20, 26)))
    for row in range(2):
        alone = slice(row, row + 1)
        torch.testing.assert_close(method.embed(x, positions)[alone], method.embed(x[alone], positions[row]))
        torch.testing.assert_close(method.rotate(q, positions)[alone], method.rotate(q[alone], positions[row]))


COMPOSED = ["rotary+alibi", "sinusoidal+t5", "xpos+alibi"]


@pytest.mark.parametrize("name", [*names(), *COMPOSED])
@pytest.mark.parametrize("two_sided", [False, True])
def test_placed_once_it_does_what_the_method_does(name: str, two_sided: bool) -> None:
    """The scores of what it splits and hands to the op are those of the method's own rotation, bias and decay."""
    method, mask = make(name), Bidirectional() if two_sided else Causal()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for positions in (torch.arange(5), torch.tensor([[7, 8, 9, 10, 11], [0, 1, 2, 3, 4]])):
            qkv = torch.randn(2, 5, 4 + 2 * 2, 8).to(dtype)
            placed = method.at(positions, dtype, two_sided)
            got = attention(*placed.split(qkv, 4, 2), bias=placed.bias, decay=placed.decay, mask=mask)
            q, k, v = (part.transpose(1, 2) for part in torch.split(qkv, [4, 2, 2], dim=2))
            q, k = method.rotate(q, positions), method.rotate(k, positions)
            expected = attention(q, k, v, bias=method.bias(4), decay=method.decay(), mask=mask, backend="reference")
            within = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, expected, rtol=within, atol=max(within, 1e-6))


@pytest.mark.parametrize("name", ["none", "rotary", "xpos"])
def test_a_rotation_of_ones_own_is_used(name: str) -> None:
    """A subclass that overrides `rotate` alone is not passed over for its parent's angles."""
    parent = type(make(name))

    class Mine(parent):  # type: ignore[misc, valid-type]
        def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
            return x * (1 + positions[:, None]).to(x.dtype)

    method, qkv = Mine(**SIZES), torch.randn(1, 5, 8, 8)
    q, k, v = method.at(torch.arange(5), torch.float32, False).split(qkv, 4, 2)
    parts = [part.transpose(1, 2) for part in torch.split(qkv, [4, 2, 2], dim=2)]
    assert torch.equal(q, parts[0] * torch.arange(1, 6)[:, None])
    assert torch.equal(k, parts[1] * torch.arange(1, 6)[:, None])
    assert torch.equal(v, parts[2])


@pytest.mark.parametrize("name", ["learned", "sinusoidal", "rotary", "xpos"])
def test_positions_are_checked(name: str) -> None:
    method = make(name)
    x = torch.randn(2, 6, 32) if "embed" in method.places else torch.randn(2, 4, 6, 8)
    call = method.embed if "embed" in method.places else method.rotate
    with pytest.raises(TypeError, match=r"positions: expected an integer tensor, got a torch\.float32"):
        call(x, torch.arange(6.0))
    with pytest.raises(TypeError, match="positions: expected an integer tensor, got"):
        call(x, [0, 1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=r"positions: expected shape \[6\] or \[2, 6\], got"):
        call(x, torch.arange(5))
    with pytest.raises(ValueError, match=r"positions: expected shape \[6\] or \[2, 6\], got"):
        call(x, torch.arange(18).view(3, 6))
    with pytest.raises(ValueError, match=r"x: expected . dimensions, the last of them (width=32|head_dim=8), got"):
        call(x[..., :-1], torch.arange(6))
    with pytest.raises(ValueError, match="positions: expected a tensor on cpu like x, got"):
        call(x, torch.arange(6, device="meta"))


def test_check_positions_lets_one_row_serve_a_batch() -> None:
    positions = torch.arange(5, dtype=torch.int32).view(1, 5)
    assert check_positions(torch.zeros(3, 5, 32), positions, 3, ("width", 32)) is positions


@pytest.mark.parametrize("name", ["alibi", "kerple", "sandwich", "t5"])
def test_max_distance_is_checked_and_covered(name: str) -> None:
    method = make(name)
    for max_distance in (0, 1, 7, 300):
        bias = method.bias(max_distance)
        assert bias is not None
        assert bias.heads == 4
        assert bias.at(torch.arange(max_distance + 1)).shape == (4, max_distance + 1)
    with pytest.raises(ValueError, match="max_distance: expected at least 0, got -1"):
        method.bias(-1)
    with pytest.raises(TypeError, match=r"max_distance: expected a whole number, got 3\.0"):
        method.bias(3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("name", "options"), [*LEARNED, *((name, {}) for name in names())])
def test_biases_and_decays_stay_wide_after_a_cast(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    method, plain = make(name, **options).to(dtype), make(name, **options)
    assert all(parameter.dtype == dtype for parameter in method.parameters())
    for cast, kept in zip(wide_tensors(method), wide_tensors(plain), strict=True):
        assert cast.dtype in (torch.float32, torch.float64)
        if not list(method.parameters()):
            assert torch.equal(cast, kept)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alibi", {}),
        ("alibi", {"learned": True}),
        ("kerple", {"kind": "log"}),
        ("kerple", {"kind": "power"}),
        ("sandwich", {}),
    ],
)
def test_neighbours_at_distance_65536_differ_in_a_model_cast_to_bf16(name: str, options: dict[str, Any]) -> None:
    bias = make(name, **options).to(torch.bfloat16).bias(65_600)
    assert bias is not None
    near = bias.at(torch.arange(65_536, 65_569))
    for head in near:
        assert head.unique().numel() == 33


@pytest.mark.parametrize(("name", "options"), LEARNED)
def test_state_dict_round_trip(name: str, options: dict[str, Any]) -> None:
    source, target = make(name, **options), make(name, **options)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter).mul_(0.1))
    target.load_state_dict(source.state_dict())
    assert len(source.state_dict()) == len(list(source.parameters())) >= 1
    x = torch.randn(1, 6, 32)
    assert torch.equal(source.embed(x, torch.arange(6)), target.embed(x, torch.arange(6)))
    for ours, theirs in zip(wide_tensors(source), wide_tensors(target), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["alibi", "none", "rotary", "sandwich", "sinusoidal", "xpos"])
def test_methods_without_parameters_have_an_empty_state_dict(name: str) -> None:
    assert not make(name).state_dict()


@pytest.mark.parametrize("name", names())
def test_copies_and_pickles_do_the_same_and_carry_no_cache(name: str) -> None:
    method, positions = make(name), torch.arange(6)
    x, q = torch.randn(1, 6, 32), torch.randn(1, 4, 6, 8)
    expected = [method.embed(x, positions), method.rotate(q, positions), *wide_tensors(method)]
    for copied in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert copied._kept is None
        got = [copied.embed(x, positions), copied.rotate(q, positions), *wide_tensors(copied)]
        for ours, theirs in zip(expected, got, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "options"), [*LEARNED, *((name, {}) for name in names())])
def test_biases_and_decays_are_on_the_module_s_device(name: str, options: dict[str, Any]) -> None:
    method = make(name, **options)
    wide_tensors(method)  # what is remembered from the CPU must not be given out elsewhere
    method.to("meta")
    assert method.device.type == "meta"
    assert all(tensor.device.type == "meta" for tensor in wide_tensors(method))


@pytest.mark.parametrize(("name", "options"), [case for case in LEARNED if case[0] != "learned"])
def test_built_on_the_meta_device_and_reset_it_is_the_same(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        method = make(name, **options)
    method.to_empty(device="cpu")
    method.reset_parameters()
    for ours, theirs in zip(wide_tensors(method), wide_tensors(make(name, **options)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["alibi", "rotary", "sandwich", "xpos"])
def test_what_inference_mode_made_can_be_trained_with(name: str) -> None:
    method, positions = make(name), torch.arange(6)
    q = torch.randn(1, 4, 6, 8)
    with torch.inference_mode():
        method.rotate(q, positions)
        wide_tensors(method)
    q.requires_grad_()
    loss = method.rotate(q, positions).square().sum()
    for tensor in wide_tensors(method, 7):
        weight = torch.ones((), requires_grad=True)
        loss = loss + (tensor * weight).sum()  # saves the tensor for the backward pass
    loss.backward()
    assert q.grad is not None


@pytest.mark.parametrize("name", names())
def test_compiles_in_one_piece(name: str) -> None:
    torch.compiler.reset()  # each method is a program of its own
    method = make(name)

    def call(x: Tensor, q: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        bias, decay = method.bias(11), method.decay()
        extra = (() if bias is None else (bias.tensors[0],)) + (() if decay is None else (decay.rates,))
        return (method.embed(x, positions), method.rotate(q, positions), *extra)

    given = torch.randn(1, 12, 32), torch.randn(1, 4, 12, 8), torch.arange(12)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(*given), call(*given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_decay_is_the_attention_s_own_kind() -> None:
    assert isinstance(make("xpos").decay(), Decay)
    assert isinstance(make("alibi").bias(3), Linear)
    assert isinstance(make("t5").bias(3), Table)
