"""What a tensor repeats along a dimension, stored once: the logarithm of a row's sum in a log-softmax, a row's deviation.

A tensor that several operators read is stored where it is dear to compute again. Often only what belongs to its rows is dear;
with that in memory the rest is computed where it is read, and nothing of the tensor's own size is written.
"""

from __future__ import annotations

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor, axes

# A load and an operation: what costs no more is computed again.
CHEAP = 2
# Elements of a row at least; and where a tensor is stored otherwise, whose rows have fewer numbers than it has.
MIN_REPEATS, FEW_REPEATS = 16, 2
# Of these a value may depend that guards them.
BOUND = ("assert", *ops.RANDOM)


def with_row_values_stored(b: Builder, tensor: Tensor, least: int = 0, repeats: int = MIN_REPEATS) -> Tensor:
    """The tensor, with its values of rows of so many elements in buffers of their own: those that cost so much at least."""
    row_values = {value for value in _row_values(tensor, repeats) if vs.total_cost([value]) >= least}
    if not row_values:
        return tensor

    def visit(value: Value, args: tuple[Value, ...], _: object) -> Value:
        return _stored(b, tensor, value) if value in row_values else vs.rebuild(value, args, value.attr)

    return tensor.with_value(vs.rewrite([tensor.value], visit)[tensor.value])


def stores_few(tensor: Tensor, repeats: int) -> bool:
    """Whether its values of rows of so many elements have half of its elements at most: others move no less than it does."""
    sizes = ([v.extent for v in tensor.axes if v in one.variables()] for one in _row_values(tensor, repeats))
    numbers, elements = [ix.product(own).as_int() for own in sizes], tensor.numel().as_int()
    return elements is not None and None not in numbers and 2 * sum(n for n in numbers if n) <= elements


def remaining_cost(tensor: Tensor, repeats: int = MIN_REPEATS) -> int:
    """What the tensor costs once its values of rows of so many elements are in memory."""
    row_values = _row_values(tensor, repeats)
    seen: set[Value] = set()
    pending, cost = [tensor.value], 0
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            cost += 1 if value in row_values else ops.cost(value.op)
            pending += [] if value in row_values else value.args
    return cost


def row_cost(tensor: Tensor) -> int:
    """What the dearest of its values of rows costs."""
    return max((vs.total_cost([value]) for value in _row_values(tensor)), default=0)


def _row_values(tensor: Tensor, repeats: int = MIN_REPEATS) -> set[Value]:
    """The largest values in it that vary along some of its dimensions only, and cost more than a load."""
    found: set[Value] = set()
    seen: set[Value] = set()
    pending = [tensor.value]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if _repeats(tensor, value, repeats) and vs.total_cost([value]) > CHEAP and vs.loads([value]) and _is_free(value):
            found.add(value)
        else:
            pending += value.args
    return found


def _repeats(tensor: Tensor, value: Value, repeats: int) -> bool:
    """Whether it is of a row: one number of the whole tensor is computed where it is read, by many kernels at once."""
    varies = value.variables()
    rows = any(v in varies and v.extent != 1 for v in tensor.axes)
    return rows and any(v not in varies and ix.lower_bound(v.extent) >= repeats for v in tensor.axes)


def _is_free(value: Value) -> bool:
    """Whether it may be computed at every row, whoever needs it."""
    for one in vs.topological([value]):
        guarded = one.op in BOUND or (one.op == "load" and bool(one.args))
        if guarded or any(isinstance(atom, ix.Indirect) for e in vs.index_exprs(one) for atom in ix.free_atoms(e)):
            return False
    return True


def _stored(b: Builder, tensor: Tensor, value: Value) -> Value:
    kept: list[Var] = [v for v in tensor.axes if v in value.variables()]
    sizes = tuple(v.extent for v in kept)
    own = dict(zip(kept, (v.expr() for v in axes(sizes)), strict=True))
    row = Tensor(sizes, value.dtype, tensor.device, vs.substitute(value, dict(own.items())))
    name = b.realize(row, f"{b.stem()}_row").value.attr[0]
    return vs.load(name, [v.expr() for v in kept], value.dtype)
