"""Batches: many independent loops as one kernel. What may join, what must not, and that the results are eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.nodes import storages
from kgen.ir.plan import ComboKernel, Kernel, Schedule, members
from kgen.scheduler import Options
from kgen.scheduler.analysis.memory import reads, root, writes
from kgen.scheduler.fusion import combo_kernels
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.kernels import plans
from tests.rendering import step_text

r = torch.randn
Lists = Sequence[Sequence[Tensor]]


def adam(parameters: Lists, gradients: Lists, means: Lists, squares: Lists, steps: Lists) -> None:
    """The step of torch.optim.Adam(foreach=True, capturable=True)."""
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(means, gradients, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
    rates = torch._foreach_pow(0.9, steps)
    torch._foreach_sub_(rates, 1)
    torch._foreach_div_(rates, 0.001)
    torch._foreach_reciprocal_(rates)
    deviations = torch._foreach_sqrt(squares)
    torch._foreach_add_(deviations, 1e-8)
    torch._foreach_div_(deviations, rates)
    torch._foreach_addcdiv_(parameters, means, deviations)


def adam_state(shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    torch.manual_seed(0)
    state = [[r(shape) for shape in shapes] for _ in range(4)]
    state[3] = [t.abs() for t in state[3]]
    return [*state, [torch.tensor(float(k)) for k in range(len(shapes))]]


def batches(plan: Schedule) -> list[ComboKernel]:
    return [step for step in plan.steps if isinstance(step, ComboKernel)]


def source(plan: Schedule, at: int) -> str:
    return step_text(plan.kernels[at], plan.graph)


def check(f: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[str]:
    """Compares results and changed arguments with eager's; gives the kernels' names."""
    torch._dynamo.reset()
    expected_args, actual_args = _copied(args), _copied(args)
    expected = f(*expected_args)
    with torch.no_grad():
        actual = torch.compile(f, backend="kgen", dynamic=dynamic, fullgraph=True)(*actual_args)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_args, expected_args)
    return [k.name for k in kgen.explain(f, *_copied(args)).kernels]


def _copied(tree: Any) -> Any:
    """A copy with the same strides, and the same tensors twice where they are twice."""
    made: dict[int, Tensor] = {}

    def copy(t: Tensor) -> Tensor:
        if id(t) not in made:
            whole = t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).clone()
            made[id(t)] = whole.as_strided(t.shape, t.stride(), t.storage_offset())
        return made[id(t)]

    return torch.utils._pytree.tree_map_only(Tensor, copy, tree)


# ---- what joins -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_over_a_hundred_tensors_is_two_kernels_of_one_body_each() -> None:
    """All counters, then all parameters; the text grows by a table row a tensor."""
    plan = plans(adam, *adam_state([(256, 1024)] * 100)).forward
    assert [len(b.members) for b in batches(plan)] == [100, 100]
    assert len(plan.kernels) == 2
    small = plans(adam, *adam_state([(256, 1024)] * 2)).forward
    for at in range(2):
        bodies = [[line for line in source(p, at).splitlines() if not line.startswith("    {")] for p in (plan, small)]
        assert len(bodies[0]) == len(bodies[1])
    batched = [v for v in plan.verdicts if v.outcome is Outcome.BATCHED]
    assert len(batched) == 198
    assert {v.reason for v in batched} == {Reason.INDEPENDENT}


def test_sizes_share_a_body_and_layouts_do_not() -> None:
    plan = plans(adam, *adam_state([(n,) for n in range(100, 1000, 30)])).forward
    assert [source(plan, at).count("const auto form") for at in range(2)] == [1, 1]

    def scale(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        return torch._foreach_mul(x, y)

    args = [r(40, 50), r(60, 70), r(50, 40).t()], [r(40, 50), r(60, 70), r(40, 50)]
    text = source(plans(scale, *args).forward, 0)
    assert text.count("const auto form") == 2
    assert "2000}" in text
    assert "4200}" in text


def test_large_kernels_join_only_their_likes_and_only_at_the_end() -> None:
    big = torch.empty(3000, 1000)
    combined = plans(lambda x, y: (x.exp(), y.exp()), big, big.clone()).forward
    assert len(batches(combined)) == 1
    different = plans(lambda x, y: (x.exp(), y.sin()), big, big.clone()).forward
    assert not batches(different)
    # matmuls wait for the results, which would leave the cache before
    followed = plans(lambda x, y, w: (x.exp() @ w, y.exp() @ w), big, big.clone(), torch.empty(1000, 10)).forward
    assert not batches(followed)


def test_memory_is_not_held_for_a_distant_kernel() -> None:
    def f(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = x.exp()
        for _ in range(combo_kernels.NEAR + 2):
            x = x @ w
        return x, torch.cumsum(x, 0) + (y.exp() @ w)

    plan = plans(f, r(16, 16), r(16, 16), r(16, 16)).forward
    assert not batches(plan)


def test_fusion_switches_hold_for_batches() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), y.sin()

    assert len(batches(plans(f, r(10), r(20)).forward)) == 1
    apart = Options(demands=(FusionDemand("aten.sin", "aten.exp", False),))
    assert not batches(plans(f, r(10), r(20), options=apart).forward)
    assert not batches(plans(f, r(10), r(20), options=Options(fusion=False)).forward)


# ---- what must not --------------------------------------------------------------------------------------------------


def _overwrite_after_reading(x: Tensor, y: Tensor) -> Tensor:
    """Reads x with another index than the write, so that the two cannot be one loop."""
    z = x.flip(0).sin() + 1
    x.mul_(y)
    return z


def _chain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = x.exp()
    b = (a.t() + 1).contiguous()
    return a, b.sin().t() + w


def _views_of_one_storage(flat: Tensor, other: Tensor) -> Tensor:
    torch._foreach_mul_([flat[:100], flat[100:]], 2.0)
    torch._foreach_add_([flat[50:150], other[:10]], 1.0)
    flat[60:70].mul_(other[:10])
    return flat + 1


def _each_from_the_other(x: Tensor, y: Tensor) -> None:
    x.add_(1.0)
    x.mul_(y.flip(0))
    y.mul_(x.flip(0))
    x.sub_(y.flip(0))


def _dying_read_by_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scan's result dies in a batch whose members read it in two orders: neither may write over it."""
    t = torch.cumsum(x, 1)
    return torch.exp(t), t.t().contiguous() * 3 + t.t().flip(0)


HAZARDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a write after a read": (_overwrite_after_reading, (r(64), r(64))),
    "a chain": (_chain, (r(24, 24), r(24, 24))),
    "views of one storage": (_views_of_one_storage, (r(200), r(30))),
    "each from the other": (_each_from_the_other, (r(33), r(33))),
    "an intermediate that two members read": (_dying_read_by_two, (r(48, 48),)),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name: str) -> None:
    f, args = HAZARDS[name]
    check(f, *args)


@pytest.mark.parametrize("name", HAZARDS)
def test_members_touch_nothing_that_another_one_writes(name: str) -> None:
    f, args = HAZARDS[name]
    for plan in plans(f, *args).schedules:
        independent(plan)


def independent(plan: Schedule) -> None:
    """No member touches elements that another one writes, or memory that its result takes over."""
    for step in batches(plan):
        for one in () if step.in_order else step.members:
            taken = storages(plan.graph, [plan.reuses[n] for n in writes(one) if n in plan.reuses])
            for other in step.members:
                theirs = storages(plan.graph, writes(other) | reads(other))
                assert other is one or taken.isdisjoint(theirs)
                shared = storages(plan.graph, writes(one)) & theirs
                assert other is one or not shared or _elements(plan, one, False).isdisjoint(_elements(plan, other, True))


def _elements(plan: Schedule, kernel: Kernel, reads_too: bool) -> set[tuple[str, int]]:
    """The elements that a kernel writes, or touches, as places in the memory of a buffer: all points of its loops tried out."""
    accesses = [(out, s.store) for s in kernel.statements for out in s.outs]
    if reads_too:
        accesses += [load.attr[:2] for load in vs.loads(root for s in kernel.statements for root in s.roots)]
    points = itertools.product(*(range(v.extent.as_int()) for v in kernel.outer))
    found = set[tuple[str, int]]()
    for point in points:
        at = dict(zip(kernel.outer, point, strict=True))
        for name, index in accesses:
            buffer = plan.graph.buffers[name]
            place = sum(ix.evaluate(e * s, at.__getitem__) for e, s in zip(index, buffer.strides or (), strict=True))
            found.add((root(plan.graph, name), place + int(buffer.offset)))
    return found


# ---- results --------------------------------------------------------------------------------------------------------

ODD = [(1,), (5,), (16,), (17,), (63, 3), (1, 1), (40, 25), (0,), (3, 0, 2), (), (1000,), (5000,)]


