"""What the author of a template writes: operands, results, named axes, knobs, and what the kernel computes.

    @kgen.template(implements=contraction("m,k", "k,n -> m,n"), device="cuda", source="matmul.py.jinja")
    class Matmul(kgen.KernelTemplate):
        A, B, C = operand("m", "k"), operand("k", "n"), result("m", "n")
        BLOCK_M, BLOCK_N, BLOCK_K = knob(64, 128), knob(64, 128), knob(32, 64)

An axis is named by a lower-case letter; ``BLOCK_M`` is the tile along axis ``m``, and an axis without such a knob is one index
of the program (a batch). Every axis may be composite, that is, stand for several loops at once: slots work out the loops. What
else the class may declare and define is in its base class, `templates/base.py:KernelTemplate`.

Besides operands, results and knobs it may have memory of its own and numbers that the host works out before a launch:

    LOCKS = workspace(torch.int32, lambda problem, config: problem.programs(config), zeroed=True)
    STEPS = host_value(lambda problem, config: ix.ceildiv(problem.extent("k"), config.BLOCK_K))

In the Jinja file ``{{ LOCKS }}`` is a pointer, ``{{ STEPS }}`` a number, or the name of a parameter where sizes are dynamic.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import jinja2
import jinja2.meta
import jinja2.nodes
import torch

from kgen import errors
from kgen.ir import ops
from kgen.ir.plan import Config
from kgen.templates import registry
from kgen.templates.author_calls import guarded
from kgen.templates.author_files import line_of, source_file, version_of
from kgen.templates.base import PUBLIC, KernelTemplate, Request, Resources
from kgen.templates.pattern import Pattern, contraction, letters, never_seen, operator
from kgen.templates.render import environment

if TYPE_CHECKING:
    from kgen.ir.index import Expr
    from kgen.templates.loop_contract import LoopKernel, Loops
    from kgen.templates.problem import Problem

__all__ = [
    "Config", "HostValue", "Knob", "Operand", "Pattern", "Resources", "Result", "Template", "Workspace",
    "contraction", "host_value", "knob", "operand", "operator", "result", "template", "workspace",
]  # fmt: skip

# Numbers from a problem and a configuration.
Computed = Callable[["Problem", "Config"], "Expr | int"]

DEVICES = ("cuda", "cpu")
LANGUAGES = ("triton", "gluon")
# Names that every template's Jinja file may use, besides its own operands, results, knobs and axes.
GIVEN = frozenset({"kernel", "config", "problem", "facts", "program", "parts"})
# How a template makes several problems in one launch, and the name that its Jinja file then has: each problem by programs of
# its own, or all together.
JOINING = ("program", "parts")
# What an author writes, for type checkers.
Device = Literal["cuda", "cpu"]
OperandAccess = Literal["pointer", "tma", "predicated", "coordinates"]
ResultAccess = Literal["pointer", "tma", "shared"]


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of the kernel's main loop, a slot for prologues. `access` is how its tiles are loaded: by pointers, or "tma", or
    "predicated": by pointers, whose loads have an operand's own bounds as predicates, if it is nothing else.
    When it is `many`, each of the contractions that share a kernel has its own; their other operand they have in common. With
    `sums` the template can also add up its elements over the axes that no result has, a slot for an operand reduction. A right
    operand that `packs` may be an array of the C++ engine, packed once, where it is the same at each call."""

    axes: tuple[str, ...]
    access: str = "pointer"
    many: bool = False
    sums: bool = False
    packs: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What the main loop computes, a slot for epilogues. Of `many`, all are there when the joint epilogue runs. `access` is how
    an epilogue's tiles move: by pointers, or "tma", unless the configuration has a knob TMA_EPILOGUE that is False; in Gluon,
    through the memory that `store` is given. With "shared", warps share rows there. In C++ an `ordered` one is stored in order
    along the axes that a problem names (`Problem.in_order`), a slot for updates that may hit one element twice."""

    axes: tuple[str, ...]
    access: str = "pointer"
    many: bool = False
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that a configuration fixes."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a kernel's own: `length` numbers of `dtype`, which only this launch sees, zero before it where `zeroed`."""

    dtype: torch.dtype
    length: Computed
    zeroed: bool = False


