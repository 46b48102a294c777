"""Matmuls that read one operand, as q, k and v do: one launch, or one call of an engine, in which each keeps its own sizes and
its own epilogue. Programs that read one buffer are one launch, too, as the gradients of queries and of keys are.

They share no results, so fusion leaves them apart. What one kernel saves is launches, and SMs that stand idle at the end
of each; on a CPU the operand is packed once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.cost import model
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import BySize, Choice, ComboKernel, Kernel, Schedule, Statement, Step
from kgen.only import Only
from kgen.scheduler.analysis.memory import LiveBytes, room_above
from kgen.scheduler.analysis.moves import Moves
from kgen.scheduler.fusion.combo_kernels import forbids
from kgen.scheduler.selection.choose import contraction_of, prepared
from kgen.scheduler.selection.memo import for_form, memoised_best, prices
from kgen.scheduler.selection.size_buckets import Best, Hints, Prices, choices_by_bucket
from kgen.templates import registry
from kgen.templates.base import Request
from kgen.templates.contract import Config, Template
from kgen.templates.problem import Problem, problem_of
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Joining:
    """What decides about grouped matmuls: `best` is the best to be had of a matmul alone, None where no template has it."""

    device: Callable[[str], Device]
    best: Callable[[Kernel], Best | None]
    demands: tuple[FusionDemand, ...] = ()
    only: Only | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """What kernels have as one: a choice, those by size, and the estimated seconds, 0 where one was asked for."""

    choice: Choice
    by_size: BySize | None
    seconds: float


# Small matmuls, one behind the other, among which those are looked for that need nothing of each other.
AT_ONCE = 32


def join(plan: Schedule, how: Joining) -> None:
    """Makes batches of matmuls, with their template, where that is faster than one by one, and needs no more memory."""
    found: dict[int, ComboKernel] = {}
    gone: set[int] = set()
    live = LiveBytes(plan.graph, plan.steps)
    most = room_above(live.peak)
    for shared in _sharing_an_operand(plan, how):
        group = _within_memory(plan, shared, live, most)
        kernels = [plan.steps[k] for k in group]
        if len(group) < 2:
            continue
        batch = _known([k for k in kernels if isinstance(k, Kernel)], plan.graph, how)
        if batch is not None:
            found[group[0]] = batch
            gone.update(group[1:])
            plan.verdicts += _verdicts(batch)
    plan.steps[:] = [found.get(k, step) for k, step in enumerate(plan.steps) if k not in gone]


def _within_memory(plan: Schedule, group: Sequence[int], live: LiveBytes, most: int) -> list[int]:
    """Those of a group whose results may wait in memory from the first one on, so that there are `most` bytes at no time."""
    first, kept = group[0], [group[0]]
    for k in group[1:]:
        step = plan.steps[k]
        assert isinstance(step, Kernel)
        if k < first:  # its results come later, and what it reads is read by the other one
            kept.append(k)
            continue
        if max(live.earlier(step, k, first), default=0) > most:
            other = plan.steps[first]
            assert isinstance(other, Kernel)
            plan.verdicts.append(Verdict(other.name, step.name, Outcome.UNPROFITABLE, Reason.MORE_MEMORY))
            continue
        live.move(step, k, first)
        kept.append(k)
    return kept


def _known(kernels: Sequence[Kernel], graph: ir.Graph, how: Joining) -> ComboKernel | None:
    """The kernels as one, where that is better."""
    found = _together(kernels, graph, how)
    return None if found is None else _batch(kernels, found.choice, found.by_size)


def _together(kernels: Sequence[Kernel], graph: ir.Graph, how: Joining) -> Together | None:
    """What they have as one: the same for all that are equal but for names, in whatever attempt."""
    return for_form(("grouped kernels", how.only), kernels, graph, lambda: _grouped(kernels, graph, how))


def _verdicts(batch: ComboKernel) -> Iterable[Verdict]:
    first, *others = batch.members
    for one in others:
        shared = set(_operands(first)) & set(_operands(one)) or not (_sums(first) or _sums(one))
        reason = Reason.SAME_OPERAND if shared else Reason.FEW_TILES
        yield Verdict(first.name, one.name, Outcome.BATCHED, reason)
    for one in batch.members:
        yield Verdict(contraction_of(one), "", Outcome.CHOSEN, Reason.TEMPLATE, detail=str(one.by_size or one.choice))


# ---- which ------------------------------------------------------------------------------------------------------------


def _sharing_an_operand(plan: Schedule, how: Joining) -> list[list[int]]:
    """Steps whose matmuls read one operand, or are small, and which may all run where the first of them does."""
    moves = Moves(plan.graph, plan.steps)
    groups = _partners(plan, moves, how)
    taken = {k for group in groups for k in group}
    known: dict[Hashable, list[int]] = {}
    for k, step in enumerate(plan.steps):
        if isinstance(step, Kernel) and step.contracts and k not in taken:
            for operand in _operands(step):
                known.setdefault(operand, []).append(k)
    for steps in known.values():
        _gather(moves, steps, how, groups, taken)
    small = _small(plan, how, taken)
    for begin in range(0, len(small), AT_ONCE):
        _gather(moves, small[begin : begin + AT_ONCE], how, groups, taken)
    return groups


def _partners(plan: Schedule, moves: Moves, how: Joining) -> list[list[int]]:
    """Steps with different programs, of which a template makes one with the others, where that is faster. They run in the place
    of the first of a group."""
    programs = {k: step for k, step in enumerate(plan.steps) if isinstance(step, Kernel) and step.contracts and not _sums(step)}
    if len(programs) < 2:
        return []
    kind = how.device(contraction_of(next(iter(programs.values())))).kind
    groups: list[list[int]] = []
    for template in sorted((t for t in registry.every(kind) if t.partner), key=lambda t: -t.most.grouped):
        for group in _of_template(template, programs):
            if any(k in other for other in groups for k in group):
                continue
            order = next((order for first in group if (order := _at(moves, first, group, how))), [])
            if order and _is_faster([programs[k] for k in order], plan.graph, how):
                groups.append(order)
    return groups


def _of_template(template: Template, programs: Mapping[int, Kernel]) -> Iterable[tuple[int, ...]]:
    """As many steps as a template makes at most, one of them its partner's, that read something in common; or two."""
    own, partners = (
        [k for k, kernel in programs.items() if _main(kernel).op == _key(one)]
        for one in (template, registry.find(template.partner))
    )
    for k in partners:
        near = [j for j in own if j != k and (template.most.grouped == 2 or _buffers(programs[j]) & _buffers(programs[k]))]
        yield from (tuple(sorted((k, *found))) for found in itertools.combinations(near, template.most.grouped - 1))


