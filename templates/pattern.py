"""The patterns of templates: one contraction, one operator, or a small program of contractions and what is between them.

contraction("b,m,k", "b,k,n -> b,m,n")                          # a sum of products
contraction("b,h+r,w+s,c", "r,s,c,k -> b,h,w,k")                # with windows: h + r is one dimension of the tensor
operator("mylib::gated", "m,k", "n,k -> m,n")                   # an operator of torch.ops
program(                                                        # several steps, by name
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=softmax("scores", over="n"),
    out=contraction("weights", "b,n,v -> b,m,v"),
)
program(                                                        # a function of the elements of two contractions
    left=contraction("b,m,d", "b,n,d -> b,m,n"),
    right=contraction("b,m,v", "b,n,v -> b,m,n"),
    both=elementwise("left", "right"),
    out=contraction("both", "b,n,e -> b,m,e"),
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen import errors
from kgen.ir.program import Axes, Contract, Elementwise, Program, Ref, Softmax, Step


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a template computes: a sum of products over the axes that no result has, what `operator` does, or a `program`, whose
    text is the `operator` then. `reference` computes the same in plain torch, for checks; by default the operator itself does.
    `windows` are pairs of axes (position, tap) that walk through one dimension of an operand together. `examples` are
    an operator's other arguments, by name, as checks give them."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    operator: str = ""
    reference: Callable[..., Any] | None = None
    program: Program | None = None
    windows: tuple[tuple[str, str], ...] = ()
    examples: tuple[tuple[tuple[str, Any], ...], ...] = ()

    @property
    def axes(self) -> Axes:
        return tuple(dict.fromkeys(a for axes in (*self.operands, *self.results) for a in axes))

    @property
    def batch(self) -> Axes:
        """Axes of the result that all operands have."""
        return tuple(a for a in self.results[0] if all(a in axes for axes in self.operands))

    @property
    def steps(self) -> tuple[str, ...]:
        """Steps of its program whose results the last one needs."""
        return () if self.program is None else tuple(step.name for step in self.program.steps[:-1])

    @property
    def middles(self) -> tuple[str, ...]:
        """Steps whose results pass through a slot of the template's."""
        return () if self.program is None else tuple(step.name for step in self.program.middles)

    @property
    def seconds(self) -> tuple[str, ...]:
        """Steps of its program with a second result, in the order of these."""
        return () if self.program is None else tuple(step.name for step in self.program.seconds)


@dataclass(frozen=True, slots=True)
class Normalised:
    """A step of a program: `of` made into weights along `over`."""

    of: str
    over: str
    logsumexp: bool = False


@dataclass(frozen=True, slots=True)
class Combined:
    """A step of a program: one element each of contractions made into one, or weights of a softmax times something."""

    of: tuple[str, ...]


def contraction(first: str, rest: str) -> Pattern:
    """``contraction("b,m,k", "b,k,n -> b,m,n")``: the axes of both factors and of the result. An axis of a template may be
    empty in a problem, so one pattern covers matrices and batches of them. ``h+r`` are two axes that walk through one dimension
    of the tensor, as the positions and taps of a convolution do. In a `program` a factor may be the name of an earlier step."""
    _check_texts("contraction", (first, rest))
    operands, results, windows = _axes((first, rest))
    if len(operands) != 2 or len(results) != 1:
        raise errors.BadTemplate(template="contraction", problem="it has two operands and one result")
    return Pattern(operands, results, windows=windows)


