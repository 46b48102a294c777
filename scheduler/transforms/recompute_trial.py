"""Whether contractions had better be recomputed (`recompute.py`). Once a schedule is settled, those whose rows are
reduced and read again are tried: the graph is scheduled with them twice, and what that is estimated to take, or was measured
to, is compared with what it took before. Where nothing can be won there is no trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.cost import model
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Call, Kernel, Step, members
from kgen.scheduler.analysis.dependencies import needed
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of
from kgen.scheduler.transforms.offered import offered_for_rows
from kgen.scheduler.transforms.pricing import measured_or_estimated
from kgen.scheduler.transforms.recompute import (
    RECOMPUTE,
    Around,
    computations,
    recompute_candidates,
    recomputed,
    stored,
    with_recomputation,
)
from kgen.scheduler.transforms.split_k import leaves_idle
from kgen.scheduler.transforms.tile_partials import reduction_of
from kgen.verdict import Outcome, Reason, Verdict

# How much faster two computations have to be where they were measured, and where they are estimated: then a tile has little
# to multiply and much to do behind it, what estimates know least about. A masked softmax of 64 x 1024 x 1024 results of sums
# over 64 was estimated 1.3 times as fast recomputed, and took 1.1 to 1.5 times as long on an H200.
SURE, ESTIMATED = 1.1, 1.6


class Recompute(Transform):
    """Computes contractions twice where that is faster than to store them."""

    name = RECOMPUTE

    def apply(self, draft: Draft) -> None:
        draft.nodes = needed(draft.graph, draft.nodes)  # what is computed as a prologue has no reader any more
        again = recomputed(draft.decisions)
        if again:
            draft.nodes = with_recomputation(draft, again)
            draft.without_library |= computations(draft.graph, again).keys()

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        found = stored(attempt.plan, recomputed(attempt.decisions))
        return {Candidate(self.name, matmul): verdict for matmul, verdict in found.items()}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        matmul = computations(attempt.graph, recomputed(attempt.decisions)).get(contraction_of(kernel))
        if isinstance(chosen, Kernel) or matmul is None:
            return {}
        return {Candidate(self.name, matmul): replace(chosen, producer=matmul, outcome=Outcome.STORED)}

    def tried(self, attempt: Attempt) -> Changes:
        trial = _trial(attempt)
        settings = {Candidate(self.name, matmul): True for matmul in trial.around}
        return Changes(settings, {Candidate(self.name, one.producer): one for one in trial.refusals})

    def judged(self, attempt: Attempt, settled: Attempt) -> Mapping[Candidate, Verdict]:
        again = recomputed(attempt.decisions)
        found = judged(attempt, _trial(settled), again) if again else {}
        return {Candidate(self.name, matmul): verdict for matmul, verdict in found.items()}


@dataclass(frozen=True, slots=True)
class Trial:
    """The contractions that are tried, with their seconds in the settled plan, and why others are not."""

    around: Mapping[str, Around]
    seconds: Mapping[str, float]
    refusals: tuple[Verdict, ...]


def _trial(settled: Attempt) -> Trial:
    """`trial_of`, asked again by each attempt that is compared with the settled plan."""
    return memoised_for(settled, "trial", lambda: trial_of(settled))


def trial_of(settled: Attempt) -> Trial:
    """Those of the contractions that may be recomputed and could gain by it."""
    options, around, seconds = settled.options, dict[str, Around](), dict[str, float]()
    refusals: list[Verdict] = []
    wanted = options.fusion and options.recompute and options.only is None
    steps, faster = _Steps.of(settled.plan.steps if wanted else ()), _faster(options)
    for one in recompute_candidates(settled.draft, offered_for_rows(settled.graph, options)) if wanted else ():
        matmul = one.node.out
        if one.refusal is not None:
            refusals.append(one.refusal)
        elif not _is_settled(settled, one):
            now, least = _seconds(settled, one, steps), _least(settled, one)
            if least * faster < now:
                around[matmul], seconds[matmul] = one, now
            else:
                refusals.append(_dear(matmul, least, now))
    return Trial(around, seconds, tuple(refusals))


def _faster(options: Options) -> float:
    """How much faster what is tried has to be at least: without measurements, `judged` asks for more."""
    oracle = options.oracle
    return SURE if oracle is not None and options.only is None and oracle.is_worth_asking else ESTIMATED


def judged(attempt: Attempt, trial: Trial, again: frozenset[str]) -> dict[str, Verdict]:
    """Of the contractions that the plan recomputes, those for which that is slower. What is to be said of the others
    becomes a verdict of the plan."""
    refused: dict[str, Verdict] = {}
    steps = _Steps.of(attempt.plan.steps)
    for matmul in sorted(again):
        recomputing, storing = _seconds(attempt, trial.around[matmul], steps), trial.seconds[matmul]
        if recomputing * (SURE if _is_measured(attempt, trial.around[matmul], steps) else ESTIMATED) >= storing:
            refused[matmul] = _dear(matmul, recomputing, storing)
        else:
            times = (recomputing * 1e6, storing * 1e6)
            attempt.plan.verdicts.append(Verdict(matmul, "", Outcome.RECOMPUTED, Reason.RECOMPUTE_CHEAP, measured=times))
    return refused


def _dear(matmul: str, recomputing: float, storing: float) -> Verdict:
    return Verdict(matmul, "", Outcome.STORED, Reason.RECOMPUTE_DEAR, measured=(recomputing * 1e6, storing * 1e6))


def _is_settled(attempt: Attempt, around: Around) -> bool:
    """Whether a demand is about operators around the matmul, or it has few tiles and long sums, which other ways are for."""
    graph, demands = attempt.graph, attempt.options.demands
    of = [node for node in graph.nodes if around.names.intersection(ir.outs(node))] if demands else []
    calls = [call for node in of if not isinstance(node, ir.Extern) for call in node.origin.calls]
    if any(d.names(calls) for d in demands):
        return True
    node, device = around.node, attempt.options.device(graph, around.node.out)
    return leaves_idle(node.out_vars, node.reduced, Sizes(graph.size_hints), device)


def _least(attempt: Attempt, around: Around) -> float:
    """Seconds that two computations take at least, whatever they are computed by."""
    node, sizes = around.node, Sizes(attempt.graph.size_hints)
    device = attempt.options.device(attempt.graph, node.out)
    assert node.operands is not None
    flops = 2 * sizes.points((*node.out_vars, *node.reduced))
    return 2 * flops / device.rate(node.operands) + 3 * model.LAUNCH[device.kind]


def _seconds(attempt: Attempt, around: Around, steps: _Steps) -> float:
    """Seconds of the steps that make anything around a matmul, each of which waits for the one before."""
    device = attempt.options.device(attempt.graph, around.node.out)
    seconds = [_step(step, attempt, device) for step in steps.making(around.names)]
    return sum(seconds) + model.DRAIN * (len(seconds) - 1)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a plan, of which each candidate asks for a few: by what they make, as numbers."""

    steps: Sequence[Step]
    by_result: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Steps:
        found: dict[str, list[int]] = {}
        for k, step in enumerate(steps):
            for name in _made(step):
                found.setdefault(name, []).append(k)
        return cls(steps, found)

    def making(self, names: Iterable[str]) -> list[Step]:
        """Those that make any of the buffers, in order."""
        return [self.steps[k] for k in sorted({k for name in names for k in self.by_result.get(name, ())})]