def _at(moves: Moves, place: int, group: Sequence[int], how: Joining) -> list[int]:
    """A group that runs in the place of one of its steps, that first; empty where it may not."""
    others = [k for k in group if k != place]
    may = all(_may_join(moves, k, place, how) if k > place else _may_wait(moves, k, place, how) for k in others)
    apart = all(moves.may_pass(j, k, k + 1) for k, j in itertools.combinations(sorted(others), 2))
    return [place, *others] if may and apart else []


def _is_faster(kernels: Sequence[Kernel], graph: ir.Graph, how: Joining) -> bool:
    """Whether kernels are faster as one than with one of them apart."""
    whole = _together(kernels, graph, how)
    if whole is None or len(kernels) == 2:
        return whole is not None
    for k, kernel in enumerate(kernels):
        rest, alone = _together([*kernels[:k], *kernels[k + 1 :]], graph, how), how.best(kernel)
        if rest is not None and alone is not None and rest.seconds + alone.seconds <= whole.seconds:
            return False
    return True


def _key(template: Template) -> str:
    return template.implements.operator


def _main(kernel: Kernel) -> Statement:
    """A kernel's first contraction."""
    return next(s for s in kernel.statements if s.kind == "contraction")


def _gather(moves: Moves, steps: Sequence[int], how: Joining, groups: list[list[int]], taken: set[int]) -> None:
    """Adds groups of steps to those that there are, as long as templates make them; what does not fit begins another one."""
    waiting = [k for k in steps if k not in taken]
    while len(waiting) > 1:
        group: list[int] = []
        for k in waiting:
            if _may_grow(moves, group, k, how):
                group.append(k)
        if len(group) > 1:
            groups.append(group)
            taken.update(group)
        waiting = [k for k in waiting[1:] if k not in taken]


def _small(plan: Schedule, how: Joining, taken: set[int]) -> list[int]:
    """Steps of a GPU whose matmuls have so few tiles that most SMs are idle, whatever they read; not those that
    nobody has measured, which the library has where it may."""
    found: list[int] = []
    for k, step in enumerate(plan.steps):
        if isinstance(step, Kernel) and step.contracts and k not in taken and _sums(step):
            device = how.device(contraction_of(step))
            best = how.best(step) if device.kind == "cuda" else None
            if (
                best is not None
                and not best.problem.uncalibrated
                and Sizes(plan.graph.size_hints).of(best.problem.programs(best.config)) <= device.compute_units // 2
            ):
                found.append(k)
    return found


