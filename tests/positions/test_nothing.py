import torch

from lengthen.positions import NoPosition, build


def test_none_tells_the_model_nothing() -> None:
    method = build("none", heads=2, head_dim=4, width=8)
    assert isinstance(method, NoPosition)
    x, q, positions = torch.randn(1, 5, 8), torch.randn(1, 2, 5, 4), torch.arange(5)
    assert method.embed(x, positions) is x
    assert method.rotate(q, positions) is q
    assert method.bias(4) is None
    assert method.decay() is None
