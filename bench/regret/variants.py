"""A problem as kgen compiles it by default, without templates, and with each template: made in processes that need no GPU."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from bench.calibration import SIZES, Problem, problems
from bench.contenders import failure
from bench.patterns import outputs_of
from kgen import config as configuration
from kgen import ir, pipeline, torch_adapter
from kgen.build import cpp, triton
from kgen.config import Config
from kgen.decompositions import table as decompositions
from kgen.host.assemble import assemble
from kgen.host.compiled import Blueprint, check_shared
from kgen.plan import Batch, Call, Launch, Schedule, members
from kgen.scheduler import chosen_problem, product_of
from kgen.scheduler import schedule as make_schedule
from kgen.templates import problem as templates
from kgen.templates.contract import Config as Knobs
from kgen.torch_adapter import GraphInfo
from kgen.tuning import model
from kgen.tuning.answer import Answer, Place, Question
from kgen.tuning.only import Only, only
from kgen.verdict import Verdict

CHOSEN, LIBRARY = "chosen", "library"
# A GPU that is not here: an H100 with HBM3.
H100 = {"arch": 90, "processors": 132, "shared": 232448, "clock": 1_980_000_000, "memory": 3_352_320_000_000}
# Configurations beyond the first of a template are left out where the model thinks them so many times slower than its favourite.
HOPELESS = 4.0


@dataclass(frozen=True)
class Job:
    """A problem by its number in the set of a size, to be compiled for a device with these `facts` (of a GPU) or `threads`;
    `configs` are the configurations of each template, the model's favourites first."""

    size: str
    number: int
    dtype: torch.dtype
    device: str
    facts: Mapping[str, int] | None
    configs: int = 2
    threads: int = 1

    @property
    def problem(self) -> Problem:
        return _problems(self.size)[self.number].of_type(self.dtype)


@cache
def _problems(size: str) -> list[Problem]:
    return problems(SIZES[size])


@dataclass
class Variant:
    """One way to compute a problem: the steps of its plan, what the model says of its products, and the blueprint. `same_as`
    names an earlier variant with the same kernels and calls; `failed` says why there is none."""

    name: str
    steps: list[str] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    blueprint: bytes = b""
    compile_s: float = 0.0
    same_as: str = ""
    failed: str = ""


@dataclass
class Compiled:
    """All variants of a problem, and its products as templates see them before anything is chosen."""

    job: Job
    variants: list[Variant] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""


def compile_job(job: Job) -> Compiled:
    """Everything that has to be known of a problem before it is timed. Never raises: a problem that does not compile is one
    more result."""
    done = Compiled(job)
    try:
        with _settled(job):
            _compile(job, done)
    except Exception as cause:
        done.failed = failure(cause)
    return done


@contextmanager
def _settled(job: Job) -> Iterator[None]:
    """As on the machine that times: its threads, and the GPU's facts, whether or not this process sees one."""
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        if job.facts is not None:
            facts = dict(job.facts)
            stack.enter_context(patch.object(torch_adapter, "gpu_facts", lambda device: facts))
        stack.enter_context(torch.no_grad())
        yield


def _compile(job: Job, done: Compiled) -> None:
    cpp.prepare()
    gm = traced(job.problem, job.device)
    maker = _Maker(job, gm)
    questions = maker.questions()
    done.products = [_description(q) for q in questions]
    known: dict[Any, str] = {}
    for name, context, config in ways(questions, job.configs):
        variant, key = maker.variant(name, context, config)
        if key is not None:
            variant.same_as = known.setdefault(key, name)
            if variant.same_as == name:
                variant.same_as = ""
            else:
                variant.blueprint = b""
        done.variants.append(variant)


def traced(problem: Problem, device: str) -> GraphModule:
    """The aten graph of a problem. Where there is no GPU, autograd does not run on tensors that are said to be on one: the graph
    is traced on a CPU and moved."""
    moves = device == "cuda" and not torch.cuda.is_available()
    mode, where = FakeTensorMode(), torch.device("cuda:0" if device == "cuda" and not moves else "cpu")
    args = [FakeTensor(mode, one, where) for one in problem.make("meta")]
    with mode:
        gm = make_fx(lambda *given: outputs_of(problem.fn(*given)), decomposition_table=decompositions())(*args)
    return _moved(gm, mode, torch.device("cuda:0")) if moves else gm


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