@dataclass(frozen=True, slots=True)
class HostValue:
    """A number that the host works out before the launch."""

    compute: Computed


# What the members of a template's class declare.
DECLARED = (Operand, Result, Knob, Workspace, HostValue)


def operand(
    *axes: str, access: OperandAccess = "pointer", many: bool = False, sums: bool = False, packs: bool = False
) -> Operand:
    """An operand over the named axes, outermost first; ``operand("b", "h+r", "c")`` where two axes walk through a dimension."""
    return Operand(letters(axes), access, many, sums, packs)


def result(*axes: str, access: ResultAccess = "pointer", many: bool = False, ordered: bool = False) -> Result:
    """A result over the named axes, outermost first."""
    return Result(axes, access, many, ordered)


def knob(*values: int) -> Knob:
    """A knob with the values worth trying."""
    return Knob(values)


def workspace(dtype: torch.dtype, length: Computed, *, zeroed: bool = False) -> Workspace:
    """Memory for partial results or counters. ``length(problem, config)`` is how many numbers: an int, or an expression over
    sizes. With `zeroed` they are 0 when the kernel starts, which takes a launch before it."""
    return Workspace(dtype, length, zeroed)


def host_value(compute: Computed) -> HostValue:
    """A number, ``compute(problem, config)``, an int or an expression over sizes, which no program need work out itself."""
    return HostValue(compute)


# The longest axis of a GPU's template. Where lengths are constants, authors count in 32 bits, past the end of the last tile;
# lengths that are known at run time only have 64.
MOST_INDICES = 2**31 - (1 << 20)


