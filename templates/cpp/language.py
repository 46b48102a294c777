"""C++: from a problem and a configuration to the text of a function for CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.rendered.kernel_call import Rendered
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.template import render_template
from kgen.templates.cpp.kernels.foreach import render_batch
from kgen.templates.cpp.kernels.loops import render_kernel
from kgen.templates.cpp.kernels.packing import render_packing
from kgen.templates.problem import Problem
from kgen.templates.registry import Language

__all__ = ["CPP"]


def _contraction(problems: Sequence[Problem], config: Config, symbol: str, _exact: bool) -> Rendered:
    """What eager rounds is always rounded."""
    return render_template(problems, config, symbol)


CPP = Language(
    _contraction,
    {
        "pointwise": render_kernel,
        "reduction": render_kernel,
        "scan": render_kernel,
        "column_reduction": render_kernel,
        "multi_tensor": render_batch,
        "packing": render_packing,
    },
)
