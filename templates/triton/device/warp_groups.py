"""What templates in Gluon call, as ``ws.name(...)``: warps with parts of their own, barriers between them, stages of tiles.

Gluon (`triton.experimental.gluon`) is the level of Triton at which layouts and shared memory are written out, and warps of one
program may run different functions. Functions of `library` can be called from there, too. Imports Triton only, as that does.
"""

from __future__ import annotations

import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kgen.templates.triton.device.integers import to_halves
from kgen.templates.triton.device.intrinsics import approximate_exp2


@gluon.constexpr_function
def accumulator(columns, warps, size, most=256):
    """How warps hold a tile of `columns` that they add up: each group of four has 64 rows of it at a time. `size` are the bytes
    of a factor, and `most` the columns of the widest instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, min(columns, most), 32 // size])


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr = 1):
    """Barriers that so many arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(count):
        mbarrier.init(made.index(k), count=arrivals)
    return made


@gluon.jit
def retire(made, count: gl.constexpr):
    """Takes `count` barriers back, when no warp group uses them any more. PTX demands it before their memory is used otherwise;
    up to here it is theirs."""
    for k in gl.static_range(count):
        mbarrier.invalidate(made.index(k))


@gluon.jit
def counting(length: gl.constexpr):
    """The numbers below a length, spread over the warps that run this."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, length, layout)


@gluon.jit
def share(tile, group: gl.constexpr, height: gl.constexpr):
    """The rows of a tile in shared memory that belong to a warp group."""
    return tile.slice(group * height, height, 0)


@gluon.jit
def ones(rows: gl.constexpr, kind: gl.constexpr, warps: gl.constexpr):
    """A tile of ones in shared memory: multiplied by it, a tile's rows are added up, 16 times each."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])
    made = gl.allocate_shared_memory(kind, [rows, 16], gl.NVMMASharedLayout.get_default_for([rows, 16], kind))
    made.store(gl.full([rows, 16], 1.0, kind, layout))
    fence_async_shared()
    return made


@gluon.jit
def await_free(free, stage, turn):
    """Waits until the stage's tiles of the turn before have been multiplied; in the first turn nothing is waited for."""
    mbarrier.wait(free.index(stage), (turn & 1) ^ 1)


@gluon.jit
def await_ready(ready, stage, turn):
    """Waits until the stage's tiles are there."""
    mbarrier.wait(ready.index(stage), turn & 1)


@gluon.jit
def release(free, stage):
    """The stage's tiles have been multiplied."""
    mbarrier.arrive(free.index(stage))


@gluon.jit
def release_read(free, stage):
    """The stage's tiles are in registers, and TMA may write there."""
    fence_async_shared()
    release(free, stage)


@gluon.jit
def pingpong_wait(order, group: gl.constexpr, count, groups: gl.constexpr):
    """Of warp groups that ping-pong, waits until the one before has asked for all MMAs of the tile before; the first tile's
    group waits for nobody. `count`: the group's tiles before this one."""
    if groups > 1:
        mbarrier.wait(order.index(group), (count & 1) ^ (0 if group > 0 else 1))


@gluon.jit
def pingpong_arrive(order, group: gl.constexpr, groups: gl.constexpr):
    """All MMAs of this tile have been asked for."""
    if groups > 1:
        mbarrier.arrive(order.index((group + 1) % groups))


@gluon.jit
def expect(ready, stage, count: gl.constexpr):
    """`count` bytes will make the stage ready."""
    mbarrier.expect(ready.index(stage), count)


@gluon.jit
def fetch(descriptor, origin, ready, ring, stage, barrier):
    """Issues the TMA load of a tile into a stage of a ring, which the barrier of that number tracks."""
    tma.async_copy_global_to_shared(descriptor, origin, ready.index(barrier), ring.index(stage))


@gluon.jit
def begin(rows: gl.constexpr, columns: gl.constexpr, kind: gl.constexpr, layout: gl.constexpr):
    """A sum of products, none so far."""
    return warpgroup_mma_init(gl.zeros([rows, columns], kind, layout))


@gluon.jit
def multiply(left, right, acc):
    """acc + left right, which will be there after a `settle`."""
    return warpgroup_mma(left, right, acc, is_async=True)


@gluon.jit
def settle(acc, pending: gl.constexpr):
    """Waits until no more than `pending` multiplications are under way."""
    return warpgroup_mma_init(warpgroup_mma_wait(pending, deps=(acc,)))


@gluon.jit
def total(acc):
    """The sum, when all of it is there."""
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def write(descriptor, origin, value, staging, pending: gl.constexpr):
    """Stores a tile by TMA. `staging`, which may have leading dimensions of length 1, is free when all but the
    last `pending` stores have read theirs."""
    tma.store_wait(pending)
    send(descriptor, origin, value, staging)