@dataclass(frozen=True)
class Template:
    """A registered template. `version` changes with its source: caches and tuning files never mistake one for another."""

    name: str
    implements: Pattern
    device: str
    source: Path
    operands: Mapping[str, Operand]
    results: Mapping[str, Result]
    knobs: Mapping[str, Knob]
    longest: Mapping[str, int]
    author: KernelTemplate  # an instance of the decorated class
    version: str
    joins: str | None = None  # one of JOINING: how one launch can make several problems
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    values: Mapping[str, HostValue] = field(default_factory=dict)
    language: str = "triton"  # of a GPU's kernel, by the name of the module with its decorators

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.implements.axes

    @cached_property
    def on_matrix_units(self) -> bool:
        """Whether the text hands on how exactly float32 numbers are multiplied: it multiplies tiles, not elements."""
        return "PRECISION" in self.source.read_text()

    @cached_property
    def seconds(self) -> Mapping[str, str]:
        """Results that are second ones of a program's steps, with these."""
        return dict(zip(list(self.results)[1:], self.implements.seconds, strict=False))

    @property
    def partner(self) -> str:
        """The template of another pattern whose problems it makes together with its own."""
        return self.author.partner

    @cached_property
    def many(self) -> str | None:
        """The operand of which each contraction of a family has its own."""
        return next((name for name, one in self.operands.items() if one.many), None)

    def block(self, axis: str) -> str | None:
        """The knob that is the tile along an axis, if there is one."""
        name = f"BLOCK_{axis.upper()}"
        return name if name in self.knobs else None

    @cached_property
    def tile(self) -> int:
        """Points along the last axis of a result that is cut into tiles, in the first configuration; 0 where none is."""
        blocks = (self.block(axis) for axis in reversed(self.implements.results[0]))
        return next((self.knobs[block].values[0] for block in blocks if block), 0)

    @cached_property
    def most(self) -> Request:
        """The most that fusion may ask for, but for `reduction`."""
        own = self.author
        return Request(
            family=own.family if self.many else 1,
            grouped=own.grouped if self.joins else 1,
            full_row=self._full_row(),
            ordered=all(one.ordered for one in self.results.values()),
            prologue_cost=own.prologue_cost, scale_cost=own.scale_cost, epilogue_cost=own.epilogue_cost,
        )  # fmt: skip

    def _full_row(self) -> int:
        if self.author.full_row is not None:
            return self.author.full_row
        blocks = (self.block(axis) for axis in self.implements.results[0])
        return max((max(self.knobs[block].values) for block in blocks if block and self.device == "cuda"), default=0)

    def why_not(self, request: Request) -> str | None:
        """Why none of the template's kernels is as fusion asks; None where one may be."""
        if request.reduction and not self.tile:
            return "it has no tiles that an epilogue could reduce"
        if request.reduction and request.reduction not in self.author.reductions:
            return f"its epilogue does not reduce tiles by {request.reduction}"
        if request.ordered and not self.most.ordered:
            return "it stores its tiles in no order, and updates of one element have one"
        for name, what in LIMITS.items():
            wanted, most = getattr(request, name), getattr(self.most, name)
            if wanted > most:
                return f"{wanted} {what}, where it has {most} at most"
        return None

    def refuse(self, problem: Problem) -> str | None:
        for axis, most in self.longest.items():
            length = problem.extent(axis).as_int()
            if length is None or length > most:
                return f"axis {axis} may be longer than {most}"
        for axis in problem.loops if self.device == "cuda" else ():
            length = problem.extent(axis).as_int()
            if length is not None and length > MOST_INDICES:
                return f"axis {axis} has more indices than 32 bits hold"
        reductions = {s.op for s in problem.epilogue if s.kind == "partial"}
        wanted = [Request(full_row=max(problem.whole.values(), default=0)), *(Request(reduction=op) for op in reductions)]
        return next(filter(None, map(self.why_not, wanted)), None) or self._refused(problem)

    def _refused(self, problem: Problem) -> str | None:
        """What the author's method says. Raises BadTemplate for what is no reason: True would take or refuse in silence."""
        reason = self.author.refuse(problem)
        if reason is None or (isinstance(reason, str) and reason):
            return reason
        raise self._bad("refuse", f"refuse returns {reason!r}, where it returns None or a reason for people")

    def _bad(self, method: str, what: str) -> errors.BadTemplate:
        """A mistake in a method of the author's."""
        code = getattr(type(self.author), method).__code__
        return errors.BadTemplate(f"{code.co_filename}, line {code.co_firstlineno}", template=self.name, problem=what)

    def configs(self, problem: Problem) -> Iterator[Config]:
        """The configurations on offer, each once: knobs that depend on the problem may make several of an author's the same.
        Raises BadTemplate where another package's template offers none, or no knobs of its own: it would never run, and nobody
        would know why."""
        found = set[Config]()
        for one in self._offered(problem):
            config = one if isinstance(one, Config) else self._named(one)
            if config not in found:
                found.add(config)
                yield config
        if not found and not registry.is_built_in(self):
            raise self._bad("configs", "configs offers none for a problem that refuse takes")

    def _offered(self, problem: Problem) -> Iterable[Config | Mapping[str, int]]:
        offered = self.author.configs(problem)
        if not isinstance(offered, Iterable):
            raise self._bad("configs", f"configs returns {offered!r}, where it gives dicts of knobs")
        return offered

    def _named(self, values: Mapping[str, int]) -> Config:
        if not isinstance(values, Mapping):
            raise self._bad("configs", f"configs gives {values!r}, where each is a dict of knobs")
        unknown = sorted(values.keys() - self.knobs.keys())
        if unknown:
            raise self._bad("configs", f"a configuration names {unknown}, which are no knobs")
        if not registry.is_built_in(self):
            chosen = {name: Knob((value,)) for name, value in values.items()}
            check_values(chosen, partial(self._bad, "configs"))
            _check_blocks(chosen, self.device, self.author.language, partial(self._bad, "configs"))
        return self.config(**values)

    def combinations(self) -> Iterator[Config]:
        """All combinations of the knobs' values."""
        names = list(self.knobs)
        for values in itertools.product(*(self.knobs[n].values for n in names)):
            yield Config(tuple(zip(names, values, strict=True)))

    def config(self, **values: int) -> Config:
        """A configuration: named knobs, the first value of every other one."""
        check_knobs(self.name, self.knobs, values)
        return Config(tuple((name, values.get(name, k.values[0])) for name, k in self.knobs.items()))

    def resources(self, problem: Problem, config: Config) -> Resources:
        found = self.author.resources(problem, config)
        if not isinstance(found, Resources):
            raise self._bad("resources", f"resources returns {found!r}, where it returns kgen.Resources(...)")
        return found

    @property
    def is_calibrated(self) -> bool:
        """Whether its estimates have been compared with measurements on all problems."""
        return type(self.author).uncalibrated is KernelTemplate.uncalibrated

    def uncalibrated(self, problem: Problem) -> str | None:
        """Why nothing is known of how long the template takes for a problem."""
        return self.author.uncalibrated(problem)

    def facts(self, problems: Sequence[Problem], config: Config) -> object:
        """What the Jinja file reads as `facts`."""
        return self.author.facts(problems, config)


