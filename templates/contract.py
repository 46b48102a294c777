"""What the author of a template writes: operands, results, named axes, knobs, and what the kernel computes.

    @kgen.template(implements=contraction("m,k", "k,n -> m,n"), device="cuda", source="matmul.py.jinja")
    class Matmul:
        A, B, C = operand("m", "k"), operand("k", "n"), result("m", "n")
        BLOCK_M, BLOCK_N, BLOCK_K = knob(64, 128), knob(64, 128), knob(32, 64)

An axis is named by a lower-case letter; ``BLOCK_M`` is the tile along axis ``m``, and an axis without such a knob is one index
of the program (a batch). Every axis may be composite, that is, stand for several loops at once: slots work out the loops. The
class may define

- ``language = "gluon"``: that the Jinja file is in Gluon, the level of Triton at which layouts and shared memory are written
  out;
- ``longest = {"m": 1}``: how long axes may be; longer ones are refused, and conformance problems stay within. The
  operands of a sum of products change places for it;
- ``refuse(self, problem) -> str | None``: why the template cannot take a problem, for people to read;
- ``resources(self, problem, config) -> Resources``: what a program needs; a configuration that needs more than the device has
  is never offered;
- ``configs(self, problem)``: the configurations worth trying, in place of all combinations of the knobs;
- ``sides(self, problem, config) -> dict``: how many points along an axis the epilogue gets at once, where that is not a whole
  tile, as ``{"n": config.BLOCK_N // 2}``. Every call of ``C.store`` begins at a multiple of it: reductions in an epilogue count
  on that;
- ``grid(self, problem, config)``: the number of programs, in place of one for each tile of the first result;
- ``order(self, problem, config)``: equal for configurations, of other templates too, whose sums are added in one order, so that
  their results are equal bit by bit; without it each configuration has an order of its own (``numerics="stable"``);
- ``seconds(self, problem, config) -> float``: an estimate, in place of the device's roofline;
- ``uncalibrated(self, problem) -> str | None``: why that estimate was never compared with measurements on such problems. The
  library takes these problems in the default mode, until the template has been measured to be faster.

Besides operands, results and knobs it may have memory of its own and numbers that the host works out before a launch:

    LOCKS = workspace(torch.int32, lambda problem, config: problem.programs(config), zeroed=True)
    STEPS = host_value(lambda problem, config: ix.ceildiv(problem.extent("k"), config.BLOCK_K))

In the Jinja file ``{{ LOCKS }}`` is a pointer, ``{{ STEPS }}`` a number, or the name of a parameter where sizes are dynamic.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.meta
import jinja2.nodes
import torch

from kgen import errors
from kgen.templates import registry
from kgen.templates.pattern import Pattern, letters
from kgen.templates.pattern import contraction as contraction
from kgen.templates.pattern import operator as operator
from kgen.templates.render import environment

DEVICES = ("cuda", "cpu")
# Names that every template's Jinja file may use, besides its own operands, results, knobs and axes.
GIVEN = frozenset({"kernel", "config", "problem", "program", "parts"})
# Those of them with which a template can make several problems in one launch: each by programs of its own, or all together.
JOINING = ("program", "parts")


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of the kernel's main loop, a slot for prologues. `access` is how its tiles are loaded: by pointers, or "tma".
    When it is `many`, each of the products that share a kernel has its own; their other operand they have in common. With
    `sums` the template can also add up its elements over the axes that no result has, a slot for a side sum. A right operand
    that `packs` may be an array of the C++ engine, packed once, where it is the same at each call."""

    axes: tuple[str, ...]
    access: str = "pointer"
    many: bool = False
    sums: bool = False
    packs: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What the main loop computes, a slot for epilogues. Of `many`, all are there when the joint epilogue runs. `access` is how
    an epilogue's tiles move: by pointers, or "tma", unless the configuration has a knob ENGINE that is False. With "shared",
    warps share rows, and groups of them the memory that results leave from, unless a knob SENT is False. In C++ an `ordered`
    one is stored in order along the axes that a problem names (`Problem.in_order`), a slot for updates that may hit one element
    twice."""

    axes: tuple[str, ...]
    access: str = "pointer"
    many: bool = False
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that a configuration fixes."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a kernel's own: `length` numbers of `dtype`, which only this launch sees, zero before it where `zeroed`."""

    dtype: torch.dtype
    length: Callable[[Any, Any], Any]
    zeroed: bool = False


@dataclass(frozen=True, slots=True)
class HostValue:
    """A number that the host works out before the launch."""

    compute: Callable[[Any, Any], Any]


