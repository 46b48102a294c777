"""A batch of loops over points or rows as one Triton kernel: the template for multi-tensor kernels, and what fills its slots.

Members of one form share a function of their pointers, the sizes that differ, and a program's number within its member. A
program compares its number with the members' first numbers, a tree of depth log2(members) whose leaves hold a member's
arguments: a few scalar branches and loads of parameters, the same for all threads of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Size
from kgen.ir.plan import ComboKernel, Nest, Tiling, address
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.templates.contract import Config, knob, template
from kgen.templates.form import Form, form_of, without_parts
from kgen.templates.loop_contract import LoopKernel, LoopProblem, LoopTemplate, loops
from kgen.templates.loop_slots import TritonForm, TritonForms
from kgen.templates.render import canonical_text, clean, lines, render_slots, source_lines
from kgen.templates.triton.codegen.choices import choose
from kgen.templates.triton.codegen.emit import Emitter
from kgen.templates.triton.codegen.launch import aligned, compile_options
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.kernels.loops import (
    OF_LAUNCH,
    FunctionHead,
    loop_line,
    program_axes,
    row_passes,
)

# Masks that change at multiples of so many points let whole vectors through: of 16 bytes, of 8 where numbers are bytes.
WHOLE = 8
# Parameters in a line.
PER_LINE = 6


@template(implements=loops("multi_tensor"), device="cuda", source="foreach.py.jinja", name="triton_multi_tensor")
class MultiTensor(LoopKernel):
    """Each program computes a tile of one of many independent loops over points, or reduces rows of one."""

    WARPS = knob(1, 2, 4, 8)


def render_batch(problem: LoopProblem, template: LoopTemplate, config: Config, name: str) -> KernelCall:
    """The Triton function of a batch whose members' sizes are all numbers."""
    graph, tilings = problem.graph, problem.tilings
    bodies = _bodies([replace(one, kernel=without_parts(one.kernel, graph)) for one in tilings], problem)
    in_order = isinstance(problem.step, ComboKernel) and problem.step.in_order
    parameters = _Parameters(graph)
    forms = [body.form(f"{name}_form{body.number}", parameters) for body in bodies]
    comments = (f"independent loops: {len(tilings)}, forms: {len(bodies)}", *source_lines(problem.origins))
    texts = tuple(p if k % PER_LINE else f"\n    {p}" for k, p in enumerate(parameters.names))
    own = tuple(one for one in config.values if one[0] not in OF_LAUNCH)
    calls = _in_turn(forms) if in_order else _calls(forms)
    slots = TritonForms(FunctionHead(name, comments, texts, own), tuple(f.slot for f in forms), lines(calls))
    text = render_slots(template.source, "cuda", slots, config, problem)
    names = frozenset(n for body in bodies for n in body.made_names) | set(parameters.names)
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names),
        tuple(TRITON_TYPES[graph.buffers[b].dtype].pointer for b in parameters.buffers),
        tuple(aligned(graph.buffers[b]) for b in parameters.buffers),
        config.get("WARPS", problem.proposed["WARPS"]), 1, compile_options(any(body.emitter.checks for body in bodies)),
    )  # fmt: skip
    programs = ix.ONE if in_order else ix.constant(bodies[-1].end)
    return KernelCall(name, tuple(parameters.buffers), (), (programs, ix.ONE, ix.ONE), launch)


def _bodies(tilings: Sequence[Tiling], problem: LoopProblem) -> list[_Body]:
    """The functions, each with the members that share it and the numbers of their programs."""
    groups: dict[Hashable, list[_Member]] = {}
    in_order = isinstance(problem.step, ComboKernel) and problem.step.in_order
    for number, tiling in enumerate(tilings):
        member = _Member(tiling, form_of(_nest(tiling), problem.graph), _programs(tiling))
        groups.setdefault(number if in_order else _body_key(member, problem.graph), []).append(member)
    bodies: list[_Body] = []
    for members in groups.values():
        first = bodies[-1].end if bodies else 0
        bodies.append(_Body(members, problem.graph, len(bodies), first, problem.exact))
    return bodies


@dataclass(frozen=True, slots=True)
class _Form:
    """A function, and the statements that find its arguments and call it in programs before `end`."""

    slot: TritonForm
    end: int
    call: tuple[str, ...]


