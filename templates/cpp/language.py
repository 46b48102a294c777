"""C++: from a problem and a configuration to the text of a function for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kgen.rendered.kernel_call import Rendered
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.template import render_template
from kgen.templates.cpp.kernels.foreach import render_batch
from kgen.templates.cpp.kernels.loops import render_kernel
from kgen.templates.cpp.kernels.packing import render_packing
from kgen.templates.loop_contract import LoopProblem, LoopTemplate
from kgen.templates.problem import Problem

__all__ = ["Cpp"]

Write = Callable[[LoopProblem, LoopTemplate, Config, str], Rendered]
OTHER_KINDS: dict[str, Write] = {"multi_tensor": render_batch, "packing": render_packing}


class Cpp:
    """The language of kernels for CPUs."""

    def contraction(self, problems: Sequence[Problem], config: Config, symbol: str, exact: bool) -> Rendered:
        """The kernel of a contraction, or of several that share an operand. What eager rounds is always rounded."""
        return render_template(problems, config, symbol)

    def loops(self, problem: LoopProblem, template: LoopTemplate, config: Config, symbol: str) -> Rendered:
        """The kernel of loops without a contraction."""
        return OTHER_KINDS.get(problem.kind, render_kernel)(problem, template, config, symbol)
