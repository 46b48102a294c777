"""Patterns of several steps, and patterns with windows, as functions of tensors: what users would write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from kgen import errors
from kgen.ir.program import Axes, Elementwise, Program, Ref, Softmax, Step
from kgen.templates.pattern import Pattern

__all__ = ["Convolution", "Steps", "shape_of"]

# Of a step's name and result: what its slot makes of it.
Middle = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Steps:
    """A program as einsums and softmaxes, over those of its axes that are `present`."""

    program: Program
    present: frozenset[str]

    def __call__(self, *operands: torch.Tensor, middle: Middle = lambda _, made: made) -> torch.Tensor:
        return self._made(operands, middle)[self.program.steps[-1].name]

    def with_seconds(self, *operands: torch.Tensor, middle: Middle = lambda _, made: made) -> tuple[torch.Tensor, ...]:
        """The result, and the second ones of steps behind it."""
        made = self._made(operands, middle)
        rows = (torch.logsumexp(made[s.of], self.axes(s.axes).index(s.over)) for s in self.program.seconds)
        return (made[self.program.steps[-1].name], *rows)

    def _made(self, operands: Sequence[torch.Tensor], middle: Middle) -> Mapping[Ref, torch.Tensor]:
        made: dict[Ref, torch.Tensor] = dict(enumerate(operands))
        slots = {step.name for step in self.program.middles}
        for step in self.program.steps:
            found = self._run(step, made)
            made[step.name] = middle(step.name, found) if step.name in slots else found
        return made

    def axes(self, axes: Iterable[str]) -> Axes:
        return tuple(a for a in axes if a in self.present)

    def _run(self, step: Step, made: Mapping[Ref, torch.Tensor]) -> torch.Tensor:
        if self.program.multiplies(step):
            return self._scaled(made[step.reads[0]], step)
        if isinstance(step, Elementwise):  # some function of bounded numbers, so that sums of it are as exact as others
            return functools.reduce(torch.mul, (torch.tanh(made[one]) for one in step.of))
        if isinstance(step, Softmax):
            return torch.softmax(made[step.of], self.axes(step.axes).index(step.over))
        left, right, result = ("".join(self.axes(axes)) for axes in (*map(self.program.axes_of, step.reads), step.axes))
        return torch.einsum(f"{left},{right}->{result}", *(made[ref] for ref in step.reads))

    def _scaled(self, weights: torch.Tensor, step: Step) -> torch.Tensor:
        """Weights of which every third one is dropped, and the others are larger."""
        last = len(self.axes(step.axes)) - 1
        kept = torch.arange(weights.shape[last], device=weights.device) % 3 != 1
        return torch.where(kept, weights * 1.5, 0.0)


def shape_of(pattern: Pattern, axes: Axes, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor over some axes: those of a window are one dimension."""
    taps = {tap: position for position, tap in pattern.windows if tap in axes and position in axes}
    ends = {position: tap for tap, position in taps.items()}
    return tuple(lengths[a] + (lengths[ends[a]] - 1 if a in ends else 0) for a in axes if a in lengths and a not in taps)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A pattern with windows as the convolution that it is. Raises BadTemplate for one that is none."""

    pattern: Pattern
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = [len(axes) for axes in (self._made, self._channels, self._groups, self._batch)]
        if len(self.pattern.windows) > 3 or max(found) > 1 or not (self._made or self._groups):
            problem = "its windows are those of no convolution: give check_template problems with them"
            raise errors.BadTemplate(template=str(self.pattern.operands), problem=problem)

    @property
    def _windowed(self) -> int:
        return next(k for k, axes in enumerate(self.pattern.operands) if self.pattern.windows[0][0] in axes)

    @property
    def _image(self) -> Axes:
        """The axes of the image, but those of taps."""
        return tuple(a for a in self.pattern.operands[self._windowed] if a not in self._taps)

    @property
    def _filters(self) -> Axes:
        return self.pattern.operands[1 - self._windowed]

    @property
    def _positions(self) -> Axes:
        return tuple(position for position, _ in self.pattern.windows)

    @property
    def _taps(self) -> Axes:
        return tuple(tap for _, tap in self.pattern.windows)

    @property
    def _groups(self) -> Axes:
        return self.pattern.batch

    @property
    def _batch(self) -> Axes:
        result = self.pattern.results[0]
        return tuple(a for a in self._image if a in result and a not in (*self._positions, *self._groups))

    @property
    def _channels(self) -> Axes:
        return tuple(a for a in self._image if a in self._filters and a not in self._groups)

    @property
    def _made(self) -> Axes:
        return tuple(a for a in self._filters if a in self.pattern.results[0] and a not in self._groups)

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        """Without groups the tensors lack their axis."""
        image, filters = (operands[k] for k in (self._windowed, 1 - self._windowed))
        groups = self._groups if image.ndim == len(self._image) else ()
        axes = [tuple(a for a in own if a in groups or a not in self._groups) for own in (self._image, self._filters)]
        image = _permuted(image, axes[0], (*self._batch, *groups, *self._channels, *self._positions))
        filters = _permuted(filters, axes[1], (*groups, *self._made, *self._channels, *self._taps))
        filters = filters if self._made else filters.unsqueeze(len(groups))
        if not self._channels:
            image, filters = (x.unsqueeze(-1 - len(self._taps)) for x in (image, filters))
        image = image if self._batch else image[None]
        count = filters.shape[0] if groups else 1
        if groups:
            image, filters = image.flatten(1, 2), filters.flatten(0, 1)
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.pattern.windows) - 1]
        result = call(image, filters, groups=count, **self.arguments)
        result = result.unflatten(1, (count, -1)) if groups else result
        result = result if self._made else result.squeeze(1 + len(groups))
        result = result if self._batch else result[0]
        wanted = tuple(a for a in self.pattern.results[0] if a in groups or a not in self._groups)
        return _permuted(result, (*self._batch, *groups, *self._made, *self._positions), wanted)


def _permuted(tensor: torch.Tensor, axes: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    return tensor.permute([axes.index(a) for a in wanted])
