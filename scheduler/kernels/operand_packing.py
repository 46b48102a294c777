"""Frozen operands of matmuls in the order in which a template reads them, made once: `pack_operands`.

After everything else: neither fusion nor the choice of templates (whose estimates know that packing costs nothing) changes by
it, and what is measured for tuning reads its operands as they lie. Matmuls with one operand in common have one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.plan import Call, ComboKernel, Kernel, Packing, Schedule
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates.cpp.codegen.packing import packing_of, why_not
from kgen.templates.problem import Problem
from kgen.verdict import Outcome, Reason, Verdict


def pack_operands(plan: Schedule, device: Callable[[str], Device]) -> None:
    """Changes the plan: matmuls read packed arrays, which become further inputs of the graph behind all others."""
    found: dict[Packing, str] = {}

    def packed(kernel: Kernel) -> Kernel:
        if kernel.choice is None:
            return kernel
        problem = chosen_problem(kernel, plan.graph, device(contraction_of(kernel)))
        made = tuple(_operands(problem, plan, found))
        return replace(kernel, packed=made)

    for k, step in enumerate(plan.steps):
        if isinstance(step, ComboKernel):
            plan.steps[k] = replace(step, members=tuple(map(packed, step.members)))
        elif not isinstance(step, Call):
            plan.steps[k] = packed(step)
    plan.packings = [replace(one, name=array) for one, array in found.items()]
    for one in plan.packings:
        kind = plan.graph.buffers[one.source].device
        sizes = (ix.as_expr(one.count),)
        plan.graph.buffers[one.name] = ir.Buffer(one.name, one.dtype, kind, sizes, (ix.ONE,), 0, "input")
        plan.graph.inputs.append(ir.GraphInput(one.name, static=True, frozen=True))


def _operands(problem: Problem, plan: Schedule, found: dict[Packing, str]) -> Iterator[tuple[str, int, str]]:
    """The operands of a kernel that are packed: name, number of the matmul, array."""
    for name, operand in problem.template.operands.items():
        for number in range(len(problem.members) if operand.many else 1):
            if not operand.packs or not problem.is_frozen(name, number):
                continue
            matmul, load = contraction_of(problem.kernel), problem.members[number][name].load
            assert load is not None
            source: str = load.attr[0]
            reason = why_not(problem, name, number)
            if reason is not None:
                verdict = Verdict(source, matmul, Outcome.NOT_PACKED, Reason.UNPACKED_BETTER, detail=reason)
            else:
                what = packing_of(problem, name, number)
                array = found.setdefault(what, ir.fresh(plan.graph, f"packed_{source}", found.values()))
                size = f"{what.count * what.dtype.itemsize:,} bytes"
                verdict = Verdict(source, matmul, Outcome.PACKED, Reason.FROZEN_OPERAND, detail=size)
                yield name, number, array
            plan.verdicts.append(verdict)