@gluon.jit
def send(descriptor, origin, value, staging):
    """The same with `staging` known to be free."""
    if len(staging.shape) > 2:
        staging.reshape(value.shape).store(value)
    else:
        staging.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, origin, staging)


@gluon.jit
def written():
    """Waits until all that was stored has left shared memory."""
    tma.store_wait(0)


@gluon.constexpr_function
def registers(warps):
    """How warps hold a tile whose columns they share, of which matrix units multiply registers."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.constexpr_function
def doublings(first, end):
    """`first`, twice that, and so on, below `end`."""
    return [first << k for k in range((end // first).bit_length() - 1)]


@gluon.constexpr_function
def rows(height, columns, warps):
    """How warps hold full rows that `dot_in_chunks` has made: a thread has eight neighbours, then those of the row eight
    further down, then of what is 32 columns for each warp further on, or 16 rows."""
    own = [[0, 1], [0, 2], [0, 4], [8, 0]]
    own += [[0, at] for at in doublings(32 * warps, columns)] + [[at, 0] for at in doublings(16, height)]
    shares = [[0, at] for at in doublings(32, 32 * warps)]
    return gl.DistributedLinearLayout(own, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], shares, [], [height, columns])


@gluon.jit
def dot_in_chunks(left, right, columns: gl.constexpr, warps: gl.constexpr):
    """The matmul of a tile and all of an operand, chunk by chunk of its rows, the columns of the result, which lie `by_eights`
    (`templates/triton/codegen/tma_layout.py`): naming what each thread holds puts them in order."""
    factor = left.load(gl.DotOperandLayout(0, registers(warps), 2))
    return gl.convert_layout(_chunks(factor, right, columns, warps, 0), rows(left.shape[0], columns, warps))


@gluon.jit
def _chunks(left, right, columns: gl.constexpr, warps: gl.constexpr, first: gl.constexpr):
    height: gl.constexpr = left.shape[0]
    if columns > 32 * warps:
        half: gl.constexpr = columns // 2
        one = _chunks(left, right, half, warps, first)
        other = _chunks(left, right, half, warps, first + half // (32 * warps))
        return gl.join(one, other).permute([0, 2, 1]).reshape([height, columns])
    else:
        factor = right.index(first).reshape([columns, left.shape[1]]).permute((1, 0))
        operand = factor.load(gl.DotOperandLayout(1, registers(warps), 2))
        made = mma_v2(left, operand, gl.zeros([height, columns], gl.float32, registers(warps)))
        return made.reshape([height, 4, warps, 4, 2]).permute([0, 2, 3, 1, 4]).reshape([height, columns])


@gluon.jit
def by_warp(tile, warps: gl.constexpr):
    """A tile whose threads hold it as `rows` says, with what each warp has of a row by itself: rows, warps, elements."""
    height: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    apart = tile.reshape([height, columns // (32 * warps), warps, 32]).permute([0, 2, 1, 3])
    return apart.reshape([height, warps, columns // warps])


@gluon.constexpr_function
def meeting(height, warps):
    """How threads that hold the same rows as in `rows` hold something of each warp for each of these."""
    own = [[0, at] for at in doublings(1, warps)] + [[at, 0] for at in doublings(8, height)]
    shares = [[0, 0] for _ in doublings(1, warps)]
    return gl.DistributedLinearLayout(own, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], shares, [], [height, warps])


@gluon.jit
def of_warps(parts, warps: gl.constexpr):
    """What each warp has of each row, for all of them."""
    return gl.convert_layout(parts, meeting(parts.shape[0], warps))


@gluon.jit
def of_rows(folded, layout: gl.constexpr):
    """A number for each row of a tile."""
    return gl.convert_layout(folded, gl.SliceLayout(1, layout))


@gluon.jit
def chosen(byte, a, b):
    """`a` where a byte is not 0, else `b`, of float32: of four bytes at a time each is tested where it is."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .b32 byte;
        and.b32 byte, $4, 0xff;
        setp.ne.b32 one, byte, 0;
        selp.b32 $0, $5, $9, one;
        and.b32 byte, $4, 0xff00;
        setp.ne.b32 one, byte, 0;
        selp.b32 $1, $6, $10, one;
        and.b32 byte, $4, 0xff0000;
        setp.ne.b32 one, byte, 0;
        selp.b32 $2, $7, $11, one;
        and.b32 byte, $4, 0xff000000;
        setp.ne.b32 one, byte, 0;
        selp.b32 $3, $8, $12, one;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [byte, a, b], tl.float32, True, 4,
    )  # fmt: skip


