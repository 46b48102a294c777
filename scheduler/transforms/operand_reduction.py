"""Sums of a matmul's operand over what the matmul is summed over, in the matmul's own kernel: the gradient of a linear
layer's bias, ``dy.sum(0)``, is a sum of the operand of ``dy.t() @ x``, whose kernel has every element of dy in hand.

Fusion leaves the two apart, for they cover different loops. Once it is done, a kernel that does nothing but such a sum, and
work on its results, is moved into that of the matmul, where that is at another place in the order without anybody seeing a
difference. Whether a template makes the sum, and whether that is faster than a kernel of its own, is decided with the template:
where not, the graph is scheduled anew with the sums of this matmul apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from kgen.cost import model
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement, Step
from kgen.scheduler.analysis.memory import has_hidden_effects, reads, root, writes
from kgen.scheduler.fusion.combo_kernels import forbids
from kgen.scheduler.protocol import Attempt, Candidate, Forming, Transform
from kgen.scheduler.selection.choose import Given, best, contraction_of, demanded, problems
from kgen.scheduler.transforms.column_reduction import placed
from kgen.scheduler.transforms.pricing import given_for
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# Loops of a kernel whose orders are all tried.
MAX_LOOPS = 4
# How much slower one kernel may look than two: estimates are no better, and one reads the operand once.
DOUBT = 1.05


OPERAND_REDUCTION = "operand reduction"


class OperandReduction(Transform):
    """Moves sums of a contraction's operand into its kernel."""

    name = OPERAND_REDUCTION

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        draft = forming.draft
        if not draft.options.horizontal_fusion:
            return steps
        apart = frozenset(draft.decisions.refused(self.name))
        return carry_sums(steps, Setting(draft.graph, apart, draft.options.demands, draft.options.stable), forming.verdicts)

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        if not operand_reductions(kernel):
            return {}
        out = contraction_of(kernel)
        device = attempt.options.device(attempt.graph, out)
        apart = why_apart(kernel, chosen, attempt.graph, device, given_for(attempt, out))
        return {} if apart is None else {Candidate(self.name, out): apart}

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (candidate.target,)


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides besides the steps: contractions whose sums were rejected before, the user's demands, and whether the
    order of additions may depend on the matmul's tile."""

    graph: ir.Graph
    apart: frozenset[str] = frozenset()
    demands: tuple[FusionDemand, ...] = ()
    stable: bool = False


def carry_sums(steps: Sequence[Step], setting: Setting, verdicts: list[Verdict]) -> list[Step]:
    """The steps with sums of operands moved into the kernels of matmuls."""
    entries: list[Step | None] = list(steps)
    matmuls: dict[str, list[int]] = {}
    for where, step in enumerate(steps):
        if isinstance(step, Kernel) and step.contracts:
            for name in reads(step):
                matmuls.setdefault(name, []).append(where)
    for at, step in enumerate(steps):
        if isinstance(step, Kernel) and _only_sums(step):
            candidates = sorted({where for name in reads(step) for where in matmuls.get(name, ())})
            _carry(entries, at, candidates, setting, verdicts)
    return [step for step in entries if step is not None]


def operand_reductions(kernel: Kernel) -> tuple[Statement, ...]:
    """The sums of operands in a matmul's kernel."""
    return tuple(s for s in kernel.statements if s.kind == "reduction") if kernel.contracts else ()


def without_sums(kernel: Kernel) -> Kernel:
    """The matmul's kernel as it was before."""
    made = {out for s in operand_reductions(kernel) for out in s.outs}
    kept: list[Statement] = []
    for s in kernel.statements:
        if s in operand_reductions(kernel) or any(load.attr[0] in made for load in vs.loads(s.roots)):
            made.update(s.outs)
        else:
            kept.append(s)
    return replace(kernel, statements=tuple(kept))


def why_apart(kernel: Kernel, chosen: Kernel | Verdict, graph: ir.Graph, device: Device, given: Given) -> Verdict | None:
    """Why the sums in a matmul's kernel are better off in kernels of their own, once it was `chosen` how to make it with them.
    Estimates decide: nothing has measured the matmul without them."""
    sums = operand_reductions(kernel)
    if not sums:
        return None
    out, names = contraction_of(kernel), ", ".join(s.outs[0] for s in sums)
    if isinstance(chosen, Verdict):
        if chosen.reason is Reason.NO_TEMPLATE:
            return Verdict(out, names, Outcome.ILLEGAL, Reason.NO_OPERAND_REDUCTION, detail=chosen.detail)
        return replace(chosen, consumer=names, outcome=Outcome.UNPROFITABLE)
    if given.only is not None or demanded(kernel, given.demands):
        return None
    with_them, alone = (problems(one, graph, device, None)[0] for one in (kernel, without_sums(kernel)))
    estimates = replace(given, tuning_results={})
    together, bare = best(with_them, estimates), best(alone, estimates)
    if together is None or bare is None:
        return None
    apart = bare.seconds + model.sums_seconds(together.problem)
    if together.seconds_of_template <= apart * DOUBT:
        return None
    times = (together.seconds_of_template * 1e6, apart * 1e6)
    return Verdict(out, names, Outcome.UNPROFITABLE, Reason.APART_FASTER, detail=str(bare.choice), measured=times)


