"""Each optimisation can be switched off: on both back ends the plan is another one then, and the results stay right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz_graphs import grow
from torch import Tensor

import kgen
from kgen.config import CODE_FIELDS
from kgen.ir.plan import members
from kgen.only import only
from kgen.report.record import Record, recording
from kgen.scheduler import Options
from kgen.verdict import Reason
from tests.kernels import plans
from tests.templates.test_template_contract import DISTANCES, OPERATOR, Author, author  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.cpu, pytest.mark.interpret, pytest.mark.filterwarnings("ignore::UserWarning")]

# By back end: options, and the template that matmuls are left to.
BACK_ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "cpp": ({"cache": False}, "cpp_matmul"),
    "triton": ({"cache": False, "gpu_interpreter": True}, "triton_matmul"),
}


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@dataclass(frozen=True)
class Made:
    """What became of a function: its kernels, their statements, library calls, tensors that never become memory, and code."""

    kernels: int
    statements: int
    calls: int
    locals: int
    code: str
    reasons: Counter[Reason]


def made(f: Callable[..., Any], args: tuple[Tensor, ...], back_end: str, **switches: bool) -> Made:
    """Compiles and runs the function, and compares what it gives with eager's."""
    options, template = BACK_ENDS[back_end]
    torch._dynamo.reset()
    with recording() as recorder, only(template, lambda configs: configs[0]), torch.no_grad():
        got = torch.compile(f, backend="kgen", fullgraph=True, options={**options, **switches})(*args)
    wanted = f(*args)
    for one, other in zip(*(t if isinstance(t, list | tuple) else (t,) for t in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    [graph] = (g for g in recorder.graphs if isinstance(g, Record))
    kernels = graph.plan.kernels
    code = [unit.source for unit in graph.units.sources] + [c.launch.source for c in graph.units.calls.values() if c.launch]
    return Made(
        len(kernels), sum(len(k.statements) for step in kernels for k in members(step)), len(graph.plan.calls),
        len(graph.plan.local), "\n".join(code), Counter(v.reason for v in graph.plan.verdicts),
    )  # fmt: skip


def both(f: Callable[..., Any], args: tuple[Tensor, ...], back_end: str, switch: str) -> tuple[Made, Made]:
    return made(f, args, back_end), made(f, args, back_end, **{switch: False})


def gate_up(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y.sum(0), y.sum(1)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_fusion(back_end: str) -> None:
    on, off = both(lambda x: torch.softmax(x * 2, -1), (r(33, 70),), back_end, "fusion")
    assert (on.kernels, off.kernels > 1) == (1, True)
    on, off = both(lambda x, w: torch.relu(x @ w), (r(33, 20), r(20, 17)), back_end, "fusion")
    assert [(m.kernels, m.calls) for m in (on, off)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_inlining(back_end: str) -> None:
    """Off, each operator is a loop. They still fuse, and what two kernels read is computed once."""
    on, off = both(lambda x: torch.relu(x * 2 + 1), (r(33, 70),), back_end, "inlining")
    assert [(m.kernels, m.statements, m.locals) for m in (on, off)] == [(1, 1, 0), (1, 3, 2)]
    on, off = both(shared, (r(33, 70),), back_end, "inlining")
    assert (on.statements, on.locals) == (2, 0)
    assert off.statements == 3
    assert off.reasons[Reason.CHEAP] == 0


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_nothing_fuses_without_inlining_and_fusion(back_end: str) -> None:
    apart = made(lambda x: torch.relu(x * 2 + 1), (r(33, 70),), back_end, inlining=False, fusion=False)
    assert apart.kernels == 3


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_loop_reordering(back_end: str) -> None:
    on, off = both(lambda x, y: x.t() + y.t(), (r(64, 96), r(64, 96)), back_end, "loop_reordering")
    assert on.code != off.code
    on, off = both(lambda x, y: x + y.t(), (r(64, 96), r(96, 64)), back_end, "loop_reordering")
    assert on.code != off.code


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_templates(back_end: str) -> None:
    on, off = both(lambda x, w: torch.relu(x @ w), (r(33, 20), r(20, 17)), back_end, "templates")
    assert [(m.kernels, m.calls) for m in (on, off)] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_prologues(back_end: str) -> None:
    on, off = both(lambda x, w, s: (x * s) @ w, (r(33, 20), r(20, 17), r(20)), back_end, "prologues")
    assert [(m.kernels, m.calls) for m in (on, off)] == [(1, 0), (2, 0)]
    on, off = both(lambda x, w: x.t() @ w, (r(20, 33), r(20, 17)), back_end, "prologues")
    assert [m.kernels for m in (on, off)] == [1, 1]  # a view is no prologue


def test_prologues_of_an_operator(author: Author) -> None:  # noqa: F811
    author.registers(jinja=DISTANCES, module=OPERATOR.replace("{power}", "1"))
    args = r(35, 20), r(37, 20)
    for prologues, kernels in ((True, 1), (False, 2)):
        with kgen.config.override(gpu_interpreter=True, prologues=prologues, cache=False):
            f = lambda x, y: torch.ops.example.l1_distance(x * 2, y)  # noqa: E731
            report = kgen.explain(f, *args, print_report=False)
            assert (len(report.kernels), len(report.externs)) == (kernels, 0)
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(f, backend="kgen")(*args), f(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_horizontal_fusion(back_end: str) -> None:
    on, off = both(gate_up, (r(33, 20), r(20, 17), r(20, 17)), back_end, "horizontal_fusion")
    assert [(m.kernels, m.calls) for m in (on, off)] == [(1, 0), (2, 0)]
    on, off = both(lambda x: (x.sum(-1), x.amax(-1)), (r(33, 70),), back_end, "horizontal_fusion")
    assert [m.kernels for m in (on, off)] == [1, 2]
    assert off.reasons[Reason.HORIZONTAL_OFF]
    on, off = both(lambda x, y: torch._foreach_add([x, y], 1), (r(33), r(44)), back_end, "horizontal_fusion")
    assert [m.kernels for m in (on, off)] == [1, 2]


@pytest.mark.parametrize("early", [True, False])
def test_early_launch(early: bool) -> None:
    """Of generated kernels, batches, and templates."""
    f = lambda x, w, y: (torch.relu(x @ w), torch.softmax(y, -1), *torch._foreach_add([x, w], 1))  # noqa: E731
    torch._dynamo.reset()
    options = {"gpu_interpreter": True, "cache": False, "early_launch": early}
    with recording() as recorder, only("triton_matmul", lambda configs: configs[0]):
        torch.compile(f, backend="kgen", options=options)(r(33, 20), r(20, 17), r(50, 60))
    [graph] = (g for g in recorder.graphs if isinstance(g, Record))
    launches = [call.launch for call in graph.units.calls.values()]
    assert len(launches) == 3
    assert {("launch_pdl", True) in kernel.options for kernel in launches} == {early}


def test_what_flows_is_fused_without_horizontal_fusion() -> None:
    plan = plans(lambda x: torch.softmax(x, -1) * x, r(64, 1000), options=Options(horizontal_fusion=False)).forward
    assert len(plan.kernels) == 1


def test_every_switch_enters_the_cache_key() -> None:
    assert {"fusion", "inlining", "loop_reordering", "templates", "prologues", "horizontal_fusion", "early_launch"} <= set(
        CODE_FIELDS
    )


@pytest.mark.parametrize("switch", ["inlining", "horizontal_fusion", "prologues", "loop_reordering"])
def test_random_programs_without(switch: str) -> None:
    """Writes, views, gathers and scans among them, which lean on what is stored when."""
    for seed in range(6):
        f, args = grow(seed).load()
        torch._dynamo.reset()
        got = torch.compile(f, backend="kgen", options={"cache": False, switch: False})(*(a.clone() for a in args))
        torch.testing.assert_close(got, f(*(a.clone() for a in args)), rtol=1e-2, atol=1e-2, equal_nan=True)
