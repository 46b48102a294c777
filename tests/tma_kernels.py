"""Kernels that take TMA descriptors, and graphs of which they are the only kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import launch_kernels as tk
import torch
from codegen import plan_of
from op_case import capture

from kgen.host.assemble import Assembled, assemble
from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.rendered.tensor_map import TensorMap

COPY = """def copy(x, out):
    place = [tl.program_id(0) * {rows}, tl.program_id(1) * {columns}]
    out.store(place, x.load(place))
"""

# Descriptors, pointers and sizes in any order.
ADD = """def add(bias, x, columns, out, y):
    row, column = tl.program_id(0) * {rows}, tl.program_id(1) * {columns}
    at = column + tl.arange(0, {columns})
    more = tl.load(bias + at, mask=at < columns, other=0.0)
    out.store([row, column], x.load([row, column]) + y.load([row, column]) + more[None, :])
"""

# The sizes that come with a descriptor are the kernel's as well.
MATMUL = """def matmul(x, y, out):
    row, column = tl.program_id(0) * {rows}, tl.program_id(1) * {columns}
    total = tl.zeros([{rows}, {columns}], tl.float32)
    for start in range(0, x.shape[1], {depth}):
        total = tl.dot(x.load([row, start]), y.load([start, column]), total)
    out.store([row, column], total.to({result}))
"""

# A convolution's tile: one row and one column before the image, where there is nothing.
SHIFT = """def shift(x, out):
    tiles = tl.cdiv(x.shape[1], 4)
    image, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * 4
    column, channel = tl.program_id(1) * 8, tl.program_id(2) * 16
    out.store([image, row, column, channel], x.load([image, row - 1, column - 1, channel]))
"""

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8"}


def maps(graph: Any, names: Sequence[str], dtypes: Sequence[torch.dtype], blocks: Sequence[tuple[int, ...]]) -> list[TensorMap]:
    found = []
    for name, dtype, block in zip(names, dtypes, blocks, strict=True):
        buffer = graph.buffers[name]
        strides = buffer.strides or ix.contiguous_strides(buffer.sizes)
        found.append(TensorMap(name, _NAMES[dtype], block, buffer.sizes, strides))
    return found


def blocks_of(sizes: Sequence[Expr], block: Sequence[int]) -> tuple[Expr, Expr, Expr]:
    rows, columns = (ix.floordiv(size + (b - 1), b) for size, b in zip(sizes, block, strict=True))
    return rows, columns, ix.ONE


def copy_call(names: Sequence[str], graph: Any, dtypes: Sequence[torch.dtype], block: tuple[int, int] = (32, 64)) -> KernelCall:
    x, out = maps(graph, names, dtypes, [block] * 2)
    source = COPY.format(rows=block[0], columns=block[1])
    kernel = tk.kernel(source, (x.type, out.type))
    return KernelCall("", (), (), blocks_of(x.sizes, block), kernel, (x, out))


def tail_call(names: Sequence[str], graph: Any, dtypes: Sequence[torch.dtype]) -> KernelCall:
    """Copies all but the first 16 columns: a descriptor of a part of a buffer."""
    made = copy_call(names, graph, dtypes)
    x, out = made.maps
    return replace(made, maps=(replace(x, sizes=out.sizes, offset=16 * x.strides[1]), out))


def shift_call(names: Sequence[str], graph: Any, dtypes: Sequence[torch.dtype]) -> KernelCall:
    x, out = maps(graph, names, dtypes, [(1, 4, 8, 16)] * 2)
    images, rows, columns, channels = x.sizes
    grid = (images * ix.floordiv(rows + 3, 4), ix.floordiv(columns + 7, 8), ix.floordiv(channels + 15, 16))
    return KernelCall("", (), (), grid, tk.kernel(SHIFT, (x.type, out.type)), (x, out))


def add_call(names: Sequence[str], graph: Any, dtypes: Sequence[torch.dtype]) -> KernelCall:
    x, y, bias, out = names
    block = (16, 32)
    x_map, y_map, out_map = maps(graph, (x, y, out), [dtypes[0]] * 3, [block] * 3)
    signature = ("*" + _NAMES[dtypes[0]], x_map.type, "i32", out_map.type, y_map.type)
    kernel = tk.kernel(ADD.format(rows=16, columns=32), signature)
    [columns] = [atom.name for atom in ix.free_atoms(x_map.sizes[1])]
    return KernelCall("", (bias,), (columns,), blocks_of(x_map.sizes, block), kernel, (x_map, out_map, y_map))


def matmul_call(
    names: Sequence[str], graph: Any, dtypes: Sequence[torch.dtype], tile: tuple[int, int, int] = (64, 64, 32), **options: int
) -> KernelCall:
    rows, columns, depth = tile
    found = maps(graph, names, dtypes, [(rows, depth), (depth, columns), (rows, columns)])
    result = {"fp32": "tl.float32", "fp16": "tl.float16", "bf16": "tl.bfloat16"}[found[2].dtype]
    source = MATMUL.format(rows=rows, columns=columns, depth=depth, result=result)
    kernel = replace(tk.kernel(source, tuple(item.type for item in found)), **options)
    return KernelCall("", (), (), blocks_of(found[2].sizes, tile[:2]), kernel, tuple(found))


def copied(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def tail(x: torch.Tensor) -> torch.Tensor:
    return x[:, 16:] + 1


def shifted(x: torch.Tensor) -> torch.Tensor:
    """What `shift_call` computes of images with channels last."""
    return torch.nn.functional.pad(x, (0, 0, 1, 0, 1, 0))[:, :-1, :-1]


def added(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + y + bias


def matmul_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Reads and makes what a matmul does, as a pointwise kernel."""
    return x[:, :1] + y[:1, :]


def assembled(
    like: Callable[..., torch.Tensor], call: Callable[..., KernelCall], args: Sequence[torch.Tensor], *, dynamic: bool = False,
    interpret: bool = False,
) -> Assembled:  # fmt: skip
    """The program of `like`, whose one kernel is the one that `call` gives."""
    made_plan = plan_of(capture(like, args, "symbolic" if dynamic else "fake"))
    [step] = made_plan.kernels
    [out] = {name for statement in step.statements for name in statement.outs}
    names = [item.buffer for item in made_plan.graph.inputs if item.buffer is not None]
    dtypes = [arg.dtype for arg in args]
    made = call([*names, out], made_plan.graph, [*dtypes, made_plan.graph.buffers[out].dtype])
    return assemble(made_plan, {step.name: made}, interpret)


def kernel_of(like: Callable[..., torch.Tensor], call: Callable[..., KernelCall], args: Sequence[torch.Tensor]) -> TritonKernel:
    [kernel] = assembled(like, call, args).launches
    return kernel
