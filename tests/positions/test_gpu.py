"""What only a GPU can show: tensors follow the module there, gradients repeat, graphs replay."""

import pytest
import torch

from lengthen.positions import T5, build, names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"heads": 4, "head_dim": 8, "width": 32}


@pytest.mark.parametrize("name", names())
def test_a_method_gives_on_the_gpu_what_it_gives_on_the_cpu(name: str) -> None:
    options = {"max_length": 64} if name == "learned" else {}
    method = build(name, **SIZES, **options)
    x, q, positions = torch.randn(2, 6, 32), torch.randn(2, 4, 6, 8), torch.arange(6)
    bias, decay = method.bias(99), method.decay()
    expected = [method.embed(x, positions), method.rotate(q, positions)]
    expected += [] if bias is None else [bias.at(torch.arange(100))]
    expected += [] if decay is None else [decay.rates]

    method.cuda()
    bias, decay = method.bias(99), method.decay()
    got = [method.embed(x.cuda(), positions.cuda()), method.rotate(q.cuda(), positions.cuda())]
    got += [] if bias is None else [bias.at(torch.arange(100).cuda())]
    got += [] if decay is None else [decay.rates]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_t5_repeats_to_the_bit() -> None:
    method = T5(**SIZES, max_distance=1_000_000).cuda()
    grad = torch.randn(4, method.starts[-1] + 1, device="cuda")
    runs = []
    for _ in range(3):
        method.weight.grad = None
        method.bias(999_999).values.backward(grad)
        assert method.weight.grad is not None
        runs.append(method.weight.grad.clone())
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_a_cuda_graph_replays_with_new_positions() -> None:
    method = build("rotary", **SIZES)
    q, positions = torch.randn(1, 4, 6, 8, device="cuda"), torch.arange(6, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        method.rotate(q, positions)  # remembers tables that the graph must not use
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = method.rotate(q, positions)
    positions += 500
    graph.replay()
    torch.testing.assert_close(out, build("rotary", **SIZES).rotate(q, positions.clone()))
