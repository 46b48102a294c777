"""From a problem and a configuration to a Triton kernel: renders a template's Jinja file."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.rendered.tensor_map import TensorMap
from kgen.templates import slots as sl
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.render import canonical_text, clean, source_lines, tidy
from kgen.templates.triton.codegen.choices import choose
from kgen.templates.triton.codegen.gluon_handles import Barriers
from kgen.templates.triton.codegen.gluon_handles import names as names_of
from kgen.templates.triton.codegen.gluon_slots import GluonSlots
from kgen.templates.triton.codegen.launch import aligned, compile_options
from kgen.templates.triton.codegen.precision import are_arithmetic, exact_values
from kgen.templates.triton.codegen.slots import Slots
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.codegen.tile import Parameters
from kgen.templates.triton.codegen.tma_layout import in_registers

WARPS, STAGES = 4, 3
# Where a function's parameters come, which only its slots know.
PARAMETERS = "\0parameters\0"
# Bytes of spilled registers of a thread: an epilogue's few are hidden; with 728 a kernel took four times its estimate.
MOST_STACK = 256
# Compute capabilities whose matrix units work on their own, out of registers, while the program goes on: 9.x.
HOPPER_MAJOR = 9


def render_template(problems: Sequence[Problem], config: Config, name: str, exact: bool = False) -> KernelCall:
    """The kernel of a problem, or of several: those whose programs run side by side in one launch, or whose template makes them
    together."""
    groups = [problems] if problems[0].template.joins == "parts" else [[problem] for problem in problems]
    parts, text = _one(groups[0], config, exact, name) if len(groups) == 1 else _joined(groups, config, exact, name)
    maps = _maps(parts)
    graph, pointers, sizes = (
        problems[0].graph,
        _all(p.parameters.pointers for p in parts),
        _all(p.parameters.sizes for p in parts),
    )
    names = frozenset(n for part in parts for n in part.names)
    launch = TritonKernel(
        name, text, canonical_text(text.replace(name, "kernel"), names),
        (*(TRITON_TYPES[graph.buffers[b].dtype].pointer for b in pointers), *(m.type for m in maps), *("i64" for _ in sizes)),
        (*(aligned(graph.buffers[b]) for b in pointers), *(False for _ in (*maps, *sizes))),
        config.get("WARPS", WARPS), config.get("STAGES", STAGES),
        compile_options(False, not any(p.precise for p in parts)), MOST_STACK,
    )  # fmt: skip
    programs = sum((part.programs for part in parts), ix.ZERO)
    return KernelCall(name, pointers, sizes, (programs, ix.ONE, ix.ONE), launch, tuple(maps))


def _one(problems: Sequence[Problem], config: Config, exact: bool, name: str) -> tuple[list[_Part], str]:
    part = _Part(problems, config, exact, {})
    return [part], part.text(name, _imports([part]))


def _maps(parts: Sequence[_Part]) -> dict[TensorMap, str]:
    """The descriptors that the parts of a kernel need, in the order in which they were made."""
    used = {box for part in parts for box in part.maps}
    return {box: name for box, name in parts[0].parameters.maps.items() if box in used}


def _all(found: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """What the parts of a kernel need, each once."""
    return tuple(dict.fromkeys(name for names in found for name in names))


@dataclass(frozen=True, slots=True)
class _Head:
    """``{{ kernel() }}`` opens the kernel."""

    part: _Part
    name: str
    head: str
    more: Sequence[str]

    def __call__(self) -> str:
        waits = "" if self.more else "\n    lib.wait_for_previous()"
        return f"{self.head}{self.part.opening(self.name, self.more)}{waits}"

    def end(self) -> str:
        """Nothing closes a Triton function."""
        return ""


@dataclass(frozen=True, slots=True)
class _GluonHead:
    """``{{ kernel() }}`` opens the kernel. One whose warps have different parts is made of several functions:
    ``{{ kernel("loads", ready, ring) }}`` opens one that has these handles as parameters before the kernel's, and
    ``{{ kernel.call("loads", ready, ring) }}`` is what says so. ``{{ kernel.invoke("ends", ring) }}`` calls one from another,
    so that it has variables of its own. ``kernel.barriers("ready", STAGES)`` is a handle.

    The kernel, which comes last, takes its barriers back when all warps have ended. Of barriers that no warp waits for, the
    compiler would give the memory to tiles, and a barrier's first state may arrive there after a tile."""

    part: _Part
    name: str
    head: str
    opened: list[str] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)

    def __call__(self, suffix: str = "", *own: object) -> str:
        if self.made:
            raise ValueError("barriers are made in the kernel, which is the last of its functions")
        head = "" if self.opened else self.head
        self.opened.append(suffix)
        if not suffix:
            return f"{head}{self.part.opening(self.name, ())}\n    lib.wait_for_previous()"
        return f"{head}{self.part.opening(f'{self.name}_{suffix}', names_of(own))}"

    def call(self, suffix: str, *own: object) -> str:
        return f"{self.name}_{suffix}, ({', '.join([*names_of(own), PARAMETERS])})"

    def invoke(self, suffix: str, *own: object) -> str:
        return f"{self.name}_{suffix}({', '.join([*names_of(own), PARAMETERS])})"

    def barriers(self, name: str, count: int, arrivals: int = 1) -> Barriers:
        return Barriers(name, count, arrivals, self._made)

    def _made(self, name: str, count: int) -> None:
        if not self.opened or self.opened[-1]:
            raise ValueError(f"the barriers {name} are not made in the kernel, but in a part of it")
        self.made[name] = count

    def end(self) -> str:
        return "".join(f"    ws.retire({name}, {count})\n" for name, count in self.made.items())


