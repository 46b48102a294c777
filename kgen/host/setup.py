"""Writes down how the constants of a plan are made of frozen arguments, for `kgen/host/frozen.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.build import toolchain
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.freeze import Freezing
from kgen.host import program as hp
from kgen.host.frozen import Packed, Setup
from kgen.ir import index as ix
from kgen.ir.plan import LibraryPacking, Packing, Schedule
from kgen.rendered.kernel_call import KernelCall

__all__ = ["setup_of"]


def setup_of(freezing: Freezing, plan: Schedule, calls: Mapping[str, KernelCall], program: hp.Program) -> Setup | None:
    """The setup of a plan and the program that was made of it; None where nothing is computed once."""
    if freezing.setup is None and not plan.packings and not plan.library_packings:
        return None
    graph, strides = b"", tuple[tuple[int, ...], ...]()
    if freezing.setup is not None:
        graph = EagerGraph(freezing.setup, ()).serialize()
        (results,) = freezing.setup.graph.find_nodes(op="output")
        strides = tuple(tuple(node.meta["val"].stride()) for node in results.args[0])
    position = {one.buffer: k for k, one in enumerate(plan.graph.inputs) if one.buffer is not None}
    packed = tuple(_packed(one, position[one.source], plan, calls[one.name].symbol) for one in plan.packings)
    packed += tuple(_reordered(one, position[one.source], plan) for one in plan.library_packings)
    sources = {one.source for one in packed}
    spent = {k for k in sources if k >= freezing.arguments and isinstance(program.inputs[k], hp.InputIgnored)}
    watched = sorted({*freezing.uses, *(k for k in sources if k < freezing.arguments)})
    behind = frozenset(k - freezing.arguments for k in spent)
    return Setup(tuple(watched), freezing.uses, graph, strides, packed, behind)


def _packed(packing: Packing, position: int, plan: Schedule, symbol: str) -> Packed:
    """With a program of one step, the function `symbol`."""
    code = (hp.Alloc(1), hp.Kernel(0, (0, 1)))
    program = _program(packing.source, packing.name, plan, code, (symbol,))
    isa = toolchain.isa()
    geometry = packing.offset, packing.lengths, packing.strides, packing.other, program.slots[0].dtype
    return Packed(position, program, (*geometry, isa.name, *isa.flags))


def _reordered(packing: LibraryPacking, position: int, plan: Schedule) -> Packed:
    """With a program of one step, the library's function."""
    schema = packing.target._schema
    args = (hp.ArgTensor(0), *map(_argument, packing.numbers))
    call = hp.Extern(schema.name, schema.overload_name, args, outs=(1,))
    return Packed(position, _program(packing.source, packing.name, plan, (call,)), (schema.name, packing.numbers))


def _argument(number: Any) -> hp.Arg:
    return hp.ArgList(tuple(map(_argument, number))) if isinstance(number, tuple) else hp.ArgConst(number)


def _program(
    source: str, made: str, plan: Schedule, code: tuple[hp.Instruction, ...], symbols: tuple[str, ...] = ()
) -> hp.Program:
    """From one tensor to one array."""
    registers: dict[int, int] = {0: 0}

    def slot(name: str) -> hp.SlotSpec:
        buffer = plan.graph.buffers[name]
        dims = (buffer.sizes, buffer.strides or ix.contiguous_strides(buffer.sizes))
        numbers = ([int(e.as_int() or 0) for e in some] for some in dims)
        sizes, strides = (tuple(registers.setdefault(n, len(registers)) for n in some) for some in numbers)
        return hp.SlotSpec(buffer.dtype, sizes, strides, 0, str(buffer.device))

    slots = slot(source), slot(made)
    inputs = (hp.InputTensor(0, slots[0].dtype, slots[0].sizes, slots[0].strides),)
    return hp.Program(inputs, tuple(registers), slots, code, (hp.OutTensor(1),), symbols)
