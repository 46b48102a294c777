"""Whether products had better be computed twice (`recompute.py`). Once a schedule is settled, those whose rows are
reduced and read again are tried: the graph is scheduled with them twice, and what that is estimated to take, or was measured
to, is compared with what it took before. Where nothing can be won there is no trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Kernel, Schedule, Step, members
from kgen.ir.sizes import Sizes
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.selection.size_buckets import Best
from kgen.scheduler.transforms.recompute import Around, may_be_twice, second_of
from kgen.scheduler.transforms.split_k import leaves_idle
from kgen.scheduler.transforms.tile_partials import Tiles, reduction_of
from kgen.templates.problem import Device
from kgen.tuning import model
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# How much faster two computations have to be where they were measured, and where they are estimated: then a tile has little
# to multiply and much to do behind it, what estimates know least about. A masked softmax of 64 x 1024 x 1024 results of sums
# over 64 was estimated 1.3 times as fast computed twice, and took 1.1 to 1.5 times as long on an H200.
SURE, ESTIMATED = 1.1, 1.6


@dataclass(frozen=True, slots=True)
class Pricing:
    """What decides: `best` is the best to be had of a product's kernel, None where no template has it. What the user has said
    about the operators around a product stays as it is without a trial."""

    device: Callable[[str], Device]
    best: Callable[[Kernel], Best | None]
    demands: tuple[FusionDemand, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """The settled `plan` with its `buffers`, the products that are tried, with their seconds in that plan, and why others are
    not."""

    plan: Schedule
    buffers: Mapping[str, ir.Buffer]
    around: Mapping[str, Around]
    seconds: Mapping[str, float]
    refusals: tuple[Verdict, ...]

    def given_up(self) -> Schedule:
        """The plan, as it was."""
        self.plan.graph.buffers = dict(self.buffers)
        return self.plan


def trial_of(plan: Schedule, offered: Iterable[str], tiles: Tiles, pricing: Pricing) -> Trial:
    """Of the products in `offered`, those that may be computed twice and could gain by it."""
    around: dict[str, Around] = {}
    seconds: dict[str, float] = {}
    refusals: list[Verdict] = []
    for one in may_be_twice(plan.graph, offered, tiles):
        product = one.node.out
        if one.refusal is not None:
            refusals.append(one.refusal)
        elif not _is_settled(plan.graph, one, pricing):
            now, least = _seconds(plan, one, pricing), _least(plan.graph, one, pricing.device(product))
            if least * SURE < now:
                around[product], seconds[product] = one, now
            else:
                refusals.append(_dear(product, least, now))
    return Trial(plan, dict(plan.graph.buffers), around, seconds, tuple(refusals))


def judged(plan: Schedule, trial: Trial, tiles: Tiles, pricing: Pricing) -> dict[str, Verdict]:
    """Of the products that the plan computes twice, those for which that is slower, by the names of their refusals. What is to
    be said of the others becomes a verdict of the plan."""
    refused: dict[str, Verdict] = {}
    for product in sorted(tiles.twice):
        twice, once = _seconds(plan, trial.around[product], pricing), trial.seconds[product]
        if twice * (SURE if _is_measured(plan, trial.around[product], pricing) else ESTIMATED) >= once:
            refused[second_of(product)] = _dear(product, twice, once)
        else:
            times = (twice * 1e6, once * 1e6)
            plan.verdicts.append(Verdict(product, "", Outcome.RECOMPUTED, Reason.PRODUCT_CHEAP, measured=times))
    return refused


def _dear(product: str, twice: float, once: float) -> Verdict:
    return Verdict(product, "", Outcome.STORED, Reason.PRODUCT_DEAR, measured=(twice * 1e6, once * 1e6))


def _is_settled(graph: ir.Graph, around: Around, pricing: Pricing) -> bool:
    """Whether a demand is about operators around the product, or it has few tiles and long sums, which other ways are for."""
    nodes = [node for node in graph.nodes if around.names.intersection(ir.outs(node)) and not isinstance(node, ir.Extern)]
    operators = {part for node in nodes for op in node.origin.operators for part in (op, op.rpartition(".")[0])}
    if any(operators.intersection((d.producer, d.consumer)) for d in pricing.demands):
        return True
    node, device = around.node, pricing.device(around.node.out)
    return leaves_idle(node.out_vars, node.reduced, Sizes(graph.size_hints), device)


def _least(graph: ir.Graph, around: Around, device: Device) -> float:
    """Seconds that two computations take at least, whatever they are computed by."""
    node, sizes = around.node, Sizes(graph.size_hints)
    assert node.operands is not None
    flops = 2 * sizes.points((*node.out_vars, *node.reduced))
    return 2 * flops / device.rate(node.operands) + 3 * model.LAUNCH[device.kind]


def _seconds(plan: Schedule, around: Around, pricing: Pricing) -> float:
    """Seconds of the steps that make anything around a product, each of which waits for the one before."""
    device, names = pricing.device(around.node.out), around.names
    steps = [_step(step, plan, device, pricing) for step in plan.steps if names & _made(step)]
    return sum(steps) + model.DRAIN * (len(steps) - 1)


def _is_measured(plan: Schedule, around: Around, pricing: Pricing) -> bool:
    """Whether it is known of both computations what they take."""
    steps = [step for step in plan.steps if not isinstance(step, Call) and around.names & _made(step)]
    found = [pricing.best(kernel) for step in steps for kernel in members(step) if kernel.contracts]
    return all(best is not None and best.measured for best in found)


def _made(step: Step) -> set[str]:
    return set(ir.outs(step.node)) if isinstance(step, Call) else {out for s in step.statements for out in s.outs}


def _step(step: Step, plan: Schedule, device: Device, pricing: Pricing) -> float:
    sizes, buffers = Sizes(plan.graph.size_hints), plan.graph.buffers
    streaming = sum(sizes.bytes(buffers[name]) for name in reads(step) | writes(step)) / device.bandwidth / model.STREAM_RATE
    if isinstance(step, Call):
        return _call(step, plan.graph, streaming, device)
    products = [pricing.best(kernel) for kernel in members(step) if kernel.contracts]
    if products:
        return sum(best.seconds_of_template for best in products if best is not None)
    joins = any(reduction_of(plan.graph, name) for name in reads(step))  # its launch is counted with the product
    return streaming + (0.0 if joins else model.LAUNCH[device.kind])


def _call(step: Call, graph: ir.Graph, streaming: float, device: Device) -> float:
    """Of the library's products. What other calls take is unknown, and the same with all plans."""
    product = next((n for n in graph.nodes if isinstance(n, ir.Contraction) and n.out in ir.outs(step.node)), None)
    compute = 0.0
    if product is not None and product.operands is not None:
        flops = 2 * Sizes(graph.size_hints).points((*product.out_vars, *product.reduced))
        compute = flops / device.rate(product.operands) / model.LIBRARY_RATE[device.kind]
    return max(compute, streaming) + model.LAUNCH[device.kind]


__all__ = ["Pricing", "Trial", "judged", "trial_of"]
