"""FlexAttention's nodes become ordinary operators: forward and gradients, masks, captured tensors, grouped heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

import kgen
from kgen.capture.higher_order import expand

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]

LENGTH = 48
Function = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return m >= n


def window(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (m - n).abs() < 9


def softcap(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return 3 * torch.tanh(s / 3)


def alibi(slopes: Tensor) -> Function:
    return lambda s, b, h, m, n: s + slopes[h] * (n - m)


def relative(table: Tensor) -> Function:
    return lambda s, b, h, m, n: s + table[h, (m - n).clamp(-8, 8) + 8]


def documents(numbers: Tensor) -> Function:
    return lambda b, h, m, n: (numbers[b, m] == numbers[b, n]) & (m >= n)


@dataclass(frozen=True)
class Case:
    """`score` makes the score function of the captured tensor, `mask` the mask function of document numbers."""

    score: Callable[[Tensor], Function | None] = field(default=lambda captured: None)
    captured: tuple[int, ...] = ()
    mask: Callable[[Tensor], Function | None] = field(default=lambda numbers: None)
    heads_of_keys: int = 4
    keys: int = LENGTH
    values: int = 16
    scale: float | None = None


CASES = {
    "plain": Case(),
    "scaled": Case(scale=0.3, values=24),
    "causal": Case(mask=lambda _: causal),
    "window": Case(mask=lambda _: window),
    "documents": Case(mask=documents),
    "softcap": Case(score=lambda _: softcap, mask=lambda _: causal),
    "alibi": Case(score=alibi, captured=(4,)),
    "relative": Case(score=relative, captured=(4, 17), mask=lambda _: causal),
    "grouped": Case(score=alibi, captured=(4,), heads_of_keys=2),
    "longer keys": Case(keys=80),
}


def arguments(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(2, 4, LENGTH, 16), (2, case.heads_of_keys, case.keys, 16), (2, case.heads_of_keys, case.keys, case.values)]
    return [torch.randn(shape, dtype=dtype) for shape in (*shapes, case.captured)]


def block_mask(case: Case) -> BlockMask | None:
    mask = case.mask(torch.arange(LENGTH).expand(2, -1) // 20)
    return None if mask is None else create_block_mask(mask, 2, None, LENGTH, case.keys, device="cpu", BLOCK_SIZE=16)


def attention(case: Case, mask: BlockMask | None) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, captured: Tensor) -> Tensor:
        return flex_attention(
            q, k, v, case.score(captured), mask, case.scale, enable_gqa=case.heads_of_keys != 4
        )  # fmt: skip

    return run


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="kgen", fullgraph=True)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str) -> None:
    case = CASES[name]
    fn, args = attention(case, block_mask(case)), arguments(case)
    with torch.no_grad():
        got = compiled(fn)(*args)
        want = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert got.stride() == fn(*args).stride()
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def _gradients() -> list[Any]:
    quick = ("relative", "grouped", "documents")
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in CASES]


def test_nothing_is_left_to_the_library() -> None:
    case = CASES["documents"]
    fn, args = attention(case, block_mask(case)), arguments(case)
    kgen.coverage_reset()
    with torch.no_grad():
        compiled(fn)(*args)
    assert kgen.coverage()["externs"] == {}


def test_lengths_that_are_symbols_and_the_log_sum_exp() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, AuxOutput]:
        return flex_attention(q, k, v, softcap, return_aux=AuxRequest(lse=True))

    torch._dynamo.reset()
    fast = torch.compile(run, backend="kgen", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (40, 56):
            q, k, v = (torch.randn(2, 2, length, 16) for _ in range(3))
            got, aux = fast(q, k, v)
            want, wanted = run(q.double(), k.double(), v.double())
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(aux.lse.double(), wanted.lse.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", _gradients())
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for a GPU here, though the graph of a CPU is the same."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    case = CASES[name]
    fn = attention(case, block_mask(case))
    found = []
    for run, dtype in ((compiled(fn), torch.float32), (fn, torch.float64)):
        args = [a.to(dtype).requires_grad_() for a in arguments(case)]
        run(*args).square().sum().backward()
        found.append([a.grad for a in args])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-4)


def _compared(make: Callable[[Tensor], Function], dtype: torch.dtype = torch.float32, dynamic: bool | None = None) -> None:
    """Compares the result and gradients of a score function that is made of the query with eager's in float64."""
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, make(q))

    fast = torch.compile(run, backend="kgen", fullgraph=True, dynamic=dynamic)
    given = [torch.randn(2, 2, 32, 16, dtype=torch.float64) for _ in range(3)]
    found = []
    for fn, kind in ((fast, dtype), (run, torch.float64)):
        args = [a.to(kind).detach().requires_grad_() for a in given]
        result = fn(*args)
        found.append([result, *torch.autograd.grad(result.square().sum(), args)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-4)


def test_captured_tensors_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, and tensors of floats that want none, beside one that does."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    number, fixed = torch.ones((), dtype=torch.int32), torch.randn(32)
    learned = torch.randn(32, dtype=torch.float64, requires_grad=True)
    _compared(lambda q: lambda s, b, h, m, n: s + number)
    _compared(lambda q: lambda s, b, h, m, n: s + fixed[m])
    _compared(lambda q: lambda s, b, h, m, n: s + fixed[m] * number + learned[n].to(s.dtype))


def test_sizes_that_are_symbols_in_score_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured query is asked for a size alone: its gradient has nothing of that."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    _compared(lambda q: lambda s, b, h, m, n: s + (m - n) * torch.exp2(-((h + 1) * 8.0 / q.shape[1])), dynamic=True)
    torch._dynamo.reset()
    fast = torch.compile(
        lambda q, k, v, number: flex_attention(q, k, v, lambda s, b, h, m, n: s + (m - n) / number),
        backend="kgen", fullgraph=True, dynamic=True,
    )  # fmt: skip
    with torch.no_grad():
        for number in (8, 5, 7):
            q, k, v = (torch.randn(2, 2, 32, 16) for _ in range(3))
            want = flex_attention(q.double(), k.double(), v.double(), lambda s, b, h, m, n, by=number: s + (m - n) / by)
            torch.testing.assert_close(fast(q, k, v, number).double(), want, atol=1e-5, rtol=1e-5)


def test_float64_has_the_dtype_of_its_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    _compared(lambda q: lambda s, b, h, m, n: s * s, torch.float64)


def test_numbers_of_the_meaning_are_numbers_of_the_graph() -> None:
    """As a tensor on a GPU, -inf would be read from memory, and no tile be left out."""
    kept: list[GraphModule] = []

    def keep(gm: GraphModule, _: object) -> Callable[..., Any]:
        with _disable_current_modes():  # constants are read
            kept.append(expand(gm))
        return make_boxed_func(kept[-1].forward)

    case = CASES["causal"]
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attention(case, block_mask(case)), backend=aot_autograd(fw_compiler=keep))(*arguments(case))
    [gm] = kept
    assert not gm.graph.find_nodes(op="get_attr")
    numbers = [node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.scalar_tensor.default)]
    assert -math.inf in numbers
