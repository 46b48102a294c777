"""Matmuls with few tiles and long sums: the sum is cut into parts, which the matmul has as one more batch, and a generated
reduction adds the parts up, with the epilogue. Two launches, and always the same order of addition.

    out[m, n] = f(sum over k of a[m, k] b[k, n])
    part[p, m, n] = sum over j of a[m, p*chunk + j] b[p*chunk + j, n];  out[m, n] = f(sum over p of part[p, m, n])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kgen.cost import model
from kgen.cost.tuning_query import place
from kgen.device import Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel
from kgen.scheduler.analysis.items import finished
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Decisions, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of, least_seconds, problems
from kgen.scheduler.selection.memo import for_form, prices
from kgen.scheduler.transforms.accumulators import make_accumulators
from kgen.templates.problem import Problem

# Elements of tiles that keep an SM busy, the largest first; the shortest sum that is worth a program of its own. Smaller
# tiles read operands more often, from the L2 cache, and leave fewer parts to be added up.
TILES, CHUNK = (128 * 128, 64 * 128, 64 * 64), 512
# Parts of a sum begin at multiples of so many terms: rows of 128 bytes, as TMA loads them, of 16-bit numbers.
ROUND = 64
# How much faster parts have to be by their estimate: two of ConvNeXt's gradients at 56 x 56, with 1.08, were to take 32 us and
# took 34 and 42, the library's 31 and 33 (H200, 2026-11-30, bench.regret --kernels). 256 x 32768 x 256, with 1.11, takes 14 us
# and the library's 15.5 (docs/decisions/0010-gpu-matmul-results.md).
DOUBT_OF_PARTS = 1.09


SPLIT_K = "split-K"
# The role of a contraction that is a part of another one (output split): its sum stays whole.
SPLIT_OUTPUT = "piece"


def parts_by_result(decisions: Decisions) -> dict[str, int]:
    """Into how many parts the sums of contractions are split; 1: they were asked, and stay whole."""
    return decisions.settled(SPLIT_K, int)


class SplitK(Transform):
    """Splits long sums of few tiles into parts."""

    name = SPLIT_K

    def apply(self, draft: Draft) -> None:
        wanted = {out: parts for out, parts in parts_by_result(draft.decisions).items() if parts > 1}
        if wanted:
            draft.nodes = [one for node in draft.nodes for one in _split(draft, node, wanted)]

    def settle(self, attempt: Attempt) -> Changes:
        """Contractions that were not asked yet, where some are worth splitting."""
        found = {Candidate(self.name, out): parts for out, parts in _best_parts(attempt)}
        return Changes(found) if any(parts > 1 for parts in found.values()) else Changes()


def _split(draft: Draft, node: ir.Node, wanted: Mapping[str, int]) -> Sequence[ir.Node]:
    if not ir.is_contraction(node) or node.vendor is not None or node.out not in wanted:
        return (node,)
    partial, joining = cut(draft.graph, node, wanted[node.out])
    make_accumulators(draft.graph, partial)
    draft.measured_as[partial.out] = node.out
    draft.without_library.add(partial.out)
    draft.asked.add(partial.out)
    return (partial, *joining)


def _best_parts(attempt: Attempt) -> Iterator[tuple[str, int]]:
    plan, options = attempt.plan, attempt.options
    sizes, known = Sizes(plan.graph.size_hints), parts_by_result(attempt.decisions)
    for kernel in (step for step in plan.steps if isinstance(step, Kernel) and step.contracts):
        out = contraction_of(kernel)
        device = options.device(plan.graph, out)
        whole = out not in known and out not in attempt.draft.measured_as and whole_of(plan.graph, out) == out
        if not whole or not may_cut(kernel, sizes, device):
            continue
        tuning_result = attempt.tuning_results.get(out, {}).get(place({}))
        if options.only is not None:
            yield out, options.only.parts
        elif options.stable:  # a rule of the sizes and the machine
            yield out, next(iter(possible_parts(problems(kernel, plan.graph, device, None)[0], kernel)), 1)
        else:
            yield out, _estimated_parts(kernel, plan.graph, device) if tuning_result is None else tuning_result.parts


def _estimated_parts(kernel: Kernel, graph: ir.Graph, device: Device) -> int:
    """`parts_of` a kernel, the same for those that are equal but for names."""
    return for_form(("parts", device), [kernel], graph, lambda: parts_of(problems(kernel, graph, device, None)[0], kernel))


def whole_of(graph: ir.Graph, name: str) -> str:
    """The contraction of which a buffer is a part, or the buffer."""
    return ir.source_in(graph, name, SPLIT_OUTPUT) or name


def partial_of(graph: ir.Graph, out: str) -> str:
    """The buffer of a matmul's parts."""
    return ir.derived(graph, ir.Derived(out, "cut"))