class _Part:
    """One problem of a kernel, or several that are made together: its slots, and what they turned out to need."""

    def __init__(
        self, problems: Sequence[Problem], config: Config, exact: bool, maps: dict[TensorMap, str],
        open_shifts: frozenset[int] | None = frozenset(),
    ) -> None:  # fmt: skip
        self.problems, self.problem, self.config, self.exact = problems, problems[0], config, exact
        self.parameters = Parameters(maps=maps, open=open_shifts)
        slots = GluonSlots if self.problem.template.language == "gluon" else Slots
        self.fillers = [slots(problem, config, exact, self.parameters) for problem in problems]

    def text(self, name: str, head: str, *more: str) -> str:
        """The function `name`; a program's number is the first of the parameters `more`, or the device's. What its slots need
        are its parameters, so these are known last."""
        program = more[0] if more else "tl.program_id(0)"
        gluon = self.problem.template.language == "gluon"
        opens = _GluonHead(self, name, head) if gluon else _Head(self, name, head, more)
        text = sl.render(self.fillers, opens, _facts, program) + opens.end()
        return text.replace(PARAMETERS, ", ".join([*self.arguments(), *self.parameters.shift_names()]))

    def with_shifts(self, open_shifts: frozenset[int]) -> _Part:
        """The same part, of whose function other shifts are parameters."""
        return _Part(self.problems, self.config, self.exact, self.parameters.maps, open_shifts)

    @property
    def maps(self) -> dict[TensorMap, str]:
        """The descriptors that it needs, with their names."""
        return {box: name for box, name in self.parameters.maps.items() if name in self.parameters.made_names}

    def arguments(self) -> list[str]:
        """The names of its parameters."""
        p = self.parameters
        return _names(p.pointers, self.maps.values(), p.sizes)

    @property
    def precise(self) -> bool:
        """Whether any value must be as exact as eager's that is rounded at all."""
        return self.exact or any(are_arithmetic(exact_values(p.kernel.statements, p.graph)) for p in self.problems)

    @property
    def programs(self) -> Expr:
        """By the author's rule for several problems that are made together, or as many as they have alone."""
        if len(self.problems) > 1:
            return ix.as_expr(self.problem.template.author.grid_of_parts(self.problems, self.config))
        return self.problem.programs(self.config)

    @property
    def names(self) -> set[str]:
        """Names that the graph gives, those of workspaces among them: kernels that are equal but for them are built once."""
        made = self.parameters.made_names | set(map(clean, self.parameters.sizes))
        return made | set(self.parameters.shift_names()) | {f"p_{clean(b)}" for b in self.parameters.pointers}

    def opening(self, name: str, more: Sequence[str]) -> str:
        """The signature, knobs, and the lengths of the axes."""
        problem, filler = self.problem, self.fillers[0]
        lines = [f"@{problem.template.language}.jit", f"def {name}({', '.join([*more, PARAMETERS])}):"]
        constants: list[tuple[str, object]] = [(k, v) for k, v in self.config.values if k not in ("WARPS", "STAGES")]
        constants += [
            ("ACCUMULATOR", TRITON_TYPES[problem.accumulator].compute),
            ("PRECISION", repr(_precision(problem))),
        ]
        lines += [f"    {key}: tl.constexpr = {value}" for key, value in constants]
        for axis in problem.template.axes:
            kind = ": tl.constexpr" if problem.static(axis) else ""
            lines.append(f"    {axis.upper()}{kind} = {filler.size(axis)}")
        return "\n".join(lines)


