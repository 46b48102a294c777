"""What a GPU kernel's launch and its compiler are told about it."""

from __future__ import annotations

from kgen.ir import nodes as ir
from kgen.rendered.gpu_kernel import EARLY

__all__ = ["ALIGNMENT", "aligned", "compile_options"]

# Alignment, in bytes, of what torch allocates and of what the host makes sure of for inputs.
ALIGNMENT = 16


def compile_options(checks: bool, contracts: bool = False) -> tuple[tuple[str, object], ...]:
    """For Triton's compiler; `checks`: the kernel traps where an index is out of range; `contracts`: a*b+c may be rounded once,
    where eager rounds twice. All kernels wait for the one before (`lib.wait_for_previous`), so they may be launched early."""
    plain = (("enable_fp_fusion", contracts), EARLY)
    return (*plain, ("debug", True), ("sanitize_overflow", False)) if checks else plain


def aligned(buffer: ir.Buffer) -> bool:
    """Whether the first element is at a multiple of ALIGNMENT: an own storage does, the host sees to inputs."""
    offset = buffer.offset if isinstance(buffer.offset, int) else buffer.offset.as_int()
    return offset is not None and offset * buffer.dtype.itemsize % ALIGNMENT == 0