# What a template has most of, in words.
LIMITS = {
    "family": "contractions with one epilogue",
    "grouped": "contractions in one launch",
    "full_row": "points of a row in one tile",
    "prologue_cost": "operations for an element of an operand",
    "scale_cost": "operations for a scale of each element",
    "epilogue_cost": "operations again for each element that is reduced",
}

T = TypeVar("T", bound="type[KernelTemplate] | type[LoopKernel]")


def template(*, implements: Pattern | Loops, device: Device, source: str, name: str | None = None) -> Callable[[T], T]:
    """Registers the decorated class, which derives from `KernelTemplate` (of `loops`, from `LoopKernel`), as a template.

    `implements` is what it computes: a contraction, an operator, or `loops` (`loop_contract.py`). `device` is "cuda" (Triton)
    or "cpu" (C++), `source` the Jinja file beside the module, or its text where that has several lines (in a notebook).
    Raises BadTemplate for a declaration that does not hold together, DuplicateTemplate for a name that is taken."""

    def register(cls: T) -> T:
        _check_call(cls, implements, source, name)
        if isinstance(implements, Pattern):
            registry.add(_checked(cls, implements, device, source, name or cls.__name__))
        else:
            implements.declare(cls, device, source, name or cls.__name__)
        return cls

    return register


def _check_call(cls: object, implements: object, source: object, name: object) -> None:
    """The arguments of `template` are of the kinds that it takes. Raises BadTemplate."""
    called = name if name is not None and isinstance(name, str) else getattr(cls, "__name__", repr(cls))

    def fail(problem: str) -> errors.BadTemplate:
        return errors.BadTemplate(line_of(cls) if isinstance(cls, type) else "", template=called, problem=problem)

    if not isinstance(cls, type):
        raise fail(f"it decorates a class that derives from kgen.KernelTemplate, and this is {cls!r}")
    if not hasattr(implements, "declare") and not isinstance(implements, Pattern):
        raise fail(f"implements is kgen.contraction(...), kgen.operator(...) or kgen.loops(...), and this is {implements!r}")
    if not isinstance(source, str) or not source.strip():
        raise fail(f"source is the name of a Jinja file or its text, and this is {source!r}")
    if name is not None and (not isinstance(name, str) or not name or any(c.isspace() for c in name)):
        raise fail(f"name is a text without spaces, and this is {name!r}")


