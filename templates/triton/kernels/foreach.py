"""A batch of loops over points as one Triton kernel: fills the slots of the `foreach` template.

Members of one form share a function of their pointers, the sizes that differ, and a program's number within its member. A
program compares its number with the members' first numbers, a tree of depth log2(members) whose leaves hold a member's
arguments: a few scalar branches and loads of parameters, the same for all threads of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from kgen.build.gpu_kernel import TritonKernel
from kgen.build.unit import canonical_text
from kgen.host.assemble import KernelCall
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Size
from kgen.ir.plan import Batch, Nest, Tiling, address
from kgen.templates.form import Form, form_of
from kgen.templates.render import clean, render
from kgen.templates.triton.codegen.emit import Emitter
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.kernels.loops import FOLDER, aligned, compile_options, loop_line, program_axes, source_lines

# Masks that change at multiples of so many points let whole vectors through: of 16 bytes, of 8 where numbers are bytes.
WHOLE = 8
# Parameters in a line.
PER_LINE = 6


def render_batch(batch: Batch, tilings: Sequence[Tiling], graph: ir.Graph, name: str, exact: bool = False) -> KernelCall:
    """The Triton function of a batch whose members have `tilings`, all sizes numbers; `exact` as for `Emitter`."""
    groups: dict[Hashable, list[_Member]] = {}
    for tiling in tilings:
        member = _Member(tiling, form_of(_nest(tiling), graph), _programs(tiling))
        groups.setdefault(_alike(member, graph), []).append(member)
    parameters = _Parameters(graph)
    bodies: list[_Body] = []
    first = 0
    for members in groups.values():
        bodies.append(_Body(members, graph, len(bodies), first, exact))
        first = bodies[-1].end
    slots = SimpleNamespace(name=name, blocks=[])
    slots.comments = [f"independent loops: {len(tilings)}, forms: {len(bodies)}", *source_lines(batch.origins)]
    slots.forms = [body.slots(f"{name}_form{body.number}", parameters) for body in bodies]
    for form in slots.forms:
        alone, last = len(bodies) == 1, form is slots.forms[-1]
        word = "if" if form is slots.forms[0] else "elif"
        form.branch = "" if alone else "else:" if last else f"{word} program < {form.end}:"
        form.depth = 1 if alone else 2
    slots.parameters = [p if k % PER_LINE else f"\n    {p}" for k, p in enumerate(parameters.names)]
    text = render(FOLDER, "foreach.py.jinja", k=slots)
    names = frozenset(n for body in bodies for n in body.made_names) | set(parameters.names)
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names),
        tuple(TRITON_TYPES[graph.buffers[b].dtype].pointer for b in parameters.buffers),
        tuple(aligned(graph.buffers[b]) for b in parameters.buffers),
        max(t.blocks.warps for t in tilings), 1, compile_options(any(body.emitter.checks for body in bodies)),
    )  # fmt: skip
    return KernelCall(name, tuple(parameters.buffers), (), (ix.constant(first), ix.ONE, ix.ONE), launch)


@dataclass(frozen=True, slots=True)
class _Member:
    tiling: Tiling
    form: Form
    programs: int


def _nest(tiling: Tiling) -> Nest:
    """The tiling as `form_of` takes it: the fastest loops are those along which memory access is decided."""
    fast, slow = (loops[-1] if loops else None for loops in (tiling.x, tiling.y))
    return Nest(tiling.kernel, fast, 1, slow)


def _programs(tiling: Tiling) -> int:
    sides = (
        ix.ceildiv(ix.product(v.extent for v in loops), block)
        for loops, block in ((tiling.x, tiling.blocks.x), (tiling.y, tiling.blocks.y))
    )
    count = ix.product(sides).as_int()
    assert count is not None
    return count


def _alike(member: _Member, graph: ir.Graph) -> Hashable:
    """Equal for members of one body: what decides its text, and how wide its accesses are."""
    tiling, places = member.tiling, dict[Hashable, int]()
    shared = tuple(places.setdefault(address(graph, name), len(places)) for name in member.form.buffers)
    starts = tuple(aligned(graph.buffers[name]) for name in member.form.buffers)
    points = ix.product(v.extent for v in tiling.x).as_int()
    whole = points is not None and points % WHOLE == 0
    return member.form.key, len(tiling.x), tiling.blocks, tiling.wide, shared, starts, whole


class _Parameters:
    """The kernel's pointers: one for each place in memory."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.buffers: list[str] = []
        self.named: dict[Hashable, str] = {}

    def of(self, buffer: str) -> str:
        place = address(self.graph, buffer)
        if place not in self.named:
            self.named[place] = f"p_{clean(buffer)}"
            self.buffers.append(buffer)
        return self.named[place]

    @property
    def names(self) -> list[str]:
        return list(self.named.values())


