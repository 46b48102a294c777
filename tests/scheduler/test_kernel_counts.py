"""How many kernels common patterns take, and that they move no more memory than they must."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Launch, Schedule, members
from kgen.ir.values import loads
from kgen.scheduler import Options
from kgen.verdict import Outcome, Reason
from tests.kernels import plans

r = torch.randn


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = torch.tanh(x * 2 + y)
    b = torch.exp(a - y).clamp(max=3)
    c = torch.sigmoid(b) * x - a / (1 + x.abs())
    return a, b, c


PATTERNS = {
    "softmax": (lambda x: torch.softmax(x, -1), (r(64, 1000),), 1),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), (r(64, 1000),), 1),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1000,), w, b), (r(64, 1000), r(1000), r(1000)), 1),
    "residual_layer_norm": (
        lambda x, y, w, b: F.layer_norm(x + y, (1000,), w, b),
        (r(64, 1000), r(64, 1000), r(1000), r(1000)),
        1,
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (1000,), w), (r(64, 1000), r(1000)), 1),
    "gelu": (lambda x: F.gelu(x * 2 + 1) * x, (r(64, 1000),), 1),
    "cross_entropy": (F.cross_entropy, (r(64, 1000), torch.randint(0, 1000, (64,))), 2),
    "chain_of_twelve": (chain, (r(64, 1000), r(64, 1000)), 1),
    "transposed_add": (lambda x, y: x + y.t(), (r(128, 128), r(128, 128)), 1),
    "group_norm": (lambda x: F.group_norm(x, 4), (r(4, 8, 16, 16),), 1),
    "mean_and_max": (lambda x: (x.mean(-1), x.amax(-1)), (r(64, 1000),), 1),
    "broadcast_row": (lambda x, y: (x * y).relu(), (r(64, 1000), r(1000)), 1),
    "through_reshape": (lambda x: (x.exp().view(64, 10, 100) + 1).reshape(640, 100) * 2, (r(64, 1000),), 1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_kernel_count(name: str) -> None:
    f, args, most = PATTERNS[name]
    found = plans(f, *args)
    assert found.kernels <= most, [str(v) for v in found.forward.verdicts]
    assert not found.externs


@pytest.mark.parametrize("name", PATTERNS)
def test_bytes_moved(name: str) -> None:
    f, args, _ = PATTERNS[name]
    found = plans(f, *args).forward
    assert moved(found) <= 1.1 * fewest(found)


def moved(plan: Schedule) -> int:
    """Bytes that the kernels load and store: each buffer once a kernel, or only the elements that an index picks."""
    return sum(_kernel_bytes(kernel, plan) for kernel in plan.kernels)


def _kernel_bytes(step: Launch, plan: Schedule) -> int:
    return sum(_nest_bytes(kernel, plan) for kernel in members(step))


def _nest_bytes(kernel: Kernel, plan: Schedule) -> int:
    sizes, buffers = Sizes(plan.graph.size_hints), plan.graph.buffers
    made = {o for s in kernel.statements for o in s.outs}
    touched: dict[str, int] = {}
    for s in kernel.statements:
        points = sizes.points(kernel.outer) * (sizes.points(kernel.inner) if s.inner else 1)
        for load in loads([s.value]):
            if load.attr[0] not in made:
                touched[load.attr[0]] = max(touched.get(load.attr[0], 0), points * load.attr[2].itemsize)
        for out, stored in zip(s.outs, s.stored, strict=True):
            if stored:
                touched[out] = points * buffers[out].dtype.itemsize
    return sum(min(sizes.bytes(buffers[name]), count) for name, count in touched.items())


def fewest(plan: Schedule) -> int:
    """Every input that is read once, every output once."""
    sizes, graph = Sizes(plan.graph.size_hints), plan.graph
    read = {v.attr[0] for node in graph.nodes for v in loads(ir.roots(node))}
    inputs = [b for b in graph.buffers.values() if b.kind == "input" and b.name in read]
    outputs = {o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg)}
    return sum(map(sizes.bytes, inputs)) + sum(sizes.bytes(graph.buffers[o]) for o in outputs)


def test_row_writes_move_rows() -> None:
    """n in-place row writes touch n rows, never the whole array."""

    def write(x: torch.Tensor, v: torch.Tensor) -> None:
        for k in range(5):
            x[k * 7] = v[k]

    plan = plans(write, r(1000, 64), r(5, 64)).forward
    assert moved(plan) <= 2 * 5 * 64 * 4


def test_verdicts_say_why() -> None:
    plan = plans(lambda x: (x.sum(0), x.sum(1)), r(64, 100)).forward
    assert any(v.outcome is not Outcome.FUSED and v.reason is Reason.REDUCED_AXES_DIFFER for v in plan.verdicts)
    assert sum(len(members(step)) for step in plan.kernels) == 2


def test_fusion_switch() -> None:
    f, args, _ = PATTERNS["softmax"]
    plan = plans(f, *args, options=Options(fusion=False)).forward
    assert len(plan.kernels) > 1
    assert all(v.reason is Reason.SWITCHED_OFF for v in plan.verdicts if v.outcome is Outcome.UNPROFITABLE)


def test_no_fusion_across_a_cycle() -> None:
    """a -> mm -> b and a -> b: a and b cannot be one kernel, because the matmul is between them."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.exp(x)
        return a @ w + a

    plan = plans(f, r(32, 32), r(32, 32), options=Options(templates=False)).forward
    assert len(plan.kernels) == 2
    assert any(v.reason is Reason.CYCLE for v in plan.verdicts)
