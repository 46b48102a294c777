"""kgen: a torch.compile backend in which every kernel is a template with slots.

``torch.compile(f, backend="kgen")`` needs no import of this package. Names load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

# public name -> where it lives; a name without a colon is a module
_PUBLIC = {
    "compile": "kgen.backend:compile",
    "config": "kgen.config",
    "contraction": "kgen.templates.pattern:contraction",
    "coverage": "kgen.report.coverage:coverage",
    "coverage_reset": "kgen.report.coverage:coverage_reset",
    "errors": "kgen.errors",
    "explain": "kgen.report.explain:explain",
    "forbid_fused": "kgen.verdict:forbid_fused",
    "host_value": "kgen.templates.contract:host_value",
    "knob": "kgen.templates.contract:knob",
    "operator": "kgen.templates.pattern:operator",
    "operand": "kgen.templates.contract:operand",
    "program": "kgen.templates.pattern:program",
    "require_fused": "kgen.verdict:require_fused",
    "result": "kgen.templates.contract:result",
    "softmax": "kgen.templates.pattern:softmax",
    "template": "kgen.templates.contract:template",
    "testing": "kgen.testing",
    "workspace": "kgen.templates.contract:workspace",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kgen' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
