"""Sums of one term, and of two to four at many points, are arithmetic: neither library calls nor kernels of rows. So are
running sums of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Kernel
from tests.kernels import plans
from tests.matmuls import compiled, error
from tests.scheduler.selection.test_safe_choices import planned


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Sums of one term, as the gradient of a weighted read of a memory has them."""
    return torch.sin(torch.bmm(x[:, :, None], y[:, None]))


def with_addend(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w, beta=0.5, alpha=2.0)


def one_after_the_other(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x @ y @ z


def areas(x: Tensor) -> Tensor:
    return (x[:, None, :2] - x[None, :, 2:]).clamp(min=0).prod(-1).amax(1)


def wrapped_distances(x: Tensor) -> Tensor:
    """Terms of several operations each: one kernel stores the sums."""
    apart = x[:, None] - x[None]
    return ((apart - 10 * torch.round(apart / 10) + 0.1).abs() ** 2).sum(-1)


def counted(x: Tensor) -> Tensor:
    return (x.view(-1, 3) > 0).sum(-1)


def mean_of_pairs(x: Tensor) -> Tensor:
    return x.view(-1, 2, 2).mean((1, 2))


def causal(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, w, b, padding=3, groups=x.shape[1])[..., : x.shape[-1]])


def strided(x: Tensor, w: Tensor) -> Tensor:
    """Two results of each channel."""
    return F.conv2d(x, w, stride=2, dilation=3, padding=1, groups=x.shape[1])


def gradient_of_image(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(
        g, x, w, None, [1], [3], [1], False, [0], x.shape[1], [True, False, False]
    )[0]
    return found


def gradient_of_strided_image(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(
        g, x, w, None, [2], [1], [1], False, [0], x.shape[1], [True, False, False]
    )[0]
    return found


def blurred(x: Tensor, w: Tensor) -> Tensor:
    """Images of one channel: rows, then columns."""
    return F.conv2d(F.conv2d(x, w, padding=(0, 2)), w.mT, padding=(2, 0)).relu()


def edges(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1).square()


def gradient_of_blurred_image(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(
        g, x, w, None, [1, 1], [1, 2], [1, 2], False, [0, 0], 1, [True, False, False]
    )[0]
    return found


def least_around(x: Tensor) -> Tensor:
    """A stack of what surrounds each pixel, reduced along its first axis: each term is one part, not a choice of four."""
    p = F.pad(x, (1, 1, 1, 1), value=1e3)
    return torch.stack([p[..., 1:-1, :-2], p[..., 1:-1, 2:], p[..., :-2, 1:-1], p[..., 2:, 1:-1]]).amin(0) + 1


def mean_of_models(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.exp(), y * 2, torch.sigmoid(x + y)]).mean(0).sin()


def mixed_in_logarithms(x: Tensor, y: Tensor) -> Tensor:
    """What a divergence of two models subtracts, of a stack, and of parts that are in memory."""
    both = torch.stack([x.sin() - 0.1, y * 2 - 2.3])
    return (y - torch.logsumexp(both, 0)).sin() + torch.logsumexp(torch.stack([x, y], 1), 1, keepdim=True).squeeze(1)


def columns_joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, None], y[:, None].tanh()], 1).square().sum(1).sqrt()


def small_areas(x: Tensor) -> Tensor:
    """Few results, whose reader is a kernel of rows."""
    return (x[:, None, :2] - x[None, :, 2:]).clamp(min=0).prod(-1).amax(1)


def running_cumprods(x: Tensor) -> Tensor:
    """What the gradient of `prod` along a short axis is made of."""
    before = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1)
    return before.cumprod(1) * before.flip(1).cumprod(1)


def running_sums(x: Tensor) -> Tensor:
    """Along an axis that is not the last one."""
    return (x * 2 + 1).cumsum(1).sin()


