"""Hand-written kernels in the form that the emitter makes, for tests of what is behind it."""

from __future__ import annotations

import re
from typing import Any

from kgen.build import triton
from kgen.rendered.gpu_kernel import TritonKernel

HEADER = """import triton
import triton.language as tl
from kgen.templates.triton.device import library as lib


@triton.jit
"""

ADD = """def add(x, y, out, n):
    i = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)
"""

DOUBLED = """def twice(x, n):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
"""

MATMUL = """def matmul(x, y, out, n):
    m, k, c = tl.arange(0, 128)[:, None], tl.arange(0, 64), tl.arange(0, 128)[None, :]
    row, column = tl.program_id(0) * 128, tl.program_id(1) * 128
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, n, 64):
        left = tl.load(x + (row + m) * n + start + k[None, :])
        right = tl.load(y + (start + k[:, None]) * n + column + c)
        total = tl.dot(left, right, total)
    tl.store(out + (row + m) * n + column + c, total)
"""
MATMUL_SIGNATURE = ("*bf16", "*bf16", "*fp32", "i32")

# Each program makes its descriptors in scratch memory.
COPY_BY_DESCRIPTOR = """def copy(x, out, rows):
    source = tl.make_tensor_descriptor(x, [rows, 64], [64, 1], [32, 64])
    target = tl.make_tensor_descriptor(out, [rows, 64], [64, 1], [32, 64])
    row = tl.program_id(0) * 32
    target.store([row, 0], source.load([row, 0]))
"""


# Instructions that touch memory which other kernels can see.
MEMORY = r"\b(LDG|LD\b|STG|ST\b|ATOM(?!S)|RED(?!UX)|UTMA|UBLK|CCTL|SULD|SUST|SURED)"


def waits_first(cubin: bytes) -> bool:
    """Whether a kernel's machine code waits for the kernel before, and touches no memory until then."""
    before, wait, _ = triton.dumped(cubin, "-sass").partition("ACQBULK")
    return bool(wait) and re.search(rf"{MEMORY}|\bBRA\b|\bEXIT\b", before) is None


def kernel(source: str, signature: tuple[str, ...], divisible: tuple[bool, ...] | None = None, **more: Any) -> TritonKernel:
    """The text after the decorator to a kernel; pointers are aligned unless `divisible` says otherwise."""
    name = source.removeprefix("def ").partition("(")[0]
    if divisible is None:
        divisible = tuple(p.startswith("*") for p in signature)
    return TritonKernel(name, HEADER + source, source, signature, divisible, **{"num_warps": 4, "num_stages": 3, **more})


def add(size: str = "i64", **more: Any) -> TritonKernel:
    return kernel(ADD, ("*fp32", "*fp32", "*fp32", size), **more)