Way = tuple[str, Callable[[], AbstractContextManager[Any]], Config]


def ways(questions: Sequence[Question], configs: int) -> Iterator[Way]:
    """By default, without templates, and with all products left to one template in turn, under several of its configurations;
    with sums in parts and copies of operands where these are possible."""
    plain = replace(configuration.current(), measurements=False)
    yield CHOSEN, nullcontext, plain
    yield LIBRARY, nullcontext, replace(plain, templates=False)
    for forced, name in _forced(questions, configs):
        yield name, lambda forced=forced: only(forced.template, forced.pick, forced.parts, forced.copies), plain


def _forced(questions: Sequence[Question], configs: int) -> Iterator[tuple[Only, str]]:
    offers = [offer for q in questions for offer in offers_of(q)]
    if not offers:
        return
    best = min(seconds for _, seconds in offers)
    by_template: dict[str, list[float]] = {}
    for name, seconds in offers:
        by_template.setdefault(name, []).append(seconds)
    ordered = sorted(by_template, key=lambda name: min(by_template[name]))
    for name in ordered:
        hopeful = sum(seconds <= HOPELESS * best for seconds in by_template[name])
        for rank in range(max(1, min(configs, hopeful))):
            yield Only(name, picker(rank)), f"{name} {rank}"
    for parts in list(dict.fromkeys(parts for q in questions for parts in q.parts))[:2]:
        takers = [p[0].template.name for q in questions for p in q.problems if parts in q.parts and p[0].template.implements.batch]
        for name in [name for name in ordered if name in takers][:2]:
            yield Only(name, picker(0), parts=parts), f"{name} 0, sum in {parts}"
    for copies in list(dict.fromkeys(c for q in questions for c in q.copies if c))[:2]:
        takers = [p.template.name for q in questions if copies in q.copies for p in q.copies[copies][1]]
        for name in [name for name in dict.fromkeys((*ordered, *takers)) if name in takers][:2]:
            yield Only(name, picker(0), copies=copies), f"{name} 0, copies: {copies}"


def picker(rank: int) -> Callable[[Sequence[Knobs]], Knobs]:
    """The model's favourite, or the one so far behind it."""
    return lambda configs: configs[min(rank, len(configs) - 1)]


def offers_of(question: Question) -> list[tuple[str, float]]:
    """Templates that take a question, once for each configuration, with the model's seconds."""
    found: list[tuple[str, float]] = []
    for own in question.problems:
        for config in model.feasible(own[0]):
            if all(model.fits(p, config) for p in own):
                found.append((own[0].template.name, _seconds(question, own, config)))
    return found


def _seconds(question: Question, own: Sequence[templates.Problem], config: Knobs) -> float:
    return model.joint_seconds(own, config) if isinstance(question.step, Batch) else model.seconds(own[0], config)


class _Listener:
    """An oracle that knows nothing, and remembers what it was asked first about each product."""

    is_worth_asking = True

    def __init__(self) -> None:
        self.asked: dict[tuple[str, ...], Question] = {}

    def answers(self, questions: Sequence[Question], graph: ir.Graph) -> Mapping[str, Mapping[Place, Answer]]:
        for question in questions:
            self.asked.setdefault(tuple(product_of(one) for one in members(question.step)), question)
        return {}

    def verdicts(self) -> list[Verdict]:
        return []


# ---- one variant -------------------------------------------------------------------------------------------------------