CASES: list[tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = [
    (layer, [(300, 3), (3, 100)]),
    (outer, [(64, 20), (64, 21)]),
    (with_addend, [(300, 4), (4, 100), (100,)]),
    (one_after_the_other, [(4096, 2, 3), (4096, 3, 2), (4096, 2, 2)]),
    (areas, [(130, 4)]),
    (wrapped_distances, [(150, 3)]),
    (counted, [(3 << 14,)]),
    (mean_of_pairs, [(4 << 14,)]),
    (causal, [(2, 64, 160), (64, 1, 4), (64,)]),
    (strided, [(1, 32, 48, 50), (64, 1, 2, 2)]),
    (gradient_of_image, [(2, 64, 163), (2, 64, 160), (64, 1, 4)]),
    (gradient_of_strided_image, [(2, 64, 80), (2, 64, 160), (64, 1, 4)]),
    (blurred, [(2, 1, 90, 97), (1, 1, 1, 5)]),
    (edges, [(2, 1, 90, 97), (2, 1, 3, 3)]),
    (gradient_of_blurred_image, [(2, 1, 90, 97), (2, 1, 90, 97), (1, 1, 3, 3)]),
    (least_around, [(3, 90, 97)]),
    (mean_of_models, [(130, 150), (130, 150)]),
    (mixed_in_logarithms, [(130, 150), (130, 150)]),
    (columns_joined, [(130, 150), (130, 150)]),
    (small_areas, [(100, 4)]),
    (running_cumprods, [(1 << 14, 2)]),
    (running_sums, [(300, 2, 100)]),
]
NAMES = [fn.__name__ for fn, _ in CASES]


@pytest.mark.parametrize(("fn", "shapes"), CASES, ids=NAMES)
def test_no_step_is_a_call_or_a_row_of_terms(fn: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> None:
    plan = planned(fn, *(torch.empty(s) for s in shapes))
    assert all(isinstance(step, Kernel) and not step.contracts for step in plan.steps)
    assert all(v.extent.as_int() > 4 for step in plan.kernels for v in step.inner)


@pytest.mark.every(5)
@pytest.mark.parametrize("device", ["cpu", pytest.param("interpreter", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fn", "shapes"), CASES, ids=NAMES)
def test_values(fn: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
    args: list[Any] = [torch.randn(s).to(dtype) for s in shapes]
    run = compiled if device == "interpreter" else torch.compile(fn, backend="kgen", fullgraph=True)
    got = run(fn, *args) if device == "interpreter" else run(*args)
    assert got.dtype == fn(*args).dtype
    assert error(got, fn(*(a.double() for a in args))) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("length", "rows", "dear"), [(2, 100, False), (2, 1 << 14, True), (3, 1 << 14, False)])
def test_few_or_dear_running_sums_stay_a_scan(length: int, rows: int, dear: bool) -> None:
    plan = planned(lambda x: (x.erfinv() if dear else x).cumsum(1), torch.empty(rows, length))
    assert any(s.kind == "scan" for kernel in plan.kernels for s in kernel.statements)


def test_few_results_stay_a_matmul() -> None:
    [step] = planned(lambda x, w: x @ w, torch.empty(8, 3), torch.empty(3, 8)).steps
    assert not isinstance(step, Kernel) or step.contracts


def test_a_matmul_of_one_term_is_arithmetic_on_a_cpu_too() -> None:
    """The gradient of a linear layer that has seen one row."""
    plan = plans(lambda g, x: (g.t() @ x, g.sum(0)), torch.empty(1, 300), torch.empty(1, 200)).forward
    assert all(isinstance(step, Kernel) and not step.contracts for step in plan.steps)


def test_channels_side_by_side_are_arithmetic_too() -> None:
    x = torch.empty(2, 160, 64, dtype=torch.bfloat16).transpose(1, 2)
    plan = planned(causal, x, torch.empty(64, 1, 4, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16))
    assert all(isinstance(step, Kernel) and not step.contracts for step in plan.steps)


def bits_apart(codes: Tensor, queries: Tensor) -> Tensor:
    """The least Hamming distance of codes of two numbers: one value is read again by each step of the count."""
    v = queries[:, None] ^ codes
    v = v - ((v >> 1) & 0x5555555555555555)
    v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((v * 0x0101010101010101) >> 56).sum(-1).amin(1)


def test_large_values_of_rows_and_columns_are_computed_again() -> None:
    """Stored, they are 128 MB that are written and read."""
    codes, queries = (torch.empty(n, 2, dtype=torch.int64) for n in (8000, 1001))
    assert len(planned(bits_apart, codes, queries).kernels) == 1


def test_a_stack_in_logarithms_is_stored_nowhere() -> None:
    """With the softmaxes before it, and the sum behind it, in one kernel."""

    def divergence(x: Tensor, y: Tensor) -> Tensor:
        s, t = x.float().log_softmax(-1), y.float().log_softmax(-1)
        m = torch.logsumexp(torch.stack([s - 0.1, t - 2.3]), 0)
        return (t.exp() * (t - m)).sum(-1)

    [kernel] = planned(divergence, *(torch.empty(2044, 49152, dtype=torch.bfloat16) for _ in range(2))).kernels
    stored = [o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept]
    assert len(stored) == 1


@pytest.mark.parametrize("where", [0, 1])
def test_infinities_in_logarithms(where: int) -> None:
    """As of one reduction: the maximum where that is infinite, and nan where a part is."""
    x = torch.randn(130, 150)
    y = torch.full_like(x, -torch.inf)
    x[::3], x[1::7] = -torch.inf, torch.inf
    x[5] = torch.nan
    torch._dynamo.reset()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(torch.stack([x, y] if where else [y, x]), 0)

    torch.testing.assert_close(torch.compile(fn, backend="kgen")(x, y), fn(x, y), equal_nan=True)
