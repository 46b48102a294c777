"""What kernels link of the matmul engine (`include/kgen/matmul.h`): its loops, compiled once a machine for two types."""

from __future__ import annotations

__all__ = ["declaration", "objects"]


def declaration(left: str, right: str) -> str:
    """The line by which a unit leaves the loops of products of these types to the objects that it links."""
    return f"KGEN_PRODUCT({left}, {right})"


def objects(left: str, right: str) -> tuple[str, ...]:
    """The texts of these objects, each once, those that take longest first."""
    kinds = dict.fromkeys((left, right))
    loops = [f"KGEN_LOOPS_OF_{part}(, {left}, {right}, {kind})" for part in ("FEW_ROWS", "PACKING") for kind in kinds]
    return (*loops, f"KGEN_LOOPS_OF_PRODUCT(, {left}, {right})")
