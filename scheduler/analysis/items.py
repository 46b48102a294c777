"""Loop nodes as the scheduler sees them: values over shared loop variables, with reads and writes by (buffer, index)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Index, Value
from kgen.scheduler.analysis.dependencies import reads_of

Mapping = dict[Atom, Expr]
# Items of a kernel from which on it matters how many of their values are needed at the same time.
MANY = 64


@dataclass(frozen=True, slots=True)
class Access:
    """A touch of memory: element `index` of `buffer`."""

    buffer: str
    index: Index


@dataclass(frozen=True)
class Item:
    """One loop node rewritten onto a group's variables. `level` is "outer" (once per outer point) or "inner" (once per
    outer and inner point); `store` is the index written, empty for a reduction over no outer dimension."""

    node: ir.Loop | ir.Partial | ir.TemplateNode
    position: float
    outer: tuple[Var, ...]
    inner: tuple[Var, ...]
    value: Value
    store: Index
    mask: Value | None = None
    rank: Expr | None = None  # of a reduction: the row-major position that counts as this point's index; of an update: its turn
    in_order: bool = True  # some loop's points must run one after the other
    factors: tuple[Value, ...] = ()  # further operands of a matmul
    axes: tuple[tuple[str, Expr], ...] = ()  # of an operator: its template's names of the loops
    made: tuple[str, ...] = ()  # of a matmul: its accumulators
    second: bool = False  # what a template makes besides its results: nothing in its kernel may read it

    @property
    def reduces(self) -> bool:
        return isinstance(self.node, ir.Reduction) or ir.is_template_node(self.node)

    @property
    def is_partial(self) -> bool:
        """Whether it reduces the tiles of a matmul."""
        return isinstance(self.node, ir.Partial)

    @property
    def is_whole(self) -> bool:
        """Whether it reduces full rows of a matmul, each of which is in one tile."""
        return isinstance(self.node, ir.Partial) and self.node.whole

    @property
    def is_update(self) -> bool:
        """Whether it is a write that combines with what is there, under a mask, or at indices from data."""
        if not isinstance(self.node, ir.Scatter):
            return False
        from_data = any(ix.indirects(e) for e in self.store)
        return self.node.mode != "set" or self.mask is not None or from_data

    def turn(self, loops: tuple[Var, ...]) -> Expr:
        """The place of an update's point among those that may hit one element, all of which differ along `loops`."""
        return ix.position_in([v for v in loops if not _tells_apart(self.store, v)])

    @property
    def contracts(self) -> bool:
        return ir.is_template_node(self.node)

    @property
    def outs(self) -> tuple[str, ...]:
        return self.made if ir.is_template_node(self.node) else ir.outs(self.node)

    @cached_property
    def own(self) -> tuple[tuple[Var, Expr], ...]:
        """The loop variables with themselves as expressions: the identity mapping."""
        return tuple((v, v.expr()) for v in self.outer + self.inner)

    @cached_property
    def roots(self) -> tuple[Value, ...]:
        indirect = [atom.value for e in self.store for atom in ix.indirects(e)]
        return (self.value, *indirect, *(() if self.mask is None else (self.mask,)), *self.factors)

    @cached_property
    def reads(self) -> tuple[Access, ...]:
        found = dict.fromkeys([v.attr[:2] for v in vs.loads(self.roots)])
        return tuple([Access(buffer, index) for buffer, index in found])

    @cached_property
    def cost(self) -> int:
        return vs.total_cost(self.roots)

    def substituted(self, mapping: Mapping, outer: tuple[Var, ...], inner: tuple[Var, ...]) -> Item:
        """The item over other loop variables; itself when nothing changes, so that what it has cached stays."""
        if outer == self.outer and inner == self.inner and all(mapping.get(v, e) is e for v, e in self.own):
            return self
        masks = [] if self.mask is None else [self.mask]
        value, *rest = vs.substitute_all([self.value, *masks, *self.factors], mapping)
        mask = rest.pop(0) if masks else None
        memo: dict[Expr, Expr] = {}
        axes = tuple((name, ix.substitute(e, mapping, memo)) for name, e in self.axes)
        store = tuple(ix.substitute(e, mapping, memo, lambda v: vs.substitute(v, mapping)) for e in self.store)
        rank = None if self.rank is None else ix.substitute(self.rank, mapping, memo)
        return Item(
            self.node,
            self.position,
            outer,
            inner,
            value,
            store,
            mask,
            rank,
            self.in_order,
            tuple(rest),
            axes,
            self.made,
            self.second,
        )


