"""Operators on lists of tensors: the elementwise rule applied to each position; the scheduler may share launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.lowering.activation import RULES as ACTIVATION
from kgen.lowering.builder import Builder
from kgen.lowering.concat import joined
from kgen.lowering.logic import RULES as LOGIC
from kgen.lowering.pointwise import RULES as POINTWISE
from kgen.lowering.pointwise import addcdiv, addcmul, fill, identity, where
from kgen.lowering.reduction import RULES as REDUCTION
from kgen.lowering.reduction import amax
from kgen.lowering.special import RULES as SPECIAL
from kgen.lowering.tensor import Tensor, broadcast, convert, reindex, reshape

List = Sequence[Any]


def each(rule: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Applies a rule at every position; an argument that is no list is shared by all."""

    def on_list(b: Builder, *args: Any, **kwargs: Any) -> list[Tensor]:
        lists = [a for a in args if isinstance(a, list | tuple)]
        results = []
        for k in range(len(lists[0])):
            picked = [a[k] if isinstance(a, list | tuple) else a for a in args]
            results.append(rule(b, *picked, **kwargs))
        return results

    return on_list


def with_scalars(rule: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """addcmul and addcdiv with their factors in one vector."""

    def on_list(b: Builder, x: List, y: List, z: List, scalars: Tensor) -> list[Tensor]:
        def factor(k: int) -> Tensor:
            return reindex(scalars, (), lambda: [ix.constant(k)])

        return [_scaled(rule, b, (x[k], y[k], z[k]), factor(k)) for k in range(len(x))]

    return on_list


def _scaled(rule: Callable[..., Tensor], b: Builder, parts: tuple[Tensor, Tensor, Tensor], factor: Tensor) -> Tensor:
    x, y, z = parts
    scaled = POINTWISE["aten.mul"](b, y, convert(factor, y.dtype))
    return rule(b, x, scaled, z)


def copy(b: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return broadcast(convert(source, x.dtype), x.sizes)


def unscale(b: Builder, gradients: List, found: Tensor, scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradients times `scale`, and 1 in place of `found` where an element of theirs is infinite or NaN."""
    if not gradients:
        return [], found
    flags = [_is_any_infinite(b, one) for one in gradients]
    (seen,) = b.reduce("max", joined(b, [reshape(flag, (1,)) for flag in flags], 0), [0])
    none = broadcast(LOGIC["aten.logical_not"](b, seen), found.sizes)
    found = where(b, none, found, fill(b, found, 1))
    return [_unscaled(b, one, scale) for one in gradients], found


def _is_any_infinite(b: Builder, x: Tensor) -> Tensor:
    """1 where an element is infinite or NaN, else 0."""
    flags = convert(LOGIC["aten.logical_not"](b, LOGIC["aten.isfinite"](b, x)), torch.float32)
    return b.reduce("max", flags, range(x.rank))[0] if x.rank else flags


def _unscaled(b: Builder, x: Tensor, scale: Tensor) -> Tensor:
    """Rounded once: 16-bit floats are multiplied in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return convert(POINTWISE["aten.mul"](b, convert(x, wide), convert(reshape(scale, ()), wide)), x.dtype)


_SAME_NAME = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma"
    " log log10 log1p log2 max maximum minimum mul neg norm pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan"
    " tanh trunc"
)
_RULES_OF = {**POINTWISE, **SPECIAL, **ACTIVATION, **REDUCTION}

RULES: dict[str, Callable[..., Any]] = {
    **{f"aten._foreach_{name}": each(_RULES_OF[f"aten.{name}"]) for name in _SAME_NAME.split()},
    "aten._foreach_addcmul.Tensor": with_scalars(addcmul),
    "aten._foreach_addcdiv.Tensor": with_scalars(addcdiv),
    "aten._amp_foreach_non_finite_check_and_unscale": unscale,
    "aten._foreach_max": each(amax),
    "aten._foreach_zero": each(lambda b, x: fill(b, x, 0)),
    "aten._foreach_clone": each(identity),
    "aten._foreach_copy": each(copy),
}