def _checked(cls: type, implements: Pattern, device: str, source: str, name: str) -> Template:
    def fail(problem: str, where: str = "") -> errors.BadTemplate:
        return errors.BadTemplate(where or line_of(cls), template=name, problem=problem)

    if not issubclass(cls, KernelTemplate):
        raise fail(f"{cls.__name__} does not derive from kgen.KernelTemplate: write class {cls.__name__}(kgen.KernelTemplate)")
    members = members_of(cls)
    operands = {k: v for k, v in members.items() if isinstance(v, Operand)}
    results = {k: v for k, v in members.items() if isinstance(v, Result)}
    knobs = {k: v for k, v in members.items() if isinstance(v, Knob)}
    check_device(device, fail)
    never = never_seen(implements.operator) if implements.operator and implements.program is None else None
    if never is not None:
        raise fail(never)
    for what, found, wanted in (("operands", operands, implements.operands), ("results", results, implements.results)):
        axes = tuple(v.axes for v in found.values())
        if axes != wanted:
            raise fail(f"its {what} are over {axes}, but it implements {wanted}")
    for knob_name in knobs:
        axis = knob_name.removeprefix("BLOCK_").lower()
        if knob_name.startswith("BLOCK_") and axis not in implements.axes:
            raise fail(f"{knob_name} is the tile of an axis {axis!r}, but its axes are {', '.join(implements.axes)}")
    check_values(knobs, fail)
    _check_capabilities(cls, implements, device, fail)
    _check_family(operands, results, fail)
    _check_sums(operands, implements, fail)
    _check_packs(operands, implements, device, fail)
    path = source_file(cls, source, device, fail)
    own = {k: v for k, v in members.items() if isinstance(v, Workspace | HostValue)}
    made = Template(
        name, implements, device, path, operands, results, knobs, cls.longest, _author(cls, name), version_of(cls, path),
        cls.joins, {k: v for k, v in own.items() if isinstance(v, Workspace)},
        {k: v for k, v in own.items() if isinstance(v, HostValue)}, cls.language,
    )  # fmt: skip
    if cls.__module__ not in registry.BUILT_IN:
        check_file(made, members, fail)
    _check_blocks(knobs, device, cls.language, fail)
    return made


def check_file(made: Template, members: Mapping[str, object], fail: Callable[..., Exception]) -> None:
    """The class, of which these are all members, and the Jinja file agree with each other. For kgen's own files, tests ask:
    parsing them takes a tenth of what compiling a graph does."""
    implements, results, own = made.implements, list(made.results), (*made.workspaces, *made.values)
    slots = (*made.knobs, *implements.axes, *implements.steps)
    together = results[: len(results) - len(implements.seconds)]
    used, rendered = _check_source(made.source, made.operands, together, (*slots, *results), own, fail)
    _check_seconds(implements, results[len(together) :], rendered, fail)
    _check_members(members, rendered, fail)
    _check_steps(implements, members, rendered, fail)
    _check_joining(made.joins, used, fail)
    _check_elements(made.device, implements, made.knobs, rendered, fail)
    _check_frame(made.source, made.device, rendered, fail)


def members_of(cls: type) -> dict[str, object]:
    """What a template's class has, by name."""
    return {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items()}


# Old names of authors' methods.
_RENAMED = {"sides": "epilogue_subtile", "refuse_joint": "refuse_grouped"}


def _check_members(members: Mapping[str, object], used: Container[str], fail: Callable[[str], Exception]) -> None:
    """Every public name is something that a template has: whatever else was meant, it would be overlooked."""
    for name, value in members.items():
        if name in PUBLIC:
            if _is_method(value) != _is_method(vars(KernelTemplate)[name]):
                raise fail(f"{name} is {'no method' if _is_method(value) else 'a method'} of kgen.KernelTemplate")
        elif not (name.startswith("_") or isinstance(value, DECLARED) or name in used or _is_constant(name, value)):
            near = [_RENAMED[name]] if name in _RENAMED else difflib.get_close_matches(name, PUBLIC, n=1)
            hint = f"was {near[0]} meant?" if near else "a helper's name begins with an underscore"
            raise fail(f"{name} is no slot, no knob and nothing that kgen.KernelTemplate has: {hint}")


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod)


def _is_constant(name: str, value: object) -> bool:
    return name.isupper() and not _is_method(value)


def _check_capabilities(cls: type[KernelTemplate], implements: Pattern, device: str, fail: Callable[[str], Exception]) -> None:
    unknown = [axis for axis in cls.longest if axis not in implements.axes]
    if unknown:
        raise fail(f"it says how long axis {unknown[0]!r} may be, but its axes are {', '.join(implements.axes)}")
    if cls.language not in LANGUAGES:
        raise fail(f"language {cls.language!r} is none of {', '.join(LANGUAGES)}")
    if cls.full_row and device == "cpu":
        raise fail("it holds full rows, which no epilogue in C++ reads again")
    unknown = sorted(cls.reductions - ops.REDUCTIONS.keys())
    if unknown:
        raise fail(f"it reduces by {unknown[0]!r}, which is none of {', '.join(ops.REDUCTIONS)}")


