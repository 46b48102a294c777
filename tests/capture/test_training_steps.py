"""Training steps of attention with scores computed again: kernels of backward, what is in memory, and all gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import Tensor

import kgen
from kgen.ir.nodes import TensorArg
from kgen.ir.plan import Schedule, members
from kgen.only import only
from kgen.report.record import Record, recording
from tests.capture import test_recompute_scores as spellings

Function = Callable[..., Tensor]
B, H, M, N = spellings.B, spellings.H, spellings.M, spellings.N
# Whether GPU kernels run in Triton's interpreter, by the prefix of templates.
INTERPRETED = {"cpp": False, "triton": True}
# Kernels of each launch of backward: on a GPU the gradients of queries and of keys share one.
BACKWARD = {"cpp": [1, 1, 1], "triton": [1, 2]}


@dataclass(frozen=True)
class Step:
    """The schedules of a training step, and the gradients of all that has any."""

    schedules: list[Schedule]
    gradients: list[Tensor]

    @property
    def in_memory(self) -> int:
        """Elements of the largest tensor that a step makes in memory."""
        found = [
            math.prod(size.as_int() or 0 for size in plan.graph.buffers[name].sizes)
            for plan in self.schedules
            for name in _in_memory(plan)
            if plan.graph.buffers[name].kind == "intermediate"
        ]
        return max(found)

    def kernels_of(self, template: str) -> list[int]:
        """Of each launch by the template, how many kernels share it."""
        launches = (members(step) for step in self.schedules[-1].kernels)
        chosen = ([one.choice for one in own if one.choice is not None] for own in launches)
        return sorted(len(own) for own in chosen if own and own[0].template.startswith(template))


def _in_memory(plan: Schedule) -> set[str]:
    """Tensors that die at some step, and results."""
    results = {one.buffer for one in plan.graph.outputs if isinstance(one, TensorArg)}
    return {*chain(*plan.dead_after), *results} - plan.local


def trained(f: Function, args: list[Tensor], prefix: str) -> Step:
    args = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    torch._dynamo.reset()
    templates = [f"{prefix}_attention{more}" for more in ("", "_backward", "_backward_values")]
    how = kgen.config.override(cache=False, recompute_scores="on", gpu_interpreter=INTERPRETED[prefix])
    with recording() as recorder, only(templates[0], lambda configs: configs[-1], also=tuple(templates[1:])), how:
        made = torch.compile(f, backend="kgen", fullgraph=True)(*args)
        weights = spellings.r(*made.shape, seed=7).to(made.dtype)
        found = torch.autograd.grad((made * weights).sum(), [a for a in args if a.requires_grad])
    return Step([graph.plan for graph in recorder.graphs if isinstance(graph, Record)], list(found))


def assert_right(f: Function, args: list[Tensor], step: Step, tolerance: float = 1e-5) -> None:
    spellings.assert_close(step.gradients, spellings.gradients(f, spellings.wide(args), None), tolerance)


MARKS = {"cpp": pytest.mark.cpu, "triton": pytest.mark.interpret}
BOTH = pytest.mark.parametrize("prefix", [pytest.param(p, marks=mark) for p, mark in MARKS.items()])
IN_CACHES = (
    "plain",
    "gpt2",
    "bert",
    "alibi",
    "softcap",
    "window",
    "shared heads",
    "expanded heads",
    "decomposed",
    "float32 softmax",
)
QUICK = ("gpt2", "softcap", "shared heads")


@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in IN_CACHES])
def test_three_kernels_and_no_scores_in_memory(name: str, prefix: str) -> None:
    f, more = spellings.SPELLINGS[name]
    step = trained(f, [*spellings.QKV, *more], prefix)
    assert step.kernels_of(f"{prefix}_attention_backward") == BACKWARD[prefix]
    assert step.in_memory < spellings.MATRIX * B * H
    assert_right(f, [*spellings.QKV, *more], step)


# ---- captured tensors -----------------------------------------------------------------------------------------------


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (spellings.scores(q, k) + bias).softmax(-1) @ v


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    rows, columns = spellings.positions()
    return (spellings.scores(q, k) + slopes[:, None, None] * (columns - rows)).softmax(-1) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


CAPTURED: dict[str, tuple[Function, Tensor]] = {
    "bias": (biased, spellings.r(H, M, N)),
    "slopes": (sloped, spellings.r(H) * 0.1),
    "scale": (scaled, spellings.r(1) + 0.5),
    "table": (spellings.t5, spellings.r(11, H)),
}


@BOTH
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "bias" else pytest.mark.slow) for n in CAPTURED])
def test_gradients_of_captured_tensors(name: str, prefix: str) -> None:
    """They are sums of the scores' gradients, which are in memory for them: no template takes those of operands then."""
    f, more = CAPTURED[name]
    assert_right(f, [*spellings.QKV, more], trained(f, [*spellings.QKV, more], prefix), 3e-5)


# ---- random score functions -----------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda s, x: s * x,
    "plus": lambda s, x: s + x,
    "cap": lambda s, x: torch.tanh(s / (1 + x)) * (1 + x),
    "sigmoid": lambda s, x: s * torch.sigmoid(s * x),
    "slope": lambda s, x: s - x * (spellings.positions()[0] - spellings.positions()[1]).abs() / 8,
    "softplus": lambda s, x: torch.nn.functional.softplus(s) * x,
    "low": lambda s, x: torch.where(s > -x, s, s * 0.5),
}
MASKS: dict[str, Callable[[int], Tensor] | None] = {
    "none": None,
    "causal": lambda x: spellings.positions()[1] > spellings.positions()[0] + x,
    "window": lambda x: (spellings.positions()[1] - spellings.positions()[0]).abs() > x + 4,
    "prefix": lambda x: (spellings.positions()[1] > spellings.positions()[0]) & (spellings.positions()[1] >= x + 1),
}


def random_function(seed: int) -> tuple[str, Function]:
    chance = random.Random(seed)
    chosen = [(name, round(chance.uniform(0.2, 1.5), 2)) for name in chance.choices(list(STEPS), k=chance.randint(1, 4))]
    mask, reach = chance.choice(list(MASKS)), chance.randint(0, 5)
    keep = MASKS[mask]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = spellings.scores(q, k)
        for name, number in chosen:
            s = STEPS[name](s, number)
        return (s if keep is None else s.masked_fill(keep(reach), -math.inf)).softmax(-1) @ v

    return f"{chosen} {mask} {reach}", function


@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 2 else pytest.mark.slow) for n in range(24)])
def test_random_score_functions(seed: int, prefix: str) -> None:
    name, f = random_function(seed)
    step = trained(f, spellings.QKV, prefix)
    assert step.kernels_of(f"{prefix}_attention_backward") == BACKWARD[prefix], name
    assert step.in_memory < spellings.MATRIX * B * H, name
    assert_right(f, spellings.QKV, step, 3e-5)
