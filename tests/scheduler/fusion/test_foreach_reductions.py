"""Foreach reductions and concatenations of hundreds of tensors: how few kernels they are, and that results are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton_kernels as tk
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu, gpu_from
from kgen.ir.plan import ComboKernel, Schedule, members
from kgen.scheduler import Options
from kgen.verdict import FusionDemand, Reason
from tests.kernels import plans
from tests.scheduler.fusion.test_combo_kernels import independent
from tests.scheduler.fusion.test_foreach_gpu import rendered

r = torch.randn
GPU = Options(gpu_everywhere=True)
SHAPES = [(64,), (256,), (64, 16, 3, 3), (1000, 51), (512,), (7,), (33, 130), (20_000,)]


def clip(gradients: Sequence[Tensor], kind: float = 2.0) -> Tensor:
    """What torch.nn.utils.clip_grad_norm_ does with foreach=True."""
    norms = torch._foreach_norm(gradients, kind)
    total = torch.linalg.vector_norm(torch.stack(norms), kind)
    torch._foreach_mul_(gradients, torch.clamp(1.0 / (total + 1e-6), max=1.0))
    return total


def tensors(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [r(SHAPES[k % len(SHAPES)]).to(dtype) for k in range(count)]


def with_scalars() -> list[Tensor]:
    return [*tensors(9), r(()), r(1), r(1, 1)]


def unscale(gradients: Sequence[Tensor], found: Tensor, scale: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)


def plan(f: Callable[..., Any], *args: Any, options: Options = GPU) -> Schedule:
    return plans(f, *args, options=options).forward


def check(f: Callable[..., Any], make: Callable[[], Any], interpreted: bool, **tolerance: Any) -> None:
    """Compares results and changed arguments with those of eager."""
    torch._dynamo.reset()
    expected_args, actual_args = make(), make()
    expected = f(*expected_args)
    options = {"gpu_interpreter": True} if interpreted else {}
    with torch.no_grad():
        actual = torch.compile(f, backend="kgen", fullgraph=True, options=options)(*actual_args)
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)
    torch.testing.assert_close(actual_args, expected_args, equal_nan=True, **tolerance)


# ---- how few kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [200, pytest.param(400, marks=pytest.mark.slow)])
def test_clipping_hundreds_of_gradients_is_three_launches(count: int) -> None:
    made = plan(clip, tensors(count))
    assert not made.calls
    shares, total, scaled = made.kernels
    assert isinstance(shares, ComboKernel)
    assert len(shares.members) == count
    assert isinstance(total, ComboKernel)
    assert total.in_order
    assert len(members(scaled)) >= count
    independent(made)
    assert any(v.reason is Reason.SEQUENCE for v in made.verdicts)


def test_clipping_on_a_cpu_is_three_kernels() -> None:
    made = plan(clip, tensors(200), options=Options())
    assert len(made.kernels) == 3


def test_short_rows_need_no_shares() -> None:
    made = plan(clip, [r(100 + k) for k in range(20)])
    assert [len(members(step)) for step in made.kernels] == [20, 1, 20]


def test_shares_of_all_rows_are_a_matrix() -> None:
    """Rows get equally many shares, so that one kernel joins them. The longest decides how many."""
    made = plan(clip, [r(100), r(200_000), r(7), r(64, 64), r(3000)])
    [matrix] = [b for b in made.graph.buffers.values() if len(b.parts) == 5 and b.name != "stack"]
    assert matrix.sizes[0].as_int() == 5 * 128
    assert [len(members(step)) for step in made.kernels] == [5, 2, 5]


def test_a_gradient_as_long_as_the_vector_of_norms() -> None:
    """It is scaled where the total is made, by a second walk over that row."""
    made = plan(clip, [r(100), r(200_000), r(5), r(64, 64), r(3000)])
    assert [len(members(step)) for step in made.kernels] == [5, 2, 4]


def test_norms_that_are_returned_are_finished_one_by_one() -> None:
    """They have memory of their own: no kernel fills a vector with them."""

    def f(xs: list[Tensor]) -> list[Tensor]:
        return torch._foreach_norm(xs)

    made = plan(f, [r(100), r(200_000), r(300_000)])
    assert sorted(len(members(step)) for step in made.kernels) == [1, 2, 2]


def test_demands_keep_kernels_of_a_sequence_apart() -> None:
    never = FusionDemand("aten._foreach_norm", "aten.linalg_vector_norm", wanted=False)
    made = plan(clip, tensors(9), options=Options(gpu_everywhere=True, demands=(never,)))
    assert not any(isinstance(step, ComboKernel) and step.in_order for step in made.steps)


def test_a_sequence_passes_no_step_that_changes_what_it_reads() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x * x).sum(1)
        before = rows.exp().sum() + y.sum()
        y.add_(1.0)
        return before, (y * rows.sum()).sum()

    args = r(8, 30), r(100)
    for step in plan(f, *args).steps:
        if isinstance(step, ComboKernel) and step.in_order:
            written = [set(s.outs) for member in step.members for s in member.statements]
            assert len(written) == len({frozenset(w) for w in written})
    check(f, lambda: tuple(a.clone() for a in args), True, rtol=1e-5, atol=1e-5)


# ---- pointers ---------------------------------------------------------------------------------------------------------


def test_parts_of_one_result_share_its_pointer() -> None:
    made = plan(torch.cat, [r(40 + k % 3) for k in range(500)])
    [call] = rendered(made)
    assert len(made.kernels) == 1
    assert len(call.buffers) == 501


def test_older_drivers_take_fewer_pointers() -> None:
    facts = {"arch": 90, "compute_units": 132, "shared": 232448, "clock": 1, "memory": 1}
    assert gpu_from(facts, 12010).parameters == 32764
    assert gpu_from(facts, 12000).parameters == 4096
    old = Options(gpu_everywhere=True, gpu=Gpu(parameters=4096))
    made = plan(torch.cat, [r(8) for _ in range(500)], options=old)
    assert len(made.kernels) == 2
    assert all(len(call.buffers) <= 480 for call in rendered(made))


# ---- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
def test_clipping(kind: float, interpreted: bool) -> None:
    check(lambda xs: clip(xs, kind), lambda: (tensors(12),), interpreted, rtol=1e-5, atol=1e-5)


@pytest.mark.every(5)
@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("make", [with_scalars, lambda: [r(9) for _ in range(9)], lambda: [*tensors(7), r(9), r(9)]])
def test_clipping_of_rows_of_any_length(make: Callable[[], list[Tensor]], interpreted: bool) -> None:
    def seeded() -> tuple[list[Tensor]]:
        torch.manual_seed(1)
        return (make(),)

    check(clip, seeded, interpreted, rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
def test_clipping_of_16_bit_gradients(interpreted: bool) -> None:
    check(clip, lambda: (tensors(12, torch.bfloat16),), interpreted)


@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
def test_reductions_of_many_kinds(interpreted: bool) -> None:
    """Rows along either dimension, strides, integers, masks, and rows that are stored as well."""

    def f(xs: list[Tensor], ks: list[Tensor]) -> list[Tensor]:
        rows = [x.sum(-1) for x in xs] + [x.amax(0) for x in xs] + [(x > 0).any(-1) for x in xs]
        both = [y for x in xs for y in (x.exp(), x.exp().sum(0))]
        return rows + both + torch.ops.aten._foreach_max.default(xs) + [k.sum() for k in ks] + [k.prod(0) for k in ks]

    def make() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        xs = [r(40, 30), r(30, 50).t(), r(7, 1, 9), r(64, 64)[:, ::2], r(3, 300)]
        return xs, [torch.randint(1, 3, (9, 4)), torch.randint(1, 3, (20, 3))]

    check(f, make, interpreted, rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_row_that_does_not_divide_into_shares(interpreted: bool) -> None:
    """The last shares have points past the end, or none at all."""

    def f(xs: list[Tensor]) -> Tensor:
        return torch.stack([x.amin() for x in xs]).sum() + torch.stack([x.prod() for x in xs]).sum()

    def make() -> tuple[list[Tensor]]:
        torch.manual_seed(0)
        scales = {(2,): 1.0, (100_003,): 1e-6, (65,): 0.1, (3, 5, 7): 0.1, (17, 1001): 1e-6}
        return ([r(shape).abs() * scale + 1.0 for shape, scale in scales.items()],)

    check(f, make, interpreted, rtol=1e-5, atol=1e-5)


@pytest.mark.every(5)
@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("bad", [1.0, float("inf"), float("nan")])
def test_unscaling(bad: float, interpreted: bool) -> None:
    def make() -> tuple[list[Tensor], Tensor, Tensor]:
        gradients = [*tensors(9), *tensors(3, torch.float16), *tensors(3, torch.float64)]
        gradients[3].view(-1)[77] = bad
        return gradients, torch.zeros(1), torch.full((1,), 1 / 3)

    check(unscale, make, interpreted)


def test_unscaling_calls_nothing() -> None:
    made = plan(unscale, tensors(50), torch.zeros(1), torch.ones(1))
    assert not made.calls
    assert len(made.kernels) <= 4


@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
def test_many_parts(interpreted: bool) -> None:
    """Offsets that are no multiples of anything, in two kernels where types differ."""

    def f(xs: list[Tensor], ys: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cat(xs), torch.cat([y * 2 for y in ys], 1), torch.stack(ys, -1)

    def make() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return [r(k % 7 + 1) for k in range(60)], [r(5, 9).half() for _ in range(9)]

    check(f, make, interpreted)


# ---- what the compiler makes of it ------------------------------------------------------------------------------------


@pytest.mark.ptx
def test_clipping_compiles(tmp_path: Any) -> None:
    """No registers spilled, and a barrier between the kernels of a sequence."""
    made = plan(clip, tensors(60))
    kernels = [call.launch for call in rendered(made) if call.launch is not None]
    assert [one.stack for one in triton.compile_kernels(kernels, 90)] == [0, 0, 0]
    ptx = tk.ptx_of(kernels[1], tmp_path, 90)
    assert "bar.sync" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("count", [20, 200])
def test_clipping_on_a_gpu(count: int) -> None:
    torch._dynamo.reset()
    expected, actual = ([t.cuda() for t in tensors(count)] for _ in range(2))
    compiled = torch.compile(clip, backend="kgen", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(actual), clip(expected), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_cat_of_500_on_a_gpu() -> None:
    torch._dynamo.reset()
    parts = [r(1000 + k % 9, device="cuda") for k in range(500)]
    compiled = torch.compile(torch.cat, backend="kgen", fullgraph=True)
    assert torch.equal(compiled(parts), torch.cat(parts))


@pytest.mark.cpu
def test_rows_of_one_vector_share_a_kernel() -> None:
    """Such rows have no loop: the body of a combo kernel must say so as a kernel of its own does."""

    def f(tables: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
        return [torch.rsqrt(t[i].square().mean(-1, keepdim=True) + 1e-6) for t, i in zip(tables, rows, strict=True)]

    def make() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return [r(40, 32), r(40, 32), r(40, 11), r(40, 11)], [torch.randint(0, 40, (2, 16)) for _ in range(4)]

    assert [len(members(step)) for step in plan(f, *make(), options=Options()).kernels] == [2, 2]
    check(f, make, interpreted=False)
