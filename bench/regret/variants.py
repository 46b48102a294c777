"""A problem as kgen compiles it by default, without templates, and with each template: made in processes that need no GPU."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from bench.calibration import SIZES, Problem, problems
from bench.contenders import failure
from bench.measure import rounding
from bench.patterns import outputs_of
from kgen import config as configuration
from kgen import pipeline, unusable
from kgen.build import cpp, triton
from kgen.capture import torch_adapter
from kgen.capture.decompositions import TABLE
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.cost import model
from kgen.cost.tuning_query import Place, TuningQuery, TuningResult, place
from kgen.errors import KernelSpills, KernelTooLarge
from kgen.host.assemble import assemble
from kgen.host.compiled import Blueprint, check_shared, check_spills
from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Choice, ComboKernel, Launch, Schedule, members
from kgen.only import Only, only
from kgen.scheduler import chosen_problem, contraction_of
from kgen.scheduler import schedule as make_schedule
from kgen.templates import problem as templates
from kgen.templates.contract import Config as Knobs
from kgen.unusable import Unusable
from kgen.verdict import Verdict

CHOSEN, LIBRARY = "chosen", "library"
# A GPU that is not here: an H100 with HBM3.
H100 = {
    "arch": 90,
    "compute_units": 132,
    "shared": 232448,
    "clock": 1_980_000_000,
    "memory": 3_352_320_000_000,
    "driver": 12_080,
}
# And an H200, whose memory is faster.
H200 = {**H100, "memory": 4_916_736_000_000}
# Of a template, configurations beyond the first are left out where the model thinks them so many times slower than the best.
HOPELESS = 4.0
# Templates that are tried on one matmul alone, and with parts and copies; ways to cut and to copy.
OF_EACH = 2

K = TypeVar("K")


@dataclass(frozen=True)
class Job:
    """A problem by its number in the set of a size, to be compiled for a device with these `facts` (of a GPU) or `threads`;
    `configs` are the configurations of each template, the model's favourites first. With `tf32` matmuls in float32 may round
    their operands."""

    size: str
    number: int
    dtype: torch.dtype
    device: str
    facts: Mapping[str, int] | None
    configs: int = 2
    threads: int = 1
    tf32: bool = False

    @property
    def problem(self) -> Problem:
        return _problems(self.size)[self.number].of_type(self.dtype)


@cache
def _problems(size: str) -> list[Problem]:
    return problems(SIZES[size])


@dataclass
class Variant:
    """One way to compute a problem: the steps of its plan, what the model says of its matmuls, and the blueprint. `same_as`
    names an earlier variant with the same kernels and calls; `failed` says why there is none."""

    name: str
    steps: list[str] = field(default_factory=list)
    matmuls: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    blueprint: bytes = b""
    compile_s: float = 0.0
    same_as: str = ""
    failed: str = ""


@dataclass
class Compiled:
    """All variants of a problem, and its matmuls as templates see them before anything is chosen."""

    job: Job
    variants: list[Variant] = field(default_factory=list)
    matmuls: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""


def compile_job(job: Job) -> Compiled:
    """Everything that has to be known of a problem before it is timed. Never raises: a problem that does not compile is one
    more result."""
    done = Compiled(job)
    try:
        with settled(job):
            _compile(job, done)
    except Exception as cause:
        done.failed = failure(cause)
    return done


@contextmanager
def settled(job: Job) -> Iterator[None]:
    """As on the machine that times: its threads, and the GPU's facts, whether or not this process sees one."""
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        if job.facts is not None:
            facts = dict(job.facts)
            stack.enter_context(patch.object(torch_adapter, "gpu_facts", lambda device: facts))
        stack.enter_context(torch.no_grad())
        stack.enter_context(rounding(job.tf32))
        yield