def operand(*axes: str, access: str = "pointer", many: bool = False, sums: bool = False, packs: bool = False) -> Operand:
    """An operand over the named axes, outermost first; ``operand("b", "h+r", "c")`` where two axes walk through a dimension."""
    return Operand(letters(axes), access, many, sums, packs)


def result(*axes: str, access: str = "pointer", many: bool = False, ordered: bool = False) -> Result:
    """A result over the named axes, outermost first."""
    return Result(axes, access, many, ordered)


def knob(*values: Any) -> Knob:
    """A knob with the values worth trying."""
    return Knob(values)


def workspace(dtype: torch.dtype, length: Callable[[Any, Any], Any], *, zeroed: bool = False) -> Workspace:
    """Memory for partial results or counters. ``length(problem, config)`` is how many numbers: an int, or an expression over
    sizes. With `zeroed` they are 0 when the kernel starts, which takes a launch before it."""
    return Workspace(dtype, length, zeroed)


def host_value(compute: Callable[[Any, Any], Any]) -> HostValue:
    """A number, ``compute(problem, config)``, an int or an expression over sizes, which no program need work out itself."""
    return HostValue(compute)


@dataclass(frozen=True, slots=True)
class Config:
    """Values of a template's knobs, as attributes."""

    values: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        for key, value in object.__getattribute__(self, "values"):
            if key == name:
                return value
        raise AttributeError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.values).get(name, default)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a configuration needs: shared memory in bytes, 32-bit registers of a thread."""

    shared: int = 0
    registers: int = 0


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
    author: Any  # an instance of the decorated class
    version: str
    joins: str | None = None  # one of JOINING: how one launch can have several problems
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    values: Mapping[str, HostValue] = field(default_factory=dict)
    language: str = "triton"  # of a GPU's kernel, by the name of the module with its decorators

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return self.implements.axes

    @cached_property
    def many(self) -> str | None:
        """The operand of which each product of a family has its own."""
        return next((name for name, one in self.operands.items() if one.many), None)

    def block(self, axis: str) -> str | None:
        """The knob that is the tile along an axis, if there is one."""
        name = f"BLOCK_{axis.upper()}"
        return name if name in self.knobs else None

    def refuse(self, problem: Any) -> str | None:
        for axis, most in self.longest.items():
            length = problem.extent(axis).as_int()
            if length is None or length > most:
                return f"axis {axis} may be longer than {most}"
        method = getattr(self.author, "refuse", None)
        return method(problem) if method else None

    def configs(self, problem: Any) -> Iterator[Config]:
        """The configurations on offer."""
        method = getattr(self.author, "configs", None)
        if method is not None:
            yield from (c if isinstance(c, Config) else self.config(**c) for c in method(problem))
            return
        names = list(self.knobs)
        for values in itertools.product(*(self.knobs[n].values for n in names)):
            yield Config(tuple(zip(names, values, strict=True)))

    def config(self, **values: Any) -> Config:
        """A configuration: named knobs, the first value of every other one."""
        unknown = sorted(set(values) - set(self.knobs))
        if unknown:
            raise errors.BadTemplate(template=self.name, problem=f"a configuration names {unknown}, which are no knobs")
        return Config(tuple((name, values.get(name, k.values[0])) for name, k in self.knobs.items()))

    def resources(self, problem: Any, config: Config) -> Resources:
        method = getattr(self.author, "resources", None)
        return method(problem, config) if method else Resources()

    def uncalibrated(self, problem: Any) -> str | None:
        """Why nothing is known of how long the template takes for a problem."""
        method = getattr(self.author, "uncalibrated", None)
        return method(problem) if method else None

    def method(self, name: str) -> Callable[..., Any] | None:
        """An optional method of the author's."""
        return getattr(self.author, name, None)


T = TypeVar("T", bound=type)


def template(*, implements: Pattern, device: str, source: str, name: str | None = None) -> Callable[[T], T]:
    """Registers the decorated class as a template.

    `implements` is what it computes, `device` "cuda" (Triton) or "cpu" (C++), `source` the Jinja file beside the module.
    Raises BadTemplate for a declaration that does not hold together, DuplicateTemplate for a name that is taken."""

    def register(cls: T) -> T:
        registry.add(_checked(cls, implements, device, source, name or cls.__name__))
        return cls

    return register