def _carry(entries: list[Step | None], at: int, candidates: Iterable[int], setting: Setting, verdicts: list[Verdict]) -> None:
    """Moves the sums at a place into the first of the matmuls that may take them."""
    kernel = entries[at]
    assert isinstance(kernel, Kernel)
    for where in candidates:
        matmul = entries[where]
        assert isinstance(matmul, Kernel)
        moved = _over(matmul, kernel)
        if not moved or contraction_of(matmul) in setting.apart:
            continue
        reason = _refusal(entries, where, at, setting)
        if reason is None:
            origins = tuple(dict.fromkeys((*matmul.origins, *kernel.origins)))
            entries[where] = replace(matmul, statements=(*matmul.statements, *moved), origins=origins)
            entries[at] = None
            verdicts.append(
                Verdict(matmul.name, kernel.name, Outcome.FUSED, Reason.OPERAND_REDUCTION, _saved(matmul, kernel, setting))
            )
            return
        outcome = Outcome.UNPROFITABLE if reason in (Reason.FORBIDDEN, Reason.STABLE_ORDER) else Outcome.ILLEGAL
        verdicts.append(Verdict(matmul.name, kernel.name, outcome, reason))


def _saved(matmul: Kernel, kernel: Kernel, setting: Setting) -> int:
    """Bytes that are not read a second time."""
    sizes = Sizes(setting.graph.size_hints)
    return sum(sizes.bytes(setting.graph.buffers[name]) for name in reads(matmul) & reads(kernel))


def _only_sums(kernel: Kernel) -> bool:
    """Whether a kernel adds up one value, and otherwise makes new buffers of the sums, point by point."""
    if kernel.contracts or kernel.sections != 1 or kernel.rows or kernel.share is not None:
        return False
    sums = [s for s in kernel.statements if s.inner]
    if any(s.kind != "reduction" or s.op != "sum" for s in sums) or len({s.value for s in sums}) != 1:
        return False
    made = {out for s in sums for out in s.outs}
    for s in kernel.statements:
        if s.inner:
            continue
        if s.kind != "pointwise" or s.target is not None or made.isdisjoint(load.attr[0] for load in vs.loads(s.roots)):
            return False
        made.update(s.outs)
    return True


def _over(matmul: Kernel, kernel: Kernel) -> tuple[Statement, ...]:
    """The statements of a kernel of sums over the loops of a matmul one of whose operands is what they add up; none where
    that is not so."""
    value = next(s.value for s in kernel.statements if s.inner)
    mains = [s for s in matmul.statements if s.kind == "contraction" and s.op == "sum"]
    for operand in dict.fromkeys(v for s in mains for v in (s.value, *s.factors)):
        if operand.dtype != value.dtype or not operand.dtype.is_floating_point:
            continue
        own = tuple(v for v in matmul.outer if v in operand.variables())
        for mapping in _mappings(kernel, own, matmul.inner):
            if vs.substitute(value, mapping) is operand:
                return tuple(s.substituted(mapping) for s in kernel.statements)
    return ()


def _mappings(kernel: Kernel, own: tuple[Var, ...], summed: tuple[Var, ...]) -> Iterator[dict[Atom, Expr]]:
    """The loops of a kernel of sums in terms of those of an operand, in all orders."""
    if max(len(own), len(summed)) > MAX_LOOPS:
        return
    for inner in permutations(summed):
        down = placed(kernel.inner, inner)
        for outer in permutations(own) if down is not None else ():
            across = placed(kernel.outer, outer)
            if down is not None and across is not None:
                yield {**down, **across}


# ---- legality ---------------------------------------------------------------------------------------------------------


def _refusal(entries: Sequence[Step | None], where: int, at: int, setting: Setting) -> Reason | None:
    """Why the sums may not run where the matmul does."""
    matmul, kernel = entries[where], entries[at]
    assert isinstance(matmul, Kernel)
    assert isinstance(kernel, Kernel)
    if any(not d.wanted and forbids(d, matmul, kernel) for d in setting.demands):
        return Reason.FORBIDDEN
    if setting.stable:
        return Reason.STABLE_ORDER

    def roots(names: Iterable[str]) -> set[str]:
        return {root(setting.graph, name) for name in names}

    read, made = roots(reads(kernel)), roots(writes(kernel))
    first, last = sorted((where, at))
    for step in (matmul, *(step for step in entries[first + 1 : last] if step is not None)):
        written = roots(writes(step))
        if has_hidden_effects(step) or made & roots(reads(step)) or (at > where and read & written):
            return Reason.CYCLE
        if (read | made) & written:
            return Reason.MUTATION
    return None
