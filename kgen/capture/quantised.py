"""Decompositions of `torch.ops.quantized_decomposed`: quantising and dequantising is elementwise work that fuses.

The operators exist once `torch.ao.quantization.fx._decomposed` is loaded, which kgen never does by itself. Where scales are
numbers or one for each channel, torch's own functions are the decompositions. Where they are tensors of one element, torch's
functions ask for the element's value, and a graph would break there: here it stays a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["MODULE", "decompositions_of_quantisation"]

MODULE = "torch.ao.quantization.fx._decomposed"


def decompositions_of_quantisation() -> Mapping[Any, Callable[..., Any]]:
    """Operator overload -> decomposition; none where nobody has loaded the operators."""
    module = sys.modules.get(MODULE)
    return {} if module is None else _table(module)


@cache
def _table(module: ModuleType) -> Mapping[Any, Callable[..., Any]]:
    ops = torch.ops.quantized_decomposed
    own = {
        ops.quantize_per_tensor.default: module.quantize_per_tensor,
        ops.dequantize_per_tensor.default: module.dequantize_per_tensor,
        ops.quantize_per_channel.default: module.quantize_per_channel,
        ops.dequantize_per_channel.default: module.dequantize_per_channel,
    }
    with_tensors = {
        ops.quantize_per_tensor.tensor: _quantise, ops.quantize_per_tensor.tensor2: _quantise,
        ops.dequantize_per_tensor.tensor: _dequantise, ops.dequantize_per_tensor.tensor2: _dequantise,
    }  # fmt: skip
    return {**own, **with_tensors}


def _quantise(x: Tensor, scale: Tensor, zero_point: Tensor, least: Any, most: Any, dtype: torch.dtype) -> Tensor:
    """``clamp(round(x / scale) + zero_point, least, most)`` by the factor that eager works out in float64."""
    factor = (1.0 / scale.to(torch.float64)).to(torch.float32).reshape(())
    codes = torch.round(x.to(torch.float32) * factor) + zero_point.to(torch.float32).reshape(())
    if isinstance(least, Tensor) or isinstance(most, Tensor):
        return torch.minimum(torch.maximum(codes, _bound(least, x)), _bound(most, x)).to(dtype)
    return torch.clamp(codes, least, most).to(dtype)


def _dequantise(
    x: Tensor, scale: Tensor, zero_point: Tensor, *_bounds_and_type: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``(x - zero_point) * scale`` in the type of the result; bounds and type of `x` are for whoever looks for patterns."""
    wide = x.to(out_dtype or torch.float32)
    return (wide - zero_point.to(wide.dtype).reshape(())) * scale.to(wide.dtype).reshape(())


def _bound(bound: Any, like: Tensor) -> Tensor:
    """A bound that may be a tensor of one element, as one."""
    made = bound if isinstance(bound, Tensor) else torch.full((), float(bound), device=like.device)
    return made.to(torch.float32).reshape(())