class _Maker:
    """Compiles one graph in several ways."""

    def __init__(self, job: Job, gm: GraphModule) -> None:
        self.job = job
        outputs = len(torch_adapter.output_strides(gm))
        self.info = GraphInfo("problem", "inference", frozenset(), frozenset(range(outputs)))
        with _disable_current_modes():
            self.gm = pipeline.reinplace(gm, self.info, configuration.current())

    def questions(self) -> list[Question]:
        """What would be measured: each product with what was fused into it, while templates may have all of them."""
        listener = _Listener()
        with _disable_current_modes():
            _, graph = pipeline.lower(self.gm, self.info, configuration.current())
            make_schedule(graph, replace(pipeline.scheduler_options(graph, configuration.current()), oracle=listener))
        return list(listener.asked.values())

    def variant(self, name: str, context: Callable[[], AbstractContextManager[Any]], config: Config) -> tuple[Variant, Any]:
        """The variant, and what tells it from others."""
        made, started = Variant(name), time.perf_counter()
        try:
            with _disable_current_modes(), context():
                plan, blueprint = self._blueprint(config)
                self._build(blueprint)
        except Exception as cause:
            made.failed = failure(cause)
            return made, None
        made.steps, made.products = steps_of(plan), self._products(plan, config)
        made.verdicts = [str(v) for v in plan.verdicts] if name == CHOSEN else []
        made.blueprint = pickle.dumps(blueprint)
        made.compile_s = time.perf_counter() - started
        calls = tuple(str(step.node.target) for step in plan.calls)
        return made, (tuple(launch.identity for launch in blueprint.launches), tuple(key for _, key in blueprint.units), calls)

    def _blueprint(self, config: Config) -> tuple[Schedule, Blueprint]:
        work = pipeline.schedule(pipeline.lower(self.gm, self.info, config), self.info, config)
        _, plan, units = pipeline.render(work, self.info, config)
        assembled = assemble(plan, units.calls)
        if assembled.callables:
            raise NotImplementedError("a library call is a Python function")
        return plan, Blueprint(units.sources, assembled.program, assembled.constants, {}, assembled.launches)

    def _build(self, blueprint: Blueprint) -> None:
        cpp.build_units(blueprint.cpp_units())
        if blueprint.launches and self.job.facts is not None:
            kernels = triton.compile_kernels(blueprint.launches, self.job.facts["arch"])
            check_shared(kernels, self.job.facts["shared"], "cuda:0")

    def _products(self, plan: Schedule, config: Config) -> list[dict[str, Any]]:
        """What the model says of each product that has a template."""
        options = pipeline.scheduler_options(plan.graph, config)
        found: list[dict[str, Any]] = []
        for step in plan.kernels:
            choice = members(step)[0].choice
            if choice is None:
                continue
            own = [chosen_problem(k, plan.graph, options.device(plan.graph, product_of(k))) for k in members(step)]
            knobs = own[0].template.config(**dict(choice.config))
            seconds = model.joint_seconds(own, knobs) if isinstance(step, Batch) else model.seconds(own[0], knobs)
            found.append({
                "kernel": step.name, "template": choice.template, "config": dict(choice.config), "estimate": seconds,
                "estimate_library": sum(model.vendor_seconds(p) for p in own), "sizes": sizes_of(own[0]), "members": len(own),
            })  # fmt: skip
        return found


def steps_of(plan: Schedule) -> list[str]:
    """Kernels and calls in order, products with their choices."""
    return [_step(step) for step in plan.steps]


def _step(step: Launch | Call) -> str:
    if isinstance(step, Call):
        return str(step.node.target)
    choice = members(step)[0].choice
    return f"{step.name}: {choice}" if choice else step.name


# ---- what a product is to the model ------------------------------------------------------------------------------------


def _description(question: Question) -> dict[str, Any]:
    """A product with what is fused around it: what the model knows of it, and its estimates."""
    first = question.problems[0][0] if question.problems else None
    offers = offers_of(question)
    best = {name: min(s for other, s in offers if other == name) for name, _ in offers}
    described = {} if first is None else features(first)
    library = math.nan if first is None else sum(model.vendor_seconds(p) for p in question.problems[0])
    return {
        "kernel": question.step.name, "members": len(members(question.step)), "vendor": question.vendor,
        "estimates": best, "estimate_library": library, "parts": list(question.parts), "copies": list(question.copies),
        **described,
    }  # fmt: skip


def features(problem: templates.Problem) -> dict[str, Any]:
    """What estimates are made of."""
    return {
        "sizes": sizes_of(problem), "dtype": str(problem.main_dtype).removeprefix("torch."), "flops": problem.flops,
        "traffic": model.traffic(problem), "epilogue_bytes": problem.epilogue_bytes, "stored_bytes": problem.stored_bytes,
        "result_bytes": problem.size_of_result, "finishing": problem.finishing, "epilogue": len(problem.epilogue),
        "fused_call": problem.has_fused_call, "reduces_tiles": problem.reduces_tiles, "whole": dict(problem.whole),
        "side_sums": len(problem.side_sums), "updates": len(problem.updates),
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