def by_need(items: list[Item]) -> list[Item]:
    """Independent items in program order, but what no other one reads stands behind the last one that it reads. Parts of a
    stack would keep all that they are made of until the end of a recurrence."""
    maker = {out: k for k, item in enumerate(items) for out in item.outs}
    read = {access.buffer for item in items for access in item.reads}

    def place(k: int) -> int:
        makers = [maker[access.buffer] for access in items[k].reads if access.buffer in maker]
        return max(makers, default=k) if read.isdisjoint(items[k].outs) else k

    return [items[k] for _, k in sorted((place(k), k) for k in range(len(items)))]


def accumulators(graph: ir.Graph, node: ir.TemplateNode) -> tuple[str, ...]:
    """The buffers of what a template computes, before it is scaled and rounded: they live in registers only. Results that
    nobody uses have one too, for the template makes them anyhow."""
    if ir.is_contraction(node):
        return (ir.derived(graph, ir.Derived(node.out, "sum")),)
    unused = ir.outs(node)[0]
    return tuple(
        ir.derived(graph, ir.Derived(unused, "unused", k) if out is None else ir.Derived(out, "tile"))
        for k, out in enumerate(node.outs)
    )


def make_item(node: ir.Loop | ir.Partial, position: float) -> Item:
    """The item of a loop node over its own variables, renamed so that no two nodes share one by accident."""
    if isinstance(node, ir.Reduction):
        store: Index = tuple(v.expr() for v in node.vars)
        rank = ix.position_in(node.rvars)
        return Item(node, position, node.vars, node.rvars or (ix.var("y0", 1),), node.value, store, rank=rank)
    if isinstance(node, ir.Partial):
        rank = ix.position_in(node.rvars)
        store = (ix.floordiv(rank, node.block), *(v.expr() for v in node.vars))
        return Item(node, position, node.vars + node.rvars, (), node.value, store, rank=rank, in_order=False)
    if isinstance(node, ir.Scan):
        outer = tuple(v for v in node.vars if v is not node.axis)
        return Item(node, position, outer, (node.axis,), node.value, tuple(v.expr() for v in node.vars), rank=node.axis.expr())
    if isinstance(node, ir.Scatter):
        serial = _serial_variables(node)
        outer = tuple(v for v in node.vars if v not in serial)
        inner = tuple(v for v in node.vars if v in serial)
        return Item(node, position, outer, inner, node.value, node.index, node.mask, in_order=bool(serial))
    return Item(node, position, node.vars, (), node.value, tuple(v.expr() for v in node.vars), in_order=False)


def template_item(graph: ir.Graph, node: ir.TemplateNode, position: float) -> Item:
    """The item of what a template computes."""
    outer, inner = ir.iteration(node)
    store = tuple(v.expr() for v in outer)
    value, *factors = (node.lhs, node.rhs) if ir.is_contraction(node) else node.operands
    axes = () if ir.is_contraction(node) else node.axes
    made = accumulators(graph, node)
    return Item(node, position, outer, inner or (ix.var("y0", 1),), value, store, factors=tuple(factors), axes=axes, made=made)


def finished(node: ir.Contraction, value: Value) -> Value:
    """The sum with its scale and its addend, rounded where that was asked for."""
    if node.scale is not None:
        value = vs.call("mul", value, vs.cast(node.scale, value.dtype))
    if node.addend is not None:
        value = vs.call("add", value, vs.cast(node.addend, value.dtype))
    return value if node.rounded is None else vs.cast(value, node.rounded)


def _serial_variables(node: ir.Scatter) -> set[Var]:
    """Loop variables whose points may write the same element, so that they must run in order."""
    serial: set[Var] = set()
    seen: set[Atom] = set()
    for expr in node.index:
        for atom in ix.free_atoms(expr):
            if isinstance(atom, ix.Indirect):
                serial |= atom.value.variables()
            seen.add(atom)
    affine = all(_plain(e) for e in node.index)
    for v in node.vars:
        if v.extent == 1:
            continue
        if v not in seen or (not affine and not _injective_in(node.index, v)):
            serial.add(v)
    if not serial and not _injective(node):
        serial = set(node.vars)
    for v in node.vars:  # those behind one that stays would change the order in which memory is walked through
        if v in serial and not _tells_apart(node.index, v):
            break
        serial.discard(v)
    return serial


def _tells_apart(index: Index, v: Var) -> bool:
    """Whether elements at distinct values of `v` are distinct, whatever the other variables: some dimension is affine in it and
    depends on nothing else."""
    for expr in index:
        stride = ix.stride_of(expr, v)
        alone = all(a is v or not isinstance(a, Var | ix.Indirect) for a in ix.free_atoms(expr))
        if alone and stride is not None and stride.terms:
            return True
    return False


def _plain(expr: Expr) -> bool:
    return all(isinstance(a, Var | ix.Size | ix.Indirect) for mono, _ in expr.terms for a in mono)


