"""Bytes moved, the fewest possible, and planned memory, on schedules whose numbers a person can work out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgen.only import Only
from kgen.report.record import recording
from kgen.report.traffic import bytes_minimal, bytes_moved, call_traffic, kernel_traffic, peak_memory
from kgen.scheduler import Options
from tests.kernels import plans

r = torch.randn


def only(f, *args):
    """(read, written) of the one kernel of `f`."""
    plan = plans(f, *args).forward
    [kernel] = plan.kernels
    found = kernel_traffic(kernel, plan)
    return found.read, found.written


def test_pointwise_reads_each_operand_once():
    assert only(lambda x, y: x * y + x, r(8, 16), r(8, 16)) == (2 * 512, 512)


def test_a_broadcast_row_counts_once():
    assert only(lambda x, b: x + b, r(100, 16), r(16)) == (6400 + 64, 6400)


def test_an_expanded_input_counts_its_storage():
    assert only(lambda x, y: x + y, r(100, 16), r(16).expand(100, 16)) == (6400 + 64, 6400)


def test_a_slice_counts_its_elements():
    assert only(lambda x: x[10:20] * 2, r(100, 16)) == (640, 640)


def test_overlapping_reads_count_no_more_than_the_buffer():
    read, written = only(lambda x: x[:-1] + x[1:], r(1000))
    assert (read, written) == (4000, 3996)


def test_a_gather_counts_what_it_gathers():
    read, written = only(lambda w, i: w[i] * 2, r(1000, 16), torch.randint(0, 1000, (10,)))
    assert (read, written) == (10 * 16 * 4 + 10 * 8, 640)


def test_rows_walked_twice_are_read_once():
    assert only(lambda x: torch.softmax(x, -1), r(64, 100)) == (25600, 25600)


def both_ways(x, y):
    z = (x * y + x).float()
    return z.sum(0), z.sum(1)


def matmul_norm(x, w, y):
    return F.layer_norm(x @ w + y, (w.shape[1],))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_two_kernels_share_is_stored_before_it_is_widened(dtype):
    """In eager it is rounded to the narrow type in between, too."""
    x, y = r(256, 96).to(dtype), r(256, 96).to(dtype)
    for f, args in ((both_ways, (x, y)), (matmul_norm, (x, r(96, 96).to(dtype), y))):
        plan = plans(f, *args, options=Options(templates=False)).forward
        between = plan.graph.buffers.keys() - plan.local - {i.buffer for i in plan.graph.inputs}
        wide = [name for name in between if plan.graph.buffers[name].dtype is torch.float32]
        assert not [name for name in wide if len(plan.graph.buffers[name].sizes) > 1]


def test_a_matmul_stores_what_a_norm_reads_in_its_own_type():
    """Rows are too long for a tile to hold them."""
    x, w, y = r(512, 128).bfloat16(), r(128, 2048).bfloat16(), r(512, 2048).bfloat16()
    plan = plans(matmul_norm, x, w, y, options=Options(gpu_everywhere=True, only=Only("triton_matmul", lambda c: c[0]))).forward
    size = 512 * 2048 * 2
    matmul, norm = plan.kernels
    assert kernel_traffic(matmul, plan).written == size
    assert kernel_traffic(norm, plan).read == size


def test_dropout_moves_no_mask():
    """Forward and backward are a kernel each, which read a tensor and a seed and write a tensor."""
    x = r(64, 128, requires_grad=True)
    with recording() as seen:
        run = torch.compile(lambda x: F.dropout(x.sin(), 0.5), backend="kgen", options={"cache": False})
        run(x).sum().backward()
    forward, backward = (g.plan for g in seen.graphs)
    size = 64 * 128 * 4
    for plan, most in ((forward, 2 * size), (backward, 3 * size)):  # the backward also reads x, of which the gradient depends
        [kernel] = plan.kernels
        found = kernel_traffic(kernel, plan)
        assert found.written == size
        assert size < found.read + found.written <= most + 8


def test_row_writes_move_rows():
    def write(x, i, v):
        x[i] = v
        return x.sum() * 0 if False else None

    plan = plans(write, r(10000, 16), torch.randint(0, 10000, (3,)), r(3, 16)).forward
    assert bytes_moved(plan) == 3 * 8 + 2 * 3 * 64
    assert bytes_minimal(plan) == bytes_moved(plan)


def test_an_accumulating_scatter_also_reads():
    def add(x, i, v):
        x.index_add_(0, i, v)

    plan = plans(add, r(10000, 16), torch.randint(0, 10000, (3,)), r(3, 16)).forward
    assert bytes_moved(plan) == 3 * 8 + 3 * 3 * 64


def test_fused_graphs_move_the_fewest_bytes():
    plan = plans(lambda x, w, b: F.layer_norm(x, (100,), w, b).relu(), r(64, 100), r(100), r(100)).forward
    assert bytes_moved(plan) == bytes_minimal(plan) == 2 * 25600 + 2 * 400


def test_without_fusion_the_fewest_stay_the_same():
    def f(x):
        return torch.softmax(x, -1)

    fused = plans(f, r(64, 100)).forward
    apart = plans(f, r(64, 100), options=Options(fusion=False)).forward
    assert bytes_minimal(apart) == bytes_minimal(fused)
    assert bytes_moved(apart) > 2 * bytes_moved(fused)
    assert peak_memory(apart) > peak_memory(fused) == 25600


def test_library_calls_count_operands_and_results():
    plan = plans(lambda x, w: torch.relu(x @ w), r(8, 16), r(16, 32), options=Options(templates=False)).forward
    [call] = plan.calls
    assert call_traffic(call, plan).read == 4 * (8 * 16 + 16 * 32)
    assert call_traffic(call, plan).written == 4 * 8 * 32
    relu = 2 * 4 * 8 * 32
    assert bytes_moved(plan) == bytes_minimal(plan) == call_traffic(call, plan).total + relu


def test_a_matmul_reads_its_operands_once():
    """However many times its tiles do."""
    forced = Options(only=Only("cpp_matmul", lambda configs: configs[0]))
    plan = plans(lambda x, w: torch.relu(x @ w), r(8, 16), r(16, 32), options=forced).forward
    assert not plan.calls
    assert bytes_moved(plan) == bytes_minimal(plan) == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_peak_counts_reused_memory_once():
    def chain(x, w):
        for _ in range(5):
            x = torch.relu(x @ w)
        return x

    plan = plans(chain, r(64, 64), r(64, 64)).forward
    assert peak_memory(plan) <= 3 * 64 * 64 * 4


def test_sizes_are_taken_at_the_hints():
    x = r(24, 16)
    torch._dynamo.mark_dynamic(x, 0)
    assert only(lambda x: x.relu(), x) == (1536, 1536)
