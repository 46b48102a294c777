"""What templates of matmuls call: the order of tiles, the multiplication, parts of a result's tile, a check."""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.intrinsics import finished


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
    """acc + left right, in acc's type. `precision` is the kernel's PRECISION: "ieee" or "tf32", with "+wait" where a computed
    operand may be multiplied out of registers."""
    if precision == "ieee+wait":
        return waited(left, right, acc, "ieee")
    elif precision == "tf32+wait":
        return waited(left, right, acc, "tf32")
    else:
        return tl.dot(left, right, acc, input_precision=precision, out_dtype=acc.dtype)


@triton.jit
def waited(left, right, acc, precision: tl.constexpr):
    """The matmul once it is there, where a GPU multiplies tiles of as many rows on its own."""
    total = tl.dot(left, right, acc, input_precision=precision, out_dtype=acc.dtype)
    return finished(total) if left.shape[0] >= 64 else total


@triton.jit
def dot_sliced_k(left, right, acc, precision: tl.constexpr):
    """acc[s, m, n] + the sum over a slice of k of left[m, k] right[n, k]. Where there are as many warps as slices each has one,
    and both operands come to its registers. No GPU multiplies several slices on its own, so nothing is waited for."""
    shares: tl.constexpr = acc.shape[0]
    part: tl.constexpr = left.shape[1] // shares
    a = tl.permute(tl.reshape(left, (left.shape[0], shares, part)), (1, 0, 2))
    b = tl.permute(tl.reshape(right, (right.shape[0], shares, part)), (1, 2, 0))
    return dot(a, b, acc, precision)


@triton.jit
def no_sums(rows: tl.constexpr, kind: tl.constexpr):
    """What `add_rows` begins with."""
    return tl.zeros([rows, 16], kind)


@triton.jit
def add_rows(tile, sums, precision: tl.constexpr):
    """`sums` and each row of `tile` added up, as a matmul with ones: matrix units read the tile in place, while a
    reduction would bring it to registers, and wait for the matmuls before. Every column of the result is the same."""
    ones = tl.full([tile.shape[1], sums.shape[1]], 1.0, tl.float32).to(tile.dtype)
    return dot(tile, ones, sums, precision)


@triton.jit
def sums_of(sums):
    """One column of `add_rows`."""
    return tl.max(sums, 1)


@triton.jit
def column_halves(x):
    """The left and the right half of a tile's columns."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def column_subtiles(x, parts: tl.constexpr):
    """The columns of a tile in 1, 2 or 4 parts, from left to right: an epilogue that takes them one after the other needs fewer
    registers, and less shared memory to store from."""
    if parts == 1:
        return (x,)
    elif parts == 2:
        left, right = column_halves(x)
        return left, right
    else:
        left, right = column_halves(x)
        first, second = column_halves(left)
        third, fourth = column_halves(right)
        return first, second, third, fourth


@triton.jit
def trap_unless(inside):
    """Ends the kernel where an index is out of range. An assertion would say so, but calls a function, and then the compiler
    waits for each of the asynchronous multiplications before it starts the next one."""
    test: tl.constexpr = "{ .reg .pred bad; setp.eq.b32 bad, $1, 0; @bad trap; mov.b32 $0, $1; }"
    tl.inline_asm_elementwise(test, "=r,r", [inside.to(tl.int32)], tl.int32, False, 1)
