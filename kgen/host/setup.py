"""Writes down how the constants of a plan are made of frozen arguments, for `kgen/host/frozen.py`."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.build import toolchain
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.freeze import Freezing
from kgen.host import program as hp
from kgen.host.frozen import Packed, Setup
from kgen.ir.plan import Packing, Schedule
from kgen.rendered.kernel_call import KernelCall

__all__ = ["setup_of"]


def setup_of(freezing: Freezing, plan: Schedule, calls: Mapping[str, KernelCall], program: hp.Program) -> Setup | None:
    """The setup of a plan and the program that was made of it; None where nothing is computed once."""
    if freezing.setup is None and not plan.packings:
        return None
    graph, strides = b"", tuple[tuple[int, ...], ...]()
    if freezing.setup is not None:
        graph = EagerGraph(freezing.setup, ()).serialize()
        (results,) = freezing.setup.graph.find_nodes(op="output")
        strides = tuple(tuple(node.meta["val"].stride()) for node in results.args[0])
    position = {one.buffer: k for k, one in enumerate(plan.graph.inputs) if one.buffer is not None}
    packed = tuple(_packed(one, position[one.source], plan, calls[one.name].symbol) for one in plan.packings)
    sources = {one.source for one in packed}
    spent = {k for k in sources if k >= freezing.arguments and isinstance(program.inputs[k], hp.InputIgnored)}
    watched = sorted({*freezing.uses, *(k for k in sources if k < freezing.arguments)})
    behind = frozenset(k - freezing.arguments for k in spent)
    return Setup(tuple(watched), freezing.uses, graph, strides, packed, behind)


def _packed(packing: Packing, position: int, plan: Schedule, symbol: str) -> Packed:
    """With a program of one step, the function `symbol`."""
    registers: dict[int, int] = {0: 0}

    def slot(name: str) -> hp.SlotSpec:
        buffer = plan.graph.buffers[name]
        numbers = ([int(e.as_int() or 0) for e in dims or ()] for dims in (buffer.sizes, buffer.strides))
        sizes, strides = (tuple(registers.setdefault(n, len(registers)) for n in some) for some in numbers)
        return hp.SlotSpec(buffer.dtype, sizes, strides, 0, str(buffer.device))

    slots = slot(packing.source), slot(packing.name)
    inputs = (hp.InputTensor(0, slots[0].dtype, slots[0].sizes, slots[0].strides),)
    code = (hp.Alloc(1), hp.Kernel(0, (0, 1)))
    program = hp.Program(inputs, tuple(registers), slots, code, (hp.OutTensor(1),), (symbol,))
    isa = toolchain.isa()
    geometry = packing.offset, packing.lengths, packing.strides, packing.other, slots[0].dtype
    return Packed(position, program, (*geometry, isa.name, *isa.flags))
