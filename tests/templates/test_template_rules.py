"""What Jinja files may hold; generated text names nothing but what it was given; how a kernel is built is data."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import torch.nn.functional as F
from jinja2 import nodes as jn
from torch import Tensor

import tests.templates.triton.test_full_row_matmuls as rows
import tests.templates.triton.test_warp_specialized_matmuls as warp_specialized
from kgen.build import unit
from kgen.ir.plan import members
from kgen.only import Only
from kgen.rendered.kernel_call import Rendered
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates import registry, slots
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.engine import declaration, objects
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.gluon_handles import Barriers, names
from kgen.templates.triton.codegen.gluon_slots import GluonOperand, GluonResult, GluonSlots
from kgen.templates.triton.codegen.template import render_template
from tests.codegen import plan_of
from tests.kernels import plans
from tests.op_case import capture

pytestmark = pytest.mark.none
ROOT = Path(__file__).resolve().parents[2]
JINJA = sorted(path for folder in ("templates", "examples") for path in (ROOT / folder).rglob("*.jinja"))
# Text, `if`, `for`, slot calls and the names of their results, whether a program has a step, and macros for what an author
# writes twice.
ALLOWED = (
    jn.Template, jn.Output, jn.TemplateData, jn.If, jn.For, jn.Macro, jn.Assign, jn.Name, jn.Const, jn.Getattr, jn.Call,
    jn.Keyword, jn.List, jn.Tuple, jn.Dict, jn.Pair, jn.CondExpr, jn.Compare, jn.Operand, jn.And, jn.Or, jn.Not, jn.Concat,
    jn.Test,
)  # fmt: skip
# Modules that use regular expressions. None decides from generated text how a kernel is built: they read names and types
# (`tensor_map`, `kernel_call`, `render`), what tools and other people's sources say (`toolchain`, `triton`), and PTX (`ptx`,
# which repairs it, and `triton_worker`, which checks its parameters).
FOLDERS = ("kgen/build", "kgen/host", "kgen/rendered", "templates")
READERS = {
    "kgen/rendered/tensor_map.py", "kgen/rendered/kernel_call.py", "kgen/build/toolchain.py", "kgen/build/triton.py",
    "kgen/build/ptx.py", "kgen/build/triton_worker.py", "templates/render.py",
}  # fmt: skip


def syntax(path: Path) -> jn.Template:
    return jinja2.Environment().parse(path.read_text())


@pytest.mark.parametrize("path", JINJA, ids=lambda path: path.name)
def test_no_state_in_jinja(path: Path) -> None:
    assert not list(syntax(path).find_all(jn.NSRef))
    assert "namespace(" not in path.read_text()


@pytest.mark.parametrize("name", [t.name for device in ("cuda", "cpu") for t in registry.every(device) if t.operands])
def test_no_logic_in_jinja(name: str) -> None:
    found = list(syntax(registry.find(name).source).find_all(jn.Node))
    assert {type(node).__name__ for node in found} <= {kind.__name__ for kind in ALLOWED}
    assert {node.name for node in found if isinstance(node, jn.Test)} <= {"defined"}
    calls = [node.node.name for node in found if isinstance(node, jn.Call) and isinstance(node.node, jn.Name)]
    assert set(calls) <= {"kernel", "range"} | {node.name for node in found if isinstance(node, jn.Macro)}


def test_no_decision_by_regular_expression() -> None:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert {str(p.relative_to(ROOT)) for p in files if re.search(r"^import re$", p.read_text(), re.MULTILINE)} <= READERS


# ---- names ----------------------------------------------------------------------------------------------------------


def problem_of(name: str, fn: Callable[..., Any], args: Iterable[Any], pick: Callable[..., Config]) -> tuple[Problem, Config]:
    options = Options(gpu_everywhere=True, only=Only(name, pick))
    plan = plans(fn, *args, options=options).forward
    [step] = [step for step in plan.kernels if members(step)[0].choice is not None]
    one = members(step)[0]
    problem = chosen_problem(one, plan.graph, options.device(plan.graph, contraction_of(one)))
    return problem, problem.template.config(**dict(one.choice.config))


def free_names(text: str) -> set[str]:
    """The variables that statements read, but for those that they make themselves."""
    found = [node for node in ast.walk(ast.parse(textwrap.dedent(text))) if isinstance(node, ast.Name)]
    return {n.id for n in found} - {n.id for n in found if isinstance(n.ctx, ast.Store)}


def known(made: GluonSlots) -> set[str]:
    """What every kernel's text has: the modules, knobs, lengths of axes, and the kernel's own parameters."""
    template = made.problem.template
    pointers = {f"p_{name}" for name in made.parameters.pointers}
    lengths = {axis.upper() for axis in template.axes}
    return {
        "ws",
        "gl",
        "tl",
        "lib",
        *template.knobs,
        *lengths,
        *pointers,
        *made.parameters.maps.values(),
        "ACCUMULATOR",
        "float",
    }


def prefetching(configs: list[Config]) -> Config:
    return next((c for c in configs if c.PREFETCH), configs[0])


CASES = {
    **{
        name: (warp_specialized, name)
        for name in ("rows_by_rows", "two_reads", "masked_batch", "operand_reduction", "softmax", "gate_and_up")
    },
    **{name: (rows, name) for name in ("masked", "many tiles", "read behind a reduction", "two results")},
}


@pytest.mark.parametrize("case", CASES)
def test_text_names_what_it_was_given(case: str, tf32: None) -> None:
    """Handles, stages, barriers and groups have names that no template uses."""
    module, name = CASES[case]
    problem, config = problem_of(module.NAME, *module.CASES[name], prefetching)
    made = GluonSlots(problem, config)
    guard = Barriers("zz_guard", 3, 2)
    result = made.result_slot("C")
    assert isinstance(result, GluonResult)
    reads = result.reads("zz_read", 3)
    writes = result.writes("zz_write", over=reads)
    statements = [guard.make(), *(one.make() for one in (*reads, *writes))]
    statements += [one.fetch("zz_b", "zz_m", "zz_n", stage="zz_at", ready=guard.at("zz_who")) for one in reads]
    operands = [made.operand_slot(one, {}, len(problem.members) if one == "B" else 1, frozenset()) for one in problem.inputs]
    for slot in operands:
        assert isinstance(slot, GluonOperand)
        if slot.name == "B" and module is rows:
            kept = slot.keep("zz_kept", rows=32 * config.WARPS)
            statements += [kept.make(), kept.fetch("zz_b", chunk="zz_chunk", ready=guard.at("zz_who"))]
            continue
        for ring in slot.rings("zz_ring", 3):
            statements += [ring.make(), ring.view("zz_at")]
            statements.append(ring.fetch("zz_b", "zz_m", "zz_n", stage="zz_at", ready=guard.at("zz_who")))
    for one in problem.operand_reductions:
        statements += made.store_sum(one.operand, one.number, "zz_sums", ["zz_b", "zz_m"], layout="zz_layout")
    for leaving in (writes, result.writes("zz_own").in_turn("zz_wait()")):
        through = {"layout": "zz_layout", "reads": reads.at("zz_at"), "writes": leaving, "met": "zz_met()"}
        statements.append(result.store("zz_acc", "zz_b", "zz_m", "zz_n", **through))
    text = "\n".join(statements)
    wrong = free_names(text) - known(made)
    assert all(one.startswith("zz_") for one in wrong), wrong
    assert ("two_reads" in case or "masked" in case) <= bool(reads)


def test_handles_are_parameters() -> None:
    guard = Barriers("guard", 2)
    assert names(["group: tl.constexpr", guard, [guard, None], None, 1]) == ["group: tl.constexpr", "guard", "guard", "1"]


def test_a_turn_is_for_memory_of_ones_own(tf32: None) -> None:
    """Warp groups cannot have in turn what each has fetched for itself."""
    problem, config = problem_of(warp_specialized.NAME, *warp_specialized.CASES["residual_of_a_batch"], prefetching)
    result = GluonSlots(problem, config).result_slot("C")
    assert isinstance(result, GluonResult)
    with pytest.raises(ValueError, match="cannot take the place of what is read"):
        result.writes("leaving", over=result.reads("held", 1)).in_turn("pass")


# ---- rendered once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["two_reads", "read behind a reduction"])
def test_everything_is_rendered_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = CASES[case]
    problem, config = problem_of(module.NAME, *module.CASES[name], prefetching)
    count = {"render": 0, "store": 0}
    render, store = slots.render, GluonSlots.store_tile

    def rendered(*args: Any) -> str:
        count["render"] += 1
        return render(*args)

    def stored(*args: Any) -> list[str]:
        count["store"] += 1
        return store(*args)

    monkeypatch.setattr(slots, "render", rendered)
    monkeypatch.setattr(GluonSlots, "store_tile", stored)
    render_template([problem], config, "kernel")
    assert count == {"render": 1, "store": 1}


# ---- what is linked -------------------------------------------------------------------------------------------------


def test_what_units_link_is_said_by_who_renders_them() -> None:
    linked = objects("float", "int8_t")
    assert len(linked) == len(set(linked)) == 5
    assert len(objects("float", "float")) == 3
    text = declaration("float", "int8_t")
    one, other = (Rendered(f"{text}\nvoid {name}();", (), (), frozenset(), objects=linked) for name in "fg")
    plain = Rendered(f"// {text}\nvoid h();", (), (), frozenset())
    both = unit._unit("k", [("f", "f", one), ("g", "g", other)])
    assert both.objects == linked
    assert unit._unit("k", [("h", "h", plain)]).objects == ()


def test_a_template_offers_each_configuration_once() -> None:
    """Stages beyond the steps of a sum make some of a table's rows equal: here k has one step, and tiles hold full rows."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x @ w, (1000,))

    given = torch.ones(64, 16), torch.ones(16, 1000)
    problem, _ = problem_of("triton_matmul", f, given, lambda configs: next(c for c in configs if c.BLOCK_N == 1024))
    offered, rows = list(problem.template.configs(problem)), list(problem.template.author.configs(problem))
    assert problem.whole
    assert len(offered) == len(set(offered)) < len(rows)


def test_axes_of_gpus_are_counted_in_32_bits() -> None:
    """Lengths that are constants are not passed as 64 bits: what is longer goes to the library."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(x @ w)

    options = Options(gpu_everywhere=True, only=Only("triton_matmul", lambda configs: configs[0]))
    w = torch.zeros(16, 16, dtype=torch.bfloat16)
    for length, calls in ((2**20, []), (2**31 + 2**20, ["aten.mm.default"])):
        x = torch.zeros(16, dtype=torch.bfloat16).expand(length, 16)
        plan = plan_of(capture(function, [x, w]), options)
        assert [str(call.node.target) for call in plan.calls] == calls