def _compile(job: Job, done: Compiled) -> None:
    cpp.prepare()
    gm = traced(job.problem, job.device)
    maker = MatmulGraph(job, gm)
    matmuls = maker.matmuls()
    done.matmuls = [matmul.description for matmul in matmuls]
    known: dict[Any, str] = {}
    for way in ways(matmuls, job.configs):
        variant, key = maker.variant(way)
        if key is not None and known.setdefault(key, way.name) != way.name:
            variant.same_as, variant.blueprint = known[key], b""
        done.variants.append(variant)


class _Traced(Exception):
    """Ends a compilation with the graph that it would go on with."""


def traced(problem: Problem, device: str) -> GraphModule:
    """The aten graph of a problem, as AOTAutograd hands it to kgen. Where there is no GPU, autograd does not run on tensors
    that are said to be on one: the graph is traced on a CPU and moved."""
    moves = device == "cuda" and not torch.cuda.is_available()
    mode, where = FakeTensorMode(), torch.device("cuda:0" if device == "cuda" and not moves else "cpu")
    args = [FakeTensor(mode, one, where) for one in problem.make("meta")]
    found: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        found.append(gm)
        raise _Traced

    with suppress(_Traced):
        aot_function(lambda *given: outputs_of(problem.fn(*given)), keep, decompositions=TABLE)(*args)
    return _moved(found[0], mode, torch.device("cuda:0")) if moves else found[0]


