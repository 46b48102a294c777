"""The same graphs on a GPU, and what only a GPU has: streams, graph capture, a second device, tensors past 2^31 elements."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import misaligned
from gpu_graphs import GRAPHS, Maker, run, short_rows, short_shares, wide_indices

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

PAST_32_BITS = 2**31 + 4096


def compiled(fn: Any, **how: Any) -> Any:
    return torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False}, **how)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    graph = GRAPHS[name]
    with short_rows() if graph.short else nullcontext():
        ran = run(graph.fn, *graph.inputs(Maker("cuda")), backward=graph.backward)
    assert graph.kinds <= ran.kinds
    if graph.loops is not None:
        assert ran.loops == graph.loops


@pytest.mark.parametrize("name", ["columns", "arg_reductions"])
def test_rows_that_two_kernels_share(name: str) -> None:
    with short_shares():
        assert "partial" in run(GRAPHS[name].fn, *GRAPHS[name].inputs(Maker("cuda"))).kinds


@pytest.mark.parametrize("name", ["chain", "transposed", "softmax", "arg_reductions"])
def test_wide_indices(name: str) -> None:
    with wide_indices():
        run(GRAPHS[name].fn, *GRAPHS[name].inputs(Maker("cuda")))


@pytest.mark.parametrize("name", ["chain", "transposed", "softmax", "gathers", "offset_views"])
def test_misaligned_inputs(name: str) -> None:
    """One element behind an aligned address."""
    run(GRAPHS[name].fn, *map(misaligned, GRAPHS[name].inputs(Maker("cuda"))))


def test_numbers_and_indices_of_the_cpu() -> None:
    def f(x: torch.Tensor, n: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * n, x[i] + 1, (x.sum(0) + 1).cpu() * 2

    x, n, i = Maker("cuda")(8, 6), torch.tensor(3.0), torch.tensor([1, 7, 0])
    got, want = compiled(f)(x, n, i), f(x, n, i)
    assert [t.device for t in got] == [t.device for t in want]
    torch.testing.assert_close(got, want)


def test_another_stream() -> None:
    """Work queued before on the stream is seen: the launch goes to the current one."""
    run_it = compiled(lambda x: (x * 2).softmax(-1))
    x = torch.zeros(64, 1024, device="cuda")
    run_it(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    y = Maker("cuda")(64, 1024)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(y)
        got = run_it(x)
    stream.synchronize()
    torch.testing.assert_close(got, (y * 2).softmax(-1))


def test_capture_in_a_cuda_graph() -> None:
    run_it = compiled(lambda x, w: (x @ w).relu().sum(-1) + x.amax(-1))
    x, w = Maker("cuda")(32, 64), Maker("cuda")(64, 16)
    want = run_it(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = run_it(x, w)
    x.mul_(-1)
    graph.replay()
    torch.testing.assert_close(out, run_it(x, w))
    assert not torch.equal(out, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_device() -> None:
    """Also while another device is the current one."""
    run_it = compiled(lambda x: F.layer_norm(x, (77,)).t() + 1)
    for device in ("cuda:0", "cuda:1"):
        x = Maker(device)(9, 77)
        got = run_it(x)
        assert got.device == torch.device(device)
        torch.testing.assert_close(got, F.layer_norm(x, (77,)).t() + 1)


def test_points_past_32_bits() -> None:
    x = torch.zeros(PAST_32_BITS, dtype=torch.int8, device="cuda")
    x[-5:] = torch.arange(5, device="cuda")
    got = compiled(lambda x: x * 2 + 1)(x)
    assert got[-5:].tolist() == [1, 3, 5, 7, 9]
    assert got[:5].tolist() == [1] * 5
    assert int((got == 1).sum()) == PAST_32_BITS - 4


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_past_32_bits(dim: int) -> None:
    shape = (2**16 + 3, 2**15) if dim else (2**15, 2**16 + 3)
    x = torch.zeros(shape, dtype=torch.int8, device="cuda")
    x[-1, -1], x[-1, 0], x[0, -1] = 3, 5, 7
    total, best = compiled(lambda x: (x.sum(dim), x.argmax(dim)))(x)
    want = torch.zeros_like(total)
    want[-1], want[0] = (8, 7) if dim else (10, 5)
    assert torch.equal(total, want)
    indices = torch.zeros_like(best)
    indices[-1], indices[0] = (0, shape[1] - 1) if dim else (0, shape[0] - 1)
    assert torch.equal(best, indices)


def test_a_reduction_of_everything_past_32_bits() -> None:
    x = torch.zeros(PAST_32_BITS, dtype=torch.int8, device="cuda")
    x[-1] = 3
    total, best = compiled(lambda x: (x.sum(), x.argmax()))(x)
    assert (int(total), int(best)) == (3, PAST_32_BITS - 1)
