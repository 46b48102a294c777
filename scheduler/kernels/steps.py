"""From fused groups to steps: kernels, and calls of libraries."""

from __future__ import annotations

import itertools
from dataclasses import replace

from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Kernel, Step
from kgen.scheduler.analysis.items import Group
from kgen.scheduler.analysis.memo import once
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.fusion.grouping import in_order
from kgen.scheduler.kernels.sections import make_kernel
from kgen.scheduler.options import Options
from kgen.verdict import Outcome, Reason, Verdict


def steps_of(fuser: Fuser, groups: list[Group], kept: frozenset[str], options: Options) -> list[Step]:
    """The steps of the fused groups in order, without those whose results nobody needs. `kept` are buffers that are memory
    whoever reads them."""
    steps = [_step(group, fuser, kept, options) for group in in_order(groups, fuser)]
    return [step for step in steps if not _is_dead(step)]


def _step(group: Group, fuser: Fuser, kept: frozenset[str], options: Options) -> Step:
    if group.call is not None:
        node = group.call
        call = ir.call_of(node)
        assert call is not None
        reason = Reason.LIBRARY if call is not node or len(call.origin.operators) > 1 else Reason.NO_LOWERING
        fuser.verdicts.append(Verdict(group.name, str(call.target), Outcome.EXTERN, reason, detail=call.reason))
        return Call(call)
    needed = frozenset(
        name for name in group.writes
        if name in kept or any(r is not group for r in fuser.readers.get(name, {}).values())
    )  # fmt: skip
    target = options.target(group.device)

    def made() -> tuple[Kernel, tuple[Verdict, ...]]:
        verdicts: list[Verdict] = []
        return make_kernel(group, fuser.sizes, needed, verdicts, target), tuple(verdicts)

    kernel, verdicts = once(("kernel", group.members, needed, target), made)
    fuser.verdicts += verdicts
    return kernel


def _is_dead(step: Step) -> bool:
    """Whether nobody reads what a kernel makes: a rule may store more than the graph then needs."""
    return isinstance(step, Kernel) and not any(any(s.stored) for s in step.statements)


def storage_shared(graph: ir.Graph) -> frozenset[str]:
    """Buffers whose storage has another name as well: memory whether or not anybody reads them by this one."""
    aliases = {b.name: b.alias_of for b in graph.buffers.values() if b.alias_of is not None}
    return frozenset((*aliases, *aliases.values()))


def distinct_names(steps: list[Step]) -> list[Step]:
    """Kernels with the same operators get a number, with which none has the name of another one."""
    taken: set[str] = set()
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Kernel):
            names = itertools.chain((step.name,), (f"{step.name}_{number}" for number in itertools.count(2)))
            name = next(name for name in names if name not in taken)
            step = step if name == step.name else replace(step, name=name)
            taken.add(step.name)
        out.append(step)
    return out


def local_buffers(steps: list[Step]) -> frozenset[str]:
    """Buffers that never become memory."""
    found: set[str] = set()
    for step in steps:
        if not isinstance(step, Call):
            for s in step.statements:
                found.update(o for o, stored in zip(s.outs, s.stored, strict=True) if not stored)
    return frozenset(found)