@pytest.mark.cpu
def test_adam_step() -> None:
    assert len(check(adam, *adam_state([shape for shape in ODD if torch.Size(shape).numel() > 1]))) == 2
    assert len(check(adam, *adam_state(ODD))) <= 4  # what is all scalars fuses otherwise


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [1, 2])
def test_shares_of_threads_cover_everything_once(threads: int) -> None:
    """In place, so that a point done twice or left out shows."""

    def bump(xs: list[Tensor]) -> None:
        torch._foreach_add_(xs, 1.0)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        names = check(
            bump, [torch.zeros(n) for n in (100_003, 7, 1, 500_000, 16, 31, 250_001, 3)] + [torch.zeros(300, 700).t()]
        )
    finally:
        torch.set_num_threads(before)
    assert len(names) == 1


@pytest.mark.cpu
def test_strides() -> None:
    base = r(40, 60)
    xs = [
        base.t(),
        base[::2, ::3],
        r(60).expand(40, 60),
        r(8, 9, 10).permute(2, 0, 1),
        r(40, 1),
        base.flip(0),
        r(30, 16)[:, 3:11],
    ]
    ys = [r(60, 40), r(20, 20), r(40, 60), r(10, 8, 9).permute(0, 2, 1).transpose(1, 2), r(1, 60), r(()), r(30, 8)]
    check(torch._foreach_mul, xs, ys)
    check(lambda x, y: [a * b + 1 for a, b in zip(x, y, strict=True)], xs, ys)


@pytest.mark.cpu
def test_dtypes() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    xs = [(r(100 + 7 * k) * 5).to(kind) for k, kind in enumerate(kinds)]
    check(lambda x: [a + a for a in x], xs)
    check(lambda x: [torch.where(a > 1, a, 0) for a in x], xs)
    floats = [x for x in xs if x.is_floating_point()]
    check(lambda x: torch._foreach_sqrt(torch._foreach_abs(x)), floats)


@pytest.mark.cpu
def test_constants_are_part_of_the_form() -> None:
    """-0.0 and 0.0 are equal numbers, but not one constant."""
    xs = [torch.tensor([-0.0, 0.0, 1.0]) for _ in range(4)]

    def f(x: list[Tensor]) -> list[Tensor]:
        return [
            torch.copysign(torch.ones_like(x[0]), x[0] * 0.0),
            torch.where(x[1] > 5, x[1], -0.0),
            torch.where(x[2] > 5, x[2], 0.0),
        ]

    actual = torch.compile(f, backend="kgen")(xs)
    assert [torch.signbit(t).tolist() for t in actual] == [torch.signbit(t).tolist() for t in f(xs)]


@pytest.mark.cpu
def test_types_of_results_are_part_of_the_form() -> None:
    """Both are a sum of float32 numbers inside of the kernel, and only one is rounded where it is stored."""
    check(lambda x, y: (x + x, y.float() + y.float()), r(100).bfloat16(), r(100).bfloat16())


@pytest.mark.cpu
def test_gathers_and_positions() -> None:
    """Indices from memory, checked, and values made of the loop variables."""

    def f(xs: list[Tensor], at: list[Tensor]) -> list[Tensor]:
        return [x[i] + torch.arange(i.numel()) % 7 for x, i in zip(xs, at, strict=True)]

    xs, at = [r(50), r(70), r(90)], [torch.randint(50, (n,)) for n in (10, 20, 30)]
    assert len(check(f, xs, at)) == 1
    at[1][3] = 70
    with pytest.raises(IndexError):
        torch.compile(f, backend="kgen")(xs, at)


@pytest.mark.cpu
@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_sizes(dynamic: bool | None) -> None:
    """One compiled function for several sizes, of the batch's members too."""
    torch._dynamo.reset()

    def f(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        torch._foreach_mul_([x, y, z], 2.0)
        return [*torch._foreach_add([x, y], 1.0), z.t() - 1]

    compiled = torch.compile(f, backend="kgen", dynamic=dynamic, fullgraph=True)
    for a, b in ((5, 7), (300, 20), (17, 1000), (64, 33)):
        args = (r(a), r(a, b), r(b, a).t())
        torch.testing.assert_close(compiled(*_copied(args)), f(*_copied(args)))
    if dynamic:
        assert len(batches(plans(f, r(5), r(5, 7), r(7, 5).t()).forward)) >= 1


def test_members_are_listed() -> None:
    report = kgen.explain(adam, *adam_state([(10,), (20, 3)]))
    assert [k.loops for k in report.kernels] == ["member<2", "member<2"]
    assert all("form0" in k.source for k in report.kernels)
    assert report.bytes_moved >= report.bytes_minimal
    step = plans(adam, *adam_state([(10,), (20, 3)])).forward.kernels[0]
    assert len(members(step)) == 2
