"""Triton, and Gluon: from a problem and a configuration to the call of a GPU kernel."""

from __future__ import annotations

from kgen.templates.registry import Language
from kgen.templates.triton.codegen.template import render_template
from kgen.templates.triton.kernels.foreach import render_batch
from kgen.templates.triton.kernels.loops import render_kernel

__all__ = ["TRITON"]

TRITON = Language(
    render_template,
    {
        "pointwise": render_kernel,
        "reduction": render_kernel,
        "scan": render_kernel,
        "column_reduction": render_kernel,
        "multi_tensor": render_batch,
    },
)
