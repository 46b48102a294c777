"""Hand-written kernels in the form that the emitter makes, for tests of what is behind it."""

from __future__ import annotations

from typing import Any

from kgen.build.gpu_kernel import TritonKernel

HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

ADD = """def add(x, y, out, n):
    i = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    m = i < n
    tl.store(out + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)
"""


def kernel(source: str, signature: tuple[str, ...], divisible: tuple[bool, ...] | None = None, **more: Any) -> TritonKernel:
    """The text after the decorator to a kernel; pointers are aligned unless `divisible` says otherwise."""
    name = source.removeprefix("def ").partition("(")[0]
    divisible = tuple(p.startswith("*") for p in signature) if divisible is None else divisible
    return TritonKernel(name, HEADER + source, source, signature, divisible, **{"num_warps": 4, "num_stages": 3, **more})


def add(size: str = "i64", **more: Any) -> TritonKernel:
    return kernel(ADD, ("*fp32", "*fp32", "*fp32", size), **more)
