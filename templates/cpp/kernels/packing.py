"""Packing of frozen operands in C++: the template, and what fills its slots (`codegen/packing.py` decides what is packed)."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.ir.plan import Packing
from kgen.rendered.kernel_call import Rendered
from kgen.templates.contract import Config, template
from kgen.templates.cpp.codegen.engine import declaration, objects
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.loop_contract import LoopKernel, LoopProblem, LoopTemplate, loops
from kgen.templates.loop_slots import CppPacking
from kgen.templates.render import render_slots


@template(implements=loops("packing"), device="cpu", source="packing.cpp.jinja", name="cpp_packing")
class OperandPacking(LoopKernel):
    """Threads share the panels of an operand and write each in the order in which the engine reads it."""


@dataclass(frozen=True, slots=True)
class _Head:
    """Opens and closes the function, whose pointers are the source and the array."""

    name: str

    def __call__(self) -> str:
        return f'extern "C" int {self.name}(void** ptrs, const int64_t*, int threads) {{'

    def end(self) -> str:
        """The text that closes the function."""
        return "  return 0;\n}"


def render_packing(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> Rendered:
    """The C++ function that packs one operand."""
    packing = problem.step
    assert isinstance(packing, Packing)
    batches, rows, columns = packing.lengths
    between, *strides = packing.strides
    source, other = CPP_TYPES[problem.graph.buffers[packing.source].dtype].storage, CPP_TYPES[packing.other].storage
    slots = CppPacking(
        _Head(name), source, other, batches, rows, columns,
        f"from + b * {between} + {packing.offset}", ", ".join(map(str, strides)), packing.count * packing.dtype.itemsize,
    )  # fmt: skip
    text = "\n".join((declaration(other, source), render_slots(template.source, "cpu", slots, config, problem)))
    return Rendered(text, (packing.source, packing.name), (), frozenset(), objects=objects(other, source))
