"""The registered templates: the one registry, filled by the `@kgen.template` decorator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from kgen import errors
from kgen.ir.program import Program

if TYPE_CHECKING:
    from kgen.templates.contract import Template

# Modules of this package that declare templates. Of two that cost the same, the earlier one is chosen.
BUILT_IN = (
    "kgen.templates.triton.kernels.matmul",
    "kgen.templates.triton.kernels.matmul_tma",
    "kgen.templates.triton.kernels.matmul_specialized",
    "kgen.templates.triton.kernels.matmul_resident",
    "kgen.templates.triton.kernels.matmul_rows",
    "kgen.templates.triton.kernels.matmul_sliced",
    "kgen.templates.cpp.kernels.matmul",
)

T = TypeVar("T")

_templates: dict[str, Template] = {}


def add(template: Template) -> None:
    """Registers a template. A module that is loaded again may register its own once more."""
    known = _templates.get(template.name)
    if known is not None and _class(known) != _class(template):
        raise errors.DuplicateTemplate(template=template.name, first=_class(known), second=_class(template))
    _templates[template.name] = template


def _class(template: Template) -> str:
    """The decorated class. Two of them may share one Jinja file."""
    kind = type(template.author)
    return f"{kind.__module__}.{kind.__qualname__}"


def remove(name: str) -> None:
    """Takes a template out again: for tests, and for an author who replaces one."""
    _templates.pop(name, None)


def every(device: str | None = None) -> list[Template]:
    """The templates of a device, built-in ones included, in order of registration."""
    _load()
    return [t for t in _templates.values() if device in (None, t.device)]


def operators(make: Callable[[tuple[tuple[str, ...], ...], tuple[str, ...]], T]) -> dict[str, T]:
    """The axes of the operators that templates implement, by the operator's name."""
    patterns = (t.implements for t in every())
    return {p.operator: make(p.operands, p.results[0]) for p in patterns if p.operator and p.program is None}


def programs(device: str | None = None) -> list[Program]:
    """The programs that templates of a device implement, each once, in their canonical form."""
    found = (t.implements.program for t in every(device))
    return list({p.key: p.canonical for p in found if p is not None}.values())


def find(name: str) -> Template:
    """The template of that name; raises UnknownTemplate."""
    _load()
    if name not in _templates:
        raise errors.UnknownTemplate(template=name, valid=", ".join(_templates))
    return _templates[name]


def fingerprint() -> tuple[tuple[str, str], ...]:
    """Names and versions of the templates from other packages, in order: what a cached graph depends on besides kgen itself.
    It loads none, for a process that finds its graphs in the cache needs none."""
    return tuple((t.name, t.version) for t in _templates.values() if type(t.author).__module__ not in BUILT_IN)


@cache
def _load() -> None:
    for module in BUILT_IN:
        importlib.import_module(module)
