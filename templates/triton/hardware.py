"""Single instructions of the GPU that Triton's own functions wrap in more: numbers below 2^-126 count as zero."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def approximate_exp2(x):
    """2^x of float32, exact to 2^-22."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_reciprocal(x):
    """1/x of float32, exact to 2^-23; 0 where that lies below 2^-126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