def _precision(problem: Problem) -> str:
    """What `lib.dot` has to know: how exact float32 numbers are multiplied, and whether an operand may be in registers while
    they are."""
    computed = any(in_registers(problem, one) for member in problem.members for one in member.values())
    waits = computed and problem.device.arch // 10 == HOPPER_MAJOR and problem.accumulator.itemsize == 4
    return ("tf32" if problem.tf32 else "ieee") + ("+wait" if waits else "")


def _names(pointers: Iterable[str], maps: Iterable[str], sizes: Iterable[str]) -> list[str]:
    """Parameters in the order of a kernel's signature."""
    return [*(f"p_{clean(b)}" for b in pointers), *maps, *map(clean, sizes)]


def _imports(parts: Sequence[_Part]) -> str:
    """Everything up to the functions: where the kernel comes from, and imports."""
    problems = [problem for part in parts for problem in part.problems]
    comments = [line for problem in problems for line in source_lines(problem.kernel.origins)]
    comments += [f"{problem.template.name} {parts[0].config} | {_axes_line(problem)}" for problem in problems]
    lines = [f"# {line}" for line in comments]
    lines += ["import triton", "import triton.language as tl", "from kgen.templates.triton.device import library as lib"]
    if parts[0].problem.template.language == "gluon":
        lines += ["from triton.experimental import gluon", "from triton.experimental.gluon import language as gl"]
        lines += ["from kgen.templates.triton.device import warp_groups as ws"]
    lines += ["", ""]
    return "\n".join([*lines, ""])


# ---- several problems in one launch ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parts that are one function of a program's number, of pointers, and of the constants in addresses by which they differ:
    the function's text for the first of them, and the arguments of each."""

    parts: Sequence[_Part]
    first: _Part
    arguments: Sequence[Sequence[str]]

    @property
    def programs(self) -> Expr:
        return sum((part.programs for part in self.parts), ix.ZERO)


def _joined(groups: Sequence[Sequence[Problem]], config: Config, exact: bool, name: str) -> tuple[list[_Part], str]:
    """Parts as functions of a program's number, and the kernel that calls each for its own programs; equal parts are one call,
    which is compiled once, with arguments that a program chooses. The order is that of their programs."""
    maps: dict[TensorMap, str] = {}
    parts = [_Part(group, config, exact, maps, None) for group in groups]
    calls = _shared(parts)
    ordered = [part for one in calls for part in one.parts]
    texts, symbols = _functions(calls, name)
    ends = list(itertools.accumulate(one.programs for one in calls))
    scope = parts[0].fillers[0]
    body = ["lib.wait_for_previous()", "program = tl.program_id(0)"]
    limits = ["", *map(scope.length, ends[:-1]), ""]
    for k, (one, begin) in enumerate(zip(calls, (ix.ZERO, *ends), strict=False)):
        call = _call(one, symbols[k], begin, k)
        bounds = [f"program >= ({limits[k]})"] * bool(limits[k]) + [f"program < ({limits[k + 1]})"] * bool(limits[k + 1])
        # one after the other, not one or else the other: of alternatives Triton does not see that they share memory
        body += [f"if {' and '.join(bounds)}:", *(f"    {line}" for line in call)] if bounds else call
    found = [part.parameters for part in ordered]
    given = _names(_all(p.pointers for p in found), _maps(ordered).values(), _all(p.sizes for p in found))
    kernel = ["@triton.jit", f"def {name}({', '.join(given)}):", *(f"    {line}" for line in body)]
    return ordered, tidy("\n".join([_imports(ordered), *texts, *kernel]))


