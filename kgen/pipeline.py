"""The stages between an aten graph and a callable: each takes what the one before it made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import failures, lowering
from kgen.build import cpp, toolchain, triton
from kgen.build.gpu_kernel import TritonKernel
from kgen.build.unit import Rendered, UnitPlan, plan_units
from kgen.capture import torch_adapter
from kgen.capture.aot_cache import NotSerializable
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.counters import counters
from kgen.errors import InternalError, TemplateRefused
from kgen.failed_kernels import StepFailed, failure_of, naming, say_what_failed
from kgen.failures import KernelsFailed
from kgen.host import cudagraph
from kgen.host.assemble import KernelCall, assemble
from kgen.host.compiled import Blueprint, HostGraph
from kgen.host.poison import poisoned
from kgen.host.program import accept_saved
from kgen.host.setup import setup_of
from kgen.ir import nodes as ir
from kgen.ir import verify
from kgen.ir.plan import Batch, Choice, Kernel, Launch, Nest, Packing, Schedule, members
from kgen.ir.sizes import Sizes
from kgen.report import debug
from kgen.report.provenance import trace_origins
from kgen.report.record import record
from kgen.scheduler import (
    Gpu,
    Options,
    choose_batch_tiles,
    choose_loops,
    choose_tiles,
    chosen_problem,
    pack_operands,
    product_of,
    with_offsets_as_sizes,
)
from kgen.scheduler import schedule as make_schedule
from kgen.templates import registry
from kgen.templates.cpp.codegen import template as cpp_template
from kgen.templates.cpp.codegen.packing import render_packing
from kgen.templates.cpp.kernels.foreach import render_batch
from kgen.templates.cpp.kernels.loops import render_kernel
from kgen.templates.problem import Device, Problem
from kgen.templates.triton.codegen import template as triton_template
from kgen.templates.triton.kernels import foreach as triton_foreach
from kgen.templates.triton.kernels import loops as triton_kernel
from kgen.tuning import only, unusable
from kgen.tuning.only import Only
from kgen.tuning.tuner import Kitchen, Tuner
from kgen.verdict import Outcome, Reason, Verdict, demands

# What the cost model begins with: operations a second of a core's float32 units, how many times faster bfloat16 is multiplied
# by instructions of its own, and bytes a second that a core reads, of which so many use up the memory's bandwidth.
FLOPS = {"avx512": 140e9, "avx2": 70e9, "generic": 10e9}
NARROW = {"-mamx-bf16": 7.0, "-mavx512bf16": 2.0}
BANDWIDTH, MOST_READERS = 10e9, 8
# MKL takes other ways on processors of others: its share, measured on an AMD EPYC with AVX-512.
MKL_VENDOR, FOREIGN_MKL = "GenuineIntel", 0.42
# Operations a cycle of a GPU's multiprocessor on 16-bit floats added up in float32, by compute capability; what an H200 reaches
# of that, and of its memory's rate.
MATRIX_FLOPS, OTHER_MATRIX_FLOPS = {80: 2048, 90: 4096, 100: 8192}, 1024
MATRIX_SHARE, MEMORY_SHARE = 0.738, 0.8746
REGISTER_BYTES = {"avx512": 64, "avx2": 32, "generic": 16}


def gpu_of(graph: ir.Graph) -> Gpu:
    """The GPU that the graph's kernels are made for."""
    devices = (b.device for b in graph.buffers.values())
    device = next((d for d in devices if d.type == "cuda"), None)
    return Gpu() if device is None else gpu_from(torch_adapter.gpu_facts(device))


def gpu_from(facts: Mapping[str, int]) -> Gpu:
    """What `torch_adapter.gpu_facts` says of a device as the scheduler wants it."""
    arch, processors = facts["arch"], facts["processors"]
    matrix = MATRIX_FLOPS.get(arch, OTHER_MATRIX_FLOPS)
    flops = MATRIX_SHARE * matrix * processors * facts["clock"]
    return Gpu(arch, processors, facts["shared"], flops, MEMORY_SHARE * facts["memory"])


def reinplace(gm: GraphModule, info: GraphInfo, config: Config) -> GraphModule:
    """Turns functional copies into in-place writes where the old value is dead."""
    if torch_adapter.uses_cuda(gm):
        triton.prestart()  # it starts up while this process lowers and schedules
    debug.write_graph(gm, info, config)
    return lowering.reinplace(gm)


def lower(gm: GraphModule, info: GraphInfo, config: Config) -> tuple[GraphModule, ir.Graph]:
    """Aten calls to loop IR."""
    counters.add("lowered")
    config = _without_switches(config, info)
    failed = {node: f"{one.what} failed" for one in info.failures for node in one.nodes}
    operators = registry.operators(lowering.OperatorAxes) if config.templates else {}
    context = lowering.LoweringContext(
        info.name, config.numerics, info.shape_env, info.in_inputs, frozenset(config.fallback), info.static_inputs,
        info.frozen_inputs, config.gpu_interpreter, operators, config.inlining, failed,
    )  # fmt: skip
    graph = trace_origins(gm, lowering.lower(gm, context))
    debug.write_lowered(graph, info, config)
    if config.verify:
        verify.verify(graph, "lower")
    return gm, graph


