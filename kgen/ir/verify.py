"""Checks that a loop-IR graph keeps the rules stated at the head of `kgen/ir/nodes.py`; runs after every stage in tests.

The cost is linear in the size of the graph, except that indices are checked through their memoised bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Size, Var
from kgen.ir.nodes import Buffer, Graph, TensorArg
from kgen.ir.program import Program, Softmax
from kgen.ir.values import Value


def verify(graph: Graph, stage: str) -> Graph:
    """Raises InvalidIR, naming `stage` and the node, for the first rule that `graph` breaks; else returns the graph."""
    _Verifier(graph, stage).run()
    return graph


def defined_once(names: Iterable[str], stage: str) -> None:
    """Raises InvalidIR, naming `stage`, if two nodes give one name to what they make: a consumer would read either."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise errors.InvalidIR(stage=stage, node=name, problem=f"{name} is defined twice")
        seen.add(name)


class _Verifier:
    """One pass over the nodes in order. `versions` gives, for each defined buffer, how many mutations of its storage it has
    seen; it may be read only while no later mutation has happened (`mutations` counts those of each storage)."""

    def __init__(self, graph: Graph, stage: str) -> None:
        self.graph, self.stage = graph, stage
        self.node = graph.name
        self.roots: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.mutations: dict[str, int] = {}
        self.symbols: set[Size] = set()
        self.checked: set[Value] = set()

    def fail(self, problem: str) -> NoReturn:
        raise errors.InvalidIR(stage=self.stage, node=self.node, problem=problem)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.fail(problem)

    def run(self) -> None:
        self.buffers()
        self.inputs()
        for position, node in enumerate(self.graph.nodes):
            self.node = f"node {position}"
            check = _CHECKS.get(type(node))
            if check is None:
                self.fail(f"unknown kind of node {type(node).__name__}")
            self.node = ", ".join(ir.outs(node)) or self.node
            self.reads(node)
            check(self, node)
            self.defines(node)
        for position, result in enumerate(self.graph.outputs):
            self.node = f"output {position}"
            if isinstance(result, TensorArg):
                self.tensor_arg(result)
            elif isinstance(result, ir.ArgumentMultiple):
                ignored = 0 <= result.position < len(self.graph.inputs) and self.graph.inputs[result.position].is_ignored
                self.require(ignored, f"{result} is not an argument that the graph leaves as it is")
            else:
                self._scalars(result)

    # ---- buffers, inputs --------------------------------------------------------------------------------------------

    def buffers(self) -> None:
        for name, buffer in self.graph.buffers.items():
            self.node = name
            self.require(buffer.name == name, f"is filed under {name} but named {buffer.name}")
            self.roots[name] = self._find_root(name)
            if buffer.hint is not None:
                orders = sorted(buffer.hint) == list(range(len(buffer.sizes)))
                self.require(orders, f"hint {buffer.hint} does not order its dimensions")
            for extent in buffer.sizes:
                self.require(extent.bounds()[1] >= 0, f"has the negative size {extent}")
            if buffer.parts:
                self.parts(buffer)
            if buffer.is_part:
                of = self.graph.buffers.get(buffer.alias_of or "")
                self.require(of is not None and name in of.parts, f"is no part of {buffer.alias_of}")

    def parts(self, whole: Buffer) -> None:
        """The buffer's parts lie one behind the other along a dimension, and are all there is of it."""
        parts = [self.buffer(name) for name in whole.parts]
        self.require(whole.alias_of is None and whole.strides is not None, "has parts, but no layout of its own")
        for part in parts:
            mine = part.is_part and part.alias_of == whole.name and (part.dtype, part.strides) == (whole.dtype, whole.strides)
            self.require(mine, f"its part {part.name} is no box of it")
        filled = any(self._fill(whole, parts, dim) for dim in range(len(whole.sizes)))
        self.require(filled, f"is not filled by its parts {list(whole.parts)}")

    def _fill(self, whole: Buffer, parts: Sequence[Buffer], dim: int) -> bool:
        assert whole.strides is not None
        start = ix.ZERO
        for part in parts:
            sizes = (*whole.sizes[:dim], part.sizes[dim], *whole.sizes[dim + 1 :]) if len(part.sizes) > dim else ()
            if part.sizes != sizes or ix.as_expr(part.offset) is not whole.offset + start * whole.strides[dim]:
                return False
            start = start + part.sizes[dim]
        return start is whole.sizes[dim]

    def _find_root(self, name: str) -> str:
        """The buffer at the end of the alias chain, memoised for each link so that long chains of versions stay linear."""
        chain: list[str] = []
        seen: set[str] = set()
        while name not in self.roots:
            self.require(name in self.graph.buffers, f"is an alias of {name}, which does not exist")
            self.require(name not in seen, "is an alias of itself")
            seen.add(name)
            chain.append(name)
            older = self.graph.buffers[name].alias_of
            if older is None:
                self.roots[name] = name
            else:
                name = older
        root = self.roots[name]
        self.roots.update(dict.fromkeys(chain, root))
        return root

    def inputs(self) -> None:
        for position, declared in enumerate(self.graph.inputs):
            self.node = f"input {position}"
            if declared.buffer is not None:
                buffer = self.buffer(declared.buffer)
                self.require(buffer.kind == "input", f"{buffer.name} is of kind {buffer.kind}")
                self.require(declared.buffer not in self.versions, f"{buffer.name} is an input twice")
                self.versions[declared.buffer] = 0
                self.learn((*buffer.sizes, *(buffer.strides or ()), ix.as_expr(buffer.offset)))
            if declared.symbol is not None:
                self.symbols.add(declared.symbol)
            if declared.expr is not None:
                self.learn((declared.expr,))
        for name, constant in self.graph.constants.items():
            self.node = name
            buffer = self.buffer(name)
            self.require(buffer.kind == "constant", f"holds a constant but is of kind {buffer.kind}")
            same = constant.dtype == buffer.dtype and [ix.as_expr(n) for n in constant.shape] == list(buffer.sizes)
            self.require(same, f"is declared {_typed(buffer)}, its constant is {constant.dtype} {list(constant.shape)}")
            self.versions[name] = 0

    def learn(self, exprs: Iterable[Expr]) -> None:
        for expr in exprs:
            self.symbols.update(a for a in ix.free_atoms(expr) if isinstance(a, Size))

    def buffer(self, name: str) -> Buffer:
        found = self.graph.buffers.get(name)
        if found is None:
            self.fail(f"buffer {name} does not exist")
        return found

    # ---- order ------------------------------------------------------------------------------------------------------

    def reads(self, node: ir.Node) -> None:
        for name in ir.reads(node):
            self.readable(name)

    def readable(self, name: str) -> None:
        """The buffer is defined, and no mutation of its storage has happened since."""
        self.require(not self.buffer(name).is_part, f"reads {name}, which is a part of another buffer")
        version = self._version(name)
        if version is None:
            self.fail(f"reads {name} before it is defined")
        current = version == self.mutations.get(self.roots[name], 0)
        self.require(current, f"reads {name} after a mutation of its storage made a newer version")

    def _version(self, name: str) -> int | None:
        """A buffer that no node defines is a reinterpretation of the one it is an alias of, and as old."""
        chain = []
        at: str | None = name
        while at is not None and at not in self.versions:
            chain.append(at)
            at = self.graph.buffers[at].alias_of
        if at is None:
            return None
        for link in chain:
            self.versions[link] = self.versions[at]
        return self.versions[at]

    def defines(self, node: ir.Node) -> None:
        call = ir.call_of(node)
        mutated = [(node.target, node.out)] if isinstance(node, ir.Scatter) else []
        if call is not None:
            mutated = list(call.mutates)
            self.symbols.update(symbol for symbol, _, _ in call.binds)
        for old, new in mutated:
            same = new != old and self.roots[new] == self.roots[old]
            self.require(same, f"new version {new} does not share the storage of {old}")
        fresh = dict.fromkeys(self.roots[old] for old, _ in mutated)
        for root in fresh:
            self.mutations[root] = self.mutations.get(root, 0) + 1
        for name in ir.outs(node):
            buffer = self.buffer(name)
            self.require(buffer.kind == "intermediate", f"{name} is of kind {buffer.kind} and cannot be defined by a node")
            self.require(name not in self.versions, f"{name} is defined twice")
            writes = isinstance(node, ir.Pointwise | ir.Reduction | ir.Scan | ir.TemplateNode)
            shares = f"{name} shares the storage of {buffer.alias_of}, so only a Scatter may write it"
            self.require(not writes or buffer.alias_of is None or buffer.is_part, shares)
            self.require(not buffer.parts, f"{name} is defined by a node and has parts")
            self.versions[name] = self.mutations.get(self.roots[name], 0)
            whole = self.buffer(ir.owner(self.graph, name))
            if buffer.is_part and all(part in self.versions for part in whole.parts):
                self.versions[whole.name] = self.versions[name]
            self.sizes_known((*buffer.sizes, *(buffer.strides or ())))

    # ---- indices ----------------------------------------------------------------------------------------------------

    def sizes_known(self, exprs: Iterable[Expr]) -> None:
        for expr in exprs:
            for atom in ix.free_atoms(expr):
                self.require(isinstance(atom, Size), f"size {expr} varies inside a loop")
                self.require(self.is_bound(atom), f"size symbol {atom} is not bound yet")

    def is_bound(self, atom: Atom) -> bool:
        if isinstance(atom, Size) and atom in self.graph.derived:
            return all(self.is_bound(a) for a in ix.free_atoms(self.graph.derived[atom]))
        return atom in self.symbols

    def variables(self, variables: Sequence[Var]) -> frozenset[Atom]:
        names = [v.name for v in variables]
        self.require(len(set(names)) == len(names), f"loop variables {names} are not distinct")
        self.sizes_known(v.extent for v in variables)
        return frozenset(variables)

    def index(self, index: Sequence[Expr], buffer: Buffer, scope: frozenset[Atom], masked: bool) -> None:
        rank = len(buffer.sizes)
        self.require(len(index) == rank, f"{len(index)} indices into {buffer.name}, which has {rank} dimensions")
        for dim, (expr, extent) in enumerate(zip(index, buffer.sizes, strict=True)):
            self.in_scope(expr, scope)
            if not masked and _outside(expr, extent) and not any(v.extent.as_int() == 0 for v in scope if isinstance(v, Var)):
                self.fail(f"index {expr} leaves dimension {dim} of {_typed(buffer)} {buffer.name}")

    def in_scope(self, expr: Expr, scope: frozenset[Atom]) -> None:
        for atom in ix.free_atoms(expr):
            if isinstance(atom, Var):
                self.require(atom in scope, f"uses {atom} < {atom.extent}, which is not one of its loop variables")
            elif isinstance(atom, Size):
                self.require(self.is_bound(atom), f"size symbol {atom} is not bound yet")

    # ---- values -----------------------------------------------------------------------------------------------------

    def values(self, roots: Iterable[Value], scope: frozenset[Atom]) -> None:
        for value in vs.topological(roots):
            for expr in vs.index_exprs(value):
                self.in_scope(expr, scope)
            if value.op == "load":
                buffer = self.buffer(value.attr[0])
                self.index(value.attr[1], buffer, scope, bool(value.args))
                self.require(value.attr[2] == buffer.dtype, f"loads {buffer.name} as {value.attr[2]}, it is {buffer.dtype}")
            if value not in self.checked:
                self.checked.add(value)
                problem = value_problem(value)
                self.require(problem is None, f"{value.op}: {problem}")

    def stored(self, name: str, dtype: torch.dtype, sizes: Sequence[Expr]) -> None:
        """`name` can hold values of compute dtype `dtype`, one for each point of `sizes`."""
        buffer = self.buffer(name)
        self.require(ops.compute_dtype(buffer.dtype) == dtype, f"stores {dtype} values into {_typed(buffer)} {name}")
        self.same_sizes(name, buffer.sizes, sizes)

    def same_sizes(self, name: str, declared: Sequence[Expr], actual: Sequence[Expr]) -> None:
        same = len(declared) == len(actual) and not any(map(_differ, declared, actual))
        self.require(same, f"{name} has sizes {list(declared)}, its loops run over {list(actual)}")

    # ---- node kinds -------------------------------------------------------------------------------------------------

    def pointwise(self, node: ir.Pointwise) -> None:
        self.values([node.value], self.variables(node.vars))
        self.stored(node.out, node.value.dtype, _extents(node.vars))

    def reduction(self, node: ir.Reduction) -> None:
        self.values([node.value], self.variables((*node.vars, *node.rvars)))
        self.results(node, ops.REDUCTIONS[node.op].admits)

    def scan(self, node: ir.Scan) -> None:
        self.values([node.value], self.variables(node.vars))
        wanted = 2 if node.op in ops.WITH_POSITIONS else 1
        self.require(len(node.outs) == wanted, f"{node.op} gives {wanted} results, not {len(node.outs)}")
        row = ops.REDUCTIONS.get(node.op)
        self.results(node, row.admits if row else ops.INTEGER if node.op in ops.ROW_ORDERS else ops.FLOAT)

    def results(self, node: ir.Reduction | ir.Scan, admits: str) -> None:
        dtype = node.value.dtype
        self.require(dtype in ops.admitted(admits), f"{node.op} does not admit {dtype}")
        positions = node.op in ops.WITH_POSITIONS
        for k, name in enumerate(node.outs):
            self.stored(name, torch.int64 if positions and k == 1 else dtype, _extents(node.vars))

    def scatter(self, node: ir.Scatter) -> None:
        scope = self.variables(node.vars)
        self.values(ir.roots(node), scope)
        target = self.buffer(node.target)
        self.index(node.index, target, scope, node.mask is not None)
        self.require(node.mask is None or node.mask.dtype is torch.bool, "its mask is not bool")
        self.stored(node.out, node.value.dtype, self.buffer(node.out).sizes)
        self.same_sizes(node.out, self.buffer(node.out).sizes, target.sizes)
        self.require(target.dtype == self.buffer(node.out).dtype, f"{node.out} has another dtype than {node.target}")
        self.require(
            node.mode in ("set", "max", "min") or node.value.dtype is not torch.bool, f"mode {node.mode} does not admit bool"
        )
        for load in vs.loads(ir.roots(node)):
            same_place = self.roots[load.attr[0]] == self.roots[node.target] and load.attr[0] == node.target
            if same_place and load.attr[1] != node.index and not ix.disjoint(load.attr[1], node.index):
                self.fail(f"reads {node.target} at {list(load.attr[1])} while it writes it at {list(node.index)}")

    def contraction(self, node: ir.Contraction) -> None:
        self.values([node.lhs, node.rhs], self.variables((*node.out_vars, *node.reduced)))
        self.require(node.lhs.dtype == node.rhs.dtype, f"multiplies {node.lhs.dtype} by {node.rhs.dtype}")
        self.same_sizes(node.out, self.buffer(node.out).sizes, _extents(node.out_vars))
        self.values([v for v in (node.scale, node.addend) if v is not None], self.variables(node.out_vars))
        if node.vendor is None:
            self.require(node.operands is not None, "nothing says how to compute it")
            return
        named = tuple(out for out in node.vendor.outs if out is not None)
        self.require(named == (node.out,), f"its library call defines {node.vendor.outs}")
        self.call(node.vendor)
        if node.fused is not None:
            self.require(len(node.fused.outs) == 1, f"its call for two nodes defines {node.fused.outs}")
            self.call(node.fused)
        if node.shared_call is not None:
            self.require(
                node.out in node.shared_call.call.outs, f"its call for several nodes defines {node.shared_call.call.outs}"
            )

    def operation(self, node: ir.Operation) -> None:
        self.values(list(node.operands), self.variables((*node.out_vars, *node.inner)))
        self.require(len(node.operands) == len(node.dtypes), f"{len(node.operands)} operands of {len(node.dtypes)} types")
        if node.program is not None:
            self.program(node, node.program)
        for out in node.outs:
            if out is not None:
                self.same_sizes(out, self.buffer(out).sizes, _extents(node.out_vars))
        if node.vendor is not None:
            named = tuple(out for out in node.vendor.outs if out is not None)
            defined = node.vendor.outs[: len(node.outs)] == node.outs and named == ir.outs(node)
            self.require(defined, f"its call defines {node.vendor.outs}")
            self.call(node.vendor)

    def program(self, node: ir.Operation, program: Program) -> None:
        """Each operand, and each function in a slot, depends on loops of its own axes alone."""
        self.require(node.operator == program.key, f"is called {node.operator}")
        loops = {axis: ix.free_atoms(e) for axis, e in node.axes}
        self.require(tuple(loops) == program.axes, f"names the axes {', '.join(loops)}")
        wanted = [*program.operands, *(step.axes for step in program.middles)]
        self.require(len(node.operands) == len(wanted), f"{len(node.operands)} values for {len(wanted)} operands and slots")
        slots = [*(set() for _ in program.operands), *(set(program.elements(step)) for step in program.middles)]
        for value, axes, slot in zip(node.operands, wanted, slots, strict=True):
            allowed = frozenset[Atom]().union(*(loops[axis] for axis in axes))
            self.require(value.variables() <= allowed, f"{value} depends on more than the axes {', '.join(axes)}")
            steps = {v.attr for v in vs.topological([value]) if v.op == "step"}
            self.require(steps <= slot, f"{value} reads {', '.join(sorted(steps))}")
        for one in node.seconds:
            self.second(node, one, loops)

    def second(self, node: ir.Operation, one: ir.Second, loops: Mapping[str, frozenset[Atom]]) -> None:
        """It depends on the rows of its step alone."""
        assert node.program is not None
        step = node.program.step(one.step)
        self.require(isinstance(step, Softmax), f"{one.step} has no second result")
        assert isinstance(step, Softmax)
        allowed = frozenset[Atom]().union(*(loops[axis] for axis in step.rows))
        self.values([one.value], self.variables(node.out_vars))
        used = one.value.variables().union(*map(ix.free_atoms, one.index))
        self.require(
            {a for a in used if isinstance(a, Var)} <= allowed, f"{one.out} depends on more than {', '.join(step.rows)}"
        )
        steps = {v.attr for v in vs.topological([one.value]) if v.op == "step"}
        self.require(steps <= {one.step}, f"{one.out} reads {', '.join(sorted(steps))}")
        self.require(len(one.index) == len(self.buffer(one.out).sizes), f"{one.out} has another rank than its index")

    def attention(self, node: ir.Attention) -> None:
        self.call(node.vendor)
        if node.meaning is not None:
            self.require(node.meaning.vendor is node.vendor, "its meaning is another call's")
            self.operation(node.meaning)

    def call(self, node: ir.Extern) -> None:
        for arg in ir.tensor_args((node.args, tuple(v for _, v in node.kwargs))):
            self.tensor_arg(arg)
        self._scalars((node.args, tuple(v for _, v in node.kwargs)))

    def _scalars(self, tree: Any) -> None:
        if isinstance(tree, Expr | ir.Number):
            self.sizes_known([tree if isinstance(tree, Expr) else tree.expr])
        elif isinstance(tree, list | tuple):
            for item in tree:
                self._scalars(item)

    def tensor_arg(self, arg: TensorArg) -> None:
        self.readable(arg.buffer)
        buffer = self.graph.buffers[arg.buffer]
        self.require(arg.dtype.itemsize == buffer.dtype.itemsize, f"views {_typed(buffer)} {arg.buffer} as {arg.dtype}")
        self.index(arg.index, buffer, self.variables(arg.vars), False)