def may_cut(kernel: Kernel, sizes: Sizes, device: Device) -> bool:
    """Whether a matmul leaves SMs idle while its sums are long. Sums over several loops, those of a length that only
    the call knows, and what operators make of their operands, stay whole."""
    if any(s.kind == "contraction" and s.op != "sum" for s in kernel.statements):
        return False
    single = len(kernel.inner) == 1 and kernel.inner[0].extent.as_int() is not None
    return single and leaves_idle(kernel.outer, kernel.inner, sizes, device)


def leaves_idle(outer: Iterable[Var], inner: Iterable[Var], sizes: Sizes, device: Device) -> bool:
    """Whether a matmul with such loops has few tiles and long sums."""
    tiles = -(-sizes.points(outer) // TILES[0])
    return device.kind == "cuda" and 2 * tiles <= device.compute_units and sizes.points(inner) >= 2 * CHUNK


def parts_of(problems: list[Problem], kernel: Kernel) -> int:
    """Into how many parts it is best to cut the sum of a kernel that may be cut, by the cost model; 1: leave it whole. No
    library makes parts: of what no estimate was compared with measurements there are none."""
    possible = possible_parts(problems, kernel)
    takers = [p for p in problems if p.template.implements.batch]
    if not possible or all(p.uncalibrated for p in takers):
        return 1
    whole = least_seconds(takers, vendor=True)
    seconds, parts = min((max(model.cut_seconds(takers[0], n, tile), _own(takers, n)), n) for n, tile in possible.items())
    return parts if seconds * DOUBT_OF_PARTS < whole else 1


def _own(takers: Iterable[Problem], parts: int) -> float:
    """The time of the best template at so many parts. Each does as much of the work as it has of the sum, what its operands
    cost there included, but all of them together no more of it at a time than there are idle SMs to take it."""
    found = math.inf
    for problem in (p for p in takers if not p.uncalibrated):
        for config, seconds in prices(problem):
            idle = problem.device.compute_units / max(1, problem.sizes.of(problem.blocks(config)))
            found = min(found, seconds / min(parts, max(1.0, idle)))
    return found


def possible_parts(problems: list[Problem], kernel: Kernel) -> dict[int, int]:
    """Into how many parts the sum of a kernel may be cut for templates that take batches, and the elements of the tile with
    which so many parts keep the SMs busy; those for large tiles first."""
    problems = [p for p in problems if p.template.implements.batch]
    if not problems or any(s.kind == "partial" for s in kernel.statements) or len(problems[0].members) > 1:
        return {}
    problem, sizes = problems[0], problems[0].sizes
    length = kernel.inner[0].extent.as_int()
    assert length is not None
    found: dict[int, int] = {}
    for tile in TILES:
        wanted = min(problem.device.compute_units // max(1, sizes.points(kernel.outer) // tile), length // CHUNK)
        parts = next((n for n in range(wanted, 1, -1) if length % n == 0 and length // n % ROUND == 0), 1)
        if parts > 1:
            found.setdefault(parts, tile)
    return found


def cut(graph: ir.Graph, node: ir.Contraction, parts: int) -> tuple[ir.Contraction, list[ir.Node]]:
    """The matmul of the parts; their sum, and what is left to do for the result. Buffers are added to the graph."""
    assert node.operands is not None
    chunk = ix.floordiv(math.prod((k.extent for k in node.reduced), start=ix.ONE), parts)
    part, step = ix.var("part", parts), ix.var("k", chunk)
    place = unrolled(node.reduced, part.expr() * chunk + step.expr())
    kind, name = ops.sum_dtype(node.operands), partial_of(graph, node.out)
    total = ir.derived(graph, ir.Derived(node.out, "total"))
    whole = graph.buffers[node.out]
    sizes = (ix.constant(parts), *whole.sizes)
    graph.buffers[name] = ir.Buffer(name, kind, whole.device, sizes, ix.contiguous_strides(sizes))
    graph.buffers[total] = ir.Buffer(total, kind, whole.device, whole.sizes, whole.strides)
    lhs, rhs = (vs.substitute(v, place) for v in (node.lhs, node.rhs))
    matmul = replace(
        node, out=name, out_vars=(part, *node.out_vars), reduced=(step,), lhs=lhs, rhs=rhs, scale=None, addend=None, stored=(),
        rounded=None,
    )  # fmt: skip
    row = tuple(v.expr() for v in node.out_vars)
    sums = ir.Reduction((total,), node.out_vars, (part,), "sum", vs.load(name, (part.expr(), *row), kind), node.origin)
    value = vs.cast(finished(node, vs.load(total, row, kind)), ops.compute_dtype(whole.dtype))
    return matmul, [sums, ir.Pointwise(node.out, node.out_vars, value, node.origin)]


def unrolled(loops: Sequence[Var], at: Expr) -> dict[Atom, Expr]:
    """The loops at a point of one that walks through them all, the last one fastest. A kernel that is cut has one loop for its
    sum; the matmul may have more, such as the taps of a 1x1 window."""
    place: dict[Atom, Expr] = {}
    for loop in reversed(loops):
        place[loop] = ix.mod(at, loop.extent) if len(place) < len(loops) - 1 else at
        at = ix.floordiv(at, loop.extent)
    return place