def _without_switches(config: Config, info: GraphInfo) -> Config:
    """The options without those that earlier attempts at the graph failed with."""
    off = {name: False for one in info.failures for name in one.switches}
    return replace(config, **off) if off else config  # type: ignore[arg-type]


def scheduler_options(graph: ir.Graph, config: Config) -> Options:
    """What a configuration means to the scheduler on the graph's devices."""
    templates = config.templates and config.fusion
    return Options(
        config.fusion, demands(), gpu_of(graph), config.gpu_interpreter, templates, cpu_device(), only.current(),
        stable=config.numerics == "stable", prologues=config.prologues, siblings=config.siblings,
        interpreted=config.gpu_interpreter, copies=config.operand_copies, scales=config.numerics == "fast",
    )  # fmt: skip


def _tuner(whole: Options, config: Config) -> Tuner:
    """Who knows, or finds out, which kernels are fast; it compiles candidates by the stages below, with the graph's options."""

    def make(part: ir.Graph, forced: Only | None, apart: bool, fused: bool) -> tuple[Blueprint, tuple[tuple[str, Any], ...]]:
        options = replace(
            whole, only=forced, templates=forced is not None or apart, joint=not apart, fused_calls=fused, twice=False,
            demands=tuple(d for d in whole.demands if not d.wanted),
        )  # fmt: skip
        plan = make_schedule(replace(part, buffers=dict(part.buffers)), options)
        choices = [k.choice for step in plan.kernels for k in members(step) if k.choice is not None]
        if forced is not None and not choices:
            raise TemplateRefused(template=forced.template, reason="; ".join(v.detail for v in plan.verdicts if v.detail))
        units = _units(plan, config, options)
        assembled = assemble(plan, units.calls)
        if assembled.callables:
            raise NotSerializable("the library call is a Python function")
        blueprint = Blueprint(units.sources, assembled.program, assembled.constants, {}, assembled.launches)
        return blueprint, choices[0].config if choices else ()

    def build(blueprint: Blueprint) -> None:
        cpp.build_units(blueprint.units)
        cpp.wait()  # else the process that measures does, and would count as hung
        if blueprint.launches:
            triton.compile_kernels(blueprint.launches, whole.gpu.arch)

    return Tuner(config, Kitchen(make, build, machine_name))


def machine_name(kind: str) -> str:
    """The name under which measurements on this machine's processors are kept."""
    if kind == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{toolchain.cpu_name()}, {torch.get_num_threads()} threads, {toolchain.isa().name}"


def cpu_device() -> Device:
    """This machine's processors as templates see them."""
    found = toolchain.isa()
    isa, threads = found.name, torch.get_num_threads()
    narrow = next((times for flag, times in NARROW.items() if flag in found.flags), 1.0)
    flops, bandwidth = FLOPS[isa] * threads * narrow, BANDWIDTH * min(threads, MOST_READERS)
    foreign = torch.backends.mkl.is_available() and toolchain.cpu_vendor() not in ("", MKL_VENDOR)
    lanes, library = REGISTER_BYTES[isa] // 4, FOREIGN_MKL if foreign else 1.0
    return Device("cpu", 0, threads, 0, 0, isa, lanes, flops, narrow, bandwidth, library)


def schedule(work: tuple[GraphModule, ir.Graph], info: GraphInfo, config: Config) -> tuple[GraphModule, Schedule]:
    """Loop IR to kernels in order, with a memory plan."""
    gm, graph = work
    settled = _without_switches(config, info)
    options = scheduler_options(graph, settled)
    plan = make_schedule(graph, replace(options, oracle=_tuner(options, settled)))
    if info.freezing is not None:
        plan.verdicts += info.freezing.verdicts
        if config.debug is None:  # the debug folder's script runs alone, on arguments of its own
            pack_operands(plan, lambda out: options.device(graph, out))
    for one in unusable.current():
        reason = Reason.FAILED if one.compiled else Reason.NOT_COMPILED
        plan.verdicts.append(Verdict(one.choice.template, one.choice.knobs, Outcome.DROPPED, reason, detail=one.why))
    plan.verdicts += failures.verdicts(info.failures)
    debug.write_schedule(plan, info, config)
    return gm, plan


def render(work: tuple[GraphModule, Schedule], info: GraphInfo, config: Config) -> tuple[GraphModule, Schedule, UnitPlan]:
    """Kernels to C++ translation units and to GPU kernels, which are compiled from now on."""
    gm, plan = work
    config = _without_switches(config, info)
    options = scheduler_options(plan.graph, config)
    begin = None if config.gpu_interpreter else partial(triton.begin, arch=options.gpu.arch)
    try:
        return gm, plan, _units(plan, config, options, begin)
    except StepFailed as failed:
        if failures.is_strict(config):
            raise failed.cause from failed.cause.__cause__
        source = failures.keep_report(failed.step.name, failed.cause, gm)
        raise KernelsFailed([failure_of([failed.step], failed.cause, source, work)]) from failed.cause


