"""Kernels that reach their tensors through TMA descriptors, on a GPU that has TMA (compute capability 9.0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tma_kernels as tma
import torch

from kgen.errors import TensorMapRefused
from kgen.host.compiled import Blueprint, HostGraph
from kgen.rendered.kernel_call import KernelCall

pytestmark = pytest.mark.gpu

GPU = "cuda:0"


@pytest.fixture(autouse=True)
def _has_tma() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no TMA")


def graph(like: Callable[..., Any], call: Callable[..., KernelCall], *args: torch.Tensor, dynamic: bool = True) -> HostGraph:
    made = tma.assembled(like, call, args, dynamic=dynamic)
    return HostGraph.deserialize(HostGraph(Blueprint([], made.program, made.constants, {}, made.launches)).serialize())


def random(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype is torch.int8:
        return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=GPU)
    return torch.randn(tuple(shape), device=GPU).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_copies_of_every_size(dtype):
    """Blocks reach over the edges, rows are longer than what is swizzled at once, and a tensor may have no elements."""
    run = graph(tma.copied, tma.copy_call, random((40, 80), dtype))
    for shape in ((40, 80), (32, 64), (1, 16), (100, 1040), (3, 48), (0, 16), (16, 0)):
        x = random(shape, dtype)
        assert torch.equal(run([x])[0], x), shape


@pytest.mark.parametrize("block", [(16, 16), (8, 256), (256, 8), (64, 128), (512, 16)])
def test_blocks_of_every_swizzle(block):
    run = graph(tma.copied, lambda *a: tma.copy_call(*a, block), random((300, 520), torch.bfloat16))
    x = random((300, 520), torch.bfloat16)
    assert torch.equal(run([x])[0], x)


def test_images():
    run = graph(tma.copied, tma.shift_call, random((3, 7, 10, 24), torch.bfloat16))
    for shape in ((3, 7, 10, 24), (2, 4, 8, 16), (5, 33, 17, 200)):
        x = random(shape, torch.bfloat16)
        assert torch.equal(run([x])[0], tma.shifted(x)), shape


def test_a_part_of_a_buffer():
    run = graph(tma.tail, tma.tail_call, random((40, 88)))
    for shape in ((40, 88), (3, 24), (200, 1000)):
        x = random(shape)
        assert torch.equal(run([x])[0], x[:, 16:]), shape


def test_strides_between_rows():
    wide = random((64, 160))
    run = graph(tma.copied, tma.copy_call, wide[:, 16:80])
    assert torch.equal(run([wide[:, 16:80]])[0], wide[:, 16:80])


def test_misaligned_inputs_are_copied():
    run = graph(tma.copied, tma.copy_call, random((40, 80)))
    x = random((40 * 80 + 1,))[1:].view(40, 80)
    assert torch.equal(run([x])[0], x)


def test_parameters_in_any_order():
    run = graph(tma.added, tma.add_call, random((20, 40)), random((20, 40)), random((40,)))
    for rows, columns in ((20, 40), (33, 64), (5, 68), (500, 1000)):
        x, y, bias = random((rows, columns)), random((rows, columns)), random((columns,))
        assert torch.equal(run([x, y, bias])[0], x + y + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tile", "options"),
    [((64, 64, 32), {}), ((128, 128, 64), {"num_warps": 8, "num_stages": 4}), ((128, 256, 64), {"num_warps": 8})],
)
def test_matmul(dtype, tile, options):
    for rows, columns, depth in ((64, 72, 64), (1000, 520, 304), (8, 8, 8), (129, 264, 4096)):
        torch._dynamo.reset()
        x, y = random((rows, depth), dtype), random((depth, columns), dtype)
        [got] = graph(tma.matmul_like, lambda *a: tma.matmul_call(*a, tile, **options), x, y)([x, y])
        torch.testing.assert_close(got, x @ y, rtol=2e-2, atol=2e-2 * max(depth, 1) ** 0.5)


def test_new_tensors_at_each_call():
    """Addresses and sizes change while results are kept: no descriptor of an earlier call may be used."""
    run = graph(tma.copied, tma.copy_call, random((40, 80)))
    given = [random((16 + k % 5, 64 + 16 * (k % 3))) for k in range(40)]
    results = [run([x])[0] for x in given]
    assert all(torch.equal(got, x) for got, x in zip(results, given, strict=True))


def test_captured_by_a_cuda_graph():
    run = graph(tma.matmul_like, tma.matmul_call, random((256, 128), torch.float16), random((128, 256), torch.float16))
    x, y = random((256, 128), torch.float16), random((128, 256), torch.float16)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        [result] = run([x, y])
    run([random((64, 64), torch.float16), random((64, 64), torch.float16)])  # other descriptors at the same launch
    for _ in range(3):
        x.copy_(random((256, 128), torch.float16))
        recorded.replay()
        torch.testing.assert_close(result, x @ y, rtol=2e-2, atol=0.2)


def test_a_stride_that_tma_does_not_know():
    run = graph(tma.copied, tma.copy_call, random((40, 80)))
    with pytest.raises(TensorMapRefused, match=r"kernel copy .* of x_1: a stride of 71 elements"):
        run([random((40, 71))])
    x = random((40, 80))
    assert torch.equal(run([x])[0], x)
