"""Kernels of a plan's steps, and of loops that a test has chosen, as the registered templates write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kgen.ir import nodes as ir
from kgen.ir.plan import ComboKernel, Launch, Nest, Packing, Tiling
from kgen.rendered.kernel_call import KernelCall, Rendered
from kgen.scheduler import Gpu, Options, StepChoices
from kgen.templates.loop_contract import loop_problem
from kgen.templates.registry import render_loops, render_step
from tools.replay_adapter import Texts, door, rendering
from tools.replay_corpus import Case
from tools.replay_graphs import call

__all__ = [
    "combo_call",
    "decisions",
    "cpp_function",
    "cpp_text",
    "gpu_call",
    "step_text",
    "texts_of_a_gpu",
    "training_texts_of_a_gpu",
]


def decisions(graph: ir.Graph, register_bytes: int = 64, options: Options | None = None) -> StepChoices:
    """What is decided of the steps of a graph."""
    device = partial((options or Options()).device, graph)
    return StepChoices(graph, device, register_bytes, Gpu())


def cpp_function(step: Launch | Packing, symbol: str, graph: ir.Graph, register_bytes: int = 64) -> Rendered:
    """The C++ function of a step."""
    made = render_step(step, symbol, decisions(graph, register_bytes))
    assert isinstance(made, Rendered)
    return made


def step_text(step: Launch, graph: ir.Graph, symbol: str = "kernel") -> str:
    """The text of a step's C++ function."""
    return cpp_function(step, symbol, graph).text


def cpp_text(nest: Nest, graph: ir.Graph, symbol: str = "kernel") -> str:
    """The C++ function of a loop nest."""
    made = render_loops(loop_problem(nest.kernel, graph, [nest]), symbol)
    assert isinstance(made, Rendered)
    return made.text


def gpu_call(tiling: Tiling, graph: ir.Graph, symbol: str = "kernel") -> KernelCall:
    """The GPU kernel of a tiling."""
    made = render_loops(loop_problem(tiling.kernel, graph, [tiling]), symbol)
    assert isinstance(made, KernelCall)
    return made


def combo_call(batch: ComboKernel, tilings: Sequence[Tiling], graph: ir.Graph, symbol: str = "kernel") -> KernelCall:
    """The GPU kernel of a batch."""
    made = render_loops(loop_problem(batch, graph, tilings), symbol)
    assert isinstance(made, KernelCall)
    return made


def texts_of_a_gpu(function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None) -> Texts:
    """What the inference graph of a function becomes for a GPU that need not be here; `args` have no data."""
    [found] = _texts(Case(function.__name__, lambda: (function, list(args))), options)
    return found


def training_texts_of_a_gpu(function: Callable[..., Any], *args: Any) -> tuple[Texts, Texts]:
    """The same of its forward and backward graphs."""
    forward, backward = _texts(Case(function.__name__, lambda: (function, list(args)), trains=True))
    return forward, backward


def _texts(case: Case, options: dict[str, Any] | None = None) -> list[Texts]:
    made: list[Texts] = []
    call(case, "gpu", door(options or {}), partial(rendering, made.append))
    return made