def _injective_in(index: Index, v: Var) -> bool:
    """Whether distinct values of `v` alone give distinct elements: some dimension is affine in it."""
    for expr in index:
        stride = ix.stride_of(expr, v)
        if stride is not None and stride.terms:
            return True
    return False


def _injective(node: ir.Scatter) -> bool:
    """Whether an affine store index never hits one element twice: each variable has a dimension of its own, or the
    variables of a dimension are mixed-radix digits."""
    owner: dict[Var, int] = {}
    for d, expr in enumerate(node.index):
        digits = []
        for v in node.vars:
            stride = ix.stride_of(expr, v)
            if stride is None:
                return False
            if stride.terms and v.extent != 1:
                digits.append((v, stride))
                owner.setdefault(v, d)
        if len(digits) > 1 and not is_mixed_radix(digits):
            return False
    return all(v in owner or v.extent == 1 for v in node.vars)


def is_mixed_radix(digits: list[tuple[Var, Expr]]) -> bool:
    """Whether ``sum(v * stride)`` is injective: sorted by stride, each stride is at least the span of the ones below."""
    left = list(digits)
    span = ix.ONE
    while left:
        found = next((d for d in left if ix.lower_bound(d[1] - span) >= 0 and _smallest(d[1], left)), None)
        if found is None:
            return False
        left.remove(found)
        span = found[1] * found[0].extent
    return True


def _smallest(stride: Expr, digits: list[tuple[Var, Expr]]) -> bool:
    return all(ix.lower_bound(other - stride) >= 0 for _, other in digits)


@dataclass(slots=True, eq=False)
class Members:
    """Items with the questions of legality and cost answered once: who reads, makes and overwrites which buffer. Nothing
    changes them, and they are equal to themselves alone: what is found out about a pair holds for the next attempt, too."""

    items: list[Item]
    reads: dict[str, list[tuple[Item, Index]]] = field(default_factory=dict)
    made: dict[str, Item] = field(default_factory=dict)
    mutated: dict[str, Item] = field(default_factory=dict)
    cost: int = 0
    touched: tuple[str, ...] = ()  # what is made, then what is read
    contracts: bool = field(init=False)  # whether some item is a matmul
    is_partial: bool = field(init=False)  # whether all items reduce the tiles of a matmul
    in_order: bool = field(init=False)  # whether points of some item must run in order: those of a reduction need not

    def __post_init__(self) -> None:
        self.contracts = any(item.contracts for item in self.items)
        self.is_partial = bool(self.items) and all(item.is_partial for item in self.items)
        self.in_order = any(item.in_order and not isinstance(item.node, ir.Reduction) for item in self.items)

    @classmethod
    def of(cls, items: list[Item]) -> Members:
        found = cls(items)
        for item in items:
            found.cost += item.cost
            for access in item.reads:
                found.reads.setdefault(access.buffer, []).append((item, access.index))
            for out in item.outs:
                found.made[out] = item
            if isinstance(item.node, ir.Scatter):
                found.mutated[item.node.target] = item
        found.touched = tuple(dict.fromkeys((*found.made, *found.reads)))
        return found

    def joined(self, other: Members) -> Members:
        """The union, in program order."""
        items = sorted(self.items + other.items, key=lambda i: i.position)
        items = items if len(items) <= MANY or any(i.reduces or i.in_order for i in items) else by_need(items)
        both = Members(items, dict(self.reads), cost=self.cost + other.cost)
        for name, entries in other.reads.items():
            both.reads[name] = both.reads.get(name, []) + entries
        both.made = {**self.made, **other.made}
        both.mutated = {**self.mutated, **other.mutated}
        both.touched = tuple(dict.fromkeys((*both.made, *both.reads)))
        return both


@dataclass(slots=True, eq=False)
class Group:
    """Items that will be one kernel, all rewritten onto `outer` and `inner`. An extern is a group with `call` and no items."""

    serial: int
    outer: tuple[Var, ...] = ()
    inner: tuple[Var, ...] = ()
    members: Members = field(default_factory=lambda: Members([]))
    call: ir.Node | None = None
    first: int = 0  # smallest and largest position among the nodes
    last: int = 0
    rank: int = 0  # place in a topological order of the groups
    alive: bool = True
    device: str = "cpu"

    @property
    def items(self) -> list[Item]:
        return self.members.items

    @property
    def writes(self) -> tuple[str, ...]:
        return ir.outs(self.call) if self.call is not None else tuple(self.members.made)

    @property
    def reads(self) -> tuple[str, ...]:
        return reads_of(self.call) if self.call is not None else tuple(self.members.reads)

    @property
    def name(self) -> str:
        node = self.call or self.items[0].node
        return node.origin.name or ir.outs(node)[0]
