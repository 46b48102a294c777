"""What converted functions call: blocks that Python can decide run as they are, others become higher-order operators.

Dynamo traces these functions. The algorithm is that of TensorSSA (FuncTs). A block that may write into a buffer gets it as a
parameter (block propagation). It works on a copy of its own: AOTAutograd's functionalisation makes accesses of views in it, and
assignments of writes. The block gives the copy back (pass up). Behind the block that is written into the buffer, and every
view of the buffer sees the change (pass down, rename). Lowering drops the copies where the old contents are dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from kgen.imperative.forms import (
    UNDEFINED,
    Form,
    Refusal,
    as_number,
    form_of,
    in_form,
    is_carried,
    joined,
    leaves,
    rebuilt,
    widened,
)
from kgen.imperative.indices import back, is_copy, item, part, put, through
from kgen.imperative.memory import Memory, enter
from kgen.imperative.problems import begin, end, report

__all__ = [
    "UNDEFINED",
    "Site",
    "back",
    "both",
    "branch",
    "choice",
    "count",
    "each",
    "either",
    "item",
    "kept",
    "negated",
    "part",
    "put",
    "repeat",
    "through",
]

# Loops with a known number of iterations up to this one stay Python: Dynamo unrolls them, and equal iterations become batches.
UNROLLED = 64

Values = tuple[Any, ...]
Block = Callable[..., Any]


class Site(NamedTuple):
    """A block of the source. `state` are the variables that it gives back; `updated` those of them that `x += 1` changes, and
    `fragile` those that share memory with something that is written, as far as the source tells. `buffers` are written into.
    `inner` loops are in other loops: Dynamo gives the integers that nested operators count the same name."""

    function: str
    file: str
    line: int
    state: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    fragile: tuple[str, ...] = ()
    inner: bool = False


def _refuse(site: Site, problem: str) -> None:
    report(site.function, site.file, site.line, problem)
    raise RuntimeError(problem)


# ---- conditions --------------------------------------------------------------------------------------------------------


def _decided(test: Any) -> bool | None:
    """What Python knows of a condition; None where data decide."""
    if isinstance(test, torch.Tensor):
        return None
    if not isinstance(test, bool | int | float):
        return bool(test)
    holds = test if isinstance(test, bool) else test != 0
    if guard_or_false(holds):
        return True
    return False if guard_or_false(_not(holds)) else None


def _not(holds: bool) -> bool:
    """The contrary, without asking which one it is."""
    if holds is True or holds is False:
        return holds is False
    return torch.sym_not(holds)


def _is_constant(test: Any) -> bool:
    """Whether a condition is the same for all sizes."""
    if isinstance(test, torch.Tensor):
        return False
    if not isinstance(test, bool | int | float):
        return True
    holds = test if isinstance(test, bool) else test != 0
    return statically_known_true(holds) or statically_known_true(_not(holds))


def _flag(test: Any) -> torch.Tensor:
    """A condition as a tensor of one bool."""
    if isinstance(test, torch.Tensor):
        return test.reshape(()).to(torch.bool)
    return torch.full((), as_number(test), dtype=torch.int64) != 0


def both(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`."""
    if isinstance(first, torch.Tensor) or _decided(first) is None:
        return _flag(first).logical_and(_flag(second()))
    return second() if first else first


