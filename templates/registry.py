"""The registered templates, and the kernels that they write: the one registry, filled by the `@kgen.template` decorator."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from kgen import errors
from kgen.ir.program import Axes, MatrixSizes, Program
from kgen.listeners import Listeners
from kgen.option_names import near

if TYPE_CHECKING:
    from kgen.ir.plan import Choice, Config, Launch, Packing
    from kgen.rendered.kernel_call import KernelCall, Rendered
    from kgen.templates.base import Request
    from kgen.templates.contract import Template
    from kgen.templates.loop_contract import LoopProblem, LoopTemplate
    from kgen.templates.problem import Problem

    Made = Rendered | KernelCall

# Modules of this package that declare templates. Of two that cost the same, the earlier one is chosen.
BUILT_IN = (
    "kgen.templates.triton.kernels.matmul",
    "kgen.templates.triton.kernels.matmul_tma",
    "kgen.templates.triton.kernels.matmul_warp_specialized",
    "kgen.templates.triton.kernels.matmul_b_resident",
    "kgen.templates.triton.kernels.matmul_full_row",
    "kgen.templates.triton.kernels.matmul_sliced_k",
    "kgen.templates.triton.kernels.attention",
    "kgen.templates.triton.kernels.attention_windows",
    "kgen.templates.triton.kernels.attention_backward",
    "kgen.templates.triton.kernels.attention_warp_specialized",
    "kgen.templates.triton.kernels.attention_backward_warp_specialized",
    "kgen.templates.triton.kernels.attention_backward_together",
    "kgen.templates.triton.kernels.conv",
    "kgen.templates.triton.kernels.conv_depthwise",
    "kgen.templates.triton.kernels.conv_warp_specialized",
    "kgen.templates.triton.kernels.conv_weight",
    "kgen.templates.triton.kernels.grouped_matmul",
    "kgen.templates.cpp.kernels.matmul",
    "kgen.templates.cpp.kernels.attention",
    "kgen.templates.cpp.kernels.attention_backward",
    "kgen.templates.cpp.kernels.conv_direct",
    "kgen.templates.cpp.kernels.grouped_matmul",
)

# The same for loop kernels, by device.
BUILT_IN_LOOPS = {
    "cuda": ("kgen.templates.triton.kernels.loops", "kgen.templates.triton.kernels.foreach"),
    "cpu": (
        "kgen.templates.cpp.kernels.loops", "kgen.templates.cpp.kernels.foreach", "kgen.templates.cpp.kernels.packing",
    ),
}  # fmt: skip

# Where the language of each kind of device is.
LANGUAGES = {"cuda": ("kgen.templates.triton.language", "TRITON"), "cpu": ("kgen.templates.cpp.language", "CPP")}

T = TypeVar("T")

_templates: dict[str, Template] = {}
# What `why_not` has said of the templates that are registered now.
_refusals: dict[tuple[str | None, Request], str | None] = {}
# By kind and device, in the order in which they replace each other.
_loops: dict[tuple[str, str], list[LoopTemplate]] = {}


def add(template: Template) -> None:
    """Registers a template. A module that is loaded again may register its own once more."""
    if not is_built_in(template):
        _load()  # or the name of one of kgen's own would be taken, and be missed where that is loaded
    _check_name(template)
    _templates[template.name] = template
    _refusals.clear()


def add_loops(template: LoopTemplate) -> None:
    """Registers a template of loop kernels, which has to name the one that it replaces, if there is one."""
    if not is_built_in(template):
        _load_loops(template.device)
    _check_name(template)
    chain = _loops.setdefault((template.implements.kind, template.device), [])
    again = next((k for k, one in enumerate(chain) if one.name == template.name), None)
    if again is not None:
        chain[again] = template
        return
    last = chain[-1].name if chain else ""
    if template.implements.replaces != last:
        raise errors.LoopsTaken(
            template=template.name, kind=template.implements.kind, device=template.device, last=last or "none"
        )
    chain.append(template)


def _check_name(template: Template | LoopTemplate) -> None:
    known = next((one for one in _all() if one.name == template.name), None)
    if known is not None and _class(known) != _class(template):
        raise errors.DuplicateTemplate(template=template.name, first=_class(known), second=_class(template))


def _all() -> list[Template | LoopTemplate]:
    """The templates that were registered until now."""
    return [*_templates.values(), *(one for chain in _loops.values() for one in chain)]


def _class(template: Template | LoopTemplate) -> str:
    """The decorated class. Two of them may share one Jinja file."""
    kind = type(template.author)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_built_in(template: Template | LoopTemplate) -> bool:
    """Whether it is one of kgen's own."""
    module = type(template.author).__module__
    return module in BUILT_IN or any(module in modules for modules in BUILT_IN_LOOPS.values())