def _check_joining(joins: str | None, used: set[str], fail: Callable[[str], Exception]) -> None:
    """The class and the Jinja file agree on how several problems are made."""
    for name in JOINING:
        if name in used and name != joins:
            raise fail(f"its Jinja file uses {name}, but the class does not say joins = {name!r}")
    if joins is not None and joins not in JOINING:
        raise fail(f"it joins problems by {joins!r}, which is none of {', '.join(JOINING)}")
    if joins is not None and joins not in used:
        raise fail(f"it joins problems by {joins!r}, which its Jinja file never uses")


def _check_family(operands: Mapping[str, Operand], results: Mapping[str, Result], fail: Callable[[str], Exception]) -> None:
    many = [name for name, one in operands.items() if one.many]
    if (many or any(one.many for one in results.values())) and (len(many) != 1 or not all(o.many for o in results.values())):
        raise fail("of a family of contractions, one operand and the result are many")


def _check_sums(operands: Mapping[str, Operand], implements: Pattern, fail: Callable[[str], Exception]) -> None:
    for name, one in operands.items():
        if one.sums and (implements.operator or set(one.axes) <= set(implements.results[0])):
            raise fail(f"it adds up {name}, but an operand reduction is over the axes that a sum of products goes over")


def _check_steps(
    implements: Pattern, members: Mapping[str, object], used: Container[str], fail: Callable[[str], Exception]
) -> None:
    clash = [name for name in implements.steps if name in members or name in implements.axes]
    if clash:
        raise fail(f"{clash[0]} is a step of its program and something else as well")
    unused = [name for name in implements.middles if name not in used]
    if unused:
        raise fail(f"its Jinja file never applies what is made of {unused[0]}")


def _check_head(syntax: jinja2.nodes.Template, path: Path, fail: Callable[[str], Exception]) -> None:
    called = {node.node.name for node in syntax.find_all(jinja2.nodes.Call) if isinstance(node.node, jinja2.nodes.Name)}
    if "kernel" not in called:
        raise fail(f"{path.name} never opens the kernel: {{{{ kernel() }}}} is its first line")


# The slots that store a result, of which a Jinja file has one at least.
STORES = ("store", "store_element")


def _check_frame(path: Path, device: str, rendered: set[str], fail: Callable[[str], Exception]) -> None:
    """What every kernel has besides its head: in C++ an end, and a store."""
    if device == "cpu" and "end" not in rendered:
        raise fail(f"{path.name} never closes the kernel: {{{{ kernel.end() }}}} is its last line")
    if rendered.isdisjoint(STORES):
        raise fail(f"{path.name} never stores a result")


def _check_blocks(knobs: Mapping[str, Knob], device: str, language: str, fail: Callable[[str], Exception]) -> None:
    """Triton's vectors are powers of two long."""
    for name, one in knobs.items():
        wrong = [n for n in one.values if n < 1 or n & (n - 1)] if name.startswith("BLOCK_") and device == "cuda" else []
        if wrong and language == "triton":
            raise fail(f"{name} is {wrong[0]}: the sides of a tile in Triton are powers of two")


def _check_elements(
    device: str, implements: Pattern, knobs: Container[str], rendered: set[str], fail: Callable[[str], Exception]
) -> None:
    """Epilogues reduce what comes in tiles, and a GPU's programs have nothing else."""
    if "store_element" not in rendered:
        return
    if device != "cpu":
        raise fail("it stores element by element, which is for device 'cpu': on a GPU `store` takes a tile")
    block = next((name for axis in implements.results[0] if (name := f"BLOCK_{axis.upper()}") in knobs), None)
    if block is not None:
        raise fail(f"it stores element by element, and {block} says that it stores tiles: give the knob another name")


def _check_seconds(implements: Pattern, results: Sequence[str], rendered: set[str], fail: Callable[[str], Exception]) -> None:
    for step, result in zip(implements.seconds, results, strict=True):
        if result not in rendered:
            raise fail(f"its Jinja file never stores {result}, the log-sum-exp of {step}")


