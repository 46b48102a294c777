"""The stages between an aten graph and a callable: each takes what the one before it made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import failures, lowering, only, unusable
from kgen.build import cpp, toolchain, triton
from kgen.build.toolchain import cpu_device, register_bytes
from kgen.build.unit import UnitPlan, plan_units
from kgen.capture import higher_order, torch_adapter
from kgen.capture.aot_cache import NotSerializable
from kgen.capture.notes import NOTES, notes
from kgen.capture.operators import name_calls, paths_in, trace_origins
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.counters import counters
from kgen.device import Gpu, driver_version, gpu_from
from kgen.errors import InternalError, TemplateRefused
from kgen.failed_kernels import StepFailed, failure_of, say_what_failed
from kgen.failures import KernelsFailed
from kgen.host import cudagraph
from kgen.host.assemble import assemble
from kgen.host.compiled import Blueprint, HostGraph, strides_of_results
from kgen.host.library_packing import pack_weights
from kgen.host.poison import poisoned
from kgen.host.program import accept_saved
from kgen.host.setup import setup_of
from kgen.ir import nodes as ir
from kgen.ir import verify
from kgen.ir.plan import Kernel, Launch, Packing, Schedule, members
from kgen.next_best import unfit
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall, Rendered
from kgen.report import debug, trace
from kgen.report.record import RECORDERS, Record, record
from kgen.scheduler import Options, StepChoices, chosen_problem, contraction_of, next_best, pack_operands
from kgen.scheduler import schedule as make_schedule
from kgen.templates import registry
from kgen.templates.loop_contract import LoopProblem
from kgen.templates.registry import render_step
from kgen.tuning.loop_tuner import LoopCompiler, LoopTuner
from kgen.tuning.tuner import ASKED, CandidateCompiler, Tuner
from kgen.unusable import Unusable
from kgen.verdict import DEMANDS, Outcome, Reason, Verdict


def reinplace(gm: GraphModule, info: GraphInfo, config: Config) -> GraphModule:
    """Turns functional copies into in-place writes where the old value is dead, and drops repeated calls."""
    if torch_adapter.uses_cuda(gm):
        triton.prestart()  # it starts up while this process lowers and schedules
    if torch_adapter.is_traced():
        trace.graph(gm, info)
    if config.debug:
        debug.write_graph(gm, info, config)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    if not higher_order.MEANINGS.keys().isdisjoint(targets):
        return lowering.reinplace(higher_order.expand(gm))
    return lowering.reinplace(gm) if _writes_or_repeats(targets) else gm


def _writes_or_repeats(targets: Sequence[Any]) -> bool:
    """Whether some call may be a write, or two may be equal."""
    names = (getattr(target, "__name__", "").partition(".")[0] for target in targets)
    return len(set(targets)) < len(targets) or not lowering.REINPLACED.isdisjoint(names)


def lower(gm: GraphModule, info: GraphInfo, config: Config) -> tuple[GraphModule, ir.Graph]:
    """Aten calls to loop IR."""
    counters.add("lowered")
    config = _without_switches(config, info)
    failed = {node: f"{one.what} failed" for one in info.failures for node in one.nodes}
    operators = registry.operators(lowering.OperatorAxes) if config.templates else {}
    context = lowering.LoweringContext(
        info.name, config.numerics, info.shape_env, info.in_inputs, frozenset(config.fallback), info.static_inputs,
        info.frozen_inputs, config.gpu_interpreter, operators, config.inlining, failed, config.top_k,
        torch.are_deterministic_algorithms_enabled(),
        frozenset(range(len(torch_adapter.output_values(gm)))) - info.user_visible,
    )  # fmt: skip
    paths = paths_in(gm, info.paths)
    name_calls(gm, paths)
    graph = lowering.lower(gm, context)
    graph.paths = paths
    graph = trace_origins(gm, graph)
    if torch_adapter.is_traced():
        trace.lowered(graph, info)
    if config.debug:
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
    forced = only.current() if ir.any_combines(graph) else None
    return Options(
        config.fusion, DEMANDS.get(), gpu_of(graph), config.gpu_interpreter, templates, cpu_device(), forced,
        stable=config.numerics == "stable", prologues=config.prologues, horizontal_fusion=config.horizontal_fusion,
        interpreted=config.gpu_interpreter, copies=config.operand_padding, scales=config.numerics == "fast",
    )  # fmt: skip


def gpu_of(graph: ir.Graph) -> Gpu:
    """The GPU that the graph's kernels are made for."""
    device = next((b.device for b in graph.buffers.values() if b.device.type == "cuda"), None)
    return Gpu() if device is None else gpu_from(torch_adapter.gpu_facts(device), driver_version())


