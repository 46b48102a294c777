"""The loop IR: what every stage after lowering works on.

Semantics
---------
*Buffers.* A `Buffer` is a strided array in one storage. `strides` is None while the layout is flexible: the scheduler then
picks it, starting from `hint` (eager's stride order). `alias_of` names the buffer whose storage this one shares: a
reinterpretation of an input, or a newer *version* of a mutated buffer. Loads and stores address a buffer by its logical
index, one expression per dimension, so they do not depend on the layout.

*Parts.* A buffer with `parts` is made by no node: each part is a buffer that a node makes, and a box of the whole's storage.
Parts lie one behind the other along one dimension, and are all there is of the whole. Whoever needs elements reads the whole,
never a part, and runs after everything that makes a part.

*Iteration.* A node's `vars` are its loop variables, each with its extent; all points are independent unless the node says
otherwise. A size may be symbolic or zero; a reduction over an empty space gives its identity (mean of nothing is NaN because
the lowering divides by the count).

*Values and rounding.* A stored 16-bit float is widened exactly on load; arithmetic is in float32; a store rounds to nearest
even. `round_to` is a rounding that the user's program asked for, or that of an operand whose result jumps: comparisons,
positions (of extremes, in sorted rows), divisions with a remainder, `floor` and its kin, tests of floats, and conversions that
the program asks for take 16-bit numbers as eager stores them, be they in memory or not. Under ``numerics="eager"`` the
lowering rounds after each operation. a*b+c is never contracted unless the IR says `fma`.

*Masks.* A load with a mask touches no memory where the mask is false and yields 0 there.

*Integer overflow* wraps in two's complement; division by zero gives an unspecified value, not a trap. Index arithmetic is
64-bit and never overflows for storages below 2**63 bytes.

*Failures.* An index from data is checked where an access computes an address with it. `assert` checks what no access does: an
index that does not move the address, and on a CPU that an integer divisor is not zero. A check that fails makes the call raise
what eager raises, or ends the kernel on a GPU; what the call has written by then is unspecified. A mask on loads is one on the
assertions among them, too.

*NaN.* `maximum`, `minimum`, and the reductions max, min, argmax, argmin propagate NaN (argmax returns the first NaN's
position, else the first extreme). `fmax`/`fmin` drop it.

*Reductions.* The order of combination is not specified, but fixed for one plan and one thread count. A 16-bit sum
accumulates in float32. `welford` gives (mean, m2); a variance is ``m2 / (n - correction)``.

*Sorted rows.* A scan `sort` depends on its row in full, where other scans depend on what came before: the kernel holds the row.
Its values are integers, of which equal ones are one and the same, so nothing is left open. `stable_sort` has positions, too.

*Mutation.* Only `Scatter` and an `Extern` with `mutates` change storage that already exists. They read version `target` and
define version `out` of the same storage: every reader of the old version runs before, every reader of the new one after.
For `Scatter`, points are applied in row-major order of `vars`, so the last write wins and float accumulation is in order.

*Contraction.* ``out[o...] = scale * (sum over reduced axes of lhs[...] * rhs[...]) + addend``, accumulated in float32 (float64
for float64, int32 for 8-bit integers); `lhs` and `rhs` are values over the axes, so an operand may be any pointwise
computation; before it is multiplied it is rounded to `operands`, the type that the program's contraction has. `scale` and
`addend` are values over `out_vars`; `rounded` is set under ``numerics="eager"``. `vendor` is the equivalent library call, used
when no template takes the node; its operands are buffers of their own, computed before it. Where `operands` is None the call
alone is the definition. `fused` is a library call that computes the contraction and what one later node makes of it: its result
is that node's. `shared_call` gives the results of several nodes, which it names: the library computes those of them in one call
that no template takes. `vendor` is that call for one of them.

*Operation.* A call of an operator that some template implements: to everybody else it is its `vendor`. Its operands are values
over named axes, each rounded to its own type before the operator sees it; a result is rounded as the operator's is.

*Programs.* An operation with a `program` (`kgen/ir/program.py`) is no call but steps: contractions, and what is between them.
Its values are the program's operands, then one for each middle slot: the function of a `step`, the element that the step has
made, of the loops of the step's axes, and of memory. A step's result is in the type that sums of the operands have; it is not
rounded to 16 bits between steps, except that weights of a softmax may be, to the type of what they are multiplied by, before or
after they are divided by their sum. Of a row that is -inf as a whole a softmax makes NaN; zeros where the argument `safe` is
true. An axis stands for the loops in its expression, the last one fastest. Without a `vendor` it is a template's to compute:
whoever makes one keeps the nodes that it stands for.

*Partial.* Only the scheduler makes these: a reduction cut into parts, one for each tile of a contraction.

*Attention.* A library call, and what it means as a program, if its arguments can be said so.

*Extern.* A call of a torch operator on materialised operands, in program order among externs with effects.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch
from typing_extensions import TypeIs

from kgen.ir import ops
from kgen.ir.index import ONE, Expr, Indirect, Size, Var, free_atoms, indirects, linearize, stride_of
from kgen.ir.program import Program
from kgen.ir.values import Index, Value, index_exprs, loads, topological
from kgen.verdict import OperatorCall

Sizes = tuple[Expr, ...]
Output = Union["TensorArg", Expr, "Number", "ArgumentMultiple", int, float, bool, None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: for headers, names and messages; never part of a cache key. `calls` are those that it computes,
    `parameters` are inputs that it reads and that have a name in the user's module: (name in the graph, path)."""

    calls: tuple[OperatorCall, ...] = ()
    name: str = ""
    line: str = ""
    parameters: tuple[tuple[str, str], ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators, each once."""
        return tuple(dict.fromkeys(call.operator for call in self.calls))

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that called the operators, each once."""
        return tuple(dict.fromkeys(call.module for call in self.calls if call.module))

    def joined(self, other: Origin) -> Origin:
        calls = tuple(dict.fromkeys(self.calls + other.calls))
        parameters = tuple(dict.fromkeys(self.parameters + other.parameters))
        return Origin(calls, self.name or other.name, self.line or other.line, parameters)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A strided array. `hint` orders dimensions from outermost to innermost stride when the layout is flexible. `offset`
    and `strides` count elements of `dtype`; the offset starts at the first element of the buffer at the root of `alias_of`
    (an input tensor's data pointer), or at the start of an own storage. `parts` are the buffers that fill this one between
    them; one that `is_part` is such a box of the buffer that it is an alias of."""

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: Sizes
    strides: Sizes | None = None
    offset: Expr | int = 0
    kind: str = "intermediate"  # intermediate | input | constant
    alias_of: str | None = None
    hint: tuple[int, ...] | None = None
    parts: tuple[str, ...] = ()
    is_part: bool = False

    def __post_init__(self) -> None:
        if self.strides is not None and len(self.strides) != len(self.sizes):
            raise ValueError(f"{self.name}: {len(self.strides)} strides for {len(self.sizes)} sizes")
        if self.kind not in ("intermediate", "input", "constant"):
            raise ValueError(f"{self.name}: unknown kind {self.kind}")
        if self.is_part and (self.alias_of is None or self.parts):
            raise ValueError(f"{self.name} is part of {self.alias_of}, and has the parts {list(self.parts)}")


@dataclass(frozen=True, slots=True)
class Pointwise:
    """``out[vars] = value`` for every point; the points are independent."""

    out: str
    vars: tuple[Var, ...]
    value: Value
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class Reduction:
    """``outs[k][vars] = k-th result of op over rvars of value``. The index of argmax/argmin is row-major over `rvars`."""

    outs: tuple[str, ...]
    vars: tuple[Var, ...]
    rvars: tuple[Var, ...]
    op: str
    value: Value
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if self.op not in ops.REDUCTIONS:
            raise ValueError(f"unknown reduction {self.op}")
        if len(self.outs) != ops.REDUCTIONS[self.op].outputs:
            raise ValueError(f"{self.op} has {ops.REDUCTIONS[self.op].outputs} results, got {len(self.outs)}")


@dataclass(frozen=True, slots=True)
class Partial:
    """``outs[k][t, vars] = k-th result of op over the t-th `block` of points of rvars``, counted in row-major order. Only the
    scheduler makes these, of reductions that run on the tiles of a contraction; another node joins the parts. The index of
    argmax and argmin counts from the first point of all. `block` is provisional until `fixed`: a template's tile will say. A
    `whole` one has all of the points in its one part, so that whatever else runs on the tile may read its results."""

    outs: tuple[str, ...]
    vars: tuple[Var, ...]
    rvars: tuple[Var, ...]
    op: str
    value: Value
    block: int
    fixed: bool
    origin: Origin = Origin()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """Inclusive scan of `value` along `axis` (one of `vars`); outs as for the reduction of the same name, except that among
    equals, and among NaNs, argmax and argmin give the last position so far, as torch.cummax does. A ``sort`` gives the integers
    of the row along `axis` in ascending order, a ``stable_sort`` the position of each of them, too."""

    outs: tuple[str, ...]
    vars: tuple[Var, ...]
    axis: Var
    op: str
    value: Value
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if self.op not in ops.SCANS:
            raise ValueError(f"unknown scan {self.op}")
        if self.axis not in self.vars:
            raise ValueError(f"scan axis {self.axis} is not a loop variable")


@dataclass(frozen=True, slots=True)
class Scatter:
    """``out[index] = value`` (mode ``set``) or combined with what is there (``add``, ``mul``, ``max``, ``min``), in order.
    `out` is the new version of `target`. An affine injective index makes this a slice write; `index` may hold `Indirect`."""

    out: str
    target: str
    vars: tuple[Var, ...]
    index: Index
    value: Value
    mode: str = "set"
    mask: Value | None = None
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if self.mode not in ("set", "add", "mul", "max", "min"):
            raise ValueError(f"unknown scatter mode {self.mode}")


@dataclass(frozen=True, slots=True)
class TensorArg:
    """An operand of an extern, or a graph output: the view ``buffer[index(vars)]``, affine in its variables."""

    buffer: str
    vars: tuple[Var, ...]
    index: Index
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Number:
    """A number computed from sizes, as an operand of an extern or a graph output: `kind` is float (`expr` gives the bits of
    a float64) or bool. A plain `Expr` is an integer."""

    expr: Expr
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in ("float", "bool"):
            raise ValueError(f"unknown kind of number {self.kind}")


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of a torch operator. `args`/`kwargs` hold TensorArg, Expr, Number, Python numbers, and tuples of those; `outs` may
    hold None for results nobody uses; `mutates` pairs (old version, new version) of buffers the call changes. `binds` are
    size symbols that the call's results define: (symbol, result position, dimension)."""

    outs: tuple[str | None, ...]
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    mutates: tuple[tuple[str, str], ...] = ()
    binds: tuple[tuple[Size, int, int], ...] = ()
    effect: bool = False
    reason: str = "no lowering"
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class SharedCall:
    """A library call that gives the results of several nodes at once: `call.outs` names all of them. The argument at `mask`
    tells it which ones to compute, a bool for each. `sums` says whether it makes those that are sums on its way, and not by a
    pass of its own."""

    call: Extern
    mask: int
    sums: bool = True

    def giving(self, outs: Container[str | None]) -> Extern:
        """The call for some of the results, of which somebody reads all."""
        kept = tuple(out if out is not None and out in outs else None for out in self.call.outs)
        wanted = tuple(out is not None for out in kept)
        args = (*self.call.args[: self.mask], wanted, *self.call.args[self.mask + 1 :])
        return replace(self.call, outs=kept, args=args)


@dataclass(frozen=True, slots=True)
class Contraction:
    """``out[out_vars] = scale * sum(lhs * rhs) + addend``, the sum over the axes in `reduced`; see the module docstring.
    Without a `vendor` it is a template's to compute."""

    out: str
    out_vars: tuple[Var, ...]
    reduced: tuple[Var, ...]
    lhs: Value
    rhs: Value
    vendor: Extern | None
    origin: Origin = Origin()
    operands: torch.dtype | None = None
    scale: Value | None = None
    addend: Value | None = None
    stored: tuple[Value, ...] = ()  # the operands as `vendor` reads them, for who would rather not compute them
    fused: Extern | None = None
    rounded: torch.dtype | None = None  # a type to which the result is rounded before anything reads it
    # of each operand whose scales have become part of `scale`: the number of contractions for which one kernel would scale it
    unscaled: tuple[int, int] = (0, 0)
    shared_call: SharedCall | None = None  # a library call that gives this and results of other nodes
    windowed: bool = False  # whether `vendor` reads its operands as windows of tensors, as a convolution does, without a copy


@dataclass(frozen=True, slots=True)
class Second:
    """What an operation makes besides its results: ``out[index] = value``, a function of the second result of a step (a leaf
    of that name), at indices over the loops of the operation's results that are of the step's rows."""

    step: str
    out: str
    value: Value
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operator that some template implements: `outs[out_vars]`, all over the same variables. `operands` are its
    tensors as values over ``out_vars + inner``, each in its own type `dtypes`; `axes` names the variables as the template
    does, `arguments` are the numbers among the operator's arguments. `vendor` is the call, used when no template takes it. With
    a `program`, `operands` goes on with the functions in its middle slots, in its order. Without a call, `replaces` are the
    nodes of which it takes the place, in order: they are what is compared with it, and what runs when no template takes it.
    `kinds` are the types of an operator's results, those included that nobody uses."""

    outs: tuple[str | None, ...]
    out_vars: tuple[Var, ...]
    inner: tuple[Var, ...]
    operands: tuple[Value, ...]
    dtypes: tuple[torch.dtype, ...]
    axes: tuple[tuple[str, Expr], ...]
    operator: str
    arguments: tuple[tuple[str, Any], ...]
    vendor: Extern | None
    origin: Origin = Origin()
    stored: tuple[Value, ...] = ()  # the operands as `vendor` reads them
    program: Program | None = None
    replaces: tuple[Node, ...] = field(default=(), compare=False)  # library calls among them have no hash
    seconds: tuple[Second, ...] = ()
    kinds: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale * q k^T + mask) v over named operands; the operator's own schema gives the details. `meaning` is the same
    as an operation, with this very `vendor`."""

    vendor: Extern
    origin: Origin = Origin()
    meaning: Operation | None = None


Loop = Union[Pointwise, Reduction, Scan, Scatter]
TemplateNode = Contraction | Operation  # what templates compute
Node = Union[Pointwise, Reduction, Partial, Scan, Scatter, Contraction, Operation, Attention, Extern]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A placeholder in call order: a tensor (`buffer`), an integer bound to `symbol`, or something ignored (both None). A
    `static` tensor has the same address at each call, a `frozen` one the same elements, too."""

    buffer: str | None = None
    symbol: Size | None = None
    expr: Expr | None = None
    static: bool = False
    frozen: bool = False

    @property
    def is_ignored(self) -> bool:
        return self.buffer is None and self.symbol is None and self.expr is None


@dataclass(frozen=True, slots=True)
class ArgumentMultiple:
    """A graph output: the argument at `position` as the caller gave it, times `factor`. For the nested int of a jagged
    tensor, which stands for a ragged size and has no value as an integer."""

    position: int
    factor: int = 1

    def __str__(self) -> str:
        return f"argument {self.position}" + (f" * {self.factor}" if self.factor != 1 else "")


@dataclass(frozen=True, slots=True)
class Derived:
    """What a buffer that the scheduler adds is of another one, its `source`: `role` says which transform made it, and as what.
    Of several of one role, `number` counts them; `reader` is the buffer that it was made for, where that matters."""

    source: str
    role: str
    number: int | None = None
    reader: str = ""

    @property
    def stem(self) -> str:
        """A name for people. It need not be free, and nothing parses it."""
        words = [self.source, self.role, *([self.reader] if self.reader else [])]
        number = "" if self.number is None else f"_{self.number}" if self.reader else str(self.number)
        return "_".join(words) + number


@dataclass(slots=True)
class Graph:
    """A lowered graph. `outputs` holds TensorArg, Expr (a SymInt result), Number, ArgumentMultiple, or None. `derived` defines
    size symbols that stand for a function of other sizes with no form as an index: the host computes them, and for the rest
    of the compiler they are symbols like any other. `provenance` says of each name that the scheduler made (`derived`) what
    the buffer is, and `names` the reverse. `paths` are names in the user's modules, by names in the graph: of a parameter,
    and of the module that called an operator. Decisions are made at `size_hints`: the sizes of the example inputs, until the
    scheduler puts other ones in place of those that contractions depend on. `seen` keeps the first ones, for reports."""

    name: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[GraphInput] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    size_hints: dict[Size, int] = field(default_factory=dict)
    derived: dict[Size, Expr] = field(default_factory=dict)
    seen: dict[Size, int] | None = None
    provenance: dict[str, Derived] = field(default_factory=dict)
    names: dict[Derived, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def frozen(self) -> frozenset[str]:
        """Buffers of inputs that have the same elements at each call."""
        return frozenset(one.buffer for one in self.inputs if one.buffer is not None and one.frozen)

    def is_given(self, name: str) -> bool:
        """Whether a buffer is an input or a constant."""
        buffer = self.buffers.get(name)
        return buffer is not None and buffer.kind != "intermediate"

    @property
    def seen_sizes(self) -> dict[Size, int]:
        """The sizes of the example inputs."""
        return self.size_hints if self.seen is None else self.seen


def dense_strides(buffer: Buffer) -> Sizes:
    """The buffer's strides; where these are not settled, those of a dense layout in the order that it prefers."""
    if buffer.strides is not None:
        return buffer.strides
    order = buffer.hint or tuple(range(len(buffer.sizes)))
    strides: list[Expr] = [ONE] * len(order)
    total = ONE
    for k in reversed(order):
        strides[k] = total
        total = total * (ONE if buffer.sizes[k] == 0 else buffer.sizes[k])
    return tuple(strides)


def is_row(graph: Graph, arg: TensorArg | None) -> bool:
    """Whether a vector's elements are known to lie one after another. oneDNN reads a bias so, whatever its stride is. True of
    None, and of one element."""
    if arg is None or arg.vars[0].extent == 1:
        return True
    buffer = graph.buffers[arg.buffer]
    if buffer.strides is None and len(buffer.sizes) > 1:
        return False  # which order the dimensions will have is not settled
    return stride_of(linearize(arg.index, dense_strides(buffer)), arg.vars[0]) is ONE


def own_copy(graph: Graph) -> Graph:
    """A graph that may be changed while the given one stays as it is."""
    return replace(
        graph, buffers=dict(graph.buffers), nodes=list(graph.nodes), size_hints=dict(graph.size_hints),
        provenance=dict(graph.provenance), names=dict(graph.names),
    )  # fmt: skip


def is_contraction(node: Node) -> TypeIs[Contraction]:
    """Whether a node is a sum of products."""
    return isinstance(node, Contraction)


def is_template_node(node: Node) -> TypeIs[TemplateNode]:
    """Whether a node may be computed by a template of its own: a contraction, or an operator that a template implements."""
    return isinstance(node, Contraction | Operation)


def is_call(node: Node) -> TypeIs[Extern | Attention]:
    """Whether a node is a library call, and nothing that loops or a template may compute."""
    return isinstance(node, Extern | Attention)


def replaced(node: Node) -> tuple[Node, ...]:
    """The nodes in whose place an operation stands."""
    return node.replaces if isinstance(node, Operation) else ()


def meaning_of(node: Node) -> Operation | None:
    """What a call means as a program, where somebody has said so; None of other nodes."""
    return node.meaning if isinstance(node, Attention) else None


def combines(node: Node) -> bool:
    """Whether a node makes elements out of several ones: a reduction, a scan, a contraction, an operator of a template's, a
    call that means a program, additions and the like at indices from data."""
    if isinstance(node, Scatter):
        return node.mode != "set"
    meant = meaning_of(node) is not None
    return meant or isinstance(node, Reduction | Partial | Scan | Contraction | Operation)


def any_combines(graph: Graph) -> bool:
    """Whether some node does: else every element of the graph is made on its own."""
    return any(map(combines, graph.nodes))


def fresh(graph: Graph, stem: str, taken: Container[str] = ()) -> str:
    """A name that no buffer of the graph has, none that the scheduler has given away, and none that is `taken`."""
    numbered = (f"{stem}_{number}" for number in itertools.count(2))
    used = (graph.buffers, graph.provenance, taken)
    return next(name for name in itertools.chain((stem,), numbered) if not any(name in names for names in used))


def derived(graph: Graph, what: Derived) -> str:
    """The name of what the scheduler makes of a buffer: the same one at each attempt at a schedule, and nobody else's."""
    name = graph.names.get(what)
    if name is None:
        name = graph.names[what] = fresh(graph, what.stem)
        graph.provenance[name] = what
    return name


def source_in(graph: Graph, name: str, role: str) -> str | None:
    """The buffer of which `name` is what `role` says, or None."""
    found = graph.provenance.get(name)
    return found.source if found is not None and found.role == role else None


def windowed(graph: Graph) -> set[str]:
    """The results of contractions that are those of convolutions, or of their gradients."""
    return {node.out for node in graph.nodes if is_contraction(node) and node.windowed}


def reads_windows(graph: Graph, total: str) -> bool:
    """Whether the sum of a contraction, or of a part of one, is that of a convolution or of one of its gradients."""
    results = windowed(graph)
    made = graph.provenance.get(total) if results else None
    while made is not None and made.source not in results:
        made = graph.provenance.get(made.source)
    return made is not None


def call_of(node: Node) -> Extern | None:
    """The library call that the node is, or that is equivalent to it."""
    if isinstance(node, Contraction | Operation | Attention):
        return node.vendor
    return node if isinstance(node, Extern) else None


def viewed(call: Extern) -> tuple[str, ...]:
    """The buffers whose storage results of a torch operator may share, as its schema has it: those that it views."""
    schema = getattr(call.target, "_schema", None)
    if schema is None or not any(one.alias_info is not None for one in schema.returns):
        return ()
    given = {**dict(zip((one.name for one in schema.arguments), call.args, strict=False)), **dict(call.kwargs)}
    seen = [given.get(one.name) for one in schema.arguments if one.alias_info is not None]
    return tuple(arg.buffer for arg in tensor_args(seen))


def visible(graph: Graph) -> set[str]:
    """Buffers that are needed whatever the nodes read: outputs, parts of others, and those of which others are aliases."""
    aliased = {b.alias_of for b in graph.buffers.values() if b.alias_of is not None}
    parts = {b.name for b in graph.buffers.values() if b.is_part}
    return aliased | parts | {o.buffer for o in graph.outputs if isinstance(o, TensorArg)}


def is_hidden_table(graph: Graph, scatter: Scatter) -> bool:
    """Whether nobody else sees the table that a scatter writes to: it is no result, no part, and written once."""
    results = {one.buffer for one in tensor_args(list(graph.outputs))}
    aliases = [name for name, buffer in graph.buffers.items() if buffer.alias_of in (scatter.target, scatter.out)]
    own = graph.buffers[scatter.target]
    return aliases == [scatter.out] and not results & {scatter.target, scatter.out} and own.alias_of is None and not own.parts


def owner(graph: Graph, name: str) -> str:
    """The buffer, or the one that it is a part of."""
    buffer = graph.buffers[name]
    return buffer.alias_of if buffer.is_part and buffer.alias_of is not None else name


def storage_owner(buffers: Mapping[str, Buffer], name: str, known: dict[str, str]) -> str:
    """The buffer that owns the storage of another one. A loop of writes makes a chain of as many versions: `known` keeps what
    was found, so that n questions about it take n steps."""
    passed = []
    while name not in known:
        below = buffers[name].alias_of
        if below is None:
            known[name] = name
        else:
            passed.append(name)
            name = below
    known.update(dict.fromkeys(passed, known[name]))
    return known[name]


def storages(graph: Graph, names: Iterable[str]) -> set[str]:
    """The memory under buffers, as names that are equal where two may share elements: parts of one storage are apart from each
    other, and all of them belong to whatever else has that storage."""
    found: set[str] = set()
    for name in names:
        buffer = graph.buffers[name]
        while not buffer.is_part and buffer.alias_of is not None:
            buffer = graph.buffers[buffer.alias_of]
        found.update((buffer.name, *buffer.parts))
    return found


def outs(node: Node) -> tuple[str, ...]:
    """Names of the buffers (or buffer versions) that the node defines."""
    if isinstance(node, Pointwise | Scatter | Contraction):
        return (node.out,)
    if isinstance(node, Reduction | Partial | Scan):
        return node.outs
    if isinstance(node, Operation):
        return (*(o for o in node.outs if o is not None), *(one.out for one in node.seconds))
    call = call_of(node)
    assert call is not None
    return tuple(o for o in call.outs if o is not None) + tuple(new for _, new in call.mutates)


def results(node: TemplateNode) -> tuple[str | None, ...]:
    """Names of what templates compute, in order; None for results that nobody uses."""
    return (node.out,) if isinstance(node, Contraction) else node.outs


def roots(node: Node) -> tuple[Value, ...]:
    """The values a loop node computes, those inside a scatter's index and mask included."""
    if isinstance(node, Pointwise | Reduction | Partial | Scan):
        return (node.value,)
    if isinstance(node, Scatter):
        from_index = tuple(v for e in node.index for v in _indirect_values(e))
        return (node.value, *from_index, *(() if node.mask is None else (node.mask,)))
    if isinstance(node, Contraction):
        return (node.lhs, node.rhs, *(v for v in (node.scale, node.addend) if v is not None))
    if isinstance(node, Operation):
        return (*node.operands, *(one.value for one in node.seconds))
    return ()


def _indirect_values(expr: Expr) -> Iterator[Value]:
    for atom in indirects(expr):
        yield atom.value


def tensor_args(tree: Any) -> Iterator[TensorArg]:
    """Every TensorArg in an extern's argument tree."""
    if isinstance(tree, TensorArg):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensor_args(item)


def reads(node: Node) -> tuple[str, ...]:
    """Names of the buffer versions that the node reads, a mutated target included."""
    if isinstance(node, Extern | Attention):
        call = node.vendor if isinstance(node, Attention) else node
        names = [a.buffer for a in tensor_args((call.args, tuple(v for _, v in call.kwargs)))]
        return tuple(dict.fromkeys(names + [old for old, _ in call.mutates]))
    names = [v.attr[0] for v in loads(roots(node))]
    if isinstance(node, Contraction | Operation) and node.vendor is not None:  # it reads its operands as buffers
        names += [a.buffer for a in tensor_args((node.vendor.args, tuple(v for _, v in node.vendor.kwargs)))]
    if isinstance(node, Scatter):
        names.append(node.target)
    return tuple(dict.fromkeys(names))


def sizes_used(graph: Graph, node: Node) -> set[Size]:
    """The size symbols whose values the node needs, by its results' shapes, its loops, its indices or its arguments. Derived
    symbols are replaced by what they are computed from; those that the node defines itself are not among them."""
    call = call_of(node)
    exprs: list[Expr] = []
    for name in (*outs(node), *reads(node)):
        buffer = graph.buffers[name]
        exprs += [*buffer.sizes, *(buffer.strides or ())]
    for value in topological(roots(node)):
        exprs += index_exprs(value)
    if isinstance(node, Pointwise | Reduction | Partial | Scan | Scatter | Contraction | Operation):
        exprs += [v.extent for loops in iteration(node) for v in loops]
    if isinstance(node, Scatter):
        exprs += node.index
    if call is not None:
        exprs += _numbers((call.args, tuple(v for _, v in call.kwargs)))
    found: set[Size] = set()
    for expr in exprs:
        _add_sizes(graph, expr, found)
    return found - {symbol for symbol, _, _ in call.binds} if call is not None else found


def _numbers(tree: Any) -> Iterator[Expr]:
    if isinstance(tree, Expr):
        yield tree
    elif isinstance(tree, Number):
        yield tree.expr
    elif isinstance(tree, TensorArg):
        yield from tree.index
        yield from (v.extent for v in tree.vars)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _numbers(item)


def _add_sizes(graph: Graph, expr: Expr, found: set[Size]) -> None:
    for atom in free_atoms(expr):
        if isinstance(atom, Var):
            _add_sizes(graph, atom.extent, found)
        elif isinstance(atom, Indirect):
            _add_sizes(graph, atom.size, found)
        elif isinstance(atom, Size) and atom in graph.derived:
            _add_sizes(graph, graph.derived[atom], found)
        elif isinstance(atom, Size):
            found.add(atom)


def iteration(node: Loop | Partial | TemplateNode) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """(outer variables, reduced variables) of a loop node."""
    if isinstance(node, Contraction):
        return node.out_vars, node.reduced
    if isinstance(node, Operation):
        return node.out_vars, node.inner
    return (node.vars, node.rvars) if isinstance(node, Reduction | Partial) else (node.vars, ())
