"""Programs: what a template computes where that is more than one contraction. Names of axes, of operands and of steps only; the
loops and values that a program is applied to are those of an `ir.Operation`.

A step takes operands of the program (by number) or results of earlier steps (by name). `Contract` is the sum of products over
the axes that its result lacks; `Softmax` normalises along one axis, and of a row that is -inf as a whole it makes NaN, or zeros
where the operation says so; `Elementwise` is a function of one element each of contractions over the same axes, or multiplies
the weights of one softmax by a function of indices and of memory: some may be made 0, as by dropout. Each operand is used once,
each step but the last by one step, or by several of which all are `Elementwise`. What a `Contract` makes passes through a
*middle slot* before the next step sees it: any function of the one element, of the indices, and of memory. Where `Elementwise`
steps read it, these have the slots, each a function of the elements that it reads. A `Softmax` may have a second result, the
*log-sum-exp* of each row, which passes through a slot of its own. Programs are equal whether they have it or not: it is made
only where somebody reads it.

A program over one operator's loops has axes of other lengths than another one: equality of two programs is that of their
`canonical` forms, in which axes and steps are named in the order in which they appear.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

Axes = tuple[str, ...]
Ref = int | str


@dataclass(frozen=True, slots=True)
class MatrixSizes:
    """Of a matrix between contractions that a program does not store: its rows and columns, the lengths of the contractions'
    other axes but those of batches, and the type of numbers that are multiplied, as torch names it."""

    rows: int
    columns: int
    others: frozenset[int]
    dtype: object


@dataclass(frozen=True, slots=True)
class Contract:
    """``name[axes] = sum of left * right`` over the axes of these that `axes` lacks."""

    name: str
    left: Ref
    right: Ref
    axes: Axes

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.left, self.right


@dataclass(frozen=True, slots=True)
class Softmax:
    """``name[axes] = exp(of - m) / sum(exp(of - m))`` along `over`, where m is the maximum along it. With `logsumexp` also
    ``m + log(sum(exp(of - m)))``, which is -inf of a row that is -inf as a whole."""

    name: str
    of: str
    over: str
    axes: Axes
    logsumexp: bool = field(default=False, compare=False)

    @property
    def reads(self) -> tuple[Ref, ...]:
        return (self.of,)

    @property
    def rows(self) -> Axes:
        """The axes of its second result."""
        return tuple(axis for axis in self.axes if axis != self.over)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """``name[axes] = f(of...)``: any function of one element each of the contractions `of`, all over the same axes. Of a
    softmax, which is alone then, each weight times something: a kernel may apply it before weights are divided by their sum."""

    name: str
    of: tuple[str, ...]
    axes: Axes

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.of


Step = Contract | Softmax | Elementwise


@dataclass(frozen=True)
class Program:
    """Steps in order, the last one a `Contract` that makes the result."""

    operands: tuple[Axes, ...]
    steps: tuple[Step, ...]

    @cached_property
    def result(self) -> Axes:
        return self.steps[-1].axes

    @cached_property
    def axes(self) -> Axes:
        """All axes, in the order in which operands and results name them."""
        return _distinct(a for axes in (*self.operands, *(s.axes for s in self.steps)) for a in axes)

    @cached_property
    def middles(self) -> tuple[Contract | Elementwise, ...]:
        """The steps that have a slot: contractions, unless elementwise steps read them, and these."""
        bare = {ref for s in self.steps if isinstance(s, Elementwise) for ref in s.of}
        return tuple(s for s in self.steps[:-1] if not isinstance(s, Softmax) and s.name not in bare)

    @cached_property
    def seconds(self) -> tuple[Softmax, ...]:
        """The steps that have a second result."""
        return tuple(s for s in self.steps if isinstance(s, Softmax) and s.logsumexp)

    @cached_property
    def joins(self) -> bool:
        """Whether some step needs the results of several earlier ones."""
        return any(sum(isinstance(ref, str) for ref in step.reads) > 1 for step in self.steps)

    def step(self, name: str) -> Step:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, Step]:
        return {s.name: s for s in reversed(self.steps)}

    def axes_of(self, ref: Ref) -> Axes:
        """The axes of an operand, or of a step's result."""
        return self.operands[ref] if isinstance(ref, int) else self.step(ref).axes

    def reduced(self, step: Contract) -> Axes:
        """The axes that a step sums over."""
        found = self._reduced.get(step)
        if found is None:
            inside = _distinct((*self.axes_of(step.left), *self.axes_of(step.right)))
            found = self._reduced[step] = tuple(a for a in inside if a not in step.axes)
        return found

    @cached_property
    def _reduced(self) -> dict[Contract, Axes]:
        """What steps sum over, of those that somebody has asked about."""
        return {}

    def reader(self, step: Step) -> Step:
        """The step that reads what goes through the slot of another one."""
        return next(s for s in self.steps if step.name in s.reads)

    def multiplies(self, step: Step) -> bool:
        """Whether a step multiplies the weights of a softmax."""
        return isinstance(step, Elementwise) and isinstance(self.step(step.of[0]), Softmax)

    def elements(self, step: Contract | Elementwise) -> tuple[str, ...]:
        """The steps of whose elements the function in a step's slot is."""
        return step.of if isinstance(step, Elementwise) else (step.name,)

    @cached_property
    def canonical(self) -> Program:
        """The program with the names that all equal ones have."""
        axes = dict(zip(self.axes, string.ascii_lowercase, strict=False))
        names = {s.name: f"step{k}" for k, s in enumerate(self.steps)}
        return Program(tuple(_renamed(o, axes) for o in self.operands), tuple(_canonical(s, axes, names) for s in self.steps))

    @cached_property
    def key(self) -> str:
        """Equal for equal programs; for people, too."""
        return "; ".join(map(self._text, self.canonical.steps))

    def _text(self, step: Step) -> str:
        if isinstance(step, Softmax):
            return f"{step.name} = softmax({step.of}, {step.over})"
        if isinstance(step, Elementwise):
            return f"{step.name} = elementwise({', '.join(step.of)})"
        canonical = self.canonical
        operands = (_called(ref, canonical.axes_of(ref)) for ref in step.reads)
        return f"{step.name}[{''.join(step.axes)}] = sum {' * '.join(operands)}"


def _distinct(names: Iterable[str]) -> Axes:
    return tuple(dict.fromkeys(names))


def _renamed(axes: Axes, names: Mapping[str, str]) -> Axes:
    return tuple(names[a] for a in axes)


def _canonical(step: Step, axes: Mapping[str, str], names: Mapping[str, str]) -> Step:
    if isinstance(step, Softmax):
        return replace(step, name=names[step.name], of=names[step.of], over=axes[step.over], axes=_renamed(step.axes, axes))
    if isinstance(step, Elementwise):
        return Elementwise(names[step.name], tuple(names[one] for one in step.of), _renamed(step.axes, axes))
    left, right = (ref if isinstance(ref, int) else names[ref] for ref in step.reads)
    return replace(step, name=names[step.name], left=left, right=right, axes=_renamed(step.axes, axes))


def _called(ref: Ref, axes: Axes) -> str:
    return ref if isinstance(ref, str) else f"operand{ref}[{''.join(axes)}]"
