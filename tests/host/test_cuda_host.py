"""The host on a real GPU: hand-written kernels through programs, with torch's allocator, streams and graph capture."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import launch_kernels as tk
import pytest
import torch
from program_builder import Builder

from kgen.build import cpp, triton
from kgen.errors import InputMismatch
from kgen.host import native
from kgen.host.compiled import Blueprint, HostGraph
from kgen.host.launch import load_kernel
from kgen.host.program import (
    Alias,
    Alloc,
    ArgTensor,
    Compute,
    Extern,
    Free,
    InputTensor,
    Kernel,
    Launch,
    OutTensor,
    Program,
    Reuse,
    SlotSpec,
)

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
KERNELS = (
    tk.add(),
    tk.kernel(tk.DOUBLED, ("*fp32", "i32")),
    tk.kernel(tk.MATMUL, tk.MATMUL_SIGNATURE, (True,) * 4, num_stages=4, num_warps=8),
)
ADD, DOUBLED, MATMUL = range(3)


@pytest.fixture
def b() -> Builder:
    return Builder(GPU, tuple(kernel.name for kernel in KERNELS))


def load(program: Program, device: int = 0, kernels=KERNELS, **more: Any) -> Callable[[list[Any]], list[Any]]:
    major, minor = torch.cuda.get_device_capability(device)
    launches = [load_kernel(kernel, [device]) for kernel in triton.compile_kernels(kernels, 10 * major + minor)]
    return native.load(pickle.loads(pickle.dumps(program)), launches=launches, **more)


def blocks(b: Builder, count: int) -> tuple[int, ...]:
    return b.regs((-(-count // 256), 1, 1))


def sum_program(b: Builder, count: int, **flags: bool) -> Program:
    x, y, out = b.slot((count,)), b.slot((count,)), b.slot((count,))
    code = [Alloc(out), Launch(ADD, (x, y, out), (b.reg(count),), blocks(b, count))]
    return b.program([b.input(x, **flags), b.input(y, **flags)], code, [b.out(out)])


def misaligned(count: int) -> torch.Tensor:
    found = torch.randn(count + 1, device=GPU)[1:]
    assert found.data_ptr() % 16 == 4
    return found


def test_one_launch(b):
    run = load(sum_program(b, 1000))
    x, y = torch.randn(1000, device=GPU), torch.randn(1000, device=GPU)
    given = [x, y]
    [result] = run(given)
    assert given == []
    assert torch.equal(result, x + y)
    assert result.device == torch.device(GPU)
    assert result.add_(1).sum().isfinite(), "an ordinary tensor"


def test_memory_is_torchs_and_goes_back_to_it(b):
    x, first, second, new = (b.slot((1 << 20,)) for _ in range(4))
    count, grid = (b.reg(1 << 20),), blocks(b, 1 << 20)
    code = [
        Alloc(first), Launch(ADD, (x, x, first), count, grid), Alloc(second), Launch(ADD, (x, first, second), count, grid),
        Free(first), Reuse(new, second), Launch(DOUBLED, (new,), count, grid),
    ]  # fmt: skip
    run = load(b.program([b.input(x)], code, [b.out(new)]))
    given = torch.randn(1 << 20, device=GPU)
    run([given])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    [result] = run([given])
    assert torch.cuda.memory_allocated() == before + (4 << 20)
    assert torch.cuda.max_memory_allocated() == before + (8 << 20)
    assert torch.allclose(result, 6 * given)
    del result
    assert torch.cuda.memory_allocated() == before


def test_inputs_die_at_their_last_use(b):
    x, first, second = (b.slot((1 << 20,)) for _ in range(3))
    count, grid = (b.reg(1 << 20),), blocks(b, 1 << 20)
    code = [
        Alloc(first), Launch(ADD, (x, x, first), count, grid),
        Alloc(second), Launch(ADD, (first, first, second), count, grid),
    ]  # fmt: skip
    run = load(b.program([b.input(x)], code, [b.out(second)]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    given = [torch.ones(1 << 20, device=GPU)]
    [result] = run(given)
    assert float(result.sum()) == 4 << 20
    assert torch.cuda.max_memory_allocated() <= before + (8 << 20) + 1024


def test_views_and_aliases(b):
    x, out = b.slot((8, 4)), b.slot((8, 4))
    flat, part = b.slot((32,)), OutTensor(out, b.regs((4,)), b.regs((4,)), b.reg(2), torch.float32)
    code = [Alias(flat, x), Alloc(out), Launch(ADD, (x, flat, out), (b.reg(32),), blocks(b, 32))]
    run = load(b.program([b.input(x)], code, [b.out(out), part]))
    given = torch.randn(8, 4, device=GPU)
    whole, view = run([given])
    assert torch.equal(whole, 2 * given)
    assert torch.equal(view, whole.flatten()[2:18:4])
    view.zero_()
    assert torch.equal(whole[0, 2], torch.zeros((), device=GPU))


def test_sizes_decide_the_grid(b):
    n, programs = b.reg(), b.reg()
    one, block, more = b.reg(1), b.reg(256), b.reg(255)
    padded = b.reg()
    b.slots = [SlotSpec(torch.float32, (n,), (one,), b.reg(0), GPU) for _ in range(2)]
    inputs = [InputTensor(0, torch.float32, (n,), (one,), ((n, "size", 0),))]
    computes = (Compute(padded, "add", n, more), Compute(programs, "floordiv", padded, block))
    code = [Alloc(1), Launch(ADD, (0, 0, 1), (n,), (programs, one, one))]
    run = load(b.program(inputs, code, [b.out(1)], computes=computes))
    for count in (1, 256, 257, 100_000, 0):
        x = torch.randn(count, device=GPU)
        assert torch.equal(run([x])[0], 2 * x)


def test_the_callers_stream_is_used(b):
    run = load(sum_program(b, 1000))
    x = torch.zeros(1000, device=GPU)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(3)
        [result] = run([x, x])
    stream.synchronize()
    assert torch.equal(result, torch.full((1000,), 6.0, device=GPU))


def test_a_thread_that_never_used_the_gpu(b):
    run = load(sum_program(b, 64))
    x = torch.randn(64, device=GPU)
    run([x, x])
    found = []
    thread = threading.Thread(target=lambda: found.extend(run([x, x])))
    thread.start()
    thread.join()
    assert torch.equal(found[0], 2 * x)


def test_misaligned_inputs(b):
    x, y, out, new = (b.slot((600,)) for _ in range(4))
    count, grid = (b.reg(600),), blocks(b, 600)
    code = [Alloc(out), Launch(ADD, (x, y, out), count, grid), Alias(new, x), Launch(DOUBLED, (new,), count, grid)]
    inputs = [b.input(x, aligned=True, mutated=True), b.input(y, aligned=True)]
    run = load(b.program(inputs, code, [b.out(out), b.out(new)]))
    first, second = misaligned(600), misaligned(600)
    before = first.clone()
    result, same = run([first, second])
    assert torch.equal(result, before + second)
    assert torch.equal(first, 2 * before)
    assert same is first


def test_captured_by_a_cuda_graph(b):
    """Nothing was launched before: loading kernels must not be left to the capture."""
    run = load(sum_program(b, 1000, aligned=True))
    x, y = misaligned(1000), torch.randn(1000, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        [result] = run([x, y])
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(result, x + y)


def test_gpu_kernels_and_calls_and_cpu_kernels_in_one_program(b):
    source = (
        "#include <cstdint>\n"
        'extern "C" int negate(void** p, const int64_t* n, int) {\n'
        "  for (int64_t i = 0; i < n[0]; ++i) ((float*)p[1])[i] = -((float*)p[0])[i];\n  return 0;\n}\n"
    )
    library = cpp.load_library(cpp.build_unit("negate", source, include_dirs=[]))
    x, h, minus, out = b.slot((64,)), b.slot((64,), device="cpu"), b.slot((64,), device="cpu"), b.slot((64,))
    soft = b.slot((64,))
    count, grid = (b.reg(64),), blocks(b, 64)
    code = [
        Alloc(minus), Kernel(0, (h, minus), count), Alloc(out), Launch(ADD, (x, x, out), count, grid),
        Extern("aten::neg", "", (ArgTensor(out),), (), (soft,)), Launch(DOUBLED, (soft,), count, grid),
    ]  # fmt: skip
    run = load(b.program([b.input(x), b.input(h)], code, [b.out(soft), b.out(minus)], kernels=("negate",)), libraries=[library])
    on_gpu, on_cpu = torch.randn(64, device=GPU), torch.randn(64)
    doubled, negated = run([on_gpu, on_cpu])
    assert torch.equal(doubled, -4 * on_gpu)
    assert torch.equal(negated, -on_cpu)


def test_much_shared_memory(b):
    """More than 48 KiB must be asked for."""
    size = 512
    x, y, out = (b.slot((size, size), dtype=t) for t in (torch.bfloat16, torch.bfloat16, torch.float32))
    code = [Alloc(out), Launch(MATMUL, (x, y, out), (b.reg(size),), b.regs((size // 128, size // 128, 1)))]
    major, minor = torch.cuda.get_device_capability()
    assert triton.compile_kernels([KERNELS[MATMUL]], 10 * major + minor)[0].shared > 48 * 1024
    run = load(b.program([b.input(x), b.input(y)], code, [b.out(out)]))
    p, q = (torch.randn(size, size, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    torch.testing.assert_close(run([p, q])[0], p.float() @ q.float(), rtol=1e-3, atol=1e-2)


def test_scratch_memory():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("device-side tensor descriptors use scratch memory from compute capability 9 on")
    b = Builder(GPU, ("copy",))
    x, out = b.slot((256, 64)), b.slot((256, 64))
    code = [Alloc(out), Launch(0, (x, out), (b.reg(256),), b.regs((8, 1, 1)))]
    kernel = tk.kernel(tk.COPY_BY_DESCRIPTOR, ("*fp32", "*fp32", "i32"))
    run = load(b.program([b.input(x)], code, [b.out(out)]), kernels=[kernel])
    for _ in range(3):
        given = torch.randn(256, 64, device=GPU)
        assert torch.equal(run([given])[0], given)


def test_errors_name_the_kernel(b):
    x, out = b.slot((4,)), b.slot((4,))
    code = [Alloc(out), Launch(ADD, (x, x, out), (b.reg(4),), b.regs((1, 1 << 20, 1)))]
    run = load(b.program([b.input(x)], code, [b.out(out)]))
    with pytest.raises(RuntimeError, match=r"launching kernel add on a grid of 1 x 1048576 x 1: CUDA_ERROR_INVALID_VALUE"):
        run([torch.zeros(4, device=GPU)])
    torch.cuda.synchronize()
    with pytest.raises(InputMismatch, match=r"on cpu, but the graph was compiled for .* on cuda:0"):
        run([torch.zeros(4)])


def test_a_graph_from_disk(b):
    program = sum_program(b, 1000)
    graph = HostGraph(Blueprint([], program, launches=list(KERNELS)))
    again = HostGraph.deserialize(graph.serialize())
    x = torch.randn(1000, device=GPU)
    assert torch.equal(graph([x, x])[0], 2 * x)
    assert torch.equal(again([x, x])[0], 2 * x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    b = Builder("cuda:1", tuple(kernel.name for kernel in KERNELS))
    run = load(sum_program(b, 1000), device=1)
    x = torch.randn(1000, device="cuda:1")
    [result] = run([x, x])
    assert result.device == torch.device("cuda:1")
    assert torch.equal(result, 2 * x)
    assert torch.cuda.current_device() == 0
    with pytest.raises(InputMismatch, match="on cuda:0"):
        run([x.to("cuda:0"), x])
