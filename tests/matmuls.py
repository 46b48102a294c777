"""Matmuls compiled by one template and one configuration, in Triton's interpreter or for a GPU that is not here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.cost import model
from kgen.host.interpret import Interpreted
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler.transforms import operand_padding, recompute_trial
from kgen.templates import registry
from kgen.templates.contract import Config, Resources, Template

Pick = Callable[[Sequence[Config]], Sequence[Config]]


@dataclass
class Forced:
    """What was compiled: the configurations on offer, what they were said to need, and the kernels."""

    configs: list[Config] = field(default_factory=list)
    needs: list[Resources] = field(default_factory=list)
    kernels: list[TritonKernel] = field(default_factory=list)

    @property
    def matmuls(self) -> list[TritonKernel]:
        return [k for k in self.kernels if "ACCUMULATOR" in k.source]


def only_templates(patch: pytest.MonkeyPatch, templates: Sequence[Template]) -> None:
    """There are no others. What the registry knows of those that there are is put aside: it would be another test's."""
    patch.setattr(registry, "every", lambda device=None: [t for t in templates if device in (None, t.device)])
    patch.setattr(registry, "_refusals", {})


@contextmanager
def forced(name: str, pick: Pick = lambda configs: configs[:1], runs: bool = True) -> Iterator[Forced]:
    """Graphs compiled inside leave every matmul that `name` can take to it, once. Without `runs` kernels do nothing."""
    made = Forced()
    template, call = registry.find(name), Interpreted.__call__

    def feasible(problem: Any) -> Sequence[Config]:
        made.configs = list(pick(list(template.configs(problem))))
        made.needs = [template.resources(problem, config) for config in made.configs]
        return made.configs

    def called(self: Interpreted, *args: Any) -> tuple[()]:
        made.kernels.append(self.kernel)
        return call(self, *args) if runs else ()

    with pytest.MonkeyPatch.context() as patch:
        only_templates(patch, [template])
        patch.setattr(model, "vendor_seconds", lambda problem: 1e9)
        patch.setattr(Template, "uncalibrated", lambda template, problem: None)
        patch.setattr(model, "feasible", feasible)
        patch.setattr(recompute_trial, "recompute_candidates", lambda *args: [])
        patch.setattr(operand_padding, "best_copies", lambda *args: operand_padding.NONE)
        patch.setattr(Interpreted, "__call__", called)
        torch._dynamo.reset()
        yield made


def compiled(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Any:
    options = {"gpu_interpreter": True, "cache": False}
    return torch.compile(fn, backend="kgen", fullgraph=True, dynamic=dynamic, options=options)(*args)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to the norm; infinite where something is not a number."""
    found = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()
    return float("inf") if math.isnan(found) else found


def at_several_lengths(fn: Callable[..., Any], more: Sequence[Tensor], options: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Rows of 50 elements, more and fewer of them, each with the result: of one kernel that is compiled once for all."""
    step = torch.compile(fn, backend="kgen", fullgraph=True, options=options)
    for rows in (70, 33, 128):
        x = torch.randn((rows, 50), generator=torch.Generator().manual_seed(rows + 50))
        torch._dynamo.mark_dynamic(x, 0)
        kgen.coverage_reset()
        found = step(x, *more)
        assert kgen.coverage()["kernels"] == (1 if rows == 70 else 0)
        yield x, found