_CHECKS: dict[type, Callable[[_Verifier, Any], None]] = {
    ir.Pointwise: _Verifier.pointwise, ir.Reduction: _Verifier.reduction, ir.Scan: _Verifier.scan,
    ir.Scatter: _Verifier.scatter, ir.Contraction: _Verifier.contraction, ir.Attention: _Verifier.attention,
    ir.Operation: _Verifier.operation, ir.Extern: _Verifier.call,
}  # fmt: skip


# ---- one value ------------------------------------------------------------------------------------------------------


def value_problem(value: Value) -> str | None:
    """What is wrong with a value's operation, argument dtypes or own dtype, or None."""
    dtypes = tuple(a.dtype for a in value.args)
    if value.op not in ops.OPS:
        return _structural_problem(value, dtypes)
    row = ops.OPS[value.op]
    if len(dtypes) != row.arity:
        return f"takes {row.arity} values, has {len(dtypes)}"
    if value.op == "where" and dtypes[0] is not torch.bool:
        return f"its condition is {dtypes[0]}"
    data = dtypes[1:] if value.op == "where" else dtypes
    if len(set(data)) != 1:
        return f"its arguments have dtypes {', '.join(map(str, data))}"
    if data[0] not in ops.admitted(row.admits):
        return f"does not admit {data[0]}"
    wanted = ops.result_dtype(value.op, dtypes)
    return None if value.dtype == wanted else f"gives {wanted}, is marked {value.dtype}"