def _checked(cls: type, implements: Pattern, device: str, source: str, name: str) -> Template:
    def fail(problem: str) -> errors.BadTemplate:
        return errors.BadTemplate(template=name, problem=problem)

    members = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items()}
    operands = {k: v for k, v in members.items() if isinstance(v, Operand)}
    results = {k: v for k, v in members.items() if isinstance(v, Result)}
    knobs = {k: v for k, v in members.items() if isinstance(v, Knob)}
    if device not in DEVICES:
        raise fail(f"device {device!r} is none of {', '.join(DEVICES)}")
    for what, found, wanted in (("operands", operands, implements.operands), ("results", results, implements.results)):
        axes = tuple(v.axes for v in found.values())
        if axes != wanted:
            raise fail(f"its {what} are over {axes}, but it implements {wanted}")
    for knob_name, one in knobs.items():
        axis = knob_name.removeprefix("BLOCK_").lower()
        if knob_name.startswith("BLOCK_") and axis not in implements.axes:
            raise fail(f"{knob_name} is the tile of an axis {axis!r}, but its axes are {', '.join(implements.axes)}")
        if not one.values:
            raise fail(f"knob {knob_name} has no values")
    longest: dict[str, int] = members.get("longest", {})
    unknown = [axis for axis in longest if axis not in implements.axes]
    if unknown:
        raise fail(f"it says how long axis {unknown[0]!r} may be, but its axes are {', '.join(implements.axes)}")
    _check_family(operands, results, fail)
    _check_sums(operands, implements, fail)
    _check_packs(operands, implements, device, fail)
    path = Path(inspect.getfile(cls)).parent / source
    if not path.is_file():
        raise fail(f"there is no file {path}")
    own = {k: v for k, v in members.items() if isinstance(v, Workspace | HostValue)}
    used = _check_source(path, operands, list(results), (*knobs, *implements.axes, *implements.steps), tuple(own), fail)
    _check_steps(implements, members, used, fail)
    joins = next((name for name in JOINING if name in used), None)
    return Template(
        name, implements, device, path, operands, results, knobs, longest, cls(), _version(cls, path), joins,
        {k: v for k, v in own.items() if isinstance(v, Workspace)}, {k: v for k, v in own.items() if isinstance(v, HostValue)},
        members.get("language", "triton"),
    )  # fmt: skip


def _check_family(operands: Mapping[str, Operand], results: Mapping[str, Result], fail: Callable[[str], Exception]) -> None:
    many = [name for name, one in operands.items() if one.many]
    if (many or any(one.many for one in results.values())) and (len(many) != 1 or not all(o.many for o in results.values())):
        raise fail("of a family of products, one operand and the result are many")


def _check_sums(operands: Mapping[str, Operand], implements: Pattern, fail: Callable[[str], Exception]) -> None:
    for name, one in operands.items():
        if one.sums and (implements.operator or set(one.axes) <= set(implements.results[0])):
            raise fail(f"it adds up {name}, but a side sum is over the axes that a sum of products goes over")


def _check_steps(
    implements: Pattern, members: Mapping[str, Any], used: Iterable[str], fail: Callable[[str], Exception]
) -> None:
    clash = [name for name in implements.steps if name in members or name in implements.axes]
    if clash:
        raise fail(f"{clash[0]} is a step of its program and something else as well")
    unused = [name for name in implements.middles if name not in used]
    if unused:
        raise fail(f"its Jinja file never applies what is made of {unused[0]}")


def _check_packs(operands: Mapping[str, Operand], implements: Pattern, device: str, fail: Callable[[str], Exception]) -> None:
    for name, one in list(operands.items())[: None if device != "cpu" or implements.operator else -1]:
        if one.packs:
            raise fail(f"it takes {name} packed, which only right operands of C++ products are")


def _check_source(
    path: Path,
    operands: Mapping[str, Operand],
    results: Sequence[str],
    names: Iterable[str],
    own: Sequence[str],
    fail: Callable[[str], Exception],
) -> set[str]:
    """Every operand is read, the results are stored, all of them at once, and nothing is rendered that nobody defines. The
    names that are used."""
    try:
        syntax = environment(path.parent).parse(path.read_text())
    except jinja2.TemplateSyntaxError as error:
        raise fail(f"{path.name}, line {error.lineno}: {error.message}") from error
    used = set(jinja2.meta.find_undeclared_variables(syntax))
    rendered = used | {node.attr for node in syntax.find_all(jinja2.nodes.Getattr)}  # a slot may be that of a part
    for slot in operands:
        if slot not in rendered:
            raise fail(f"{path.name} never renders the slot {slot}")
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
    unknown = sorted(used - {*operands, *results, *names, *own} - GIVEN)
    if unknown:
        raise fail(f"{path.name} uses {', '.join(unknown)}: no slot, no knob and no axis")
    return used


def _version(cls: type, path: Path) -> str:
    """A digest of the Jinja file and of the module that declares the template."""
    digest = hashlib.sha256(path.read_bytes())
    digest.update(Path(inspect.getfile(cls)).read_bytes())
    return digest.hexdigest()[:12]
