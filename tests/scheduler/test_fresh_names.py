"""What the scheduler adds to a graph has names of its own, whatever the user's operators are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen import errors
from kgen.ir import nodes as ir
from kgen.ir.verify import defined_once
from kgen.scheduler import Options
from tests.kernels import plans

BACK_ENDS = {
    "cpp": pytest.param({"cache": False}, marks=pytest.mark.cpu, id="cpp"),
    "triton": pytest.param(
        {"cache": False, "gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"
    ),
}
pytestmark = pytest.mark.usefixtures("templates_win")
# Names that transforms would give to what they make of a matmul, or of what follows it.
NAMES = (
    "mm_sum", "mm_cut", "mm_cut_sum", "mm_subtiles", "mm_first", "mm_first_sum", "mm_aligned", "mm_total", "mm_piece0",
    "arg0_1_aligned", "amax_parts", "sum_1_parts", "sum_1_partial", "sum_1_total", "left_block",
    "mm_twice", "mm_rows", "mm_pieces",
)  # fmt: skip


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    library = torch.library.Library("fresh_names", "DEF")
    for name in NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2 + 1, "CompositeExplicitAutograd")
        library.impl(name, torch.empty_like, "Meta")
    yield torch.ops.fresh_names
    library._destroy()


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


EPILOGUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, b: torch.relu(y),
    "bias and relu": lambda y, b: torch.relu(y + b),
    "row sum": lambda y, b: y.square().sum(-1, keepdim=True),
    "softmax": lambda y, b: y.softmax(-1),
    "gate": lambda y, b: (F.silu(y[:, :48]) * y[:, 48:]).repeat(1, 2),
    "log-sum-exp": lambda y, b: y.logsumexp(-1, keepdim=True),
}


def _beside(operators: Any, names: tuple[str, ...], epilogue: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Reads results of the operators in the matmul's epilogue, behind it, and in its prologue."""

    def fn(a: Tensor, b: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
        made = [getattr(operators, name)(x + number) for number, name in enumerate(names)]
        left = getattr(operators, names[0])(y)
        return epilogue((a + left.sin()) @ b, bias) + torch.stack(made).sum(0)

    return fn


@pytest.mark.every(3)
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_operators_with_names_of_transforms(operators: Any, epilogue: str, options: dict[str, Any]) -> None:
    fn = _beside(operators, NAMES, EPILOGUES[epilogue])
    args = [r(40, 50), r(50, 96), r(96), r(40, 96), r(40, 50)]
    found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    torch.testing.assert_close(found, fn(*args), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("epilogue", ["relu", "softmax", "row sum"])
@pytest.mark.parametrize("shape", [(32, 8192, 64), (256, 1000, 1000)], ids=["split", "padded"])
def test_on_a_gpu_nothing_is_defined_twice(operators: Any, epilogue: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    fn = _beside(operators, NAMES, EPILOGUES[epilogue])
    args = [r(m, k), r(k, n), r(n), r(m, n), r(m, k)]
    plan = plans(fn, *args, options=Options(gpu_everywhere=True)).forward
    calls = {name for call in plan.calls for name in ir.outs(call.node)}
    made = [name for step in plan.kernels for s in step.statements for name in s.outs]
    assert {name for name in NAMES if not name.startswith("arg")} <= calls | set(plan.graph.buffers)
    assert calls.isdisjoint(made)
    assert len(made) == len(set(made))


def test_a_name_says_the_same_at_each_attempt() -> None:
    graph = ir.Graph("test")
    graph.buffers["mm_sum"] = ir.Buffer("mm_sum", torch.float32, torch.device("cpu"), ())
    name = ir.derived(graph, ir.Derived("mm", "sum"))
    assert name not in graph.buffers
    assert ir.derived(graph, ir.Derived("mm", "sum")) == name
    assert ir.derived(graph, ir.Derived("mm_sum", "")) != name
    assert ir.source_in(graph, name, "sum") == "mm"
    assert ir.source_in(graph, "mm_sum", "sum") is None
    assert ir.fresh(graph, name) != name


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(errors.InvalidIR, match="mm is defined twice"):
        defined_once(["mm", "relu", "mm"], "schedule")