def _structural_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    rule = _STRUCTURAL.get(value.op)
    if rule is None:
        return "is not an operation"
    return rule(value, dtypes)


def _const_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    kind = bool if value.dtype is torch.bool else float if value.dtype.is_floating_point else int
    return None if type(value.attr) is kind and not dtypes else f"{value.attr!r} is not a literal of {value.dtype}"


def _index_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None if value.dtype is torch.int64 and not dtypes else f"is marked {value.dtype}, an index is int64"


def _load_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if dtypes not in ((), (torch.bool,)):
        return f"its mask has dtypes {', '.join(map(str, dtypes))}"
    wanted = ops.compute_dtype(value.attr[2])
    return None if value.dtype == wanted else f"a load of {value.attr[2]} gives {wanted}, is marked {value.dtype}"


def _step_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None if isinstance(value.attr, str) and not dtypes else f"{value.attr!r} is no step of a program"


def _cast_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if value.dtype not in ops.COMPUTE_DTYPES:
        return f"{value.dtype} is not a compute dtype"
    return None if len(dtypes) == 1 and value.attr == value.dtype else f"casts to {value.attr}, is marked {value.dtype}"


def _round_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    good = dtypes == (torch.float32,) and value.attr in ops.NARROW_FLOATS and value.dtype is torch.float32
    return None if good else f"rounds {dtypes} to {value.attr}, is marked {value.dtype}"


