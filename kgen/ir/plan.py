"""What the scheduler hands to the back ends: kernels to generate, calls to make, and where every buffer lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Size, Var, as_expr
from kgen.ir.values import Value
from kgen.verdict import Verdict

# Iterations of a tiled loop: one cache line of float32.
TILE = 16
# What a partial reduction calls the number of its tile.
PART = "part_at"
# Longest row, in points, that one program on a GPU holds in registers.
MAX_PERSISTENT = 32768


@dataclass(frozen=True, slots=True)
class Statement:
    """One item of a kernel: `value` stored at `store` of `outs`, or reduced into them. `kind` is pointwise, reduction, scan,
    scatter, column, block, contraction or partial; `section` numbers the inner loop it runs in (inner statements) or after
    which it runs (outer ones, -1: before all). `stored` says which outs are written to memory; the rest stay in registers. A
    column statement joins, for each inner point, its values at all outer points of a program, by `op`; `store` begins with the
    kernel's `share`. A contraction is what templates compute: the sum over the inner loops of `value` times `factors`,
    each rounded to its type in `operands` before, or, where `op` is not "sum", an operator of these.
    A block statement reduces runs of `block` neighbouring inner points, in the kernel of a GPU whose programs hold full rows;
    its result is there at each point. A pointwise or block statement with a `mask` is stored where the mask is true.
    A partial reduces a contraction's tile along the outer loops in `rank` (which counts their points), every `block` of them to
    one result; `store` begins with the number of the tile (`PART`), a variable that whoever emits the statement defines. A
    block of 0 is still to be chosen. A scatter in the kernel of a contraction has a `rank` where points of its loops may hit
    one element: these have to run in the order of their ranks."""

    kind: str
    outs: tuple[str, ...]
    value: Value
    store: tuple[Expr, ...]
    inner: bool
    section: int
    stored: tuple[bool, ...]
    op: str = ""  # reduction or scan operation, scatter mode
    mask: Value | None = None
    target: str | None = None
    axis: Var | None = None
    rank: Expr | None = None  # argmax, argmin, partial: what counts as the index of a point; scatter: its turn
    block: int = 0  # partial, block
    factors: tuple[Value, ...] = ()  # contraction: further operands
    operands: tuple[torch.dtype, ...] = ()
    axes: tuple[tuple[str, Expr], ...] = ()  # of an operator: the index along each of the template's axes
    arguments: tuple[tuple[str, Any], ...] = ()
    unscaled: tuple[int, ...] = ()  # contraction: see `ir.Contraction`

    @property
    def in_order(self) -> bool:
        """Whether it is an update in the kernel of a contraction that runs in the order of its ranks."""
        return self.kind == "scatter" and self.rank is not None

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that the statement computes, those inside of its indices included."""
        ranked = () if self.rank is None or self.op not in ("argmax", "argmin") else (self.rank,)
        indirect = [atom.value for e in (*self.store, *ranked) for atom in ix.indirects(e)]
        return (self.value, *indirect, *(() if self.mask is None else (self.mask,)), *self.factors)

    def substituted(self, mapping: Mapping[Atom, Expr]) -> Statement:
        """The statement over other loop variables."""
        masks = [] if self.mask is None else [self.mask]
        value, *rest = vs.substitute_all([self.value, *masks, *self.factors], mapping)
        mask = rest.pop(0) if masks else None
        memo: dict[Expr, Expr] = {}

        def moved(expr: Expr) -> Expr:
            return ix.substitute(expr, mapping, memo, lambda v: vs.substitute(v, mapping))

        rank = None if self.rank is None else moved(self.rank)
        store, axes = tuple(map(moved, self.store)), tuple((name, moved(e)) for name, e in self.axes)
        return replace(self, value=value, mask=mask, factors=tuple(rest), store=store, rank=rank, axes=axes)


@dataclass(frozen=True)
class Config:
    """Values of a template's knobs, as attributes: estimates ask for them thousands of times."""

    values: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        self.__dict__.update(self.values)

    def __getattr__(self, name: str) -> int:
        raise AttributeError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True, slots=True)
class Choice:
    """A registered template and the values of its knobs."""

    template: str
    config: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.template} {self.knobs}".rstrip()

    @property
    def knobs(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.config)