def operator(
    name: str, *axes: str, reference: Callable[..., Any] | None = None, examples: Sequence[Mapping[str, Any]] = ()
) -> Pattern:
    """``operator("mylib::gated", "m,k", "n,k -> m,n")``: an operator of ``torch.ops``, a user's custom operator among them,
    with the axes of its tensors in the order of its schema. Several results, all over the same axes, are separated by a
    semicolon, and stored by one call; numbers among the operator's arguments are attributes of ``problem.arguments``.

    `reference` computes the same in plain torch, for `check_template`. `examples` are other arguments, for both, such as
    ``[{"eps": 1e-5}]``: the first ones in all problems, each further ones in a problem of their own."""
    _check_texts("operator", (name, *axes))
    operands, results, windows = _axes(axes)
    if not isinstance(examples, Sequence) or not all(isinstance(one, Mapping) for one in examples):
        raise errors.BadTemplate(
            template=name, problem=f"examples is a list of dicts, [{{'eps': 1e-5}}], and this is {examples!r}"
        )
    if "::" not in name:
        raise errors.BadTemplate(template=name, problem="the name of an operator is written 'namespace::name'")
    if len(set(results)) != 1:
        raise errors.BadTemplate(template=name, problem=f"its results are over different axes, {results}")
    if windows:
        raise errors.BadTemplate(template=name, problem="an operator's tensors have no windows")
    made = tuple(tuple((key, _hashable(value)) for key, value in one.items()) for one in examples)
    return Pattern(operands, results, name, reference, examples=made)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def never_seen(name: str) -> str | None:
    """Why no graph would ever have an operator, ``mylib::gated``; None where one may."""
    space, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, space), own, None)
    if packet is None:
        return f"torch.ops has no operator {name}: import what defines it first"
    overloads = [getattr(packet, one) for one in packet.overloads()]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if overloads and all(one.has_kernel_for_dispatch_key(composite) for one in overloads):
        return f"torch takes {name} apart before kgen sees it: name what it calls"
    return None


def softmax(of: str, over: str, *, logsumexp: bool = False) -> Normalised:
    """A step of a `program`: ``exp(x - max(x)) / sum(exp(x - max(x)))`` of the step `of` along the axis `over`.

    With `logsumexp` the template can also store ``max(x) + log(sum(exp(x - max(x))))`` of each row, as a result over the
    remaining axes, behind the one of the last step: for those who read it, such as a backward pass."""
    return Normalised(of, over, logsumexp)


def elementwise(*of: str) -> Combined:
    """A step of a `program`: any function of one element each of the contractions `of`, over the same axes, of indices and of
    memory. Several such steps may read one contraction.

    ``elementwise("weights")`` of a `softmax` multiplies each weight by a function of indices and of memory, as dropout does.
    Its slot may be applied to exponentials that are divided by their sum later. Weights that nothing multiplies are those of
    another program."""
    return Combined(of)


def program(**steps: Pattern | Normalised | Combined) -> Pattern:
    """Steps in order, each by its name, the last one a contraction; its operands are those of all steps, in their order.

    What a contraction makes passes through a slot before the next step sees it: ``{{ scores.apply("s", "b", "rm", "rn") }}``.
    An `elementwise` step has the slot in place of the contractions that it reads: ``{{ both.apply("s t", "b", "rm", "rn") }}``.
    Raises BadTemplate for steps that do not fit together."""
    operands: list[Axes] = []
    made: dict[str, Step] = {}
    for name, one in steps.items():
        step = _step(name, one, made, operands)
        _check_reads(step, made)
        made[name] = step
    *_, last = made.values()
    read = {ref for step in made.values() for ref in step.reads if isinstance(ref, str)}
    if made.keys() - read != {last.name} or not isinstance(last, Contract):
        raise errors.BadTemplate(template="program", problem="the last step is a contraction that needs all others")
    whole = Program(tuple(operands), tuple(made.values()))
    return Pattern(whole.operands, (whole.result, *(step.rows for step in whole.seconds)), whole.key, program=whole)


def _step(name: str, one: Pattern | Normalised | Combined, made: dict[str, Step], operands: list[Axes]) -> Step:
    if isinstance(one, Normalised):
        return _softmax(name, one, made)
    return _combined(name, one, made) if isinstance(one, Combined) else _contract(name, one, made, operands)


def _check_reads(step: Step, made: dict[str, Step]) -> None:
    """Several steps may read one result only if all of them are elementwise."""
    for ref in step.reads:
        readers = [other for other in made.values() if ref in other.reads and isinstance(ref, str)]
        if any(not isinstance(one, Elementwise) for one in (*readers, step) if readers):
            raise errors.BadTemplate(template=step.name, problem=f"it reads {ref}, which another step has read")