class _Body:
    """The function of one form, and the branches that lead to it: programs `first` to `end`."""

    def __init__(self, members: list[_Member], graph: ir.Graph, number: int, first: int, exact: bool) -> None:
        self.members, self.graph, self.number = members, graph, number
        self.firsts = [first]
        for member in members:
            self.firsts.append(self.firsts[-1] + member.programs)
        self.end = self.firsts.pop()
        self.sizes = {symbol.name: [_number(m.form, symbol) for m in members] for symbol in members[0].form.sizes}
        self.tiling = members[0].tiling if all(map(_constant, self.sizes.values())) else _abstract(members[0])
        self.emitter = Emitter(self.tiling, graph, exact)
        self.lines, _ = self.emitter.run()
        self.axes = program_axes(self.tiling, self.emitter, "program")
        self.made_names = set(self.emitter.made_names)

    def slots(self, name: str, parameters: _Parameters) -> SimpleNamespace:
        pointers, same = self._pointers()
        sizes = {size: self.sizes[size] for size in self.emitter.sizes}
        choices = {f"p_{clean(p)}": [parameters.of(b) for b in self._of_members(p)] for p in pointers}
        choices |= {clean(s): self._texts(numbers) for s, numbers in sizes.items() if not _constant(numbers)}
        slots = SimpleNamespace(name=name, parameters=["program", *choices], end=self.end, loops=loop_line(self.tiling))
        slots.blocks = [("XBLOCK", self.tiling.blocks.x), *([("YBLOCK", self.tiling.blocks.y)] if self.tiling.y else [])]
        slots.blocks += [(clean(s), numbers[0]) for s, numbers in sizes.items() if _constant(numbers)]
        slots.same, slots.axes, slots.body = same, self.axes, self.lines
        slots.find, arguments = self._tree(choices)
        slots.call = f"{name}(program - {arguments[0]}, {', '.join(arguments[1:])})"
        return slots

    def _pointers(self) -> tuple[list[str], list[str]]:
        """The buffers that the function gets pointers of, and statements that give others the same pointer."""
        found: dict[Hashable, str] = {}
        same = []
        for buffer in self.emitter.pointers:
            known = found.setdefault(address(self.graph, buffer), buffer)
            if known != buffer:
                same.append(f"p_{clean(buffer)} = p_{clean(known)}")
        return list(found.values()), same

    def _of_members(self, buffer: str) -> list[str]:
        """What stands at the place of the first member's buffer."""
        at = self.members[0].form.buffers.index(buffer)
        return [member.form.buffers[at] for member in self.members]

    def _texts(self, numbers: list[int]) -> list[str]:
        wide = self.tiling.wide or not all(-(2**31) <= n < 2**31 for n in numbers)
        return [f"tl.full([], {n}, tl.int64)" if wide else str(n) for n in numbers]

    def _tree(self, choices: dict[str, list[str]]) -> tuple[list[str], list[str]]:
        """Statements that choose among `choices`, and the names of what they have chosen, the member's first program before."""
        if len(self.members) == 1:
            return [], [str(self.firsts[0]), *(texts[0] for texts in choices.values())]
        # no parameter of the kernel begins like these
        variables = {name: f"m{self.number}_{name}" for name, texts in choices.items() if len(set(texts)) > 1}
        first = f"m{self.number}_first"
        self.made_names |= {first, *variables.values()}

        def below(low: int, high: int) -> list[str]:
            if high - low == 1:
                leaf = [f"{first} = lib.branch_constant({self.firsts[low]}, program)"]
                return leaf + [f"{variable} = {choices[name][low]}" for name, variable in variables.items()]
            middle = (low + high) // 2
            sides = (below(low, middle), below(middle, high))
            left, right = (["    " + line for line in lines] for lines in sides)
            return [f"if program < {self.firsts[middle]}:", *left, "else:", *right]

        chosen = [variables.get(name, texts[0]) for name, texts in choices.items()]
        return below(0, len(self.members)), [first, *chosen]


def _abstract(member: _Member) -> Tiling:
    """The member's tiling with symbols for sizes."""
    tiling, kernel = member.tiling, member.form.nest.kernel
    new = dict(zip(tiling.kernel.outer, kernel.outer, strict=True))
    return replace(tiling, kernel=kernel, x=tuple(new[v] for v in tiling.x), y=tuple(new[v] for v in tiling.y))


def _number(form: Form, symbol: Size) -> int:
    number = form.sizes[symbol].as_int()
    assert number is not None
    return number


def _constant(numbers: list[int]) -> bool:
    return len(set(numbers)) == 1
