"""kgen: a torch.compile backend in which every kernel is a template with slots.

``torch.compile(f, backend="kgen")`` needs no import of this package. Names load when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers
    from kgen import config as config
    from kgen import errors as errors
    from kgen import testing as testing
    from kgen.background import wait_for_tuning as wait_for_tuning
    from kgen.commands.explain import explain as explain
    from kgen.door import compile as compile
    from kgen.door import control_flow as control_flow
    from kgen.exporting import export as export
    from kgen.host.exported import load as load
    from kgen.ir import plan as _plan
    from kgen.option_list import list_options as list_options
    from kgen.report.coverage import coverage as coverage
    from kgen.report.coverage import coverage_reset as coverage_reset
    from kgen.templates.base import KernelTemplate as KernelTemplate
    from kgen.templates.base import Resources as Resources
    from kgen.templates.contract import host_value as host_value
    from kgen.templates.contract import knob as knob
    from kgen.templates.contract import operand as operand
    from kgen.templates.contract import result as result
    from kgen.templates.contract import template as template
    from kgen.templates.contract import workspace as workspace
    from kgen.templates.loop_contract import LoopKernel as LoopKernel
    from kgen.templates.loop_contract import LoopProblem as LoopProblem
    from kgen.templates.loop_contract import loops as loops
    from kgen.templates.pattern import contraction as contraction
    from kgen.templates.pattern import elementwise as elementwise
    from kgen.templates.pattern import operator as operator
    from kgen.templates.pattern import program as program
    from kgen.templates.pattern import softmax as softmax
    from kgen.templates.problem import Problem as Problem
    from kgen.verdict import forbid_fused as forbid_fused
    from kgen.verdict import require_fused as require_fused

    KernelConfig = _plan.Config

__version__ = "0.1.0.dev0"

# In a clone, three packages lie beside this one: at its root, Python finds this folder before what is installed. The root is no
# place to look for packages of kgen: kgen would be a package of its own.
_CLONE = Path(__file__).parent.parent
_BESIDE = {f"kgen.{name}": _CLONE / name for name in ("lowering", "scheduler", "templates")}


class _Clone:
    """Finds the packages beside this one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _BESIDE:
            return None
        folder = _BESIDE[name]
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


if (_CLONE / "pyproject.toml").is_file() and _BESIDE["kgen.lowering"].is_dir():
    sys.meta_path.append(_Clone)


# public name -> where it lives; a name without a colon is a module
_PUBLIC = {
    "KernelConfig": "kgen.ir.plan:Config",
    "KernelTemplate": "kgen.templates.base:KernelTemplate",
    "LoopKernel": "kgen.templates.loop_contract:LoopKernel",
    "LoopProblem": "kgen.templates.loop_contract:LoopProblem",
    "Problem": "kgen.templates.problem:Problem",
    "Resources": "kgen.templates.base:Resources",
    "compile": "kgen.door:compile",
    "config": "kgen.config",
    "contraction": "kgen.templates.pattern:contraction",
    "control_flow": "kgen.door:control_flow",
    "coverage": "kgen.report.coverage:coverage",
    "coverage_reset": "kgen.report.coverage:coverage_reset",
    "elementwise": "kgen.templates.pattern:elementwise",
    "errors": "kgen.errors",
    "explain": "kgen.commands.explain:explain",
    "export": "kgen.exporting:export",
    "forbid_fused": "kgen.verdict:forbid_fused",
    "host_value": "kgen.templates.contract:host_value",
    "knob": "kgen.templates.contract:knob",
    "list_options": "kgen.option_list:list_options",
    "load": "kgen.host.exported:load",
    "loops": "kgen.templates.loop_contract:loops",
    "operator": "kgen.templates.pattern:operator",
    "operand": "kgen.templates.contract:operand",
    "program": "kgen.templates.pattern:program",
    "require_fused": "kgen.verdict:require_fused",
    "result": "kgen.templates.contract:result",
    "softmax": "kgen.templates.pattern:softmax",
    "template": "kgen.templates.contract:template",
    "testing": "kgen.testing",
    "wait_for_tuning": "kgen.background:wait_for_tuning",
    "workspace": "kgen.templates.contract:workspace",
}


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'kgen' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        module, _, attribute = _PUBLIC[name].partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
