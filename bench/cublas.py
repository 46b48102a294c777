"""cuBLAS called directly, through cupy: a function's matmuls as ``cublasGemmEx``, everything else as torch's kernels.

cupy arrays need not hold what torch has: the call takes addresses and the numbers by which CUDA names types, bfloat16 among
them, and writes into torch's memory. It takes no 8-bit floats with scales, and no epilogue: a bias is a kernel of its own. cupy
refuses to be recorded in a CUDA graph ("calling cuBLAS API during stream capture is currently unsupported").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[..., Any]
aten = torch.ops.aten
# CUDA's numbers of types (cudaDataType_t), of how sums are kept (cublasComputeType_t), and of "you choose" (cublasGemmAlgo_t).
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
IN_FLOAT32, IN_TF32 = 68, 77
ANY_ALGORITHM = -1
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)  # read by cuBLAS when it is called


class Cublas:
    """Matmuls by a library with cupy's interface of cuBLAS.

    It stores columns, so that the rows of a @ b are the columns of what it is asked for: b' @ a'."""

    def __init__(self, library: Any, handle: Callable[[], int]) -> None:
        self.library, self.handle = library, handle

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = _in_lines(a), _in_lines(b)
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        self.library.gemmEx(
            self.handle(), _flip(b), _flip(a), b.shape[1], a.shape[0], a.shape[1], ONE.ctypes.data, *_matrix(b), *_matrix(a),
            ZERO.ctypes.data, *_matrix(out), _sums(a), ANY_ALGORITHM,
        )  # fmt: skip
        return out

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = _in_lines(a), _in_lines(b)
        out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
        self.library.gemmStridedBatchedEx(
            self.handle(), _flip(b), _flip(a), b.shape[2], a.shape[1], a.shape[2], ONE.ctypes.data, *_matrix(b), b.stride(0),
            *_matrix(a), a.stride(0), ZERO.ctypes.data, *_matrix(out), out.stride(0), out.shape[0], _sums(a), ANY_ALGORITHM,
        )  # fmt: skip
        return out

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.mm(a, b) + bias

    def inside(self, fn: Function, args: Sequence[Tensor]) -> Function:
        """`fn` with its matmuls made here; ValueError where it has none that cublasGemmEx takes."""
        ours = {aten.mm.default: self.mm, aten.bmm.default: self.bmm, aten.addmm.default: self.addmm}
        graph = make_fx(fn, tracing_mode="fake")(*args)
        found = [node for node in graph.graph.nodes if node.target in ours and not node.kwargs]
        if not found:
            raise ValueError("it has no matmul that cublasGemmEx takes")
        for node in found:
            node.target = ours[node.target]
        graph.recompile()
        return graph


def through_cupy(fn: Function, args: Sequence[Tensor]) -> Function:
    """`fn` with its matmuls made by cuBLAS on torch's stream. ImportError without cupy, ValueError without a GPU."""
    try:
        import cupy
        from cupy_backends.cuda.libs import cublas
    except ImportError as cause:
        raise ImportError(f"cupy is not installed: pip install cupy-cuda13x ({cause})") from cause
    if not args[0].is_cuda:
        raise ValueError("cuBLAS takes tensors on a GPU")
    changed = Cublas(cublas, cupy.cuda.device.get_cublas_handle).inside(fn, args)

    def on_this_stream(*given: Tensor) -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return changed(*given)

    return on_this_stream


def _in_lines(t: Tensor) -> Tensor:
    """With rows or columns whose elements are neighbours: other matrices cuBLAS does not take."""
    return t if t.stride(-1) == 1 or t.stride(-2) == 1 else t.contiguous()


def _flip(t: Tensor) -> int:
    """cublasOperation_t: rows are columns to cuBLAS, so that what is stored by columns has to be turned around."""
    return 0 if t.stride(-1) == 1 else 1


def _matrix(t: Tensor) -> tuple[int, int, int]:
    """Address, type, and distance of neighbouring rows or columns, of which there may be one."""
    along, length = (t.stride(-2), t.shape[-1]) if t.stride(-1) == 1 else (t.stride(-1), t.shape[-2])
    return t.data_ptr(), TYPES[t.dtype], max(along, length)


def _sums(t: Tensor) -> int:
    return IN_TF32 if t.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else IN_FLOAT32