def either(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`."""
    if isinstance(first, torch.Tensor) or _decided(first) is None:
        return _flag(first).logical_or(_flag(second()))
    return first if first else second()


def negated(value: Any) -> Any:
    """`not value`."""
    if isinstance(value, torch.Tensor):
        return _flag(value).logical_not()
    return _not(value) if isinstance(value, bool) else not value


def choice(test: Any, then: Callable[[], Any], orelse: Callable[[], Any], line: int) -> Any:
    """`then() if test else orelse()`."""
    site = Site("a conditional expression", "its function", line, ("its value",))
    return branch(site, test, lambda _: (then(),), lambda _: (orelse(),), (UNDEFINED,), (), ())[0]


def kept(function: str, file: str, line: int, name: str, x: Any, index: Any) -> Any:
    """`name = x[index]`, where what one of them sees of writes to the other matters."""
    if is_copy(x, index):
        problem = f"{name} is a view at an index that data decide, and a write goes between it and its tensor; use .clone()"
        report(function, file, line, problem)
        raise RuntimeError(problem)
    return item(x, index)


# ---- branches ----------------------------------------------------------------------------------------------------------


def branch(
    site: Site, test: Any, then: Block, orelse: Block, state: Values, buffers: Values, reads: Values
) -> Any:  # fmt: skip
    """What `if` assigns."""
    decided = _decided(test)
    if decided is not None:
        return (then if decided else orelse)(*state, *buffers, *reads)
    begin(site.function, site.file, site.line)
    memory = enter(site, state, buffers, reads)
    tried = [form_of(memory.run(block, memory.carried, state)[1]) for block in (then, orelse)]
    forms = [None if k in memory.updated else _common(site, k, tried[0][k], tried[1][k]) for k in range(len(state))]
    given = memory.entering()

    def made(block: Block) -> Values:
        copies, results = memory.run(block, given, state)
        kept = [in_form(one, form) for one, form in zip(results, forms, strict=True) if is_carried(form)]
        return (*leaves(kept), *copies)

    results: list[Any] = []
    if memory.carried or any([is_carried(form) for form in forms]):
        results = list(torch.cond(_flag(test), lambda: made(then), lambda: made(orelse), ()))
    end(site.function, site.file, site.line)
    found = [rebuilt(form, results) if is_carried(form) else form for form in forms]
    memory.leave(results)
    return memory.with_updated(found, state)


def _common(site: Site, position: int, one: Any, other: Any) -> Any:
    """The form of a variable behind two branches."""
    name = site.state[position]
    if name.startswith("__kgen_") and (one is UNDEFINED or other is UNDEFINED):
        return other if one is UNDEFINED else one
    found = joined(one, other, lambda a, b: _is_constant(a == b) and a == b)
    if isinstance(found, Refusal):
        _refuse(site, f"data decide what {name} is: {found.why}")
    return found


# ---- loops -------------------------------------------------------------------------------------------------------------


def repeat(
    site: Site, test: Block, body: Block, stop: int, state: Values, buffers: Values, reads: Values
) -> Any:  # fmt: skip
    """What `while` assigns."""

    def holds(values: Values, memory: Values, others: Values) -> Any:
        asked = lambda: test(*values, *memory, *others)  # noqa: E731
        return asked() if stop < 0 else both(negated(values[stop]), asked)

    for _ in range(UNROLLED):
        going = holds(state, buffers, reads)
        if not _is_constant(going):
            break
        if not going:
            return state
        state = body(*state, *buffers, *reads)
    return _while(site, holds, lambda _, *given: body(*given), None, 0, state, buffers, reads)


def count(site: Site, over: Values, body: Block, stop: int, state: Values, buffers: Values, reads: Values) -> Any:
    """What `for i in range(*over)` assigns."""
    start, end = (0, over[0]) if len(over) == 1 else (over[0], over[1])
    step = over[2] if len(over) == 3 else 1
    if isinstance(start, torch.Tensor) or isinstance(step, torch.Tensor):
        _refuse(site, "a range begins at, or advances by, a number that data decide")
    if not _is_constant(step > 0) or step == 0:
        _refuse(site, "a range advances by a number whose sign is not known")
    if not isinstance(end, torch.Tensor) and statically_known_true(_trips(start, end, step) <= UNROLLED):
        start, state = _unrolled(range(start, end, step), body, stop, state, (*buffers, *reads))
        if start is None:
            return state

    def holds(i: Any, values: Values, memory: Values, others: Values) -> Any:
        at = torch.full((), i, dtype=torch.int64) if isinstance(end, torch.Tensor) and not isinstance(i, torch.Tensor) else i
        going = at < end if step > 0 else at > end
        return going if stop < 0 or values[stop] is False else _flag(going).logical_and(_flag(values[stop]).logical_not())

    def iteration(i: Any, *given: Any) -> Any:
        if not isinstance(i, torch.Tensor):
            torch._check(i >= start if step > 0 else i <= start)
        return body(i, *given)

    if stop < 0 and _differentiable((*state, *buffers, *reads)):
        return _scan(site, torch.arange(start, end, step), body, state, buffers, reads)
    return _while(site, holds, iteration, start, step, state, buffers, reads)


def _trips(start: Any, end: Any, step: Any) -> Any:
    return (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step


def _unrolled(indices: Sequence[int], body: Block, stop: int, state: Values, rest: Values) -> tuple[int | None, Values]:
    """Iterations by Python, up to one that data may have ended: gives its index, or None behind the last one."""
    for i in indices:
        if stop >= 0 and not _is_constant(state[stop]):
            return i, state
        if stop >= 0 and state[stop]:
            break
        state = body(i, *state, *rest)
    return None, state


def each(site: Site, over: Any, body: Block, stop: int, state: Values, buffers: Values, reads: Values) -> Any:
    """What `for item in over` assigns: over a tensor's rows, or over anything that Python iterates over."""
    if isinstance(over, torch.Tensor):
        rows = lambda i, *given: body(given[-1][i], *given[:-1])  # noqa: E731
        return count(site, (over.shape[0],), rows, stop, state, buffers, (*reads, over))
    iteration = lambda *given: body(given[-1], *given[:-1])  # noqa: E731
    same = lambda *given: given[: len(site.state)]  # noqa: E731
    for one in over:
        if stop >= 0 and _decided(state[stop]) is None:
            state = branch(site, negated(state[stop]), iteration, same, state, buffers, (*reads, one))
        elif stop >= 0 and state[stop]:
            return state
        else:
            state = body(one, *state, *buffers, *reads)
    return state


class _Loop:
    """A loop that data, or unknown sizes, end, as a body of what it carries. Variables keep their sizes and types."""

    def __init__(self, site: Site, memory: Memory, body: Block, state: Values, forms: list[Any], numbers: list[int]) -> None:
        self.site, self.memory, self.body, self.state, self.forms, self.numbers = site, memory, body, state, forms, numbers
        self.carried = [
            k for k, form in enumerate(forms) if k not in memory.updated and (is_carried(form) or k in numbers)
        ]  # fmt: skip

    def first(self) -> list[Any]:
        """What enters the first iteration."""
        numbers, memory = self.numbers, self.memory
        given = [self.state[k] if k in numbers else _entering(self.state[k], self.forms[k], memory) for k in self.carried]
        return [*leaves(given), *[one.contiguous() for one in memory.entering()]]

    def variables(self, flat: Sequence[Any]) -> tuple[Values, list[Any]]:
        """The variables and the buffers of what is carried."""
        rest = list(flat)
        made = tuple([rebuilt(form, rest) if k in self.carried else form for k, form in enumerate(self.forms)])
        return made, rest

    def iteration(self, i: Any, flat: Sequence[Any]) -> Values:
        """An iteration, from what is carried to what is carried."""
        values, buffers = self.variables(flat)
        copies, results = self.memory.run(lambda *given: self.body(i, *given), buffers, values)
        for k in self.carried:
            _check(self.site, k, widened(self.forms[k], form_of(results[k])))
        kept = [results[k] if k in self.numbers else in_form(results[k], self.forms[k]) for k in self.carried]
        return (*leaves(kept), *copies)

    def leave(self, flat: Sequence[Any]) -> Values:
        """The variables behind the loop."""
        values, buffers = self.variables(flat)
        self.memory.leave(buffers)
        return self.memory.with_updated(values, self.state)


def _loop(site: Site, memory: Memory, body: Block, index: Any, state: Values, integers: bool) -> _Loop:
    forms, numbers = _forms(site, memory, lambda *given: body(index, *given), state, integers)
    return _Loop(site, memory, body, state, forms, numbers)


def _while(
    site: Site, holds: Block, body: Block, start: Any, step: Any, state: Values, buffers: Values, reads: Values
) -> Any:  # fmt: skip
    """A loop of iterations as long as a condition holds."""
    if _differentiable((*state, *buffers, *reads)):
        _refuse(
            site, "data decide when the loop ends, and gradients are asked for; use torch.no_grad(), or a range without break"
        )
    begin(site.function, site.file, site.line)
    index = torch.full((), start, dtype=torch.int64) if site.inner and start is not None else start
    loop = _loop(site, enter(site, state, buffers, reads), body, index, state, not site.inner)
    counts = [] if start is None else [index]

    def going(*flat: Any) -> Any:
        values, memory = loop.variables(flat[len(counts) :])
        test = holds(*flat[: len(counts)], *loop.memory.split(memory, values))
        return _flag(test) if isinstance(test, torch.Tensor) else test

    def iteration(*flat: Any) -> Values:
        i = flat[0] if counts else None
        return (*[i + step for _ in counts], *loop.iteration(i, flat[len(counts) :]))

    results = while_loop(going, iteration, (*counts, *loop.first()))
    end(site.function, site.file, site.line)
    return loop.leave(results[len(counts) :])


def _scan(site: Site, indices: torch.Tensor, body: Block, state: Values, buffers: Values, reads: Values) -> Any:
    """A loop over indices, whose gradients PyTorch knows."""
    begin(site.function, site.file, site.line)
    loop = _loop(site, enter(site, state, buffers, reads), body, indices.new_zeros(()), state, False)
    first = loop.first()
    if not first:
        return loop.leave(())
    results, _ = scan(lambda flat, i: (loop.iteration(i, flat), ()), tuple(first), indices)
    end(site.function, site.file, site.line)
    return loop.leave(results)


def _differentiable(values: Values) -> bool:
    """Whether a gradient may be asked for."""
    if not torch.is_grad_enabled():
        return False
    for one in leaves(values):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            return True
        if isinstance(one, torch.nn.Module) and any([p.requires_grad for p in one.parameters()]):
            return True
    return False


def _entering(value: Any, form: Any, memory: Memory) -> Any:
    """A variable in front of a loop. Operators take no tensors that share memory."""
    return value if isinstance(value, torch.Tensor) and not memory.shares(value) else in_form(value, form)


def _check(site: Site, position: int, found: Any) -> Any:
    if isinstance(found, Refusal):
        _refuse(site, f"the loop changes what {site.state[position]} is: {found.why}")
    return found


def _forms(site: Site, memory: Memory, body: Block, state: Values, integers: bool) -> tuple[list[Any], list[int]]:
    """The forms of a loop's variables, and which of them are Python integers that it counts."""
    forms = [form_of(one) for one in state]
    if all([isinstance(one, Form) for one in forms]):
        return forms, []
    after = [form_of(one) for one in memory.run(body, memory.carried, state)[1]]
    numbers = [k for k, one in enumerate(state) if integers and type(one) is int and type(after[k]) is int]
    for k, one in enumerate(forms):
        if one is UNDEFINED and site.state[k].startswith("__kgen_"):
            forms[k] = after[k]
        elif one is UNDEFINED:
            _refuse(site, f"{site.state[k]} has no value in front of the loop, and data decide whether there is an iteration")
        elif k not in numbers:
            forms[k] = _check(site, k, widened(one, after[k]))
    return forms, numbers
