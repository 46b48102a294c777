"""Tensors that are joined of others, written slice by slice by the kernels that make what is joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import at_several_lengths, compiled, error, forced
from op_case import lowered
from torch import Tensor

import kgen
from kgen import errors
from kgen.build import triton
from kgen.ir import nodes as ir
from kgen.ir.plan import ComboKernel
from kgen.ir.verify import verify
from kgen.reference.evaluate import evaluate_graph
from kgen.report.traffic import bytes_minimal, bytes_moved, peak_memory
from kgen.scheduler import Options
from kgen.scheduler.protocol import Decisions
from kgen.scheduler.transforms.concat_split import with_concat_parts
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.verdict import Outcome, Reason
from tests.kernels import plans
from tests.scheduler.selection.test_safe_choices import planned
from tests.slow import slow_but

BACK_ENDS = {
    "cpp": pytest.param({"cache": False, "poison": True}, marks=pytest.mark.cpu, id="cpp"),
    "triton": pytest.param(
        {"cache": False, "poison": True, "gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"
    ),
}
bf = torch.bfloat16


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---- one kernel -------------------------------------------------------------------------------------------------------


def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x @ q, x @ k + b, F.gelu(x @ v)], -1)


def then(x: Tensor, *more: Tensor) -> Tensor:
    """What follows the cat point by point, over its whole width."""
    return torch.relu(qkv(x, *more[:-1]) * 2 + more[-1])


def heads(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A view of what is joined, in another order."""
    return torch.cat([x @ w, x @ v], -1).view(2, 35, 6, 8).transpose(1, 2).contiguous()


def viewed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(x @ w).view(2, 35, 4, 8), (x @ v).view(2, 35, 2, 8)], 2)


