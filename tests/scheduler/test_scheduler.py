"""Demands on fusion, the memory plan, equal layers, tiling, and that scheduling is deterministic."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgen import errors
from kgen.build.unit import UnitPlan, plan_units
from kgen.capture import rng
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Launch, Nest, Schedule
from kgen.only import Only
from kgen.rendered.kernel_call import Rendered
from kgen.scheduler import Options, choose_loops
from kgen.scheduler.analysis.memory import plan_memory, reads, writes
from kgen.scheduler.fusion.fuse import Fuser
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.kernels import plans
from tests.rendering import cpp_function

r = torch.randn


def units(schedule: Schedule) -> UnitPlan:
    def render(step: Launch, symbol: str) -> Rendered:
        return cpp_function(step, symbol, schedule.graph)

    return plan_units(schedule, render, 1)


def exp_then_max(x: Tensor) -> Tensor:
    return torch.exp(x).amax(-1) + 1


def test_demands_are_kept() -> None:
    forbid = Options(demands=(FusionDemand("aten.amax", "aten.add", False),))
    assert len(plans(exp_then_max, r(64, 64)).forward.kernels) == 1
    split = plans(exp_then_max, r(64, 64), options=forbid).forward
    assert len(split.kernels) == 2
    assert any(v.reason is Reason.FORBIDDEN for v in split.verdicts)
    require = Options(demands=(FusionDemand("aten.amax", "aten.add", True),))
    assert len(plans(exp_then_max, r(64, 64), options=require).forward.kernels) == 1


def test_a_demand_that_cannot_be_met_says_why() -> None:
    options = Options(demands=(FusionDemand("aten.tanh", "aten.mm", True),), templates=False)
    with pytest.raises(errors.FusionRequired, match=Reason.EXTERN_CALL.value):
        plans(lambda x: torch.tanh(x) @ x, r(8, 8), options=options)


def of_template(*demands: FusionDemand) -> Options:
    """All matmuls by a template, whatever it costs."""
    return Options(demands=demands, only=Only("cpp_matmul", lambda configs: configs[0]))


def operators(plan: Schedule) -> list[set[str]]:
    """The operators of each kernel."""
    return [{op.rpartition(".")[0] for o in k.origins for op in o.operators} for k in plan.kernels if isinstance(k, Kernel)]


def test_demands_on_operands_that_a_template_computes() -> None:
    """The operators of a prologue are in the matmul's kernel only."""

    def cheap(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x) @ w

    def costly(x: Tensor, w: Tensor) -> Tensor:
        return torch.lgamma(torch.lgamma(x)) @ w

    for f, operator, joined in ((cheap, "aten.relu", True), (costly, "aten.lgamma", False)):
        together, apart = [{operator, "aten.mm"}], [{operator}, {"aten.mm"}]
        freely = plans(f, r(32, 32), r(32, 32), options=of_template()).forward
        assert operators(freely) == (together if joined else apart)
        for wanted in (True, False):
            options = of_template(FusionDemand(operator, "aten.mm", wanted))
            plan = plans(f, r(32, 32), r(32, 32), options=options).forward
            assert operators(plan) == (together if wanted else apart)


def test_what_a_matmul_reads_is_made_before() -> None:
    """The loops of a column times one number are those of the column, and their points those of the operand."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.exp(x)
        return a, a @ w

    for rows in (1, 7):
        plan = plans(f, r(rows, 1), r(1, 1), options=of_template()).forward
        assert operators(plan) == [{"aten.exp"}, {"aten.mm"}]


def test_demands_come_before_templates() -> None:
    """The matmul's kernel would have the tanh, but with the running sum it must be."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ w)
        return y, y.cumsum(1)

    free = plans(f, r(32, 32), r(32, 32), options=of_template()).forward
    assert {"aten.mm", "aten.tanh"} in operators(free)
    asked = plans(f, r(32, 32), r(32, 32), options=of_template(FusionDemand("aten.tanh", "aten.cumsum", True))).forward
    assert operators(asked) == [{"aten.tanh", "aten.cumsum"}]


