"""Which bits of an element's place in its row are registers, lanes and warps, in the layout that Triton gives a tile."""

from __future__ import annotations

from kgen.ir import nodes as ir
from kgen.ir.plan import Tiling
from kgen.ir.vectors import VECTOR, widest_vector


def network_arguments(tiling: Tiling, graph: ir.Graph) -> str:
    """The last arguments of the library's functions that sort: bits of indices, how many of the lowest are registers,
    and how many above these are lanes and warps. A wrong guess costs time alone."""
    blocks = tiling.blocks
    levels, threads = _bits(blocks.r), _bits(32 * blocks.warps)
    vector = min(widest_vector(tiling.kernel, graph), blocks.r)
    if vector == 1 and blocks.x > 1:  # rows side by side: the first lanes have neighbouring rows
        return f"{levels}, 0, {max(0, min(levels, threads - _bits(max(1, blocks.x * 4 // VECTOR))))}"
    low = _bits(vector)
    return f"{levels}, {low}, {min(levels - low, threads)}"


def _bits(power: int) -> int:
    return power.bit_length() - 1
