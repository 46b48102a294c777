"""The stages between an aten graph and a callable: each takes what the one before it made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from kgen import failures, lowering
from kgen.build import cpp, triton
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
from kgen.ir.plan import Launch, Packing, Schedule, members
from kgen.machine import cpu_device, gpu_of, machine_name, register_bytes
from kgen.report import debug
from kgen.report.provenance import trace_origins
from kgen.report.record import record
from kgen.scheduler import Options, StepChoices, pack_operands
from kgen.scheduler import schedule as make_schedule
from kgen.templates import registry
from kgen.templates.render_step import Context, render_step
from kgen.tuning import only, unusable
from kgen.tuning.only import Only
from kgen.tuning.tuner import Kitchen, Tuner
from kgen.verdict import Outcome, Reason, Verdict, demands


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
            whole, only=forced, templates=forced is not None or apart, joint=not apart, programs=not apart, fused_calls=fused,
            twice=False,
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


def schedule(work: tuple[GraphModule, ir.Graph], info: GraphInfo, config: Config) -> tuple[GraphModule, Schedule]:
    """Loop IR to kernels in order, with a memory plan."""
    gm, graph = work
    settled = _without_switches(config, info)
    options = scheduler_options(graph, settled)
    plan = make_schedule(graph, replace(options, oracle=_tuner(options, settled)))
    if info.freezing is not None:
        plan.verdicts += info.freezing.verdicts
        if config.debug is None:  # the debug folder's script runs alone, on arguments of its own
            pack_operands(plan, lambda out: options.device(plan.graph, out))
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
    device = partial(options.device, plan.graph)
    decisions = StepChoices(plan.graph, device, register_bytes(), options.gpu, config.loop_reordering)
    context = Context(plan.graph, decisions, config.numerics == "eager")

    def one(step: Launch | Packing, symbol: str) -> Rendered | KernelCall:
        with naming(step):
            made = render_step(step, symbol, context)
        if not isinstance(made, KernelCall) or made.launch is None:
            return made
        kernel = made.launch if config.early_launch else made.launch.launched_in_turn()
        if begin is not None:
            begin(kernel)
        return replace(made, launch=kernel)

    return plan_units(plan, one, len(os.sched_getaffinity(0)))


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