@dataclass(frozen=True, slots=True)
class BySize:
    """The choices of a kernel by a length that only the call knows: the first one whose limit is at least the length; the last
    one has no limit. Limits grow, neighbours differ. Any choice is right for any length, so only time depends on them."""

    length: Expr
    choices: tuple[tuple[int | None, Choice], ...]

    def at(self, length: int) -> Choice:
        """The choice for a length."""
        return next(choice for limit, choice in self.choices if limit is None or length <= limit)

    def __str__(self) -> str:
        return "; ".join(f"{when}: {what}" for when, what in self.rows)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """For people: the range of each choice, and the choice."""
        signs = [f"<= {limit}" if limit is not None else f"> {self.choices[-2][0]}" for limit, _ in self.choices]
        return tuple((f"{self.length} {sign}", str(choice)) for sign, (_, choice) in zip(signs, self.choices, strict=True))

    @property
    def ranges(self) -> tuple[str, ...]:
        """What each choice is for, as the end of a name: to_64, to_1024, above_1024."""
        limits = [limit for limit, _ in self.choices]
        return tuple(f"to_{limit}" if limit is not None else f"above_{limits[-2]}" for limit in limits)


@dataclass(frozen=True, slots=True)
class Packing:
    """A frozen operand of contractions in the order in which a template's main loop reads it. The array `name`, of `count`
    elements of `dtype`, is made of `source` once: of the elements at `offset` and at all multiples of `strides` (batches, own
    axis, summed axis) below `lengths`. It is for contractions with an operand of type `other`."""

    name: str
    source: str
    offset: int
    lengths: tuple[int, int, int]
    strides: tuple[int, int, int]
    other: torch.dtype
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True)
class LibraryPacking:
    """A frozen operand of library calls as the library keeps it, of no layout that kernels could read: `target` makes the array
    `name` of `source` and of `numbers`, once."""

    name: str
    source: str
    target: Any
    numbers: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused loop nest. `outer` loops are independent, `inner` ones run in order inside each section. `rows` are buffers
    that live in a row of a thread's, or in a program's registers, between two sections. `target` is the language. With a
    `share` (a number of programs) each program of a GPU takes full rows of the inner space, one block of outer points after
    the other, and its column statements last from the first block to the last. `choice` is the template that renders a
    contraction; where sizes are dynamic, `by_size` may name several, among them `choice`, which is that of the hints. Of the
    template's operands, those in `packed` (name, number of the contraction) are read from the array of a `Packing`. Its
    workspaces are the buffers in `workspaces` (name, buffer); `host_values` are lengths and numbers of its that are symbols
    (definition, symbol)."""

    name: str
    outer: tuple[Var, ...]
    inner: tuple[Var, ...]
    sections: int
    statements: tuple[Statement, ...]
    rows: tuple[str, ...] = ()
    origins: tuple[ir.Origin, ...] = ()
    target: str = "cpp"  # or triton
    share: Var | None = None
    choice: Choice | None = None
    by_size: BySize | None = None
    packed: tuple[tuple[str, int, str], ...] = ()
    workspaces: tuple[tuple[str, str], ...] = ()
    host_values: tuple[tuple[Expr, Size], ...] = ()

    @property
    def contracts(self) -> bool:
        """Whether its main loop is a contraction, so that a template has to render it."""
        return any(s.kind == "contraction" for s in self.statements)


@dataclass(frozen=True, slots=True)
class ComboKernel:
    """Kernels of independent points, or contractions that share an operand, that run as one: one parallel region, or one
    launch. None reads or writes what another one writes, so they may run in any order, at the same time. Contractions have one
    choice, or one table of choices: all members switch together. Small kernels that run `in_order`, all in one program of a
    GPU, may read what those before them have written."""

    name: str
    members: tuple[Kernel, ...]
    in_order: bool = False

    @property
    def statements(self) -> tuple[Statement, ...]:
        return tuple(s for kernel in self.members for s in kernel.statements)

    @property
    def origins(self) -> tuple[ir.Origin, ...]:
        return tuple(o for kernel in self.members for o in kernel.origins)

    @property
    def target(self) -> str:
        return self.members[0].target


@dataclass(frozen=True, slots=True)
class Nest:
    """A kernel whose loads and stores are linear offsets (one index expression). `vector` is the loop that becomes lanes
    (None: scalar code), `lanes` how many; it is last in its list. `tile` is a loop that runs in short blocks together with
    blocks of the vector loop, because some input is contiguous along it: each cache line it loads is used up while it is
    near. `group` neighbouring lanes share one result of a reduction: what was their own loop has become a part of the lanes.
    `inside` are outer loops that run inside of a block of an outer vector loop: they go on in the cache lines of its points."""

    kernel: Kernel
    vector: Var | None
    lanes: int
    tile: Var | None = None
    group: int = 1
    inside: tuple[Var, ...] = ()

    @property
    def vertical(self) -> bool:
        """Whether the lanes run over an outer loop, so that reductions go across vectors, not along them."""
        return self.vector is not None and self.vector in self.kernel.outer

    @property
    def one_step(self) -> bool:
        """Whether the lanes hold a full row, so that there is no inner loop and the row stays in registers."""
        if self.vector is None or self.kernel.inner != (self.vector,):
            return False
        extent = self.vector.extent.as_int()
        return extent is not None and extent <= self.lanes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Points of one GPU program along each axis, and the warps that share them."""

    x: int
    y: int = 1
    r: int = 1
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel for a GPU: linear offsets, the outer loops of its program axes (the last of each is fastest), and the tile.
    `persistent`: the tile holds the whole inner space. `wide`: offsets need 64 bits. `group` neighbours along x share one
    result of a reduction, as in a `Nest`."""

    kernel: Kernel
    x: tuple[Var, ...]
    y: tuple[Var, ...]
    blocks: Blocks
    persistent: bool
    wide: bool
    group: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A library call."""

    node: ir.Extern