def _moved(gm: GraphModule, mode: FakeTensorMode, device: torch.device) -> GraphModule:
    """The graph as if it had been traced on another device."""

    def there(value: Any) -> Any:
        return FakeTensor(mode, value.to("meta"), device) if isinstance(value, torch.Tensor) else value

    for node in gm.graph.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = tree_map(there, node.meta["val"])
        node.kwargs = {name: device if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
    gm.recompile()
    return gm


# ---- the ways to compute it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A configuration of a template that takes a matmul, with the model's seconds."""

    template: str
    config: tuple[tuple[str, Any], ...]
    seconds: float


@dataclass(frozen=True)
class Matmul:
    """A matmul with what was fused into it, as it is asked about before anything is chosen: its results, what takes it, and
    which templates take its sum in parts, or with copies of operands. `description` is what the model knows of it."""

    outs: tuple[str, ...]
    offers: tuple[Offer, ...]
    parts: Mapping[int, tuple[str, ...]]
    copies: Mapping[str, tuple[str, ...]]
    vendor: bool
    library: float
    description: dict[str, Any]

    def best(self) -> dict[str, Offer]:
        """The model's favourite of each template, the fastest template first."""
        ordered = sorted(self.offers, key=lambda offer: offer.seconds)
        return {name: next(o for o in ordered if o.template == name) for name in dict.fromkeys(o.template for o in ordered)}


def asked_matmul(question: TuningQuery) -> Matmul:
    """What a question says. The graph that it was asked about may change afterwards."""
    outs = tuple(contraction_of(one) for one in members(question.step))
    names = tuple(own[0].template.name for own in question.problems if own[0].template.implements.batch)
    copies = {operands: tuple(p.template.name for p in own) for operands, (_, own) in question.copies.items() if operands}
    library = sum(model.vendor_seconds(p) for p in question.problems[0]) if question.problems else math.nan
    offers, parts = tuple(offers_of(question)), dict.fromkeys(question.parts, names)
    return Matmul(outs, offers, parts, copies, question.vendor, library, description_of(question, offers, library))


def offers_of(question: TuningQuery) -> Iterator[Offer]:
    grouped = isinstance(question.step, ComboKernel)
    for own in question.problems:
        for config in model.feasible(own[0]):
            if all(model.fits(p, config) for p in own):
                seconds = model.grouped_seconds(own, config) if grouped else model.seconds(own[0], config)
                yield Offer(own[0].template.name, config.values, seconds)


@dataclass(frozen=True)
class Way:
    """How to compile a problem: with a configuration of kgen, every matmul left to one template, or with answers for some of
    the matmuls, by their results."""

    name: str
    config: Config
    only: Only | None = None
    tuning_results: Mapping[tuple[str, ...], TuningResult] = field(default_factory=dict)

    @contextmanager
    def context(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.only is not None:
                stack.enter_context(only(self.only.template, self.only.pick, self.only.parts, self.only.copies))
            if self.tuning_results:
                stack.enter_context(patch.object(pipeline, "Tuner", lambda *_: FixedResults(self.tuning_results)))
                stack.enter_context(patch.object(pipeline, "_tune_loops", lambda *_: None))
            yield


def ways(matmuls: Sequence[Matmul], configs: int) -> Iterator[Way]:
    """By default, without templates, and with all matmuls left to one template in turn, under several of its configurations,
    with sums in parts and copies of operands where these are possible. Of several matmuls, each also alone by its best
    templates and by the library, while the others are as the model likes."""
    plain = replace(configuration.current(), measurements=False)
    yield Way(CHOSEN, plain)
    yield Way(LIBRARY, replace(plain, templates=False))
    for name, forced in _forced(matmuls, configs):
        yield Way(name, plain, forced)
    if len(matmuls) > 1:
        for matmul in matmuls:
            for name, tuning_result in _tuning_results(matmul):
                yield Way(f"{matmul.outs[0]}: {name}", plain, None, {matmul.outs: tuning_result})


def _forced(matmuls: Sequence[Matmul], configs: int) -> Iterator[tuple[str, Only]]:
    seconds: dict[str, list[float]] = {}
    for offer in (offer for matmul in matmuls for offer in matmul.offers):
        seconds.setdefault(offer.template, []).append(offer.seconds)
    ordered = sorted(seconds, key=lambda name: min(seconds[name]))
    hopeless = HOPELESS * min((min(own) for own in seconds.values()), default=0.0)
    for name in ordered:
        hopeful = sum(one <= hopeless for one in seconds[name])
        for rank in range(max(1, min(configs, hopeful))):
            yield f"{name} {rank}", Only(name, picker(rank))
    for parts, takers in _first({n: own for matmul in matmuls for n, own in matmul.parts.items()}):
        for name in [name for name in ordered if name in takers][:OF_EACH]:
            yield f"{name} 0, sum in {parts}", Only(name, picker(0), parts=parts)
    for copies, takers in _first({n: own for matmul in matmuls for n, own in matmul.copies.items()}):
        for name in [name for name in dict.fromkeys((*ordered, *takers)) if name in takers][:OF_EACH]:
            yield f"{name} 0, copies: {copies}", Only(name, picker(0), copies=copies)


def _first(found: Mapping[K, tuple[str, ...]]) -> list[tuple[K, tuple[str, ...]]]:
    return list(found.items())[:OF_EACH]


def _tuning_results(matmul: Matmul) -> Iterator[tuple[str, TuningResult]]:
    """For one matmul, whatever the others are: each has won a measurement that nobody has made."""
    for offer in list(matmul.best().values())[:OF_EACH]:
        yield offer.template, TuningResult(offer.template, offer.config, 1, offer.seconds, math.nan)
    if matmul.vendor and math.isfinite(matmul.library):
        yield LIBRARY, TuningResult(None, (), 1, matmul.library, matmul.library)


def picker(rank: int) -> Callable[[Sequence[Knobs]], Knobs]:
    """The model's favourite, or the best of another tile, so many tiles behind it: configurations of one tile differ least."""

    def pick(configs: Sequence[Knobs]) -> Knobs:
        tiles: dict[Any, Knobs] = {}
        for config in configs:
            tiles.setdefault(tuple(value for name, value in config.values if name in ("BLOCK_M", "BLOCK_N")), config)
        return list(tiles.values())[min(rank, len(tiles) - 1)]

    return pick


class FixedResults:
    """An oracle with the given answers, by the results of matmuls, that records what it was asked first about each."""

    is_worth_asking = True

    def __init__(self, given: Mapping[tuple[str, ...], TuningResult] | None = None) -> None:
        self.given = given or {}
        self.asked: dict[tuple[str, ...], Matmul] = {}

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, TuningResult]]:
        found: dict[str, Mapping[Place, TuningResult]] = {}
        for question in questions:
            if question.is_program:  # its contractions are asked about by themselves as well
                continue
            outs = tuple(contraction_of(one) for one in members(question.step))
            if outs not in self.asked:
                self.asked[outs] = asked_matmul(question)
            if outs in self.given:
                found[question.step.name] = {place(hints): self.given[outs] for hints in question.hints}
        return found

    def verdicts(self) -> list[Verdict]:
        return []


