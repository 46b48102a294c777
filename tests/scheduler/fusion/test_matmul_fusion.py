"""What fusion makes of matmuls, in both languages: the number of kernels, the values, and sizes that are zero or symbols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.cost import model
from kgen.ir.plan import members
from kgen.scheduler import Options
from tests.kernels import plans
from tests.matmuls import compiled, forced

pytestmark = [
    pytest.mark.interpret, pytest.mark.cpu, pytest.mark.usefixtures("templates_win"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # fmt: skip

BACK_ENDS = {"cpp": {"cache": False}, "triton": {"cache": False, "gpu_interpreter": True}}


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes) / 4


def kept(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y, y.relu() ** 2


def bytes_of(*sizes: int) -> Tensor:
    return torch.randint(-100, 100, sizes, dtype=torch.int8)


@dataclass(frozen=True)
class Case:
    """A function of the inputs that `make` draws, and its kernels in Triton and in C++."""

    f: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]
    triton: int = 1
    cpp: int = 1


def x_w(*more: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (r(70, 50), r(50, 64), *(r(*sizes) for sizes in more))


CASES = {
    "gelu(linear + bias)": Case(lambda x, w, b: F.gelu(F.linear(x, w.t(), b)), x_w((64,))),
    "linear + bias + residual, masked": Case(lambda x, w, b, y, keep: (F.linear(x, w.t(), b) + y) * (keep > 0) * 2,
                                             x_w((64,), (70, 64), (70, 64))),
    "the matmul and its squared relu": Case(kept, x_w()),
    "gelu'(saved) times dY W": Case(lambda dy, w, saved: torch.ops.aten.gelu_backward(dy @ w, saved), x_w((70, 64))),
    "int8 weights": Case(lambda x, w, s: x @ (w.to(x.dtype) * s), lambda: (r(70, 50), bytes_of(50, 64), r(64))),
    "scaled operand": Case(lambda x, w, s: (x * s[:, None]) @ w, x_w((70,))),
    "cast operand": Case(lambda x, w: x.to(w.dtype) @ w, lambda: (r(70, 50).half(), r(50, 64))),
    "padded operand": Case(lambda x, w: F.pad(x, (0, 3)) @ w, lambda: (r(70, 47), r(50, 64))),
    "gathered operand": Case(lambda x, w, i: x[i] @ w, lambda: (r(90, 50), r(50, 64), torch.randint(0, 90, (70,)))),
    "gate and up": Case(lambda x, w, v: F.silu(x @ w) * (x @ v), x_w((50, 64))),
    "heads": Case(lambda x, w: (x @ w).view(2, 35, 4, 16).permute(0, 2, 1, 3).contiguous() * 2, x_w()),
    "rows put elsewhere": Case(lambda x, w, t, i: t.index_put((i,), torch.relu(x @ w)),
                               lambda: (r(70, 50), r(50, 64), r(90, 64), torch.randperm(90)[:70]), triton=2, cpp=2),
    "rows added up": Case(lambda x, w, i: x.new_zeros(30, 64).index_add(0, i, x @ w),
                          lambda: (r(70, 50), r(50, 64), torch.randint(0, 30, (70,))), triton=2, cpp=2),
    "columns put elsewhere": Case(lambda x, w, i: x.new_zeros(70, 90).scatter(1, i, x @ w),
                                  lambda: (r(70, 50), r(50, 64), torch.rand(70, 90).argsort(1)[:, :64]), triton=2, cpp=2),
    "windows added up, as high as the sum is long": Case(lambda w, x: F.fold(w @ x, (19, 13), 7, stride=6),
                                                         lambda: (r(98, 7), r(7, 6)), triton=2, cpp=3),
    "sum of exponentials": Case(lambda x, w: (x @ w).exp().sum(-1), x_w(), triton=2, cpp=2),
    "weights' gradient and the bias'": Case(lambda dy, x: (dy.t() @ x, dy.sum(0)), lambda: (r(70, 64), r(70, 50))),
}  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, back_end: str) -> None:
    case = CASES[name]
    args = case.make()
    kgen.coverage_reset()
    found = torch.compile(case.f, backend="kgen", fullgraph=True, options=BACK_ENDS[back_end])(*args)
    counts = kgen.coverage()
    assert (counts["kernels"], counts["extern_calls"]) == (getattr(case, back_end), 0)
    wanted = case.f(*(a.double() if a.is_floating_point() and a.dtype is torch.float32 else a for a in args))
    for one, other in zip(*([t if isinstance(t, tuple) else (t,) for t in (found, wanted)]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_tiles", "triton_matmul_persistent"])
def test_updates_at_indices_from_data(template: str) -> None:
    """Several rows that add to one, and an index that is out of range."""
    half = torch.bfloat16
    args = (r(70, 48).to(half), r(48, 64).to(half), torch.randint(0, 30, (70,)))

    def f(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return torch.ones(30, 64).index_add(0, i, torch.relu(x @ w).float())

    with forced(template, lambda configs: sorted(configs, key=lambda c: c.BLOCK_M * c.BLOCK_N)[:1]) as made:
        found = compiled(f, *args)
        assert (len(made.kernels), len(made.matmuls)) == (2, 1)
        torch.testing.assert_close(found, f(*args), rtol=2e-2, atol=2e-2)
        args[2][69] = 30
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"IndexError.*out of range"):
            compiled(f, *args)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_updates_of_what_the_matmul_reads_stay_apart(back_end: str) -> None:
    def f(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return x.index_add_(0, i, x @ w)

    x, w, i = r(64, 64), r(64, 64), torch.randint(0, 64, (64,))
    found = torch.compile(f, backend="kgen", options=BACK_ENDS[back_end])(x.clone(), w, i)
    torch.testing.assert_close(found, f(x.clone(), w, i), rtol=2e-5, atol=2e-5)


@pytest.mark.every(3)
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (1, 1, 1)])
def test_sizes_of_zero_and_one(sizes: tuple[int, int, int], back_end: str) -> None:
    """Nothing to compute is an estimate's zero to divide by; a sum over nothing is 0."""
    m, k, n = sizes
    x, w = r(m, k), r(k, n)
    found = torch.compile(lambda x, w: torch.mm(x, w).relu(), backend="kgen", options=BACK_ENDS[back_end])(x, w)
    torch.testing.assert_close(found, (x @ w).relu())


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_rows_of_two_dimensions_with_no_elements(back_end: str) -> None:
    """A row's number is taken apart into digits, here of base 0."""

    def f(x: Tensor) -> Tensor:
        rows = x.slice_scatter(x.narrow(1, 0, 1) * 2, 1, 0, 1).reshape(-1, 64)
        return ((rows * 2) @ rows.t().exp()).sum(1)

    x = r(64, 2, 0).permute(2, 1, 0)
    with torch.no_grad():
        assert torch.compile(f, backend="kgen", options=BACK_ENDS[back_end])(x).shape == f(x).shape