def _check_packs(operands: Mapping[str, Operand], implements: Pattern, device: str, fail: Callable[[str], Exception]) -> None:
    for name, one in list(operands.items())[: None if device != "cpu" or implements.operator else -1]:
        if one.packs:
            raise fail(f"it takes {name} packed, which only right operands of C++ contractions are")


def _check_source(
    path: Path,
    operands: Mapping[str, Operand],
    results: Sequence[str],
    names: Iterable[str],
    own: Sequence[str],
    fail: Callable[..., Exception],
) -> tuple[set[str], set[str]]:
    """Every operand is read, the results are stored, all of them at once, and nothing is rendered that nobody defines, unless
    the file asks whether somebody does: it may be that of several programs. The names that are used, and these with the
    attributes of what they name."""
    try:
        syntax = environment(path.parent).parse(path.read_text())
    except jinja2.TemplateSyntaxError as error:
        raise fail(f"{path.name}, line {error.lineno}: {error.message}", f"{path}, line {error.lineno}") from error
    used = set(jinja2.meta.find_undeclared_variables(syntax))
    rendered = used | {node.attr for node in syntax.find_all(jinja2.nodes.Getattr)}  # a slot may be that of a part
    _check_head(syntax, path, fail)
    tests = (one for one in syntax.find_all(jinja2.nodes.Test) if one.name == "defined")
    asked = {one.node.name for one in tests if isinstance(one.node, jinja2.nodes.Name)}
    unknown = sorted(used - {*operands, *results, *names, *own} - GIVEN - asked)
    for slot in operands:
        if slot not in rendered:
            meant = f", but {', '.join(unknown)}: no slot, no knob and no axis" if unknown else ""
            raise fail(f"{path.name} never renders the slot {slot}{meant}")
    for name in own:
        if name not in rendered:
            raise fail(f"{path.name} never uses {name}")
    summed = [slot for slot, one in operands.items() if one.sums]
    if summed and "store_sum" not in rendered:
        raise fail(f"it adds up {' and '.join(summed)}, but {path.name} never calls store_sum")
    stored = [slot for slot in results if slot in rendered]
    if not stored:
        raise fail(f"{path.name} never renders the slot {results[0]}")
    if len(stored) > 1:
        raise fail(f"{path.name} renders {' and '.join(stored)}: one of them stores all results, 'first second'")
    if unknown:
        line = next(node.lineno for node in syntax.find_all(jinja2.nodes.Name) if node.name == unknown[0])
        raise fail(f"{path.name} uses {', '.join(unknown)}: no slot, no knob and no axis", f"{path}, line {line}")
    return used, rendered


def _author(cls: type[KernelTemplate], name: str) -> KernelTemplate:
    """kgen's own templates are called thousands of times a graph, and their errors are kgen's."""
    return cls() if cls.__module__ in registry.BUILT_IN else guarded(cls(), KernelTemplate, name)


def check_device(device: str, fail: Callable[[str], Exception]) -> None:
    """Templates are for known kinds of devices."""
    if device not in DEVICES:
        raise fail(f"device {device!r} is none of {', '.join(DEVICES)}")


def check_values(knobs: Mapping[str, Knob], fail: Callable[[str], Exception]) -> None:
    """A knob has numbers to choose from: whatever else it had would end in comparisons and in the text of a kernel."""
    for name, one in knobs.items():
        if not one.values:
            raise fail(f"knob {name} has no values")
        wrong = [value for value in one.values if not isinstance(value, int)]
        if wrong:
            raise fail(f"knob {name} has the value {wrong[0]!r}, where each is an int: knob(64, 128)")
        if len(set(one.values)) < len(one.values):
            raise fail(f"knob {name} has a value more than once: {one.values}")


def check_knobs(template: str, knobs: Iterable[str], values: Iterable[str]) -> None:
    """A configuration names knobs only. Raises BadTemplate."""
    unknown = sorted(set(values) - set(knobs))
    if unknown:
        raise errors.BadTemplate(template=template, problem=f"a configuration names {unknown}, which are no knobs")