def remove(name: str) -> None:
    """Takes a template out again: for tests, and for an author who replaces one."""
    _templates.pop(name, None)
    _refusals.clear()
    for chain in _loops.values():
        chain[:] = [one for one in chain if one.name != name]


def all_templates() -> list[Template | LoopTemplate]:
    """All templates, those of loop kernels included."""
    _load()
    for device in BUILT_IN_LOOPS:
        _load_loops(device)
    return _all()


def names() -> list[str]:
    """The names of all templates, those of loop kernels included."""
    return [one.name for one in all_templates()]


def loop_templates(kind: str, device: str) -> list[LoopTemplate]:
    """The templates of loop kernels of a kind: one that replaces another comes before it."""
    _load_loops(device)
    return _loops.get((kind, device), [])[::-1]


def loop_template(problem: LoopProblem, name: str = "") -> LoopTemplate:
    """The template that takes a problem: the one of that name, else the last one that was registered and does not refuse.
    Raises NoLoopTemplate."""
    refusals: list[str] = []
    for template in loop_templates(problem.kind, problem.device):
        if name in ("", template.name):
            reason = template.refuse(problem)
            if reason is None:
                return template
            refusals.append(f"{template.name}: {reason}")
    why = "; ".join(refusals) or "none is registered" + (f" as {name}" if name else "")
    raise errors.NoLoopTemplate(kernel=problem.step.name, kind=problem.kind, why=why)


def loop_names(device: str) -> frozenset[str]:
    """The names of the templates of a device's loop kernels."""
    _load_loops(device)
    return frozenset(one.name for (_, own), chain in _loops.items() if own == device for one in chain)


def every(device: str | None = None) -> list[Template]:
    """The templates of a device, built-in ones included, in order of registration."""
    _load()
    return [t for t in _templates.values() if device in (None, t.device)]


def contractions(device: str | None = None) -> list[Template]:
    """Those of a device that implement a contraction."""
    return [t for t in every(device) if not t.implements.operator]


def why_not(device: str | None, request: Request) -> str | None:
    """Why no template of a device makes such a kernel of a contraction, each with its reason; None where some may."""
    _load()
    key = (device, request)
    if key not in _refusals:
        _refusals[key] = _why_not(device, request)
    return _refusals[key]


def _why_not(device: str | None, request: Request) -> str | None:
    reasons: list[str] = []
    for template in contractions(device):
        reason = template.why_not(request)
        if reason is None:
            return None
        reasons.append(f"{template.name}: {reason}")
    return "; ".join(reasons) or "there is no template"


def operators(make: Callable[[tuple[tuple[str, ...], ...], tuple[str, ...]], T]) -> dict[str, tuple[T, ...]]:
    """The axes of the operators that templates implement, by the operator's name, whose tensors may have several ranks."""
    found: dict[str, dict[tuple[Axes, ...], T]] = {}
    for p in (t.implements for t in every()):
        if p.operator and p.program is None:
            found.setdefault(p.operator, {}).setdefault(p.operands, make(p.operands, p.results[0]))
    return {name: tuple(axes.values()) for name, axes in found.items()}


def families(device: str | None, operator: str, axes: Axes) -> list[tuple[int, int]]:
    """Of templates of an operator over such axes, the operand of which one kernel takes several, and how many of them."""
    found = [t for t in every(device) if (t.implements.operator, t.implements.axes) == (operator, axes)]
    return [(list(t.operands).index(t.many), t.most.family) for t in found if t.many is not None]


def programs(device: str | None = None) -> list[Program]:
    """The programs that templates of a device implement, each once, in their canonical form, with the most second results."""
    found: dict[str, Program] = {}
    for program in (t.implements.program for t in every(device)):
        if program is not None and (program.key not in found or len(program.seconds) > len(found[program.key].seconds)):
            found[program.key] = program.canonical
    return list(found.values())


