"""From a step of a plan to its kernel: finds the template and the configuration, and has the template's language write it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from kgen import errors
from kgen.ir import nodes as ir
from kgen.ir.plan import Choice, Launch, Nest, Packing, Tiling, members
from kgen.listeners import Listeners
from kgen.rendered.kernel_call import KernelCall, Rendered
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.loop_contract import LoopProblem, LoopTemplate, loop_problem
from kgen.templates.problem import Problem

__all__ = ["LOOP_KERNELS", "Context", "Decisions", "Language", "Made", "loop_template", "render_loops", "render_step"]

Made = Rendered | KernelCall
# Where the language of each kind of device is.
LANGUAGES = {"cuda": ("kgen.templates.triton.language", "TRITON"), "cpu": ("kgen.templates.cpp.language", "CPP")}


@dataclass(frozen=True, slots=True)
class Language:
    """Who writes kernels of one language under a name: of a contraction, or of several that share it (`exact`: with eager's
    roundings), and of each kind of loops without one."""

    contraction: Callable[[Sequence[Problem], Config, str, bool], Made]
    loops: Mapping[str, Callable[[LoopProblem, LoopTemplate, Config, str], Made]]


class Decisions(Protocol):
    """What the scheduler has decided of the kernels of a step."""

    def problems(self, step: Launch) -> Sequence[Problem]:
        """The contractions, as the chosen template sees them."""

    def vector_loops(self, step: Launch) -> tuple[Nest, ...]:
        """The loops of C++ kernels."""

    def tilings(self, step: Launch) -> tuple[Tiling, ...]:
        """The tiles of GPU kernels."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the steps of one plan have in common. `exact`: results are rounded as eager rounds them."""

    graph: ir.Graph
    decisions: Decisions
    exact: bool = False


def render_step(step: Launch | Packing, symbol: str, context: Context) -> Made:
    """The kernel of a step under a name."""
    if isinstance(step, Packing):
        return render_loops(loop_problem(step, context.graph), symbol)
    first, decisions = members(step)[0], context.decisions
    if not first.contracts:
        chosen = decisions.tilings(step) if step.target == "triton" else decisions.vector_loops(step)
        return render_loops(loop_problem(step, context.graph, chosen, context.exact), symbol, first.choice)
    assert first.choice is not None
    problems = decisions.problems(step)
    template = problems[0].template
    config = template.config(**dict(first.choice.config))
    return _language(template.device).contraction(problems, config, symbol, context.exact)


def render_loops(problem: LoopProblem, symbol: str, choice: Choice | None = None) -> Made:
    """The kernel of loops without a contraction: by the choice, else by the first template that takes the problem, as the
    scheduler has decided. Raises NoLoopTemplate where none takes it."""
    template = loop_template(problem, "" if choice is None else choice.template)
    if LOOP_KERNELS.heard:
        LOOP_KERNELS.note(lambda: (problem, template))
    config = template.config(problem, {} if choice is None else dict(choice.config))
    return _language(template.device).loops[problem.kind](problem, template, config, symbol)


# The loops that are rendered, with the template that has each.
LOOP_KERNELS: Listeners[tuple[LoopProblem, LoopTemplate]] = Listeners()


def loop_template(problem: LoopProblem, name: str = "") -> LoopTemplate:
    """The template that takes a problem: the one of that name, else the last one that was registered and does not refuse."""
    refusals: list[str] = []
    for template in registry.loop_templates(problem.kind, problem.device):
        if name in ("", template.name):
            reason = template.refuse(problem)
            if reason is None:
                return template
            refusals.append(f"{template.name}: {reason}")
    why = "; ".join(refusals) or "none is registered" + (f" as {name}" if name else "")
    raise errors.NoLoopTemplate(kernel=problem.step.name, kind=problem.kind, why=why)


@cache
def _language(device: str) -> Language:
    module, name = LANGUAGES[device]
    found: Language = getattr(importlib.import_module(module), name)
    return found
