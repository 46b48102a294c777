"""Operators on lists of tensors: the elementwise rule applied to each position; the scheduler may share launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kgen.ir import index as ix
from kgen.lowering.activation import RULES as ACTIVATION
from kgen.lowering.builder import Builder
from kgen.lowering.pointwise import RULES as POINTWISE
from kgen.lowering.pointwise import addcdiv, addcmul, fill, identity
from kgen.lowering.reduction import RULES as REDUCTION
from kgen.lowering.special import RULES as SPECIAL
from kgen.lowering.tensor import Tensor, broadcast, convert, reindex

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
    "aten._foreach_zero": each(lambda b, x: fill(b, x, 0)),
    "aten._foreach_clone": each(identity),
    "aten._foreach_copy": each(copy),
}