@gluon.constexpr_function
def in_rows(warps):
    """How warps hold a tile so that each stores neighbours of one row."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def left_operand(columns, warps):
    """How warps hold what is multiplied out of their registers by a matrix of 16-bit numbers that has so many columns."""
    return gl.DotOperandLayout(0, accumulator(columns, warps, 2), 2)


@gluon.jit
def scores(left, right, warps: gl.constexpr):
    """left right, which will be there after a `settle`. Nothing is added to it."""
    rows: gl.constexpr = left.shape[0]
    columns: gl.constexpr = right.shape[1]
    nothing = gl.zeros([rows, columns], gl.float32, accumulator(columns, warps, 2))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def settled(acc, pending: gl.constexpr):
    """The sum, when no more than `pending` multiplications are under way that were asked for later."""
    return warpgroup_mma_wait(pending, deps=(acc,))


@gluon.jit
def weights(p, kind: gl.constexpr, columns: gl.constexpr, warps: gl.constexpr):
    """A tile of weights as the left operand of a matrix of that type with so many columns. Rounded in pairs: the assembler
    joins two halves the other way round, and exchanges them in each turn of a loop that has them from the turn before."""
    narrow = to_halves(p, kind) if p.dtype == gl.float32 else p.to(kind)
    return gl.convert_layout(narrow, left_operand(columns, warps))


@gluon.jit
def rescaled(acc, factors):
    """The rows of a sum, each times its factor."""
    layout: gl.constexpr = acc.type.layout
    return acc * of_rows(factors, layout)[:, None]


@gluon.jit
def shift_of(highest, scale: gl.constexpr, exact: gl.constexpr = False):
    """What is subtracted of scores in powers of two: `scale` times the highest of a row, nothing of one that is -inf so far. Of
    `exact` powers it is the highest score itself."""
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    if exact:
        return shift
    else:
        return shift * scale


@gluon.jit
def power_of(numbers, shift, scale: gl.constexpr, exact: gl.constexpr = False):
    """2^(scale * numbers - shift), rounded once before the power is taken. An `exact` one is 2^(scale * (numbers - shift)): the
    highest number's is 1, however large it is."""
    if exact:
        return approximate_exp2((numbers - shift) * scale)
    else:
        return approximate_exp2(gl.fma(numbers, scale, -shift))


# ---- programs that add tiles up in memory, one behind the other --------------------------------------------------------------


@gluon.jit
def tiles(count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, kind: gl.constexpr):
    """Shared memory for so many tiles, as matrix units read them."""
    return gl.allocate_shared_memory(kind, [count, rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], kind))


@gluon.jit
def ticket(counter):
    """The number of programs that have begun before this one, of a counter that was 0: who has a smaller one runs already, so
    that it may be waited for."""
    return tl.atomic_add(counter, 1, sem="relaxed")


@builtin
def reduce_tile(descriptor, origin, tile, _semantic=None):
    """Adds a tile of shared memory to one in memory by TMA (`cp.reduce.async.bulk` of PTX)."""
    coordinates = _semantic._convert_to_ir_values(origin, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle)


@gluon.jit
def put_tile(descriptor, origin, tile):
    """Stores a tile of shared memory by TMA."""
    tma.async_copy_shared_to_global(descriptor, origin, tile)


@gluon.jit
def landed():
    """Waits until all that this warp has stored or added by TMA is in memory, for whoever is told so by `publish`."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [tl.full([], 0, tl.int32)], tl.int32, False, 1
    )


@gluon.jit
def await_number(pointer, number):
    """Waits until the number in memory is at least this one; what was in memory before it was published is seen then."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred there;
        .reg .b32 seen;
        again:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.ge.s32 there, seen, $2;
        @!there bra again;
        mov.u32 $0, seen;
        }""",
        "=r,l,r", [pointer, number], tl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def publish(pointer, number):
    """Says to other programs that this warp's tile is in memory: one of its threads has waited for that."""
    tl.inline_asm_elementwise(
        "bar.warp.sync -1; fence.proxy.async; st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [pointer, number], tl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def summed(memory, row, rows: gl.constexpr, columns: gl.constexpr, there, layout: gl.constexpr):
    """A tile of rows of what was added up, or zeros where nothing was; the L1 cache may have older numbers."""
    along = row + gl.arange(0, rows, gl.SliceLayout(1, layout))
    across = gl.arange(0, columns, gl.SliceLayout(0, layout))
    pointers = memory + along.to(tl.int64)[:, None] * columns + across[None, :]
    return gl.load(pointers, mask=gl.full([rows, columns], 1, tl.int1, layout) & there, other=0.0, cache_modifier=".cg")
