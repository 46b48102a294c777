"""What the author of a loop kernel's template writes: the kind of loops, knobs, and which problems it takes.

    @kgen.template(implements=loops("pointwise", replaces="triton_pointwise"), device="cuda", source="points.py.jinja")
    class Points(LoopKernel):
        XBLOCK, WARPS = knob(256, 512), knob(4, 8)

A *loop kernel* is a fused loop nest without a contraction. Each kind of them has one built-in template a device. Another one
names the template that it `replaces`; what it refuses goes to that one. The Jinja file's slots are in `loop_slots.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from kgen import errors
from kgen.ir import nodes as ir
from kgen.ir.plan import ComboKernel, Kernel, Launch, Nest, Packing, Tiling
from kgen.templates import registry
from kgen.templates.author_calls import guarded
from kgen.templates.author_files import line_of, source_file, version_of
from kgen.templates.contract import Config, Knob, check_device, check_knobs, check_values
from kgen.templates.loop_slots import KINDS, NEEDED, slot_names
from kgen.templates.render import sources, undeclared

__all__ = ["LoopKernel", "LoopProblem", "LoopTemplate", "Loops", "loop_problem", "loops"]


@dataclass(frozen=True, slots=True)
class LoopProblem:
    """What a loop kernel's template is asked to write. `kind` is one of `KINDS`. The scheduler has chosen the loops of each
    kernel of `step`: `vector_loops` in C++, `tilings` in Triton. `exact` forbids a GPU's approximations where a value ends in
    16 bits."""

    kind: str
    step: Launch | Packing
    graph: ir.Graph
    vector_loops: tuple[Nest, ...] = ()
    tilings: tuple[Tiling, ...] = ()
    exact: bool = False

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels with the chosen loops."""
        return (*(one.kernel for one in self.vector_loops), *(one.kernel for one in self.tilings))

    @property
    def origins(self) -> tuple[ir.Origin, ...]:
        """The operators that the step computes."""
        return () if isinstance(self.step, Packing) else self.step.origins

    @property
    def device(self) -> str:
        """The kind of device."""
        return "cuda" if self.tilings else "cpu"

    @property
    def proposed(self) -> Mapping[str, int]:
        """The knobs' values that the scheduler has chosen."""
        if self.kind == "packing":
            return {}
        if self.kind == "multi_tensor":
            return {"WARPS": max(t.blocks.warps for t in self.tilings)} if self.tilings else {}
        if self.vector_loops:
            return {"LANES": self.vector_loops[0].lanes}
        blocks = self.tilings[0].blocks
        return {"XBLOCK": blocks.x, "YBLOCK": blocks.y, "RBLOCK": blocks.r, "WARPS": blocks.warps, "STAGES": blocks.stages}

    def admits(self, name: str, value: int) -> bool:
        """Whether results are right where a knob has a value. The scheduler's choice always is. What it does not choose is the
        author's affair."""
        chosen = self.proposed
        if name not in chosen or value == chosen[name]:
            return True
        if self.vector_loops:
            return _may_have_lanes(self.vector_loops[0], value)
        if name == "STAGES":
            return value >= 1
        return _is_power_of_two(value) and (name == "WARPS" or _may_have_block(self.tilings[0], name, value))

    def under(self, config: Config) -> LoopProblem:
        """The problem with the values of the knobs in place of the scheduler's. Each kernel of a batch keeps its own loops."""
        if self.kind in ("packing", "multi_tensor"):
            return self
        if self.vector_loops:
            return replace(
                self, vector_loops=(_with_lanes(self.vector_loops[0], config.get("LANES", self.vector_loops[0].lanes)),)
            )
        [tiling] = self.tilings
        b = tiling.blocks
        blocks = type(b)(*(config.get(name, own) for name, own in self.proposed.items()))
        return self if blocks == b else replace(self, tilings=(replace(tiling, blocks=blocks),))


def _with_lanes(nest: Nest, lanes: int) -> Nest:
    return nest if lanes == nest.lanes else replace(nest, lanes=lanes)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _may_have_lanes(nest: Nest, lanes: int) -> bool:
    """Fewer lanes than a register or several hold are right wherever nothing else was decided for their number."""
    free = nest.vector is not None and nest.tile is None and nest.group == 1 and not nest.one_step
    return free and 2 <= lanes <= nest.lanes and _is_power_of_two(lanes)


def _may_have_block(tiling: Tiling, name: str, value: int) -> bool:
    """An axis with one point a program is none, a row in registers has all of its points, and no tile cuts a group."""
    if name == "XBLOCK":
        return value % tiling.group == 0
    return bool(tiling.y) if name == "YBLOCK" else bool(tiling.kernel.inner) and not tiling.persistent


def loop_problem(
    step: Launch | Packing, graph: ir.Graph, loops: Sequence[Nest] | Sequence[Tiling] = (), exact: bool = False
) -> LoopProblem:
    """A step without a contraction, under the loops that were chosen for each of its kernels."""
    vector_loops = tuple(one for one in loops if isinstance(one, Nest))
    tilings = tuple(one for one in loops if isinstance(one, Tiling))
    return LoopProblem(_kind(step, [one.kernel for one in loops]), step, graph, vector_loops, tilings, exact)


def _kind(step: Launch | Packing, kernels: Sequence[Kernel]) -> str:
    if not isinstance(step, Kernel):
        return "multi_tensor" if isinstance(step, ComboKernel) else "packing"
    [kernel] = kernels
    if kernel.share is not None:
        return "column_reduction"
    if any(s.kind == "scan" and s.inner for s in kernel.statements):
        return "scan"
    return "reduction" if kernel.inner else "pointwise"