def _is_measured(attempt: Attempt, around: Around, steps: _Steps) -> bool:
    """Whether it is known of both computations what they take."""
    made = [step for step in steps.making(around.names) if not isinstance(step, Call)]
    found = [measured_or_estimated(attempt, kernel) for step in made for kernel in members(step) if kernel.contracts]
    return all(best is not None and best.measured for best in found)


def _made(step: Step) -> set[str]:
    return set(ir.outs(step.node)) if isinstance(step, Call) else {out for s in step.statements for out in s.outs}


def _step(step: Step, attempt: Attempt, device: Device) -> float:
    graph = attempt.graph
    sizes, buffers = Sizes(graph.size_hints), graph.buffers
    streaming = sum(sizes.bytes(buffers[name]) for name in reads(step) | writes(step)) / device.bandwidth / model.STREAM_RATE
    if isinstance(step, Call):
        return _call(step, graph, streaming, device)
    matmuls = [measured_or_estimated(attempt, kernel) for kernel in members(step) if kernel.contracts]
    if matmuls:
        return sum(best.seconds_of_template for best in matmuls if best is not None)
    joins = any(reduction_of(graph, name) for name in reads(step))  # its launch is counted with the matmul
    return streaming + (0.0 if joins else model.LAUNCH[device.kind])


def _call(step: Call, graph: ir.Graph, streaming: float, device: Device) -> float:
    """Of the library's matmuls. What other calls take is unknown, and the same with all plans."""
    matmul = next((n for n in graph.nodes if ir.is_contraction(n) and n.out in ir.outs(step.node)), None)
    compute = 0.0
    if matmul is not None and matmul.operands is not None:
        flops = 2 * Sizes(graph.size_hints).points((*matmul.out_vars, *matmul.reduced))
        compute = flops / device.rate(matmul.operands) / model.LIBRARY_RATE[device.kind]
    return max(compute, streaming) + model.LAUNCH[device.kind]


__all__ = ["Recompute", "Trial", "judged", "trial_of"]
