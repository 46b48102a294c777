"""What keeps branches on a program's number branches of the machine, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def branch_constant(value: tl.constexpr, program):
    """`value` as an int32 that belongs to its branch: text of its own, with an effect for all that the compiler knows.

    Branches that only choose between pointers look equal to the compiler. It joins them, and then a program loads the pointers
    of all branches and selects: thousands of instructions, and registers spilled, for what this makes one load a pointer."""
    return tl.inline_asm_elementwise(f"mov.b32 $0, {value};", "=r,r", [program], tl.int32, False, 1)
