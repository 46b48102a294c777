"""Triton, and Gluon: from a problem and a configuration to the call of a GPU kernel."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.rendered.kernel_call import KernelCall
from kgen.templates.contract import Config
from kgen.templates.loop_contract import LoopProblem, LoopTemplate
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.template import render_template
from kgen.templates.triton.kernels.foreach import render_batch
from kgen.templates.triton.kernels.loops import render_kernel

__all__ = ["Triton"]


class Triton:
    """The language of kernels for GPUs."""

    def contraction(self, problems: Sequence[Problem], config: Config, symbol: str, exact: bool) -> KernelCall:
        """The kernel of a contraction, or of several that share a launch."""
        return render_template(problems, config, symbol, exact)

    def loops(self, problem: LoopProblem, template: LoopTemplate, config: Config, symbol: str) -> KernelCall:
        """The kernel of loops without a contraction."""
        write = render_batch if problem.kind == "multi_tensor" else render_kernel
        return write(problem, template, config, symbol)
