"""What templates of matrix products share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, group: tl.constexpr):
    """The row and the column of a program's tile: programs that run together share rows and columns, so that what they
    read stays in the L2 cache. `group` rows of tiles are walked column by column."""
    width = group * tiles_n
    first = (program // width) * group
    rows = min(tiles_m - first, group)
    return first + (program % width) % rows, (program % width) // rows


@triton.jit
def dot(left, right, acc, precision: tl.constexpr):
    """acc + left right, in acc's type."""
    return tl.dot(left, right, acc, input_precision=precision, out_dtype=acc.dtype)
