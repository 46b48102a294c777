"""What kernels link of the matmul engine (`include/kgen/matmul.h`, `attention.h`, `attention_backward.h`): loops, compiled for
two types."""

from __future__ import annotations

__all__ = ["declaration", "objects"]

# By what a kernel computes: loops whose objects it links, those that take longest first.
LOOPS = {
    "matmul": ("FEW_ROWS", "PACKING", "MATMUL"),
    "attention": ("ATTENTION", "PACKING"),
    "attention_backward": ("ATTENTION_BACKWARD", "PACKING"),
}
# Loops of which there is one object for each type of elements.
OF_ELEMENTS = ("FEW_ROWS", "PACKING")


def declaration(left: str, right: str, kind: str = "matmul") -> str:
    """The line by which a unit leaves the loops of matmuls of these types to the objects that it links."""
    return f"KGEN_{kind.upper()}({left}, {right})"


def objects(left: str, right: str, kind: str = "matmul") -> tuple[str, ...]:
    """The texts of these objects, each once."""
    return tuple(text for part in LOOPS[kind] for text in _texts(part, left, right))


def _texts(part: str, left: str, right: str) -> list[str]:
    if part in OF_ELEMENTS:
        return [f"KGEN_LOOPS_OF_{part}(, {left}, {right}, {kind})" for kind in dict.fromkeys((left, right))]
    return [f"KGEN_LOOPS_OF_{part}(, {left}, {right})"]