def _bitcast_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    good = len(dtypes) == 1 and value.attr == value.dtype and dtypes[0].itemsize == value.dtype.itemsize
    return None if good else f"reinterprets {dtypes} as {value.attr}, is marked {value.dtype}"


def _assert_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if value.attr not in ops.FAILURES:
        return f"{value.attr!r} is no failure"
    return None if dtypes == (value.dtype, torch.bool) else f"of {dtypes}, is marked {value.dtype}"


def _random_problem(value: Value, dtypes: tuple[torch.dtype, ...]) -> str | None:
    wanted = torch.int64 if value.op == "randbits" else torch.float32
    if dtypes != (torch.int64, torch.int64):
        return f"seed and counter have dtypes {dtypes}, int64 is needed"
    return None if value.dtype == wanted else f"gives {wanted}, is marked {value.dtype}"


_STRUCTURAL: dict[str, Callable[[Value, tuple[torch.dtype, ...]], str | None]] = {
    "const": _const_problem, "index": _index_problem, "load": _load_problem, "step": _step_problem, "cast": _cast_problem,
    "round_to": _round_problem, "bitcast": _bitcast_problem, "assert": _assert_problem, "rand": _random_problem,
    "randn": _random_problem, "randbits": _random_problem,
}  # fmt: skip


