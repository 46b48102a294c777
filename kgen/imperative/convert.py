"""A function's source as a function whose loops and branches are calls.

`if`, `while` and `for` become functions of what they change, which `kgen/imperative/blocks.py` calls. That is the block
propagation of TensorSSA (FuncTs, "Holistic functionalization of imperative tensor programs"): a block gets each variable and
each buffer that it changes as a parameter, and gives the new one back.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kgen import errors
from kgen.imperative import blocks
from kgen.imperative.exits import STOP, Exits, Refuse, refuse, same_scope
from kgen.imperative.liveness import around, needed
from kgen.imperative.names import Aliases, assigned, loaded, only_updated, path_of, roots, updated, written, written_parts
from kgen.imperative.numbers import with_new_numbers
from kgen.imperative.views import innermost, paired, replaced, stale, writes_before

__all__ = ["converted"]

_BLOCKS, _ITEM, _OURS = "__kgen_blocks", "__kgen_item", "kgen_made_it"
_VIEW, _SEEN = "__kgen_view", "__kgen_seen"
_REFUSED: dict[type[ast.AST], str] = {
    ast.Yield: "it is a generator", ast.YieldFrom: "it is a generator", ast.Await: "it awaits", ast.AsyncFor: "it awaits",
    ast.AsyncWith: "it awaits", ast.Global: "it assigns globals", ast.Nonlocal: "it assigns variables of another function",
}  # fmt: skip
Node = TypeVar("Node", bound=ast.AST)
_FUNCTIONS = ast.FunctionDef | ast.Lambda


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with control flow as calls, and with its own globals, closure and defaults.

    Raises NoSource, and NotConvertible with the line of what has no such form."""
    if not isinstance(function, types.FunctionType):
        module = isinstance(function, torch.nn.Module)
        cause = "it is a module; decorate its `forward`" if module else "it is no plain Python function"
        raise errors.NoSource(function=repr(function), cause=cause)
    tree, filename = _source(function)
    free = function.__code__.co_freevars
    _Converter(tree, refuse(filename, function.__qualname__), free, filename).run()
    made = _compiled(tree, filename, free)
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | {_BLOCKS: types.CellType(blocks)}
    closure = tuple(cells[name] for name in made.co_freevars)
    result = types.FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _source(function: types.FunctionType) -> tuple[ast.FunctionDef, str]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as cause:
        raise errors.NoSource(function=function.__qualname__, cause=str(cause)) from cause
    if not isinstance(tree, ast.FunctionDef):
        raise errors.NoSource(function=function.__qualname__, cause="it is no `def`")
    ast.increment_lineno(tree, first - 1)
    tree.decorator_list = []
    return tree, function.__code__.co_filename


def _compiled(tree: ast.FunctionDef, filename: str, free: Sequence[str]) -> types.CodeType:
    """The code of the function, as an inner one of a function that has its free variables."""
    names = [ast.arg(name) for name in (*free, _BLOCKS)]
    inner = ast.Return(_name(tree.name))
    outer = ast.FunctionDef("__kgen_outer", ast.arguments([], names, None, [], [], None, []), [tree, inner], [])
    module = ast.fix_missing_locations(ast.Module([_at(outer, tree)], []))
    code = compile(module, filename, "exec", dont_inherit=True)
    return _code_named(_code_named(code, "__kgen_outer"), tree.name)


def _code_named(code: types.CodeType, name: str) -> types.CodeType:
    return next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)


# ---- parts of the syntax --------------------------------------------------------------------------------------------------


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _tuple(items: Iterable[ast.expr]) -> ast.expr:
    return ast.Tuple(list(items), ast.Load())


def _names(names: Iterable[str]) -> ast.expr:
    return _tuple(map(_name, names))


def _path(path: str) -> ast.expr:
    first, *rest = path.split(".")
    made = _name(first)
    for one in rest:
        made = ast.Attribute(made, one, ast.Load())
    return made


def _of_blocks(name: str) -> ast.expr:
    return ast.Attribute(_name(_BLOCKS), name, ast.Load())


def _at(made: ast.stmt, like: ast.AST) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(made, like))


