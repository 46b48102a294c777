"""Where programs end: at a contraction, or at a sum, which is a contraction with the number 1.

    bias[h, m, n] = sum over b of f(scores[b, h, m, n], ...)          a contraction over b with 1
    slope[h] = sum over b, m, n of f(scores[b, h, m, n], ...)         row[b, h, m] = sum over n, then slope[h] = sum over b, m
    total = sum over m, n of g[m, n] * (sum over b of f(...))         sum over m, n, b of g[m, n] * f(...)

A kernel of a program adds up along one loop of rows or columns. What a sum goes over besides is added up by a node of its own,
of one number for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.program import Contract, Elementwise, Program
from kgen.ir.values import Value
from kgen.scheduler.transforms.graph_reader import Reader

ROW = "row"
# Types of sums of which the loops may be split: the parts are in float32.
SPLIT = (torch.float32, torch.float16, torch.bfloat16)
# Sums between a sum and what they add up that are looked through.
MOST_SUMS = 2


@dataclass(frozen=True, slots=True)
class SplitSum:
    """The node that adds up what a program has made of each row, and the buffer of these sums."""

    rest: ir.Reduction
    buffer: ir.Buffer


@dataclass(frozen=True, slots=True)
class End:
    """What the last step of a program may be: a contraction, which `node` means. Where `split`, that is a part of a sum."""

    contraction: ir.Contraction
    node: ir.Contraction | ir.Reduction
    split: SplitSum | None = None

    @property
    def out(self) -> str:
        """What the node makes whose place a program takes."""
        return ir.outs(self.node)[0] if self.split is None else self.split.rest.outs[0]

    @property
    def is_sum(self) -> bool:
        return isinstance(self.node, ir.Reduction)


def adding_up(programs: Iterable[Program]) -> list[Program]:
    """The programs that may end in a sum: of a function of several contractions. Sums of one are reduced on its tiles. Those
    that do nothing but add up come last."""
    found = [one for one in programs if _adds_up(one)]
    return sorted(found, key=_is_plain_sum)


def _adds_up(program: Program) -> bool:
    last = program.steps[-1]
    before = program.step(last.left) if isinstance(last, Contract) and isinstance(last.left, str) else None
    return isinstance(before, Elementwise) and len(before.of) > 1


def _is_plain_sum(program: Program) -> bool:
    """Whether what the last step multiplies by has no axis that its other factor lacks."""
    last = program.steps[-1]
    assert isinstance(last, Contract)
    return set(program.axes_of(last.right)) <= set(program.axes_of(last.left))


def ends_of(graph: ir.Graph, reader: Reader, node: ir.Reduction, program: Program) -> Iterator[End]:
    """The sums that a node means, as contractions with 1: of all loops, or of one of them, from the longest on."""
    if node.op != "sum" or not node.value.dtype.is_floating_point:
        return
    node = _of_elements(reader, node)
    if not _reads_contractions(reader, node.value):
        return
    yield End(_contraction(node), node)
    if len(node.rvars) > 1 and graph.buffers[node.outs[0]].dtype in SPLIT and not _is_plain_sum(program):
        for loop in sorted(node.rvars[::-1], key=lambda v: -(v.extent.as_int() or 0)):
            yield _split(graph, node, loop)


def _reads_contractions(reader: Reader, value: Value) -> bool:
    """Whether a value depends on several contractions element by element."""
    makers = {load.attr[0]: reader.makers.get(load.attr[0]) for load in vs.loads([reader.inlined(value)])}
    return sum(node is not None and ir.is_contraction(node) for node in makers.values()) > 1


# ---- sums of sums -----------------------------------------------------------------------------------------------------


def _of_elements(reader: Reader, node: ir.Reduction) -> ir.Reduction:
    """The sum without sums between it and the elements that these add up."""
    for _ in range(MOST_SUMS):
        value = reader.inlined(node.value)
        sums = [load for load in vs.loads([value]) if _is_sum(reader.makers.get(load.attr[0])) and not load.args]
        made = (_through(reader, node, value, load) for load in sums)
        node = next((one for one in made if one is not None), node)
    return node


def _is_sum(node: ir.Node | None) -> bool:
    return isinstance(node, ir.Reduction) and node.op == "sum"


def _through(reader: Reader, node: ir.Reduction, value: Value, load: Value) -> ir.Reduction | None:
    """The sum with the elements of an inner one in the place of its result; None where it is no multiple of that."""
    inner = reader.makers[load.attr[0]]
    assert isinstance(inner, ir.Reduction)
    own = {v: ix.var(f"{inner.outs[0]}_{v.name}", v.extent) for v in inner.rvars}
    mapping: dict[Atom, Expr] = dict(zip(inner.vars, load.attr[1], strict=True))
    mapping |= {v: w.expr() for v, w in own.items()}
    made = _multiple(value, load, vs.cast(vs.substitute(inner.value, mapping), load.dtype))
    return None if made is None else replace(node, rvars=(*node.rvars, *own.values()), value=made)


def _multiple(value: Value, load: Value, element: Value) -> Value | None:
    """A multiple of what is loaded as the same multiple of an element, rounded nowhere; None where it is none."""
    if value is load:
        return element
    if value.op in ("round_to", "cast", "neg") and value.dtype.is_floating_point:
        made = _multiple(value.args[0], load, element)
        return made if made is None or value.op == "round_to" else vs.rebuild(value, (made,), value.attr)
    if value.op == "mul":
        for one, other in (value.args, value.args[::-1]):
            made = _multiple(one, load, element)
            if made is not None and load not in vs.loads([other]):
                return vs.call("mul", made, other)
    if value.op == "where" and value.args[2].op == "const" and value.args[2].attr == 0:
        condition, one, zero = value.args
        made = _multiple(one, load, element) if load not in vs.loads([condition]) else None
        return None if made is None else vs.where(condition, made, zero)
    return None


# ---- their loops ------------------------------------------------------------------------------------------------------


def _contraction(node: ir.Reduction) -> ir.Contraction:
    return ir.Contraction(
        node.outs[0], node.vars, node.rvars, node.value, vs.const(1, node.value.dtype), None, node.origin, node.value.dtype
    )


def _split(graph: ir.Graph, node: ir.Reduction, loop: Var) -> End:
    """The sum along one loop, with a node that adds up the others."""
    [out] = node.outs
    name = ir.derived(graph, ir.Derived(out, f"{ROW}_{loop.name}"))
    others = tuple(v for v in node.rvars if v is not loop)
    loops = (*node.vars, *others)
    first = ir.Reduction((name,), loops, (loop,), "sum", node.value, node.origin)
    load = vs.load(name, tuple(v.expr() for v in loops), torch.float32)
    rest = ir.Reduction((out,), node.vars, others, "sum", vs.cast(load, node.value.dtype), node.origin)
    sizes = tuple(v.extent for v in loops)
    buffer = ir.Buffer(name, torch.float32, graph.buffers[out].device, sizes, ix.contiguous_strides(sizes))
    return End(_contraction(first), first, SplitSum(rest, buffer))