def _shared(parts: Sequence[_Part]) -> list[_Shared]:
    """The parts by their text but for names and constants in addresses. Descriptors have to be parameters of the kernel, not
    what a program chooses, so parts with others are apart; so are those that are aligned otherwise."""
    equal: dict[Hashable, list[_Part]] = {}
    for part in parts:
        text = part.text("part", "", "program")
        names = frozenset(part.names | set(part.arguments()))
        starts = tuple(aligned(part.problem.graph.buffers[b]) for b in part.parameters.pointers)
        static = part.programs.as_int() is not None
        key = canonical_text(text, names), starts, tuple(part.maps.values())
        equal.setdefault(key if static else id(part), []).append(part)
    return [_of_equal(found) for found in equal.values()]


def _of_equal(parts: Sequence[_Part]) -> _Shared:
    constants = [part.parameters.shifts for part in parts]
    differ = frozenset(k for k, found in enumerate(zip(*constants, strict=True)) if len(set(found)) > 1)
    wide = any(abs(found[k]) >= 2**31 for found in constants for k in differ)
    text = "tl.full([], {}, tl.int64)" if wide else "{}"
    arguments = [
        [*part.arguments(), *(text.format(shifts[k]) for k in sorted(differ))]
        for part, shifts in zip(parts, constants, strict=True)
    ]
    return _Shared(parts, parts[0].with_shifts(differ), arguments)


def _functions(calls: Sequence[_Shared], name: str) -> tuple[list[str], list[str]]:
    """The texts of the functions, equal ones only once, and the name of each call's."""
    known: dict[str, str] = {}
    texts: list[str] = []
    symbols: list[str] = []
    for k, one in enumerate(calls):
        symbol = f"{name}_part{k}"
        text = one.first.text(symbol, "", "program")
        names = frozenset(one.first.names | set(one.first.arguments()))
        symbols.append(known.setdefault(canonical_text(text.replace(symbol, "part"), names), symbol))
        texts += [text] if symbols[-1] == symbol else []
    return texts, symbols


def _call(one: _Shared, symbol: str, begin: Expr, number: int) -> list[str]:
    """Statements that call a function with what belongs to a program."""
    first = begin.as_int()
    if len(one.parts) > 1 and first is not None:
        programs = (part.programs.as_int() or 0 for part in one.parts[:-1])
        firsts = list(itertools.accumulate(programs, initial=first))
        choices = {f"a{k}": texts for k, texts in enumerate(zip(*one.arguments, strict=True))}
        lines, chosen = choose(firsts, choices, f"m{number}")
        start, arguments = chosen.pop("first"), list(chosen.values())
    else:
        # of equal branches the compiler would make one that selects among descriptors, which have to be parameters
        start = f"lib.branch_constant({first}, program)" if first is not None else f"({one.first.fillers[0].length(begin)})"
        lines, arguments = [], list(one.arguments[0])
    return [*lines, f"{symbol}({', '.join([f'(program - {start}).to(tl.int32)', *arguments])})"]


def _facts(problem: Problem, operand: str) -> dict[str, object]:
    one = problem.inputs[operand]
    return {"type": TRITON_TYPES[one.dtype].storage, "plain": one.load is not None, "contiguous": problem.contiguous(operand)}


def _axes_line(problem: Problem) -> str:
    loops = {axis: "".join(f" {v.name}<{v.extent}" for v in found) or " -" for axis, found in problem.loops.items()}
    return " | ".join(f"{axis}{text}" for axis, text in loops.items())