def takes(device: str, program: Program, lengths: Mapping[str, int | None]) -> bool:
    """Whether axes of a program in canonical form are as short as some template wants them; None: known at run time only."""
    patterns = ((t.implements.program, t.longest) for t in every(device))
    return any(_short(own, longest, lengths) for own, longest in patterns if own is not None and own.key == program.key)


def _short(program: Program, longest: Mapping[str, int], lengths: Mapping[str, int | None]) -> bool:
    own = dict(zip(program.axes, program.canonical.axes, strict=True))
    found = [(lengths[own[axis]], most) for axis, most in longest.items()]
    return all(length is not None and length <= most for length, most in found)


def calibrated_programs(device: str, sizes: MatrixSizes | None = None, arch: int = 0) -> list[Program]:
    """The programs of templates whose estimates have been compared with measurements: on all problems, or on those around a
    matrix of such sizes on a device of compute capability `arch`."""
    return [
        t.implements.program for t in every(device)
        if t.implements.program is not None and (t.is_calibrated if sizes is None else t.author.is_measured(sizes, arch))
    ]  # fmt: skip


def find(name: str) -> Template:
    """The template of that name; raises UnknownTemplate."""
    _load()
    if name not in _templates:
        raise errors.UnknownTemplate(template=name, near=near(name, _templates), valid=", ".join(_templates))
    return _templates[name]


def fingerprint() -> tuple[tuple[str, str], ...]:
    """Names and versions of the templates from other packages, in order: what a cached graph depends on besides kgen itself.
    It loads none, for a process that finds its graphs in the cache needs none."""
    return tuple((one.name, one.version) for one in _all() if not is_built_in(one))


PACKAGES = "kgen.templates"  # the entry-point group


@cache
def load_packages() -> None:
    """Imports the templates of installed packages, which name their modules in the entry-point group `kgen.templates`. One that
    cannot be imported is left out, with a warning."""
    for point in importlib.metadata.entry_points(group=PACKAGES):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001  somebody else's module may raise anything
            text = f"kgen: the templates of {point.value} are left out: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@cache
def _load() -> None:
    for module in BUILT_IN:
        importlib.import_module(module)


@cache
def _load_loops(device: str) -> None:
    for module in BUILT_IN_LOOPS[device]:
        importlib.import_module(module)


# ---- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Language:
    """Who writes kernels of one language under a name: of a contraction, or of several that share it (`exact`: with eager's
    roundings), and of each kind of loops without one."""

    contraction: Callable[[Sequence[Problem], Config, str, bool], Made]
    loops: Mapping[str, Callable[[LoopProblem, LoopTemplate, Config, str], Made]]


class Decisions(Protocol):
    """What the scheduler has decided of the kernels of a step."""

    @property
    def exact(self) -> bool:
        """Whether results are rounded as eager rounds them."""

    def choice(self, step: Launch | Packing) -> Choice | None:
        """The template and its configuration, where they are more than a matter of course."""

    def loops(self, step: Launch | Packing) -> LoopProblem | None:
        """The kernel of a step without a contraction, with its loops."""

    def problems(self, step: Launch | Packing) -> Sequence[Problem]:
        """The contractions of any other step, as the chosen template sees them."""


def render_step(step: Launch | Packing, symbol: str, decisions: Decisions) -> Made:
    """The kernel of a step under a name."""
    loops, choice = decisions.loops(step), decisions.choice(step)
    if loops is not None:
        return render_loops(loops, symbol, choice)
    assert choice is not None
    problems = decisions.problems(step)
    template = problems[0].template
    return _language(template.device).contraction(problems, template.config(**dict(choice.config)), symbol, decisions.exact)


def render_loops(problem: LoopProblem, symbol: str, choice: Choice | None = None) -> Made:
    """The kernel of loops without a contraction: by the choice, else by the first template that takes the problem, as the
    scheduler has decided. Raises NoLoopTemplate where none takes it."""
    template = loop_template(problem, "" if choice is None else choice.template)
    if LOOP_KERNELS.heard:
        LOOP_KERNELS.note(lambda: (problem, template))
    config = template.config(problem, {} if choice is None else dict(choice.config))
    return _language(template.device).loops[problem.kind](problem, template, config, symbol)


# The loops that are rendered, with the template that has each.
LOOP_KERNELS: Listeners[tuple[LoopProblem, LoopTemplate]] = Listeners()


@cache
def _language(device: str) -> Language:
    module, name = LANGUAGES[device]
    found: Language = getattr(importlib.import_module(module), name)
    return found