class LoopKernel:
    """The base of classes that declare a loop kernel's template. A subclass has knobs, and constants in capital letters."""

    def refuse(self, problem: LoopProblem) -> str | None:
        """Why the template cannot take a problem, for people to read."""
        return None

    def configs(self, problem: LoopProblem) -> Iterable[Mapping[str, int]] | None:
        """Configurations worth trying besides the scheduler's own, as values of some knobs; the others stay as chosen. None:
        each knob's other values, one knob at a time."""
        return None


@dataclass(frozen=True)
class LoopTemplate:
    """A registered template of loop kernels."""

    name: str
    implements: Loops
    device: str
    source: Path
    knobs: Mapping[str, Knob]
    author: LoopKernel
    version: str

    def refuse(self, problem: LoopProblem) -> str | None:
        """Why the template cannot take a problem."""
        return self.author.refuse(problem)

    def config(self, problem: LoopProblem, values: Mapping[str, int] | None = None) -> Config:
        """A configuration: the given values, the scheduler's for the other knobs, the first value of knobs of the author's."""
        if values:
            self._check(problem, values)
        chosen = {**problem.proposed, **(values or {})}
        return Config(tuple((name, chosen.get(name, knob.values[0])) for name, knob in self.knobs.items()))

    def _check(self, problem: LoopProblem, values: Mapping[str, int]) -> None:
        check_knobs(self.name, self.knobs, values)
        wrong = [f"{name}={value}" for name, value in values.items() if not problem.admits(name, value)]
        if wrong:
            raise errors.BadTemplate(template=self.name, problem=f"kernel {problem.step.name} cannot have {' '.join(wrong)}")

    def configs(self, problem: LoopProblem) -> Iterator[Config]:
        """The scheduler's configuration, then the others on offer."""
        others = self.author.configs(problem)
        found = [self.config(problem, values) for values in (self._others(problem) if others is None else others)]
        yield from dict.fromkeys([self.config(problem), *found])

    def _others(self, problem: LoopProblem) -> Iterator[Mapping[str, int]]:
        for name, knob in self.knobs.items():
            yield from ({name: value} for value in knob.values if problem.admits(name, value))


@dataclass(frozen=True, slots=True)
class Loops:
    """What a loop kernel's template writes: every kernel of a `kind`, in place of the template that it `replaces`."""

    kind: str
    replaces: str = ""

    def declare(self, cls: type, device: str, source: str, name: str) -> None:
        """Registers the decorated class. Raises BadTemplate or DuplicateTemplate."""
        registry.add_loops(_checked(cls, self, device, source, name))


def loops(kind: str, *, replaces: str = "") -> Loops:
    """``loops("pointwise")``: the kernels of one kind. ``replaces="triton_pointwise"`` names the template that wrote them
    before, and still writes what this one refuses."""
    if kind not in KINDS:
        raise errors.BadTemplate(template=f"loops({kind!r})", problem=f"the kinds of loops are {', '.join(KINDS)}")
    return Loops(kind, replaces)


def _checked(cls: type, implements: Loops, device: str, source: str, name: str) -> LoopTemplate:
    def fail(problem: str, where: str = "") -> errors.BadTemplate:
        return errors.BadTemplate(where or line_of(cls), template=name, problem=problem)

    check_device(device, fail)
    if not issubclass(cls, LoopKernel):
        raise fail("its class does not derive from kgen.LoopKernel, as those of loop kernels do")
    members = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).items() if not k.startswith("_")}
    knobs = {k: v for k, v in members.items() if isinstance(v, Knob)}
    unknown = sorted(k for k in members if k not in knobs and k not in vars(LoopKernel) and not k.isupper())
    if unknown:
        raise fail(f"nothing asks for its {unknown[0]}: it may have knobs, constants in capital letters, refuse and configs")
    check_values(knobs, fail)
    path = source_file(cls, source, device, fail)
    _check_source(path, device, implements.kind, set(knobs), fail)
    return LoopTemplate(name, implements, device, path, knobs, _author(cls, name), _version(cls, path, device))


def _author(cls: type[LoopKernel], name: str) -> LoopKernel:
    built_in = any(cls.__module__ in modules for modules in registry.BUILT_IN_LOOPS.values())
    return cls() if built_in else guarded(cls(), LoopKernel, name)


def _version(cls: type, path: Path, device: str) -> str:
    """A digest of the module and of all Jinja files that the template is made of."""
    texts = sorted(sources(path, device).items())
    return hashlib.sha256(repr((version_of(cls, path), texts)).encode()).hexdigest()[:12]


def _check_source(path: Path, device: str, kind: str, knobs: set[str], fail: Callable[..., Exception]) -> None:
    """Nothing is rendered that nobody defines, and nothing is left out without which results are wrong."""
    try:
        used = undeclared(path, device)
    except jinja2.TemplateSyntaxError as error:
        where = f"{path.with_name(error.name or path.name)}, line {error.lineno}"
        raise fail(f"{error.name or path.name}, line {error.lineno}: {error.message}", where) from error
    except jinja2.TemplateNotFound as error:
        raise fail(f"{path.name} includes {error.name}, which is no file") from error
    slots = slot_names(device, kind)
    unknown = sorted(used - slots - knobs)
    if unknown:
        raise fail(f"{path.name} uses {', '.join(unknown)}: no knob and no slot, which are {', '.join(sorted(slots))}")
    missing = [name for name in ("kernel", *NEEDED.get((device, kind), ())) if name not in used]
    if missing:
        raise fail(f"{path.name} never renders the slot {missing[0]}")