Launch = Union[Kernel, ComboKernel]
Step = Union[Kernel, ComboKernel, Call]


def members(step: Launch) -> tuple[Kernel, ...]:
    """The kernels of a batch, or the kernel itself."""
    return step.members if isinstance(step, ComboKernel) else (step,)


def variants(step: Launch) -> tuple[Launch, ...]:
    """The step as it is rendered: once for each of its choices by size, in their order, or just once."""
    table = members(step)[0].by_size
    if table is None:
        return (step,)
    made = zip(table.ranges, table.choices, strict=True)
    return tuple(_with_choice(step, f"{step.name}_{range_}", choice) for range_, (_, choice) in made)


def _with_choice(step: Launch, name: str, choice: Choice) -> Launch:
    if isinstance(step, ComboKernel):
        return replace(step, name=name, members=tuple(replace(one, choice=choice, by_size=None) for one in step.members))
    return replace(step, name=name, choice=choice, by_size=None)


def address(graph: ir.Graph, name: str) -> tuple[str, Expr, torch.dtype]:
    """Equal for buffers that begin at one place and hold one type: versions of a storage share a pointer."""
    buffer = root = graph.buffers[name]
    while root.alias_of is not None:
        root = graph.buffers[root.alias_of]
    return root.name, as_expr(buffer.offset), buffer.dtype


@dataclass(slots=True)
class Schedule:
    """Steps in execution order, with the verdicts that led to them, in the order of the decisions. `dead_after[i]` are buffers
    whose last use is step i; `reuses` maps a buffer to the dead one whose memory it takes. `packings` and `library_packings`
    are made once, before the first step of the first call. `call_results` are those of library calls, which may be aliases of
    what they were given. `settle` gives `final_verdicts`."""

    graph: ir.Graph
    steps: list[Step]
    verdicts: list[Verdict]
    local: frozenset[str] = frozenset()
    dead_after: list[tuple[str, ...]] = field(default_factory=list)
    reuses: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    call_results: frozenset[str] = frozenset()
    packings: list[Packing] = field(default_factory=list)
    library_packings: list[LibraryPacking] = field(default_factory=list)
    settle: Callable[[Schedule], list[Verdict]] = field(default=lambda plan: plan.verdicts, compare=False, repr=False)

    def final_verdicts(self) -> list[Verdict]:
        """The verdicts that hold in the end, among them one for each two steps that touch one buffer, with paths in the user's
        modules. Found anew by each call, so that only those pay for it who want to know."""
        return [verdict.named(self.graph.paths) for verdict in self.settle(self)]

    @property
    def kernels(self) -> list[Launch]:
        """What is launched: a batch counts once."""
        return [s for s in self.steps if not isinstance(s, Call)]

    @property
    def calls(self) -> list[Call]:
        return [s for s in self.steps if isinstance(s, Call)]