def machine_name(kind: str) -> str:
    """The name under which measurements on this machine's devices are kept."""
    if kind == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{toolchain.cpu_name()}, {torch.get_num_threads()} threads, {toolchain.isa().name}"


def _tuner(whole: Options, config: Config) -> Tuner:
    """Who knows, or finds out, which kernels are fast; it compiles candidates by the stages below, with the graph's options."""

    def make(part: ir.Graph, forced: Only | None, apart: bool, fused: bool) -> tuple[Blueprint, tuple[tuple[str, Any], ...]]:
        options = replace(
            whole, only=forced, templates=forced is not None or apart, grouped=not apart, programs=not apart, fused_calls=fused,
            recompute=False,
            demands=tuple(d for d in whole.demands if not d.wanted),
        )  # fmt: skip
        plan = make_schedule(replace(part, buffers=dict(part.buffers)), options)
        choices = [k.choice for step in plan.kernels for k in members(step) if k.choice is not None]
        if forced is not None and not choices:
            raise TemplateRefused(template=forced.template, reason="; ".join(v.detail for v in plan.verdicts if v.detail))
        return _blueprint(plan, config, options), choices[0].config if choices else ()

    def build(blueprint: Blueprint) -> None:
        cpp.build_units(blueprint.units)
        cpp.wait()  # else the process that measures does, and would count as hung
        if blueprint.launches:
            triton.compile_kernels(blueprint.launches, whole.gpu.arch)

    return Tuner(config, CandidateCompiler(make, build, machine_name))


def _tune_loops(plan: Schedule, tuner: Tuner, options: Options, config: Config) -> None:
    """Gives loop kernels the loops or tiles that were measured to be the fastest, where any were or may be."""

    def problem(step: Kernel, graph: ir.Graph) -> LoopProblem:
        found = _decisions(graph, config, options).loops(step)
        assert found is not None, "a loop kernel has no contraction"
        return found

    def alone(part: ir.Graph) -> Schedule:
        demands = tuple(d for d in options.demands if not d.wanted)
        return make_schedule(part, replace(options, oracle=None, memo=None, templates=False, demands=demands))

    found = LoopTuner(tuner, LoopCompiler(problem, alone, partial(_blueprint, config=config, options=options)))
    if found.is_worth_asking:
        found.tune(plan)


def _blueprint(plan: Schedule, config: Config, options: Options) -> Blueprint:
    """What a candidate is built of."""
    units = _units(plan, config, options)
    assembled = assemble(plan, units.calls)
    if assembled.callables:
        raise NotSerializable("the library call is a Python function")
    return Blueprint(units.sources, assembled.program, assembled.constants, {}, assembled.launches)


def schedule(work: tuple[GraphModule, ir.Graph], info: GraphInfo, config: Config) -> tuple[GraphModule, Schedule]:
    """Loop IR to kernels in order, with a memory plan."""
    gm, graph = work
    settled = _without_switches(config, info)
    options = scheduler_options(graph, settled)
    is_tuned = settled.autotune or ASKED.get() is not None
    tuner = _tuner(options, settled) if ir.any_combines(graph) or is_tuned else None
    if ir.any_combines(graph):  # else there is no choice of a template, and none for a further attempt to do without
        options = replace(options, oracle=tuner, memo=info.memo.of(graph))
    plan = make_schedule(graph, options)
    plan.verdicts += info.rewrites
    if any(NOTES in node.meta for node in gm.graph.nodes):
        plan.verdicts += notes(gm)
    if info.freezing is not None:
        plan.verdicts += info.freezing.verdicts
        if config.debug is None:  # the debug folder's script runs alone, on arguments of its own
            pack_operands(plan, lambda out: options.device(plan.graph, out))
            pack_weights(plan)
    if tuner is not None and options.only is None and config.fusion:
        _tune_loops(plan, tuner, options, settled)
    for one in unusable.FOUND.get():
        reason = Reason.FAILED if one.compiled else Reason.NOT_COMPILED
        plan.verdicts.append(Verdict(one.choice.template, one.choice.knobs, Outcome.DROPPED, reason, detail=one.why))
    if info.failures:
        plan.verdicts += failures.verdicts(info.failures)
    if torch_adapter.is_traced():
        trace.scheduled(plan, info)
    if config.debug:
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
    rendered = _rendering(plan, config, options)

    def one(step: Launch | Packing, symbol: str) -> Rendered | KernelCall:
        made = rendered(step, symbol)
        if begin is not None and isinstance(made, KernelCall) and made.launch is not None:
            begin(made.launch)
        return made

    return plan_units(plan, one, len(os.sched_getaffinity(0)))


