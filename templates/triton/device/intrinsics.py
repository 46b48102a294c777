"""Instructions of the GPU that Triton's own functions wrap in more, or do not use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def approximate_exp2(x):
    """2^x of float32, exact to 2^-22; numbers below 2^-126 count as zero."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_reciprocal(x):
    """1/x of float32, exact to 2^-23; 0 where that is below 2^-126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def approximate_rsqrt(x):
    """1/sqrt(x) of float32, exact to 2^-22, also of subnormal numbers."""
    return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def rounded_to_bfloat16(x):
    """float32 rounded to the nearest bfloat16, two at a time: one by one the conversion is as slow as a special function.
    Triton takes no tile of a single element, as one row by one column is, two at a time."""
    if x.numel == 1:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f", [x], tl.float32, True, 2,
        )  # fmt: skip


@triton.jit
def rounded_to_tf32(x):
    """float32 rounded to the nearest TF32 number, the larger one of two that are as near. The matrix units cut the last digits
    off, so that whatever they multiply would come out too small."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def finished(acc):
    """`acc` itself, of 32-bit numbers, once it is there. A Hopper GPU reads the left operand of an asynchronous multiplication
    out of registers while the program goes on, and neither Triton nor the assembler keeps these registers until it has
    (https://github.com/triton-lang/triton/issues/9433): the next tile overwrites them. To ask for the result is to wait."""
    return tl.inline_asm_elementwise("", "=r,0", [acc], acc.dtype, True, 1)