def _units(plan: Schedule, config: Config, options: Options, begin: Callable[[TritonKernel], None] | None = None) -> UnitPlan:
    """The texts of a plan. `begin` gets each GPU kernel as soon as it is there."""
    width = REGISTER_BYTES[toolchain.isa().name]
    sizes, gpu = Sizes(plan.graph.size_hints), gpu_of(plan.graph)

    def one(step: Launch | Packing, symbol: str) -> Rendered | KernelCall:
        with naming(step):
            made = rendered(step, symbol)
        if not isinstance(made, KernelCall) or made.launch is None:
            return made
        kernel = made.launch if config.early_launch else triton_kernel.launched_in_turn(made.launch)
        if begin is not None:
            begin(kernel)
        return replace(made, launch=kernel)

    def rendered(step: Launch | Packing, symbol: str) -> Rendered | KernelCall:
        if isinstance(step, Packing):
            return render_packing(step, plan.graph.buffers[step.source].dtype, symbol)
        choice = members(step)[0].choice
        if choice is not None:
            problems = [chosen_problem(k, plan.graph, options.device(plan.graph, product_of(k))) for k in members(step)]
            return render_choice(problems, choice, symbol, config.numerics == "eager")
        if step.target != "triton":
            return render_step(step, symbol, plan.graph, width, config.loop_reordering)
        exact = config.numerics == "eager"
        if isinstance(step, Kernel):
            tiling = choose_tiles(step, plan.graph, sizes, gpu, config.loop_reordering)
            return triton_kernel.render_kernel(tiling, plan.graph, symbol, exact)
        tilings = choose_batch_tiles(step, plan.graph, sizes, gpu, config.loop_reordering)
        return triton_foreach.render_batch(step, tilings, plan.graph, symbol, exact)

    return plan_units(plan, one, len(os.sched_getaffinity(0)))


def render_step(step: Launch, symbol: str, graph: ir.Graph, register_bytes: int, reorder: bool = True) -> Rendered:
    """The C++ function of one kernel or batch."""
    sizes = Sizes(graph.size_hints)
    nests = [choose_loops(kernel, graph, sizes, register_bytes, reorder) for kernel in members(step)]
    if isinstance(step, Batch):
        made = render_batch(step, nests, graph, symbol)
        return Rendered(made.text, made.buffers, made.sizes, made.names)
    return _rendered_nest(nests[0], graph, symbol)


def _rendered_nest(nest: Nest, graph: ir.Graph, symbol: str) -> Rendered:
    made = render_kernel(nest, graph, symbol)
    general, offsets = with_offsets_as_sizes(nest)

    def by_offset(symbol: str) -> Rendered:
        made = render_kernel(general, graph, symbol)
        return Rendered(made.text, made.buffers, tuple(offsets.get(name, name) for name in made.sizes), made.names)

    return Rendered(made.text, made.buffers, made.sizes, made.names, by_offset if offsets else None)


def render_choice(problems: Sequence[Problem], choice: Choice, symbol: str, exact: bool) -> Rendered | KernelCall:
    """The kernel of the template that was chosen for a product, or for several."""
    template = problems[0].template
    config = template.config(**dict(choice.config))
    if template.device == "cpu":
        return cpp_template.render_template(problems, config, symbol)
    return triton_template.render_template(problems, config, symbol, exact)


def build(work: tuple[GraphModule, Schedule, UnitPlan], info: GraphInfo, config: Config) -> HostGraph:
    """Units to machine code, and the host program that calls them."""
    gm, plan, units = work
    assembled = assemble(plan, units.calls, config.gpu_interpreter)
    if info.role == "backward":
        assembled = replace(assembled, program=accept_saved(assembled.program))
    if config.poison:
        assembled = poisoned(assembled)
    coverage: Counter[str] = Counter({"kernels": len(plan.kernels)})
    for call in plan.calls:
        coverage[f"extern.{call.node.target}"] += 1
    coverage.update(f"replaced.{one}" for one in info.failures)
    blueprint = Blueprint(units.sources, assembled.program, assembled.constants, dict(coverage), assembled.launches)
    blueprint.replaced = bool(info.failures)
    if info.freezing is not None:
        blueprint.setup = setup_of(info.freezing, plan, units.calls, assembled.program)
    if config.cudagraphs:
        static = info.static_inputs | {k for k, one in enumerate(plan.graph.inputs) if one.static}
        blueprint.recording, verdict = cudagraph.decide(assembled.program, static, info.role)
        plan.verdicts.append(verdict)
    try:
        made = HostGraph(blueprint, torch_adapter.output_strides(gm), assembled.callables)
    except InternalError as failure:
        say_what_failed(failure, (gm, plan), units, config)
        raise
    debug.write_code(record(info, plan, units, blueprint, config), gm)
    return made


def stages() -> tuple[Any, ...]:
    return (reinplace, lower, schedule, render, build)
