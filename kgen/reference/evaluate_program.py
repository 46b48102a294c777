"""Runs a program of steps (`kgen/ir/program.py`) with plain torch operations, on tensors of one dimension a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kgen.ir.program import Axes, Contract, Elementwise, Program, Ref, Softmax

Tensor = torch.Tensor
# Of a step's name, and the elements that its slot is a function of, by the names of their steps: what it makes of them.
Middle = Callable[[str, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class ProgramSteps:
    """`dimensions` are those of each axis among all, of which `extents` are the lengths. A tensor has size 1 along dimensions
    that it does not depend on."""

    program: Program
    dimensions: Mapping[str, Sequence[int]]
    extents: Sequence[int]

    def run(self, operands: Sequence[Tensor], middle: Middle, safe: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """The result, and the second results of softmaxes. Rows that are -inf as a whole give zeros where it is `safe`, else
        NaN."""
        made: dict[Ref, Tensor] = dict(enumerate(operands))
        seconds: dict[str, Tensor] = {}
        slots = {step.name for step in self.program.middles}
        for step in self.program.steps:
            if isinstance(step, Softmax):
                seconds[step.name] = self._logsumexp(made[step.of], step)
                made[step.name] = self._softmax(made[step.of], step, safe)
            elif isinstance(step, Elementwise):
                made[step.name] = middle(step.name, {one: made[one] for one in step.of})
            else:
                result = self._contract(made[step.left], made[step.right], step)
                made[step.name] = middle(step.name, {step.name: result}) if step.name in slots else result
        return made[self.program.steps[-1].name], seconds

    def _logsumexp(self, tensor: Tensor, step: Softmax) -> Tensor:
        along = self._of((step.over,))
        return torch.logsumexp(self._spread(tensor, (step.over,)), along, keepdim=True) if along else tensor

    def _spread(self, tensor: Tensor, axes: Axes) -> Tensor:
        """The tensor in full along axes."""
        shape = list(tensor.shape)
        for k in self._of(axes):
            shape[k] = self.extents[k]
        return tensor.expand(shape)

    def _of(self, axes: Axes) -> list[int]:
        return [k for axis in axes for k in self.dimensions[axis]]

    def _contract(self, left: Tensor, right: Tensor, step: Contract) -> Tensor:
        reduced = self._of(self.program.reduced(step))
        names = list(range(len(self.extents)))
        kept = [k for k in names if k not in reduced]
        total = torch.einsum(self._spread(left, self.program.reduced(step)), names, right, names, kept)
        for k in sorted(reduced):
            total = total.unsqueeze(k)
        return total

    def _softmax(self, tensor: Tensor, step: Softmax, safe: bool) -> Tensor:
        along = self._of((step.over,))
        if not along:
            return torch.ones_like(tensor)
        tensor = self._spread(tensor, (step.over,))
        top = tensor.amax(along, keepdim=True)
        weights = (tensor - top).exp()
        weights = weights / weights.sum(along, keepdim=True)
        return torch.where(top == -torch.inf, 0.0, weights) if safe else weights