# ---- index questions ------------------------------------------------------------------------------------------------


def _extents(variables: Sequence[Var]) -> tuple[Expr, ...]:
    return tuple(v.extent for v in variables)


def _differ(a: Expr, b: Expr) -> bool:
    """Whether two sizes cannot be equal; different names of one unbacked size can be."""
    if a is b:
        return False
    lo, hi = (a - b).bounds()
    return lo > 0 or hi < 0


def _outside(expr: Expr, extent: Expr) -> bool:
    """Whether some point surely leaves ``[0, extent)``, given that there are points. A sum over loop variables attains its
    bounds; of other expressions only a range that is outside altogether proves anything."""
    lo, hi = expr.bounds()
    if hi < 0 or ix.lower_bound(expr - extent) >= 0:
        return True
    terms = [(mono[0], coef) for mono, coef in expr.terms if len(mono) == 1]
    if len(terms) < sum(1 for mono, _ in expr.terms if mono) or not all(isinstance(atom, Var) for atom, _ in terms):
        return False
    falls = [atom for atom, coef in terms if coef < 0]
    if lo < 0 and all(isinstance(atom, Var) and atom.extent.as_int() is not None for atom in falls):
        return True
    return ix.lower_bound(ix.upper_expr(expr) - extent) >= 0


def _typed(buffer: Buffer) -> str:
    return f"{str(buffer.dtype).removeprefix('torch.')}[{', '.join(map(str, buffer.sizes))}]"