# ---- one variant -------------------------------------------------------------------------------------------------------


class MatmulGraph:
    """Compiles one graph in several ways."""

    def __init__(self, job: Job, gm: GraphModule) -> None:
        self.job = job
        outputs = len(torch_adapter.output_strides(gm))
        self.info = GraphInfo("problem", "inference", frozenset(), frozenset(range(outputs)))
        with _disable_current_modes():
            self.gm = pipeline.reinplace(gm, self.info, configuration.current())

    def matmuls(self) -> list[Matmul]:
        """What would be measured: each matmul with what was fused into it, while templates may have all of them."""
        listener, config = FixedResults(), configuration.current()
        with _disable_current_modes():
            graph = self.graph(config)
            make_schedule(graph, replace(pipeline.scheduler_options(graph, config), oracle=listener, recompute=False))
        return list(listener.asked.values())

    def graph(self, config: Config | None = None) -> ir.Graph:
        """The loops, a new copy each time."""
        _, graph = pipeline.lower(self.gm, self.info, config or configuration.current())
        return graph

    def plan(self, way: Way) -> Schedule:
        """What becomes of it one way."""
        with way.context():
            _, plan = pipeline.schedule((self.gm, self.graph(way.config)), self.info, way.config)
        return plan

    def variant(self, way: Way) -> tuple[Variant, Any]:
        """The variant, and what tells it from others."""
        made, started = Variant(way.name), time.perf_counter()
        try:
            with _disable_current_modes():
                plan, blueprint = self._built(way)
        except Exception as cause:
            made.failed = failure(cause)
            return made, None
        made.steps, made.matmuls = steps_of(plan), self.estimates(plan, way.config)
        made.verdicts = [str(v) for v in plan.verdicts] if way.name == CHOSEN else []
        made.blueprint = pickle.dumps(blueprint)
        made.compile_s = time.perf_counter() - started
        calls = tuple(str(step.node.target) for step in plan.calls)
        return made, (
            tuple(launch.identity for launch in blueprint.launches),
            tuple(unit.key for unit in blueprint.units),
            calls,
        )

    def _built(self, way: Way) -> tuple[Schedule, Blueprint]:
        """As users get it: without configurations that turn out not to fit the device, unless one is asked for."""
        found: tuple[Unusable, ...] = ()
        while True:
            with unusable.without(found):
                plan = self.plan(way)
                blueprint = self._blueprint(plan, way.config)
            try:
                self._build(blueprint)
            except (KernelSpills, KernelTooLarge) as cause:
                choice = choice_of(plan, cause.details["kernel"])
                one = None if choice is None else Unusable(choice, cause.text, compiled=True)
                if one is None or one in found or way.only is not None:
                    raise
                found = (*found, one)
                continue
            return plan, blueprint

    def _blueprint(self, plan: Schedule, config: Config) -> Blueprint:
        _, _, units = pipeline.render((self.gm, plan), self.info, config)
        assembled = assemble(plan, units.calls)
        if assembled.callables:
            raise NotImplementedError("a library call is a Python function")
        return Blueprint(units.sources, assembled.program, assembled.constants, {}, assembled.launches)

    def _build(self, blueprint: Blueprint) -> None:
        cpp.build_units(blueprint.units)
        if blueprint.launches and self.job.facts is not None:
            kernels = triton.compile_kernels(blueprint.launches, self.job.facts["arch"])
            check_shared(kernels, self.job.facts["shared"], "cuda:0")
            check_spills(blueprint.launches, kernels)

    def estimates(self, plan: Schedule, config: Config) -> list[dict[str, Any]]:
        """What the model says of each matmul that has a template."""
        options = pipeline.scheduler_options(plan.graph, config)
        found: list[dict[str, Any]] = []
        for step in plan.kernels:
            choice = members(step)[0].choice
            if choice is None:
                continue
            own = [chosen_problem(k, plan.graph, options.device(plan.graph, contraction_of(k))) for k in members(step)]
            knobs = own[0].template.config(**dict(choice.config))
            seconds = model.grouped_seconds(own, knobs) if isinstance(step, ComboKernel) else model.seconds(own[0], knobs)
            found.append({
                "kernel": step.name, "template": choice.template, "config": dict(choice.config), "estimate": seconds,
                "estimate_library": sum(model.vendor_seconds(p) for p in own), "sizes": sizes_of(own[0]), "members": len(own),
            })  # fmt: skip
        return found