def _operands(kernel: Kernel) -> list[Hashable]:
    """What a kernel's first matmul multiplies: equal where two matmuls read the same buffers on the same side. Equal programs
    may read one buffer on different sides."""
    matmul = _main(kernel)
    read = [frozenset(load.attr[0] for load in vs.loads([v])) for v in (matmul.value, *matmul.factors)]
    if not _sums(kernel):
        return [(kernel.target, matmul.op, name) for name in sorted(frozenset[str]().union(*read))]
    return [(kernel.target, k, names) for k, names in enumerate(read) if names]


def _buffers(kernel: Kernel) -> frozenset[str]:
    """What its first contraction reads."""
    matmul = _main(kernel)
    return frozenset(load.attr[0] for load in vs.loads([matmul.value, *matmul.factors]))


def _sums(kernel: Kernel) -> bool:
    """Whether a kernel's first contraction multiplies two operands, and is no program."""
    return _main(kernel).op == "sum"


def _may_grow(moves: Moves, group: Sequence[int], k: int, how: Joining) -> bool:
    """Whether step k may run with the group: some template makes so many in one launch."""
    step = moves.steps[k]
    assert isinstance(step, Kernel)
    kind = how.device(contraction_of(step)).kind
    refusal = registry.why_not(kind, Request(grouped=len(group) + 1))
    if refusal is not None or any(_is_forbidden(step, moves.steps[other], how) for other in group):
        return False
    return not group or _may_join(moves, k, min(group), how)  # who may run there may run at the times of the others


def _may_join(moves: Moves, k: int, first: int, how: Joining) -> bool:
    """Whether step k may run at the time of an earlier one."""
    return not _is_forbidden(moves.steps[k], moves.steps[first], how) and moves.may_pass(k, first, k)


def _may_wait(moves: Moves, k: int, last: int, how: Joining) -> bool:
    """Whether step k may run at the time of a later one."""
    return not _is_forbidden(moves.steps[k], moves.steps[last], how) and moves.may_pass(k, k + 1, last + 1)


def _is_forbidden(step: Step, other: Step, how: Joining) -> bool:
    assert isinstance(step, Kernel)
    assert isinstance(other, Kernel)
    return any(forbids(d, step, other) for d in how.demands if not d.wanted)


# ---- how --------------------------------------------------------------------------------------------------------------


def _grouped(kernels: Sequence[Kernel], graph: ir.Graph, how: Joining) -> Together | None:
    """What the matmuls have as one kernel, where a template makes them so and is estimated to be faster."""
    found = grouped_problems(kernels, graph, how.device(contraction_of(kernels[0])))
    if how.only is not None:
        choices = ((name, _configs(found.get(name, []))) for name in how.only.names)
        return next(
            (Together(Choice(name, how.only.pick(configs).values), None, 0.0) for name, configs in choices if configs), None
        )
    alone = [how.best(kernel) for kernel in kernels]
    others = any(one and (one.seconds_of_library < math.inf or one.problem.uncalibrated is None) for one in alone)
    together = _best({name: problems for name, problems in found.items() if not _is_unmeasured(problems, others)})
    if together is None or any(one is None or _is_left_to_the_library(one) for one in alone):
        return None
    faster = together.seconds < sum(one.seconds for one in alone if one is not None)
    return Together(together.choice, together.by_size, together.seconds) if faster else None


def _is_left_to_the_library(alone: Best) -> bool:
    """Whether nobody has measured what a library call, or separate kernels, would compute as well."""
    return alone.seconds_of_library < math.inf and alone.is_unmeasured


def _is_unmeasured(problems: Sequence[Problem], others: bool) -> bool:
    """Whether nobody has measured all of the problems, where `others` compute some of them as well, or where a template would
    make others' problems with its own."""
    several = len({problem.template.name for problem in problems}) > 1
    return (others or several) and any(problem.uncalibrated for problem in problems)


def grouped_problems(kernels: Sequence[Kernel], graph: ir.Graph, device: Device) -> dict[str, list[Problem]]:
    """How each template that could make them one kernel sees the matmuls."""
    ready = [prepared(kernel, graph) for kernel in kernels]
    may = [t for t in registry.every(device.kind) if t.most.grouped >= len(ready)]
    found = {t.name: _problems(t, ready, graph, device) for t in may}
    return {name: problems for name, problems in found.items() if problems}


