"""Triton kernels of the user inside of a graph, and library calls whose results are nested."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from kgen.ir import nodes as ir
from kgen.ir.verify import verify
from kgen.lowering.graph import LoweringContext, lower
from kgen.lowering.reinplace import reinplace

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def scale_rows_kernel(x, out, row, out_row, columns, factor, BLOCK: tl.constexpr):  # noqa: N803
    r, i = tl.program_id(0), tl.arange(0, BLOCK)
    mask = i < columns
    tl.store(out + r * out_row + i, tl.load(x + r * row + i, mask=mask) * factor, mask=mask)


tuned_kernel = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])(add_kernel)


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out


def tuned_add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    grid: Callable[[Any], tuple[int]] = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
    torch.library.wrap_triton(tuned_kernel)[grid](x, y, out, x.numel())
    return out


def add_into(x: Tensor, y: Tensor) -> None:
    torch.library.wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 16),)](x, y, x, x.numel(), BLOCK=16)


def scaled_rows(x: Tensor, factor: float) -> Tensor:
    out = torch.empty(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    kernel = torch.library.wrap_triton(scale_rows_kernel)
    kernel[(x.shape[0],)](x, out, x.stride(0), out.stride(0), x.shape[1], factor, BLOCK=16)
    return out


OPERATORS = {
    name: torch.library.triton_op(f"kgen_tests::{name}", function, mutates_args=written)
    for name, function, written in [
        ("add", add, {}), ("tuned_add", tuned_add, {}), ("add_into", add_into, {"x"}), ("scaled_rows", scaled_rows, {}),
    ]
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels run in its interpreter, on the CPU's tensors."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    from kgen.host.interpret import _interpreting

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
        with _interpreting():
            InterpretedFunction(self.fn)[grid](*args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **meta: [float(config.kwargs["BLOCK"])] * 3)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same_as_eager(function: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> None:
    """Results, and what the function makes of its arguments."""
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    found = torch.compile(function, backend="kgen", dynamic=dynamic, fullgraph=True)(*mine)
    torch.testing.assert_close(found, function(*theirs))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("name", ["add", "tuned_add"])
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_runs_between_kernels_of_ours(name: str) -> None:
    same_as_eager(lambda x, y: OPERATORS[name](x * 2, y.relu()) + 1, torch.randn(40), torch.randn(40))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_writes_to_an_argument_of_the_graph() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        before = x * 3
        OPERATORS["add_into"](x, y)
        return before + x

    same_as_eager(function, torch.randn(40), torch.randn(40))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_writes_to_what_the_graph_computes() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.exp()
        OPERATORS["add_into"](z, y)
        OPERATORS["add_into"](z, z * 2)
        return z, z.sin()

    same_as_eager(function, torch.randn(40), torch.randn(40))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_gets_the_strides_of_the_traced_graph() -> None:
    """Transposed, sliced and repeated arguments, given as they lie with their strides as numbers, and computed ones."""
    rows = OPERATORS["scaled_rows"]
    x = torch.randn(12, 12)
    same_as_eager(lambda x: (rows(x[:, :5], 2.0), rows(x[0].expand(3, 12), 0.5), rows((x * 2)[2:, :7], 0.5)), x)
    same_as_eager(lambda x: rows(x.relu().expand(5, 12), 2.0), torch.randn(12))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_of_dynamic_sizes() -> None:
    run = torch.compile(lambda x, y: OPERATORS["add"](x, y * 2), backend="kgen", dynamic=True, fullgraph=True)
    for size in (40, 7):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(run(x, y), x + y * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_becomes_one_call_that_writes_in_place(device: str) -> None:
    with FakeTensorMode():
        value = torch.empty(40, device=device)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    z = graph.call_function(torch.ops.aten.exp.default, (x,))
    arguments = {"x": x, "y": x, "out": z, "n": 40, "BLOCK": 16}
    settings = {"grid": [(3, 1, 1)], "tma_descriptor_metadata": {}, "kwargs": arguments, "tensors_to_clone": ["out"]}
    numbers = {"kernel_idx": kernel_side_table.add_kernel(add_kernel), "constant_args_idx": 0}
    call = graph.call_function(triton_kernel_wrapper_functional, (), {**numbers, **settings})
    result = graph.call_function(operator.getitem, (call, "out"))
    graph.output((result,))
    for node in (x, z, result):
        node.meta["val"] = value
    call.meta["val"] = {"out": value}
    lowered = lower(reinplace(GraphModule({}, graph)), LoweringContext())
    verify(lowered, "lower")
    made, called = lowered.nodes
    assert isinstance(made, ir.Pointwise)
    assert isinstance(called, ir.Extern)
    assert [old for old, _ in called.mutates] == [made.out]
    assert str(called.target) == "triton.add_kernel"


@pytest.mark.cpu
def test_a_call_whose_results_are_nested() -> None:
    def function(gradients: Sequence[Tensor], found: Tensor, scale: Tensor) -> tuple[list[Tensor], Tensor]:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        return [g + 1 for g in gradients], found * 2

    def arguments(last: float) -> tuple[list[Tensor], Tensor, Tensor]:
        return [torch.arange(4.0), torch.tensor([1.0, last])], torch.zeros(1), torch.full((1,), 0.5)

    for last in (3.0, float("inf")):
        mine, theirs = arguments(last), arguments(last)
        torch.testing.assert_close(torch.compile(function, backend="kgen")(*mine), function(*theirs))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [False, True])
def test_kernels_of_the_user_on_a_gpu(tuned: bool) -> None:
    kernel = tuned_kernel if tuned else add_kernel
    constants = {} if tuned else {"BLOCK": 16}

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        grid: Callable[[Any], tuple[int]] = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
        kernel[grid](x * 2, y, out, x.numel(), **constants)
        kernel[grid](y, out, y, x.numel(), **constants)
        return out.relu(), y * 1

    same_as_eager(function, torch.randn(400, device="cuda"), torch.randn(400, device="cuda"))
    for name in ("add", "tuned_add"):
        same_as_eager(lambda x, y, name=name: OPERATORS[name](x, y) + 1, *torch.randn(2, 400, device="cuda"))