def test_memory_is_taken_over_in_place_and_recycled() -> None:
    """A chain broken by matmuls: each elementwise step writes over the matmul it reads."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(x @ w)
        return x

    plan = plans(f, r(64, 64), r(64, 64), options=Options(templates=False)).forward
    assert len(plan.kernels) == 4
    assert len(plan.reuses) >= 3


def test_matmuls_do_not_write_over_their_operands() -> None:
    """A tile of the result needs rows and columns that other tiles of the operand would write over."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(x @ w) + x
        return x

    plan = plans(f, r(64, 64), r(64, 64), options=of_template()).forward
    matmuls = [k for k in plan.kernels if isinstance(k, Kernel) and k.contracts]
    assert len(matmuls) == 4
    assert plan.reuses  # of what is dead before
    for kernel in matmuls:
        assert not {plan.reuses.get(name) for name in writes(kernel)} & reads(kernel)


def test_memory_is_taken_over_on_its_own_device_only() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.relu(x @ w)
        return x

    plan = plans(f, r(64, 64), r(64, 64), options=Options(templates=False)).forward
    buffers = plan.graph.buffers
    for k, step in enumerate(plan.kernels):  # every second one on a GPU
        for name in (name for s in step.statements for name in s.outs):
            buffers[name] = replace(buffers[name], device=torch.device("cuda:0" if k % 2 else "cpu"))
    for call in plan.calls:
        for name in call.node.outs:
            assert name is not None
            buffers[name] = replace(buffers[name], device=torch.device("cuda:0"))
    reuses = plan_memory(plan).reuses
    assert reuses
    assert all(buffers[new].device == buffers[old].device for new, old in reuses.items())


