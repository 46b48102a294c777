"""From a problem and a configuration to a Triton kernel: renders a template's Jinja file."""

from __future__ import annotations

from functools import partial

import torch

from kgen import index as ix
from kgen.build.gpu_kernel import TritonKernel
from kgen.build.unit import canonical_text
from kgen.host.assemble import KernelCall
from kgen.index import Expr
from kgen.templates import slots as sl
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.render import clean
from kgen.templates.triton.kernel import aligned, compile_options, source_lines
from kgen.templates.triton.table import TRITON_TYPES
from kgen.templates.triton.tile import Parameters, Slots

WARPS, STAGES = 4, 3


def render_template(problem: Problem, config: Config, name: str, exact: bool = False) -> KernelCall:
    """The kernel of a problem. It is rendered twice: only its slots know which sizes the kernel needs."""
    parameters = Parameters()
    _text(name, Slots(problem, config, exact, parameters))
    parameters = Parameters(parameters.pointers, parameters.maps, parameters.sizes)
    text = _text(name, Slots(problem, config, exact, parameters))
    graph, sizes = problem.graph, tuple(parameters.sizes)
    pointers, maps = tuple(parameters.pointers), tuple(parameters.maps)
    names = frozenset(parameters.made_names | {clean(s) for s in sizes})
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names),
        (*(TRITON_TYPES[graph.buffers[b].dtype].pointer for b in pointers), *(m.type for m in maps), *("i64" for _ in sizes)),
        (*(aligned(graph.buffers[b]) for b in pointers), *(False for _ in (*maps, *sizes))),
        config.get("WARPS", WARPS), config.get("STAGES", STAGES), compile_options(parameters.checks),
    )  # fmt: skip
    return KernelCall(name, pointers, sizes, grid(problem, config), launch, maps)


def grid(problem: Problem, config: Config) -> tuple[Expr, Expr, Expr]:
    """The author's number of programs, or one for each tile of the first result."""
    own = problem.template.method("grid")
    if own is not None:
        return ix.as_expr(own(problem, config)), ix.ONE, ix.ONE
    count = ix.ONE
    for axis in problem.template.implements.results[0]:
        block = problem.template.block(axis)
        count = count * (problem.extent(axis) if block is None else problem.tiles(axis, config.get(block)))
    return count, ix.ONE, ix.ONE


def _text(name: str, filler: Slots) -> str:
    return sl.render(filler, lambda: _head(filler.problem, filler.config, name, filler), partial(_facts, filler.problem))


def _facts(problem: Problem, operand: str) -> dict[str, object]:
    one = problem.inputs[operand]
    return {"type": TRITON_TYPES[one.dtype].storage, "plain": one.load is not None, "contiguous": problem.contiguous(operand)}


def _head(problem: Problem, config: Config, name: str, filler: Slots) -> str:
    """Everything up to the body: where the kernel comes from, imports, signature, knobs, and the lengths of the axes."""
    kernel = problem.kernel
    comments = [*source_lines(kernel.origins), f"{problem.template.name} {config} | {_axes_line(problem)}"]
    names = [f"p_{clean(b)}" for b in filler.parameters.pointers]
    names += [*filler.parameters.maps.values(), *(clean(s) for s in filler.parameters.sizes)]
    lines = [f"# {line}" for line in comments]
    lines += ["import triton", "import triton.language as tl", "from kgen.templates.triton import library as lib", "", ""]
    lines += ["@triton.jit", f"def {name}({', '.join(names)}):"]
    constants = [(k, v) for k, v in config.values if k not in ("WARPS", "STAGES")]
    constants += [("ACCUMULATOR", TRITON_TYPES[problem.accumulator].compute), ("PRECISION", repr(_precision(problem)))]
    lines += [f"    {key}: tl.constexpr = {value}" for key, value in constants]
    for axis in problem.template.axes:
        kind = ": tl.constexpr" if problem.static(axis) else ""
        lines.append(f"    {axis.upper()}{kind} = {filler.size(axis)}")
    return "\n".join(lines)


def _axes_line(problem: Problem) -> str:
    loops = {axis: "".join(f" {v.name}<{v.extent}" for v in found) or " -" for axis, found in problem.loops.items()}
    return " | ".join(f"{axis}{text}" for axis, text in loops.items())


def _precision(problem: Problem) -> str:
    """How float32 operands are multiplied: as torch's setting for matrix products allows."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    return "tf32" if problem.main_dtype is torch.float32 and allowed else "ieee"