def rounded(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.cat([x @ w, x @ v], -1).to(bf)


def raw(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One matmul is a result of its own, too."""
    y = x @ w
    return y, torch.cat([y, x @ v], -1)


def also(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Points that are made of what is joined, which is a result, too."""
    y = torch.cat([F.gelu(x @ w), x @ v], -1)
    return y, y.relu() + 1


def padded(x: Tensor, w: Tensor) -> Tensor:
    return F.pad(x @ w, (3, 5))


def repeated(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.cat([y, y.relu()])


def mixed(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return torch.cat([x @ w, y, x @ v], -1)


def used(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return torch.cat([x @ w, x @ v], -1) @ u


def five(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([x @ w for w in weights], -1)


def norms(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cat([x.softmax(-1), F.layer_norm(y, (48,)), z], -1)


def gradients_of_chunks(x: Tensor, g: Tensor) -> Tensor:
    a, b, c = x.chunk(3, 1)
    v, w = torch.tanh(b * g) * b.exp(), torch.sin(c * g) * c.exp()
    total = (a + v + w).sum(1, keepdim=True)
    return torch.cat([a * total, v * g, w * g], 1)


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    args: tuple[Tensor, ...]
    kernels: int = 1
    kernels_of_gpu: int | None = None


W = (r(50, 96), r(50, 33), r(50, 31), r(33))
CASES = {
    "unequal widths": Case(qkv, (r(70, 50), *W)),
    "no columns, and one": Case(qkv, (r(70, 50), r(50, 0), r(50, 1), r(50, 33), r(1))),
    "three dimensions": Case(qkv, (r(2, 35, 50), *W)),
    "followed by points": Case(then, (r(70, 50), *W, r(160))),
    "a view, in another order": Case(heads, (r(70, 50), r(50, 32), r(50, 16))),
    "views": Case(viewed, (r(70, 50), r(50, 32), r(50, 16))),
    "rounded": Case(rounded, (r(70, 50), r(50, 32), r(50, 17))),
    "bfloat16": Case(qkv, tuple(t.to(bf) for t in (r(70, 64), r(64, 96), r(64, 32), r(64, 32), r(32)))),
    # the engine of C++ packs left operands once
    "rows": Case(lambda x, y, w: torch.cat([x @ w, y @ w]), (r(70, 50), r(33, 50), r(50, 40)), 2, 1),
    "a stack": Case(lambda x, w, v: torch.stack([x @ w, x @ v]), (r(70, 50), r(50, 40), r(50, 40) * 2)),
    "a stack in between": Case(lambda x, w, v: torch.stack([x @ w, x @ v], 1), (r(70, 50), r(50, 40), r(50, 40) * 2)),
    "a result too": Case(raw, (r(70, 50), r(50, 40), r(50, 33))),
    "points of the whole": Case(also, (r(70, 50), r(50, 40), r(50, 33))),
    "margins": Case(padded, (r(70, 50), r(50, 40)), 2),
    "one matmul twice": Case(repeated, (r(70, 50), r(50, 40))),
    "tensors among them": Case(mixed, (r(70, 50), r(50, 40), r(70, 7), r(50, 33)), 2),
    "used by a matmul": Case(used, (r(70, 50), r(50, 40), r(50, 24), r(64, 20)), 2),
    "five of them": Case(five, (r(70, 50), *(r(50, n) for n in (8, 7, 24, 9, 1)))),
    "parts of values": Case(gradients_of_chunks, (r(4, 30, 50), r(4, 1, 50))),
    "reductions": Case(norms, (r(70, 40), r(70, 48), r(70, 5)), 3),
}  # fmt: skip


def checked(case: Case, found: Any) -> None:
    wanted = case.fn(*(t.double() for t in case.args))
    for one, other in zip(_tuple(found), _tuple(wanted), strict=True):
        assert one.shape == other.shape
        assert error(one, other) < (1e-2 if one.dtype is bf else 1e-5)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


TELLING = ("unequal widths", "no columns, and one", "followed by points", "rows", "margins", "tensors among them", "reductions")


@pytest.mark.every(3)
@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", slow_but(lambda name: name in TELLING, CASES))
def test_each_kernel_stores_its_slice(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    kgen.coverage_reset()
    found = torch.compile(case.fn, backend="kgen", fullgraph=True, options=options)(*case.args)
    counts = kgen.coverage()
    wanted = case.kernels_of_gpu if case.kernels_of_gpu and "gpu_interpreter" in options else case.kernels
    assert (counts["kernels"], counts["extern_calls"]) == (wanted, 0)
    checked(case, found)


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_tiles"])
def test_each_template(template: str) -> None:
    """TMA stores slices that begin, and whose rows lie, at multiples of 16 bytes; the others go by pointers."""
    for widths in ((64, 32, 32), (64, 33, 31)):
        args = tuple(t.to(bf) for t in (r(72, 64), *(r(64, n) for n in widths), r(widths[1])))
        with forced(template) as made:
            found = compiled(qkv, *args)
        assert [len(made.matmuls), len(made.kernels)] == [1, 1]
        checked(Case(qkv, args), found)


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_sizes_of_the_call(options: dict[str, Any]) -> None:
    for x, found in at_several_lengths(qkv, W, options):
        checked(Case(qkv, (x, *W)), found)


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_slices_that_begin_where_the_call_says(options: dict[str, Any]) -> None:
    case = CASES["rows"]
    step = torch.compile(case.fn, backend="kgen", fullgraph=True, dynamic=True, options=options)
    for x, y in ((r(70, 50), r(33, 50)), (r(5, 50), r(64, 50)), (r(41, 50), r(2, 50))):
        kgen.coverage_reset()
        found = step(x, y, case.args[2])
        assert kgen.coverage()["kernels"] == ((1 if "gpu_interpreter" in options else 2) if len(x) == 70 else 0)
        checked(replace(case, args=(x, y, case.args[2])), found)


@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_gradients(options: dict[str, Any]) -> None:
    def gradients(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in args]
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad((out * out).sum(), leaves)]

    args = CASES["unequal widths"].args
    found = gradients(torch.compile(qkv, backend="kgen", fullgraph=True, options=options), args)
    wanted = gradients(qkv, tuple(t.double() for t in args))
    assert all(error(one, other) < 1e-5 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_many_tensors_take_one_pass(options: dict[str, Any]) -> None:
    """Nothing is filled before: the parts are all there is."""

    def many(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y, x * 2, y + 1, x[:0], x - 1, y.abs()])

    args = (r(9, 33), r(4, 33))
    kgen.coverage_reset()
    found = torch.compile(many, backend="kgen", fullgraph=True, options=options)(*args)
    assert kgen.coverage()["kernels"] == 1
    torch.testing.assert_close(found, many(*args))
    plan = plans(many, *args, options=Options()).forward
    assert bytes_moved(plan) == bytes_minimal(plan) == 4 * 33 * (9 + 4 + 3 * 9 + 3 * 4)
    assert peak_memory(plan) == 4 * 33 * 3 * (9 + 4)


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_what_is_joined_may_be_written_again_and_read_after(options: dict[str, Any]) -> None:
    def changed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([x, y, x + 1, y + 1, x + 2])
        total = whole.sum(0)
        whole[2:6] = y.abs()
        return whole, total + whole.amax(0)

    args = (r(9, 33), r(4, 33))
    found = torch.compile(changed, backend="kgen", fullgraph=True, options=options)(*args)
    for one, other in zip(found, changed(*args), strict=True):
        torch.testing.assert_close(one, other)


# ---- what is said, and counted ----------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_nothing_else_of_the_matmuls_size_moves() -> None:
    case = CASES["followed by points"]
    plan = plans(case.fn, *case.args, options=Options()).forward
    (step,) = plan.steps
    assert isinstance(step, ComboKernel)
    result = 4 * 70 * 160
    assert bytes_moved(plan) == bytes_minimal(plan) == sum(4 * t.numel() for t in case.args) + result
    assert peak_memory(plan) == result
    assert sum(v.reason is Reason.CONCAT_SPLIT and v.outcome is Outcome.FUSED for v in plan.verdicts) == 3
    part = extract_subgraph(plan.graph, step)
    assert part is not None
    verify(part, "subgraph")
    found = evaluate_graph(part, [case.args[[70 * 50, *(t.numel() for t in case.args[1:])].index(n)] for n in _read(part)])
    wanted = case.fn(*case.args).split([96, 33, 31], -1)
    assert all(error(one, other) < 1e-5 for one, other in zip(found, wanted, strict=True))


def _read(part: ir.Graph) -> list[int]:
    """Elements of each input, which tell them apart."""
    sizes = [part.buffers[one.buffer].sizes for one in part.inputs if one.buffer is not None]
    return [torch.Size(n.as_int() or 0 for n in own).numel() for own in sizes]


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_what_is_measured_computes_all_that_the_kernel_does() -> None:
    case = CASES["points of the whole"]
    plan = plans(case.fn, *case.args, options=Options()).forward
    (step,) = plan.kernels
    part = extract_subgraph(plan.graph, step)
    assert part is not None
    assert (len(part.inputs), len(part.outputs)) == (3, 4)
    found = evaluate_graph(verify(part, "subgraph"), case.args)
    names = [one.buffer for one in part.outputs if isinstance(one, ir.TensorArg)]
    found = [one for _, one in sorted(zip(names, found, strict=True), key=lambda pair: "cat" not in pair[0])]
    wanted = (run for whole in case.fn(*case.args) for run in whole.split([40, 33], -1))
    assert all(error(one, other) < 1e-5 for one, other in zip(found, wanted, strict=True))


@pytest.mark.cpu
def test_the_oracle_runs_nodes_in_slices() -> None:
    """Memory that no slice fills would be NaN."""
    args = CASES["followed by points"].args
    graph = lowered(then, args)
    taken = frozenset(out for node in graph.nodes if isinstance(node, ir.Contraction) for out in ir.outs(node))
    graph.nodes, refused = with_concat_parts(graph, taken, Decisions())
    assert not refused
    assert sum(graph.buffers[out].is_part for node in graph.nodes for out in ir.outs(node)) == 3
    (found,) = evaluate_graph(verify(graph, "slices"), args)
    assert error(found, then(*(t.double() for t in args))) < 1e-5


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_runs_of_a_few_neighbours_are_selected() -> None:
    def pairs(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.stack([x @ w, x @ v], -1)

    plan = plans(pairs, r(70, 50), r(50, 40), r(50, 40) * 2, options=Options()).forward
    assert len(plan.kernels) == 2
    assert [v.outcome for v in plan.verdicts if v.reason is Reason.SHORT_RUNS] == [Outcome.UNPROFITABLE] * 2


@pytest.mark.cpu
def test_library_results_are_selected() -> None:
    """Nothing else would write the slices: three copies instead of one."""
    case = CASES["unequal widths"]
    plan = plans(case.fn, *case.args, options=Options(templates=False)).forward
    assert len(plan.kernels) == 1
    assert not any(b.parts for b in plan.graph.buffers.values())


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_what_stays_in_registers_is_selected() -> None:
    def summed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x @ w, x @ v], -1).exp().sum()

    plan = plans(summed, r(70, 50), r(50, 40), r(50, 33), options=Options()).forward
    assert not any(b.parts for b in plan.graph.buffers.values())


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_forbidden() -> None:
    case = CASES["unequal widths"]
    with kgen.forbid_fused("aten.mm", "aten.cat"), kgen.forbid_fused("aten.addmm", "aten.cat"):
        report = kgen.explain(case.fn, *case.args, print_report=False)
    assert not any(v.reason is Reason.CONCAT_SPLIT for v in report.verdicts)
    assert any(v.reason is Reason.FORBIDDEN for v in report.verdicts)


# ---- rules ------------------------------------------------------------------------------------------------------------


def joined() -> ir.Graph:
    """Six tensors in one."""
    return lowered(lambda x: torch.cat([x + k for k in range(6)]), [r(3, 4)])


DAMAGE: dict[str, tuple[Callable[[ir.Graph], None], str]] = {
    "a part is missing": (lambda g: _parts(g, slice(5)), "is not filled by its parts"),
    "parts in another order": (lambda g: _parts(g, slice(None, None, -1)), "is not filled by its parts"),
    "read before all parts": (lambda g: g.nodes.pop(), "before it is defined"),
    "a part that is read": (lambda g: g.outputs.append(_part(g)), "a part of another buffer"),
    "a part of nothing": (lambda g: _parts(g, slice(0)), "is no part of"),
}


def _whole(g: ir.Graph) -> ir.Buffer:
    return next(b for b in g.buffers.values() if b.parts)


def _parts(g: ir.Graph, kept: slice) -> None:
    whole = _whole(g)
    g.buffers[whole.name] = replace(whole, parts=whole.parts[kept])


def _part(g: ir.Graph) -> ir.TensorArg:
    result = g.outputs[0]
    assert isinstance(result, ir.TensorArg)
    return replace(result, buffer=_whole(g).parts[0])


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str) -> None:
    damage, message = DAMAGE[name]
    g = joined()
    damage(g)
    with pytest.raises(errors.InvalidIR, match=message):
        verify(g, "damage")


# ---- on a GPU that is not here ----------------------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.parametrize(("template", "arch"), [("triton_matmul", 80), ("triton_matmul_tiles", 90)])
def test_compiles(template: str, arch: int) -> None:
    args = tuple(t.to(bf) for t in (r(256, 128), r(128, 256), r(128, 64), r(128, 64), r(64)))
    with forced(template, runs=False) as made:
        compiled(qkv, *args)
    (kernel,) = made.matmuls
    (done,) = triton.compile_kernels([kernel], arch)
    assert done.cubin


def test_parts_made_of_values_join_the_kernel_of_these() -> None:
    """Two parts that no reduction makes would be one node otherwise, for which the values of both were stored."""
    args = (torch.randn(8, 30, 1000), torch.randn(8, 1, 1000))
    plan = planned(gradients_of_chunks, *args, gpu=True)
    [kernel] = plan.kernels
    assert {
        ir.owner(plan.graph, out) for s in kernel.statements for out, stored in zip(s.outs, s.stored, strict=True) if stored
    } == {plan.graph.outputs[0].buffer}