@pytest.mark.every(2)
@pytest.mark.usefixtures("tf32")
@pytest.mark.ptx
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_persistent", "triton_matmul_tiles"])
def test_sizes_that_are_symbols_compile_for_a_gpu(template: str) -> None:
    """They have 64 bits in a kernel, and TMA takes 32."""

    def f(y: Tensor, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return x + F.linear(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1), w, b)

    y, w, b, x = (r(*s).bfloat16() for s in ((2, 8, 96, 64), (512, 512), (512,), (2, 96, 512)))
    for tensor, dimension in ((y, 0), (y, 2), (x, 0), (x, 1)):
        torch._dynamo.mark_dynamic(tensor, dimension)
    with forced(template, runs=False) as made:
        torch.compile(f, backend="kgen", fullgraph=True, options=BACK_ENDS["triton"])(y, w, b, x)
    assert made.matmuls
    triton.compile_kernels(made.matmuls, 90)


@pytest.mark.cpu
def test_the_library_keeps_nobodys_prologue_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second matmul would have computed of its operand, had a template taken it, is not stored for the library."""
    monkeypatch.setattr(model, "vendor_seconds", lambda one: 1e9 if "k" in one.loops and one.size("k") == 40 else 0.0)

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.gelu(x @ w) @ v

    plan = plans(f, r(70, 40), r(40, 64), r(64, 30), options=Options()).forward
    (kernel,) = [k for step in plan.kernels for k in members(step)]
    assert len(plan.calls) == 1
    assert sum(sum(s.stored) for s in kernel.statements) == 1