def _best(found: Mapping[str, Sequence[Problem]]) -> Best | None:
    """The best kernel for all of the matmuls, by the templates that see them as these problems."""

    def at(name: str, hints: Hints) -> list[Problem]:
        return [problem.at(hints) for problem in found[name]]

    def here(hints: Hints) -> Best | None:
        seen = [(problems, *row) for name in found for problems in (at(name, hints),) for row in _priced(problems)]
        priced = [(model.grouped_seconds(problems, config, alone), k) for k, (problems, config, alone) in enumerate(seen)]
        if not priced:
            return None
        seconds, k = min(priced)
        return Best(seen[k][0][0], seen[k][1], seconds, math.inf)

    def seconds(choice: Choice, hints: Hints) -> float:
        problems = at(choice.template, hints)
        config = problems[0].template.config(**dict(choice.config))
        fits = all(model.fits(problem, config) for problem in problems)
        return model.grouped_seconds(problems, config) if fits else math.inf

    first = next(iter(found.values()), ())
    everything = [problem for problems in found.values() for problem in problems]
    return memoised_best(everything, False, lambda: choices_by_bucket(first, Prices(here, seconds)))


def _batch(kernels: Sequence[Kernel], choice: Choice, by_size: BySize | None) -> ComboKernel:
    """The kernels of the template's own problems come first: its configuration is that of all."""
    template = registry.find(choice.template)
    chosen = [(kernel, _choice_of(kernel, choice, template)) for kernel in kernels]
    chosen.sort(key=lambda one: one[1].template != template.name)
    members = tuple(replace(kernel, choice=own, by_size=by_size) for kernel, own in chosen)
    return ComboKernel(f"{kernels[0].name}_and_{len(kernels) - 1}_more", members)


def _choice_of(kernel: Kernel, choice: Choice, template: Template) -> Choice:
    """Of a kernel that the template's partner sees, with as many of the knobs as that has."""
    if not template.partner or _main(kernel).op == _key(template):
        return choice
    partner = registry.find(template.partner)
    return Choice(partner.name, _suited(partner, Config(choice.config)).values)


def _suited(template: Template, config: Config) -> Config:
    return Config(tuple((name, value) for name, value in config.values if name in template.knobs))


def _problems(template: Template, kernels: Sequence[Kernel], graph: ir.Graph, device: Device) -> list[Problem]:
    """The kernels as the template sees them, or its partner, its own first; none where one of these refuses, or needs in common
    what they have not."""
    found: list[Problem] = []
    for kernel in kernels:
        problem = _seen(template, kernel, graph, device)
        if problem is None:
            return []
        found.append(problem)
    found.sort(key=lambda problem: problem.template is not template)
    if any(problem.template is not template for problem in found):
        return found if found[0].template is template and template.author.refuse_grouped(found) is None else []
    common = [name for name, one in template.operands.items() if not one.many]
    if template.joins == "parts" and any(problem.operand_reductions for problem in found):
        return []  # sums belong to one of the parts
    if template.joins == "parts" and any(len({p.inputs[name].identity for p in found}) > 1 for name in common):
        return []
    return found if template.author.refuse_grouped(found) is None else []


def _seen(template: Template, kernel: Kernel, graph: ir.Graph, device: Device) -> Problem | None:
    """A kernel as a template, or its partner, sees it."""
    for one in (template, *([registry.find(template.partner)] if template.partner else [])):
        problem = problem_of(one, kernel, graph, device)
        if not isinstance(problem, str) and one.refuse(problem) is None:
            return problem
    return None


def _configs(problems: Sequence[Problem]) -> list[Config]:
    """Configurations that suit all of the problems: those of the largest one."""
    return [config for config, _ in _priced(problems)]


def _priced(problems: Sequence[Problem]) -> list[tuple[Config, list[float]]]:
    """Those, with the seconds of each problem alone."""
    if not problems:
        return []
    largest = max(problems, key=lambda p: p.flops)
    tables = [dict(prices(problem)) for problem in problems]
    rows = []
    for config, _ in prices(largest):
        if not _fit_together(problems, config):
            continue
        alone = [_seconds(problem, config, known) for problem, known in zip(problems, tables, strict=True)]
        if None not in alone:
            rows.append((config, [seconds for seconds in alone if seconds is not None]))
    return rows


def _fit_together(problems: Sequence[Problem], config: Config) -> bool:
    """Whether the device can run a program that makes them all, where that needs more than each of them."""
    needs, device = problems[0].template.author.resources_of_parts(problems, config), problems[0].device
    return needs is None or (needs.shared <= device.shared and needs.registers <= device.registers)


def _seconds(problem: Problem, config: Config, known: Mapping[Config, float]) -> float | None:
    """The seconds of a problem, None where the configuration does not suit it. Most are known, for nobody joins what was not
    looked at by itself; but a template may offer a small problem fewer configurations."""
    config = _suited(problem.template, config)
    if config in known:
        return known[config]
    return model.seconds(problem, config) if model.fits(problem, config) else None