def choice_of(plan: Schedule, symbol: str) -> Choice | None:
    """What a kernel of a plan was chosen to be, by the kernel's symbol, which is numbered."""
    name = symbol.partition("_")[2]
    return next((members(step)[0].choice for step in plan.kernels if step.name == name), None)


def steps_of(plan: Schedule) -> list[str]:
    """Kernels and calls in order, matmuls with their choices."""
    return [_step(step) for step in plan.steps]


def _step(step: Launch | Call) -> str:
    if isinstance(step, Call):
        return str(step.node.target)
    choice = members(step)[0].choice
    return f"{step.name}: {choice}" if choice else step.name


# ---- what a matmul is to the model ------------------------------------------------------------------------------------


def description_of(question: TuningQuery, offers: Sequence[Offer], library: float) -> dict[str, Any]:
    """A matmul with what is fused around it: what the model knows of it, and its estimates."""
    best = {name: min(o.seconds for o in offers if o.template == name) for name in dict.fromkeys(o.template for o in offers)}
    return {
        "kernel": question.step.name, "members": len(members(question.step)), "vendor": question.vendor,
        "estimates": best, "estimate_library": library, "parts": list(question.parts), "copies": list(question.copies),
        **(features(question.problems[0][0]) if question.problems else {}),
    }  # fmt: skip


def features(problem: templates.Problem) -> dict[str, Any]:
    """What estimates are made of."""
    return {
        "sizes": sizes_of(problem), "dtype": str(problem.main_dtype).removeprefix("torch."), "flops": problem.flops,
        "traffic": model.traffic(problem), "epilogue_bytes": problem.epilogue_bytes, "stored_bytes": problem.stored_bytes,
        "result_bytes": problem.size_of_result, "finishing": problem.finishing, "epilogue": len(problem.epilogue),
        "fused_call": problem.has_fused_call, "reduces_tiles": problem.reduces_tiles, "whole": dict(problem.whole),
        "operand_reductions": len(problem.operand_reductions), "scatters": len(problem.scatters),
        "loops": {axis: [str(v.extent) for v in loops] for axis, loops in problem.loops.items()},
        "operands": {name: _operand(problem, name) for name in problem.inputs},
    }  # fmt: skip


def sizes_of(problem: templates.Problem) -> dict[str, int]:
    return {axis: problem.size(axis) for axis in problem.loops}


def _operand(problem: templates.Problem, name: str) -> dict[str, Any]:
    one = problem.inputs[name]
    strides = {axis: problem.stride(name, axis) for axis in one.axes}
    return {
        "computed": one.load is None, "unscaled": one.unscaled, "bytes": problem.bytes_of_operand(name),
        "bytes_read": problem.bytes_read(name), "loops": {axis: len(loops) for axis, loops in one.loops.items()},
        "strides": {axis: None if s is None else problem.sizes.of(s) for axis, s in strides.items()},
    }  # fmt: skip