def _combined(name: str, one: Combined, made: dict[str, Step]) -> Step:
    known = (Contract, Softmax) if len(one.of) == 1 else (Contract,)
    wrong = [of for of in one.of if not isinstance(made.get(of), known)]
    if wrong or not one.of:
        problem = f"no earlier contraction is called {wrong[0]}" if wrong else "it is elementwise of nothing"
        raise errors.BadTemplate(template=name, problem=problem)
    axes = made[one.of[0]].axes
    if len(set(one.of)) < len(one.of) or any(made[of].axes != axes for of in one.of):
        raise errors.BadTemplate(template=name, problem=f"it is elementwise of distinct steps over the same axes, not {one.of}")
    return Elementwise(name, one.of, axes)


def _softmax(name: str, one: Normalised, made: dict[str, Step]) -> Step:
    if one.of not in made or one.over not in made[one.of].axes:
        raise errors.BadTemplate(template=name, problem=f"no earlier step {one.of} has an axis {one.over}")
    return Softmax(name, one.of, one.over, made[one.of].axes, one.logsumexp)


def _contract(name: str, one: Pattern, made: dict[str, Step], operands: list[Axes]) -> Step:
    """The step, whose own operands are added to those of the program."""
    if one.operator or one.windows:
        raise errors.BadTemplate(template=name, problem="a step is a plain contraction, a softmax, or elementwise")
    refs: list[Ref] = []
    for axes in one.operands:
        if len(axes) == 1 and axes[0] in made:
            refs.append(axes[0])
        elif any(len(axis) > 1 for axis in axes):
            raise errors.BadTemplate(template=name, problem=f"there is no earlier step {axes[0]}")
        else:
            refs.append(len(operands))
            operands.append(axes)
    return Contract(name, refs[0], refs[1], one.results[0])


def letters(axes: Sequence[str]) -> Axes:
    """The axes of an operand, those of windows one by one."""
    _check_texts("operand or result", axes)
    return tuple(axis for names in axes for axis in names.split("+"))


def _check_texts(what: str, given: Sequence[object]) -> None:
    """Raises BadTemplate where an axis, or a list of them, is no text."""
    wrong = [one for one in given if not isinstance(one, str)]
    if wrong:
        raise errors.BadTemplate(template=what, problem=f"axes are named by texts such as 'm', and this is {wrong[0]!r}")


def _axes(parts: Sequence[str]) -> tuple[tuple[Axes, ...], tuple[Axes, ...], tuple[tuple[str, str], ...]]:
    """The axes of operands and results in ``("m,k", "k,n -> m,n")``, and the windows among them."""
    left, arrow, right = ", , ".join(parts).rpartition("->")
    named = [_names(part) for part in left.split(", , ")]
    operands, results = tuple(letters(names) for names in named), tuple(_names(part) for part in right.split(";"))
    if not arrow or not all((*operands, *results)):
        raise errors.BadTemplate(template=" ".join(parts), problem="this is no pattern such as 'm,k', 'k,n -> m,n'")
    pairs = [tuple(name.split("+")) for names in named for name in names if "+" in name]
    windows = tuple((pair[0], pair[-1]) for pair in pairs)
    if any(len(pair) != 2 or pair[0] not in results[0] or pair[1] in results[0] for pair in pairs):
        problem = "a window is 'h+r', of an axis that the result has and one that it lacks"
        raise errors.BadTemplate(template=" ".join(parts), problem=problem)
    steps = {names[0] for names in operands if len(names) == 1 and names[0].islower()}  # earlier ones of a program
    wrong = [a for axes in (*operands, *results) for a in axes if a not in steps and (len(a) != 1 or not a.islower())]
    if wrong:  # its length in a kernel is the capital letter, its mask is told from others by the letter
        raise errors.BadTemplate(template=" ".join(parts), problem=f"axis {wrong[0]!r} is no lower-case letter")
    return operands, results, windows


def _names(part: str) -> Axes:
    return tuple(name.strip() for name in part.split(",") if name.strip())