def _parameter(path: str) -> str:
    """The name of a block's parameter for a buffer."""
    return path if "." not in path else f"__kgen_{path.replace('.', '_')}"


class _Paths(ast.NodeTransformer):
    """Buffers that are attributes, as parameters of the block."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = frozenset(path for path in paths if "." in path)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        path = path_of(node)
        if path in self.paths and path.endswith(f".{node.attr}"):
            return ast.copy_location(ast.Name(_parameter(path), node.ctx), node)
        return node


class _Expressions(ast.NodeTransformer):
    """`and`, `or`, `not` and `a if c else b`, which ask their operands for a Python bool, and indices, as calls."""

    depth = 0  # of functions of views

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """What writes into `b[i]` is a function of that view."""
        for one in node.args[:1] if path_of(node.func) == f"{_BLOCKS}.put" else written_parts(node):
            view = innermost(one)
            if view is not None:
                return ast.copy_location(self._through(node, one, view), node)
        return self.generic_visit(node)

    def _through(self, node: ast.Call, written: ast.expr, view: ast.Subscript) -> ast.Call:
        given = [self.visit(view.value), self.visit(_index(view.slice))]
        outer = [_name(f"{_SEEN}{self.depth}")] if self.depth else []
        self.depth += 1
        names = [f"{name}{self.depth}" for name in (_VIEW, _SEEN)]
        whole = replaced(node, view, _name(names[0]))
        for step in writes_before(written):
            whole = replaced(whole, step, ast.Call(_name(names[1]), [step], []))
        write = _later(self.visit(whole), *names)
        self.depth -= 1
        return ast.Call(_of_blocks("through"), [*given, write, *outer], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        made = node.values[-1]
        for one in reversed(node.values[:-1]):
            made = ast.Call(_of_blocks(name), [one, _later(made)], [])
        return ast.copy_location(made, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        is_not = isinstance(node.op, ast.Not)
        return ast.copy_location(ast.Call(_of_blocks("negated"), [node.operand], []), node) if is_not else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(
            _of_blocks("choice"), [node.test, _later(node.body), _later(node.orelse), ast.Constant(node.lineno)], []
        )
        return ast.copy_location(call, node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Call(_of_blocks("item"), [node.value, _index(node.slice)], []), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node


def _visited(node: Node) -> Node:
    """A copy with its expressions converted: what has been analysed stays as it was."""
    made: Node = _Expressions().visit(copy.deepcopy(node))
    return made


def _index(node: ast.expr) -> ast.expr:
    """What stands between brackets, as an expression."""
    if isinstance(node, ast.Tuple):
        return _tuple(_index(one) for one in node.elts)
    if not isinstance(node, ast.Slice):
        return node
    parts = (node.lower, node.upper, node.step)
    return ast.Call(_of_blocks("part"), [one if one is not None else ast.Constant(None) for one in parts], [])


def _puts(target: ast.expr) -> bool:
    """Whether an assignment to this writes at an index."""
    if isinstance(target, ast.Starred):
        return _puts(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return any(_puts(one) for one in target.elts)
    return isinstance(target, ast.Subscript)


def _put(target: ast.Subscript, value: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(_of_blocks("put"), [target.value, _index(target.slice), value], []))


def _read(target: ast.Subscript, base: str, index: str, view: str) -> list[ast.stmt]:
    """`b[i]`, in parts that have names."""
    parts = [target.value, _index(target.slice), ast.Call(_of_blocks("item"), [_name(base), _name(index)], [])]
    stores = [ast.Name(one, ast.Store()) for one in (base, index, view)]
    return [ast.Assign([store], part) for store, part in zip(stores, parts, strict=True)]


def _call(what: str, *names: str) -> ast.stmt:
    return ast.Expr(ast.Call(_of_blocks(what), [_name(one) for one in names], []))


def _unbound(names: Iterable[str], at: ast.AST) -> list[ast.stmt]:
    return [_at(ast.Assign([ast.Name(one, ast.Store())], _of_blocks("UNDEFINED")), at) for one in sorted(names)]


def _later(value: ast.expr, *names: str) -> ast.expr:
    made = ast.Lambda(ast.arguments([], list(map(ast.arg, names)), None, [], [], None, []), value)
    setattr(made, _OURS, True)
    return made


@dataclass(frozen=True, slots=True)
class _Block:
    """What a block changes and reads, in the order of its parameters."""

    site: blocks.Site
    reads: Sequence[str]
    at: ast.stmt

    @property
    def parameters(self) -> list[str]:
        return [*self.site.state, *map(_parameter, self.site.buffers), *self.reads]

    def function(self, name: str, body: Sequence[ast.stmt], first: Sequence[str], returns: ast.expr | None = None) -> ast.stmt:
        """The block as a function of `first` and its parameters."""
        given = [ast.arg(one) for one in (*first, *self.parameters)]
        paths = _Paths(self.site.buffers)
        end = ast.Return(returns if returns is not None else _names(self.site.state))
        whole = [*(paths.visit(one) for one in body), paths.visit(_at(end, self.at))]
        return _at(ast.FunctionDef(name, ast.arguments([], given, None, [], [], None, []), whole, []), self.at)

    def call(self, what: str, first: Sequence[ast.expr]) -> ast.stmt:
        """The statement that runs it, and assigns what it changes."""
        parts: list[Any] = list(self.site)
        site = ast.Call(_of_blocks("Site"), [ast.Constant(one) for one in parts], [])
        given = [site, *first, _names(self.site.state), _tuple(map(_path, self.site.buffers)), _names(self.reads)]
        call = ast.Call(_of_blocks(what), given, [])
        if not self.site.state:
            return _at(ast.Expr(call), self.at)
        target = ast.Tuple([ast.Name(one, ast.Store()) for one in self.site.state], ast.Store())
        return _at(ast.Assign([target], call), self.at)


# ---- the function ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Converter:
    """Rewrites one function in place."""

    tree: ast.FunctionDef
    refused: Refuse
    free: Sequence[str]
    filename: str
    locals: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    aliases: Aliases = field(default_factory=Aliases)
    stale: frozenset[str] = frozenset()
    count: int = 0
    depth: int = 0  # of the loops around
    early: set[str] = field(default_factory=set)  # names that a block may meet before they are bound

    def run(self) -> None:
        for node in (one for stmt in self.tree.body for one in same_scope(stmt)):
            if type(node) in _REFUSED:
                raise self.refused(node, _REFUSED[type(node)])
        given = self.tree.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        self.arguments = frozenset(one.arg for one in every if one is not None)
        body = Exits(self.refused).function(with_new_numbers(self.tree.body, self.arguments))
        self.locals = self.arguments | assigned(*body)
        self.aliases = Aliases.of(body)
        self.stale = stale(body, self.aliases)
        self.tree.body = body
        body = self._block(body, frozenset())
        self.tree.body = [*_unbound(self.early, self.tree), *body]

    def _block(self, body: Sequence[ast.stmt], live: frozenset[str]) -> list[ast.stmt]:
        """The statements converted, from the last one on: what is read behind a statement decides what a block gives back."""
        made: list[ast.stmt] = []
        for position in range(len(body) - 1, -1, -1):
            made[:0] = self._statement(body[position], needed(body[position + 1 :], live))
        return made

    def _opened(self, block: _Block, body: Sequence[ast.stmt], live: frozenset[str]) -> list[ast.stmt]:
        """The statements of a block's function. A block in it may meet variables of the function before they are bound."""
        made = self._block(body, live)
        return [*_unbound(self.early & assigned(*body) - frozenset(block.parameters), block.at), *made]

    def _statement(self, stmt: ast.stmt, live: frozenset[str]) -> list[ast.stmt]:
        if isinstance(stmt, ast.If):
            return self._if(stmt, live)
        if isinstance(stmt, ast.For | ast.While):
            return self._loop(stmt, live)
        if isinstance(stmt, ast.With | ast.Try):
            return [self._nested(stmt, live | loaded(stmt))]
        return self._plain(stmt)

    def _plain(self, stmt: ast.stmt) -> list[ast.stmt]:
        """A statement without blocks; writes at an index are calls."""
        if isinstance(stmt, ast.Assign) and any(_puts(one) for one in stmt.targets):
            value = self._fresh("value")
            made: list[ast.stmt] = [ast.Assign([ast.Name(value, ast.Store())], self._kept(stmt))]
            for target in stmt.targets:
                made += self._assigned(target, _name(value))
            return [_visited(_at(one, stmt)) for one in made]
        if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Subscript):
            return [_visited(_at(one, stmt)) for one in self._update(stmt, stmt.target)]
        if isinstance(stmt, ast.Assign):
            stmt = ast.copy_location(ast.Assign(stmt.targets, self._kept(stmt)), stmt)
        return [_visited(stmt)]

    def _assigned(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        """The assignment of a value, with writes at an index as calls: those of `b[i], j = v, j + 1` from the left."""
        if isinstance(target, ast.Subscript):
            return [_put(target, value)]
        if not isinstance(target, ast.Tuple | ast.List) or not _puts(target):
            return [ast.Assign([target], value)]
        names = [self._fresh("part") for _ in target.elts]
        stores: list[ast.expr] = [ast.Name(one, ast.Store()) for one in names]
        inner = [one.value if isinstance(one, ast.Starred) else one for one in target.elts]
        for k, one in enumerate(target.elts):
            if isinstance(one, ast.Starred):
                stores[k] = ast.Starred(stores[k], ast.Store())
        made: list[ast.stmt] = [ast.Assign([ast.Tuple(stores, ast.Store())], value)]
        for one, name in zip(inner, names, strict=True):
            made += self._assigned(one, _name(name))
        return made

    def _kept(self, stmt: ast.Assign) -> ast.expr:
        """The value of an assignment. A view that gets a name is a call that may refuse it."""
        names = sorted(one for target in stmt.targets for one in assigned(target) & self.stale)
        values = stmt.value.elts if isinstance(stmt.value, ast.Tuple | ast.List) else [stmt.value]
        made = stmt.value
        for k, view in enumerate(map(innermost, values)):
            if view is not None and (names or self._is_written_before(stmt, k)):
                name = names[0] if names else ast.unparse(view)
                where = [ast.Constant(one) for one in (self.tree.name, self.filename, stmt.lineno, name)]
                call = ast.Call(_of_blocks("kept"), [*where, view.value, _index(view.slice)], [])
                made = replaced(made, view, call)
        return made

    def _is_written_before(self, stmt: ast.Assign, k: int) -> bool:
        """Whether targets in front of the one for value `k` may write into it: `b[i], b[j] = b[j], b[i]` swaps no views."""
        before = [(pairs[k][1], [target for target, _ in pairs[:k]]) for pairs in paired(stmt)]
        closure = self.aliases.closure
        return any(closure(roots(value)) & closure(written(*targets)) for value, targets in before)

    def _update(self, stmt: ast.AugAssign, target: ast.Subscript) -> list[ast.stmt]:
        """`b[i] += v`, with each part of it evaluated once; of `b[i][j] += v` the outer view is put back, too."""
        base, index, view = self._fresh("base"), self._fresh("index"), self._fresh("view")
        outer = innermost(target.value)
        if outer is not None:
            inner = ast.Subscript(replaced(target.value, outer, _name(view)), target.slice, ast.Store())
            return [*_read(outer, base, index, view), *self._update(stmt, inner), _call("back", base, index, view)]
        written = ast.AugAssign(ast.Name(view, ast.Store()), stmt.op, stmt.value)
        return [*_read(target, base, index, view), written, _call("put", base, index, view)]

    def _nested(self, stmt: ast.With | ast.Try, live: frozenset[str]) -> ast.stmt:
        """A statement whose blocks are part of the one around it."""
        for part in [stmt, *stmt.handlers] if isinstance(stmt, ast.Try) else [stmt]:
            for name in ("body", "orelse", "finalbody"):
                if getattr(part, name, None):
                    setattr(part, name, self._block(getattr(part, name), live))
        return stmt

    def _if(self, stmt: ast.If, live: frozenset[str]) -> list[ast.stmt]:
        whole = [*stmt.body, *stmt.orelse]
        block = self._described(stmt, whole, live, needed(stmt.body, live) | needed(stmt.orelse, live))
        names = [self._fresh("then"), self._fresh("orelse")]
        parts = [self._opened(block, body, live) for body in (stmt.body, stmt.orelse)]
        functions = [block.function(name, body, ()) for name, body in zip(names, parts, strict=True)]
        test = _visited(stmt.test)
        return [*functions, block.call("branch", [test, *map(_name, names)])]

    def _loop(self, stmt: ast.For | ast.While, live: frozenset[str]) -> list[ast.stmt]:
        again = live | around(stmt, live)
        bound = assigned(stmt.target) if isinstance(stmt, ast.For) else frozenset()
        if left := sorted(bound & live):
            raise self.refused(stmt, f"{left[0]} is read behind its loop; assign it to another name in the loop")
        heads = [stmt.test] if isinstance(stmt, ast.While) else []
        block = self._described(stmt, stmt.body, again, again, bound, heads)
        stop = getattr(stmt, STOP, None)
        flag = ast.Constant(block.site.state.index(stop) if stop else -1)
        self.depth += 1
        body, name = self._opened(block, stmt.body, again), self._fresh("body")
        self.depth -= 1
        if isinstance(stmt, ast.While):
            test = self._fresh("test")
            asks = block.function(test, [], (), _visited(stmt.test))
            return [asks, block.function(name, body, ()), block.call("repeat", [_name(test), _name(name), flag])]
        function = block.function(name, [_at(ast.Assign([stmt.target], _name(_ITEM)), stmt), *body], (_ITEM,))
        what, over = self._iterated(stmt.iter)
        return [function, block.call(what, [over, _name(name), flag])]

    def _iterated(self, over: ast.expr) -> tuple[str, ast.expr]:
        """What runs a loop, and over what."""
        is_range = isinstance(over, ast.Call) and path_of(over.func) == "range" and "range" not in self.locals
        if isinstance(over, ast.Call) and is_range and not over.keywords:
            return "count", _tuple(_visited(one) for one in over.args)
        return "each", _visited(over)

    def _fresh(self, what: str) -> str:
        self.count += 1
        return f"__kgen_{what}_{self.count}"

    def _described(
        self, stmt: ast.stmt, body: Sequence[ast.stmt], live: frozenset[str], entering: frozenset[str],
        bound: frozenset[str] = frozenset(), heads: Sequence[ast.AST] = (),
    ) -> _Block:  # fmt: skip
        """A block; `live` are names that are read behind it, or in its next iteration, `entering` those that it gets."""
        stores = assigned(*body) - bound
        writes = written(*body)
        rebound = stores - only_updated(*body)
        reach = self.aliases.closure(writes, stores | bound)
        for path in sorted(writes & rebound & entering):
            raise self.refused(stmt, f"{path} is both written in place and assigned anew; use one of the two ways")
        buffers = sorted(path for path in reach - stores - bound if path.partition(".")[0] not in stores | bound)
        state = sorted(stores & live)
        known = (self.locals | set(self.free)) - stores - bound - set(buffers)
        reads = sorted(loaded(*body, *heads) & known)
        self._no_captures(stmt, stores)
        self.early |= ({*state, *reads} & self.locals) - self.arguments
        changed = sorted(updated(*body) & set(state) - rebound)
        later = self.aliases.closure(written(*self.tree.body))
        fragile = tuple(name for name in state if self.aliases.closure(frozenset((name,))) & later)
        site = blocks.Site(
            self.tree.name, self.filename, stmt.lineno, tuple(state), tuple(buffers), tuple(changed), fragile, self.depth > 0
        )
        return _Block(site, reads, stmt)

    def _no_captures(self, stmt: ast.stmt, stores: frozenset[str]) -> None:
        """A function made outside of a block would go on reading the variables as they were in front of it."""
        inside = set(ast.walk(stmt))
        for node in ast.walk(self.tree):
            ours = hasattr(node, _OURS) or node is self.tree or node in inside
            if isinstance(node, _FUNCTIONS) and not ours:
                for name in sorted(loaded(node) & stores - _own_names(node)):
                    raise self.refused(stmt, f"{name} is assigned here, and read by a function that is made elsewhere")


def _own_names(node: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    own = frozenset(one.arg for one in ast.walk(node) if isinstance(one, ast.arg))
    return own | (assigned(*node.body) if isinstance(node, ast.FunctionDef) else frozenset())