def _decisions(graph: ir.Graph, config: Config, options: Options) -> StepChoices:
    """What the scheduler decides of the kernels of a graph's steps."""
    device, exact = partial(options.device, graph), config.numerics == "eager"
    return StepChoices(graph, device, register_bytes(), options.gpu, config.loop_reordering, exact)


def _rendering(plan: Schedule, config: Config, options: Options) -> Callable[[Launch | Packing, str], Rendered | KernelCall]:
    """Writes the steps of a plan under a name. Raises StepFailed."""
    decisions = _decisions(plan.graph, config, options)

    def rendered(step: Launch | Packing, symbol: str) -> Rendered | KernelCall:
        try:
            made = render_step(step, symbol, decisions)
        except failures.NOT_OURS:
            raise
        except Exception as cause:
            raise StepFailed(step, cause) from cause
        if not isinstance(made, KernelCall) or made.launch is None or config.early_launch:
            return made
        return replace(made, launch=made.launch.launched_in_turn())

    return rendered


def _unfit_with(plan: Schedule, info: GraphInfo, config: Config, failed: Launch, why: str) -> tuple[Unusable, ...]:
    """The configuration of a step that cannot run, and those after it that cannot either, for its problem alone: beside another
    epilogue they may. Of several kernels in one launch, the first decides."""
    options = scheduler_options(plan.graph, _without_switches(config, info))
    kernel = members(failed)[0]
    assert kernel.choice is not None
    found = Unusable(kernel.choice, why, compiled=True), *_unfit_after(plan, info, config, failed)
    if not kernel.contracts:
        return found
    device = options.device(plan.graph, contraction_of(kernel))
    seen = [chosen_problem(replace(kernel, choice=one.choice), plan.graph, device) for one in found]
    return tuple(replace(one, problem=problem.identity()) for one, problem in zip(found, seen, strict=True))


def _unfit_after(plan: Schedule, info: GraphInfo, config: Config, failed: Launch) -> tuple[Unusable, ...]:
    """The configurations after that of a step that cannot run either. Where candidates are measured, estimates do not say which
    ones come next."""
    settled = _without_switches(config, info)
    if config.gpu_interpreter or config.autotune or not isinstance(failed, Kernel) or not failed.contracts:
        return ()
    options = scheduler_options(plan.graph, settled)
    rendered = _rendering(plan, settled, options)

    def launch(kernel: Kernel) -> TritonKernel | None:
        with suppress(StepFailed):
            made = rendered(kernel, f"other_{kernel.name}")
            return made.launch if isinstance(made, KernelCall) else None
        return None

    choices = next_best(failed, plan.graph, options.device(plan.graph, contraction_of(failed)))
    return unfit(failed, choices, launch, options.gpu)


def build(work: tuple[GraphModule, Schedule, UnitPlan], info: GraphInfo, config: Config) -> HostGraph:
    """Units to machine code, and the host program that calls them."""
    gm, plan, units = work
    if torch_adapter.is_traced():
        trace.code(units, info)
    assembled = assemble(plan, units.calls, config.gpu_interpreter, config.profile_kernels)
    if info.role == "backward":
        assembled = replace(assembled, program=accept_saved(assembled.program))
    if config.poison:
        assembled = poisoned(assembled)
    named = replace(assembled.program, name=f"kgen {info.role} {info.name}", regions=config.profile_kernels)
    assembled = replace(assembled, program=named)
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
        strides = strides_of_results(plan.graph, torch_adapter.output_strides(gm))
        made = HostGraph(blueprint, strides, assembled.callables)
    except InternalError as failure:
        say_what_failed(failure, (gm, plan), units, config, partial(_unfit_with, plan, info, config))
        raise
    if config.debug or RECORDERS:
        made_of = record(Record(info, plan, units, blueprint, config, scheduler_options(plan.graph, config)))
        if config.debug:
            debug.write_code(made_of, gm)
    _forget(info)
    return made


def _forget(info: GraphInfo) -> None:
    """No attempt follows."""
    if info.memo.graph is not None:
        info.memo.clear()