def _in_turn(forms: Sequence[_Form]) -> list[str]:
    """One program calls all functions, each for all tiles of its member. A barrier makes what it has stored visible."""
    found: list[str] = []
    first = 0
    for form in forms:
        found += ["tl.debug_barrier()"] if found else []
        found += [f"for program in range({first}, {form.end}):", *(f"    {line}" for line in form.call)]
        first = form.end
    return found


def _calls(forms: Sequence[_Form]) -> list[str]:
    """The branches that lead a program to the function of its member's form."""
    if len(forms) == 1:
        return list(forms[0].call)
    found = []
    for number, form in enumerate(forms):
        last = number == len(forms) - 1
        branch = "else:" if last else f"{'elif' if number else 'if'} program < {form.end}:"
        found += [branch, *(f"    {line}" for line in form.call)]
    return found


@dataclass(frozen=True, slots=True)
class _Member:
    tiling: Tiling
    form: Form
    programs: int


def _nest(tiling: Tiling) -> Nest:
    """The tiling as `form_of` takes it: the fastest loops are those along which memory access is decided."""
    inner = tiling.kernel.inner
    fast, slow = (loops[-1] if loops else None for loops in (inner or tiling.x, tiling.y))
    return Nest(tiling.kernel, fast, 1, slow, tiling.group)


def _programs(tiling: Tiling) -> int:
    block_counts = (
        ix.ceildiv(ix.product(v.extent for v in loops), block)
        for loops, block in ((tiling.x, tiling.blocks.x), (tiling.y, tiling.blocks.y))
    )
    count = ix.product(block_counts).as_int()
    assert count is not None
    return count


def _body_key(member: _Member, graph: ir.Graph) -> Hashable:
    """Equal for members of one body: what decides its text, and how wide its accesses are."""
    tiling, number_of = member.tiling, dict[Hashable, int]()
    shared = tuple(number_of.setdefault(address(graph, name), len(number_of)) for name in member.form.buffers)
    starts = tuple(aligned(graph.buffers[name]) for name in member.form.buffers)
    lengths = (ix.product(v.extent for v in loops) for loops in (tiling.x, tiling.kernel.inner))
    whole = tuple(_is_whole(length) for length in lengths)
    shape = len(tiling.x), tiling.blocks, tiling.wide, tiling.persistent, tiling.group
    return member.form.key, shape, shared, starts, whole, all(map(_is_whole, member.form.sizes.values()))


def _is_whole(number: Expr) -> bool:
    known = number.as_int()
    return known is not None and known % WHOLE == 0


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
        head, sections = self.emitter.run()
        row, passes = row_passes(sections, self.tiling, self.emitter)
        self.lines = [*row, *head, *passes]
        self.axes = program_axes(self.tiling, self.emitter, "program")
        self.made_names = set(self.emitter.made_names)

    def form(self, name: str, parameters: _Parameters) -> _Form:
        """The function under a name, and its call with the kernel's parameters."""
        pointers, same = self._pointers()
        sizes = {size: self.sizes[size] for size in self.emitter.sizes}
        choices = {f"p_{clean(p)}": [parameters.of(b) for b in self._of_members(p)] for p in pointers}
        choices |= {clean(s): self._texts(numbers) for s, numbers in sizes.items() if not _constant(numbers)}
        blocks = self.tiling.blocks
        constants = [("XBLOCK", blocks.x), *([("YBLOCK", blocks.y)] if self.tiling.y else [])]
        constants += [("RBLOCK", blocks.r)] if self.tiling.kernel.inner else []
        constants += [(clean(s), numbers[0]) for s, numbers in sizes.items() if _constant(numbers)]
        head = FunctionHead(name, (), ("program", *choices), tuple(constants)).function()
        find, chosen = choose(self.firsts, choices, f"m{self.number}")  # no parameter of the kernel begins like this
        self.made_names |= {f"m{self.number}_{one}" for one in chosen}
        call = f"{name}(program - {chosen.pop('first')}, {', '.join(chosen.values())})"
        slot = TritonForm(loop_line(self.tiling), head, lines(same), lines(self.axes), lines(self.lines))
        return _Form(slot, self.end, (*find, call))

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