def test_dead_buffers_are_listed_where_they_die() -> None:
    plan = plans(lambda x, w: (torch.tanh(x @ w) @ w).sum(), r(8, 8), r(8, 8)).forward
    dead = [name for names in plan.dead_after for name in names]
    assert len(dead) == len(set(dead))
    outputs = {o.buffer for o in plan.graph.outputs}  # type: ignore[union-attr]
    assert outputs.isdisjoint(dead)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def scheduled(count: int) -> Schedule:
    """The forward of `count` layers, parameters as inputs."""
    model = Layers(count)
    names, values = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)

    def f(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    return plans(f, r(16, 32), *values).forward


def functions(plan: UnitPlan) -> int:
    return sum(unit.source.count('extern "C"') for unit in plan.sources)


def test_equal_layers_share_their_functions() -> None:
    few, many = (units(scheduled(n)) for n in (3, 12))
    assert functions(many) <= functions(few) + 1
    assert len(many.calls) > len(few.calls)


def test_names_do_not_enter_the_key() -> None:
    def one(apple: Tensor) -> Tensor:
        return torch.exp(apple) + 1

    def two(pear: Tensor) -> Tensor:
        return torch.exp(pear) + 1

    first, second = (units(plans(f, r(7, 9)).forward).sources for f in (one, two))
    assert [unit.key for unit in first] == [unit.key for unit in second]


def test_scheduling_is_deterministic() -> None:
    texts = [units(scheduled(2)).sources for _ in range(2)]
    assert texts[0] == texts[1]


def test_disagreeing_layouts_are_tiled() -> None:
    plan = plans(lambda x, y: x + y.t(), r(256, 256), r(256, 256)).forward
    nest = choose_loops(plan.kernels[0], plan.graph, Sizes({}), 64)
    assert nest.tile is not None
    assert nest.lanes == 16


def test_outer_reduction_runs_across_lanes() -> None:
    plan = plans(lambda x: x.sum(0), r(512, 256)).forward
    nest = choose_loops(plan.kernels[0], plan.graph, Sizes({}), 64)
    assert nest.vertical


def test_few_columns_that_are_read_again_are_lanes() -> None:
    """One thread that goes along memory is faster than several that gather."""
    plan = plans(lambda x: (x - x.mean(0)).square().mean(0), torch.empty(300001, 37)).forward
    [kernel] = [step for step in plan.kernels if step.sections > 1]
    nest = choose_loops(kernel, plan.graph, Sizes({}), 64)
    assert nest.vector in nest.kernel.outer


def test_few_long_rows_are_not_fused_with_a_second_pass() -> None:
    """One row of a million: fused, a single thread would have to do all of it."""
    plan = plans(lambda x: x - x.amax(-1, keepdim=True), r(1, 1 << 20)).forward
    assert any(v.outcome is Outcome.UNPROFITABLE and v.reason is Reason.PARALLELISM for v in plan.verdicts)


@pytest.mark.slow
def test_code_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Hash order must reach neither the text nor the plan: warm starts find kernels by their text."""
    script = tmp_path / "one.py"
    script.write_text(
        "import hashlib, torch\nfrom tests.scheduler.test_scheduler import scheduled, units\n"
        "plan = scheduled(2)\n"
        "text = repr(units(plan).sources) + repr(sorted(plan.reuses.items())) + repr(plan.dead_after)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(found) == 1


def mixed(count: int, seed: int) -> Callable[..., list[Tensor]]:
    """A random graph of pointwise work, reductions and matmuls over a few shapes."""

    def f(*inputs: Tensor) -> list[Tensor]:
        draw, live = random.Random(seed), list(inputs)
        for _ in range(count):
            a, b = (draw.choice(live[-12:]) for _ in range(2))
            kind = draw.random()
            if kind < 0.5:
                live.append(torch.tanh(a) * 2)
            elif kind < 0.7:
                live.append(torch.exp(a + b) if a.shape == b.shape else torch.exp(a))
            elif kind < 0.9:
                live.append(a - a.amax(-1, keepdim=True))
            else:
                live.append(a @ a.t() if a.shape[0] == a.shape[1] else a.sin())
        return live[-12:]

    return f


@pytest.mark.parametrize("seed", range(3))
def test_ranks_order_the_groups_after_every_merge(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge of groups that no path joins may still close a cycle through another merged group, unless the order of groups
    is kept up to date: found on a graph of ten thousand nodes."""
    merge = Fuser._merge

    def checked(self: Fuser, *args: Any) -> None:
        merge(self, *args)
        for serial, targets in self.after.items():
            source = self._by_serial.get(serial)
            assert source is None or all(source.rank < t.rank for t in targets)

    monkeypatch.setattr(Fuser, "_merge", checked)
    plan = plans(mixed(150, seed), r(32, 32), r(16, 32), r(32, 16)).forward
    assert len(plan.kernels) < 150


def test_wide_numbers_have_four_lanes_in_short_registers() -> None:
    plan = plans(lambda x: x * x + 1, torch.randn(1000, dtype=torch.float64)).forward
    assert choose_loops(plan.kernels[0], plan.graph, Sizes({}), 16).lanes == 4


def _nest(f: Callable[..., Any], *args: Tensor) -> Nest:
    plan = plans(f, *args).forward
    return choose_loops(plan.kernels[0], plan.graph, Sizes({}), 64)


@pytest.mark.parametrize(("kind", "lanes"), [("rand", 32), ("randbits", 16)])
def test_random_numbers_fill_a_register_of_blocks(kind: str, lanes: int) -> None:
    assert kind in rng.KINDS or kind == "randbits"
    dtype = rng.KINDS[kind]
    plan = plans(
        lambda seeds: torch.ops.kgen.rand([4096], seeds, 0, kind, dtype) + 1, torch.zeros(1, dtype=torch.int64)
    ).forward
    [kernel] = plan.kernels
    assert plan.graph is not None
    assert choose_loops(kernel, plan.graph, Sizes(plan.graph.size_hints), 64).lanes == lanes


def test_groups_of_neighbouring_channels_are_lanes() -> None:
    images = r(19, 64, 28, 28).contiguous(memory_format=torch.channels_last)
    nest = _nest(lambda x, w, b: F.group_norm(x, 8, w, b), images, r(64), r(64))
    assert nest.vertical
    assert nest.group == 8
    assert nest.vector is not None
    assert nest.vector.extent == 64


@pytest.mark.parametrize("register", [16, 32, 64])
def test_lanes_hold_whole_groups(register: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for images, channels, groups in ((2, 6, 3), (20, 64, 2), (9, 8, 4)):
            x = r(images, channels, 6, 6).to(dtype).contiguous(memory_format=torch.channels_last)
            plan = plans(lambda x, groups=groups: F.group_norm(x, groups), x).forward
            nest = choose_loops(plan.kernels[0], plan.graph, Sizes({}), register)
            assert nest.lanes >= 4
            assert nest.lanes % nest.group == 0


def test_short_rows_take_one_step() -> None:
    assert _nest(lambda x: x.softmax(1), r(100, 31)).one_step
    assert _nest(lambda x: x.softmax(1), r(100, 64)).lanes == 64
    assert not _nest(lambda x: x.softmax(1), r(100, 65)).one_step


def test_interleaved_addresses_split_the_loop() -> None:
    """x.repeat_interleave along the fast axis reads x at v // 4: along v' in v = 4 v' + r it is contiguous."""
    nest = _nest(lambda x: x[:, :, None].expand(64, 128, 4).reshape(64, 512) + 1, r(64, 128))
    assert nest.vector is not None
    assert all(ix.stride_of(e, nest.vector) is not None for s in nest.kernel.statements for e in s.store)
    loads = [load for s in nest.kernel.statements for load in vs.loads([s.value])]
    assert loads
    assert all(ix.stride_of(load.attr[1][0], nest.vector) is not None for load in loads)


@pytest.mark.parametrize(
    ("rows", "columns", "axis", "kernels"), [(4096, 1024, 0, 2), (64, 1024, 0, 1), (4096, 64, 0, 1), (4096, 1024, 1, 1)]
)
def test_long_columns_are_walked_once(rows: int, columns: int, axis: int, kernels: int) -> None:
    """Down a long column the first walk is out of cache when the second one begins; short columns, full rows and contiguous
    reductions lose nothing."""
    plan = plans(lambda x: x - x.mean(axis, keepdim=True), torch.zeros(rows, columns)).forward
    assert len(plan.kernels) == kernels
    assert any(v.reason is Reason.COLUMNS for v in plan.verdicts) == (kernels == 2)


@pytest.mark.parametrize("f", [lambda x: (x.softmax(1), x.sum(0)), lambda x: (x.sum(1), x.sum(0))])
def test_rows_and_columns_of_a_square_stay_apart(f: Callable[..., Any]) -> None:
    """Their loops are as long, but are at other elements: one kernel would read the square twice, once with strides."""
    square, oblong = (plans(f, r(n, 512)).forward for n in (512, 300))
    assert [[s.op for s in k.statements] for k in square.kernels] == [[s.op for s in k.statements] for k in oblong.kernels]


def _kept_and_stored(x: Tensor) -> tuple[Tensor, Tensor]:
    new = x.tanh()
    rows = x.softmax(-1)
    x.copy_(new)  # after the last use of x, so `new` crosses a section and cannot be computed again
    return rows, new[:5].t().contiguous().sum(-1)


def test_what_others_read_is_not_kept_in_a_row() -> None:
    for kernel in plans(_kept_and_stored, r(600, 33), options=Options(gpu_everywhere=True)).forward.kernels:
        assert isinstance(kernel, Kernel)
        stored = {o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept}
        assert stored.isdisjoint(kernel.rows)


@pytest.mark.interpret
def test_what_is_read_again_and_by_others_is_stored() -> None:
    x = r(600, 33)
    mine, theirs = x.clone(), x.clone()
    with torch.no_grad():
        got = torch.compile(_kept_and_stored, backend="kgen", options={"gpu_interpreter": True})(mine)
        torch.testing.assert_close((*got, mine), (*_kept_and_stored(theirs), theirs))


def test_a_kernel_that_nobody_reads_is_left_out():
    """Interpolation at the midpoint stores an index that it then does not need; a kernel without results has no device."""

    def midpoints(x: torch.Tensor) -> torch.Tensor:
        return torch.nanquantile(x, torch.tensor([0.03, 0.4]), dim=2, keepdim=True, interpolation="midpoint")

    x = torch.randn(3, 2, 1, 2)
    compiled = torch.compile(midpoints, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    torch.testing.assert_close(compiled(x), midpoints(x))
