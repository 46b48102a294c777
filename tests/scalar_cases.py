"""What back ends are tested with: tricky inputs of every scalar operation, and the results that the references give."""

from __future__ import annotations

import math

import numpy as np
import torch

from kgen.ir import ops
from kgen.reference.evaluate_value import apply


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def signature(op: str, dtype: torch.dtype) -> tuple[torch.dtype, tuple[torch.dtype, ...]]:
    row = ops.OPS[op]
    inputs = (torch.bool, dtype, dtype) if op == "where" else (dtype,) * row.arity
    return ops.result_dtype(op, inputs), inputs


FLOAT_SPECIALS = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38,
    math.inf, -math.inf, math.nan, 88.7, -87.4, -103.0, 89.5, 0.625, 1e-10, 12345.678,
]  # fmt: skip


def specials(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        return torch.tensor(FLOAT_SPECIALS, dtype=dtype)
    info = torch.iinfo(dtype)
    some = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2, 0, 1, 2, 3, 7, 100]
    if info.min < 0:
        some += [-1, -2, -7]
    return torch.tensor(some, dtype=dtype)


def random_values(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_floating_point:
        scale = 10 ** torch.empty(count).uniform_(-4, 2, generator=generator)
        return (torch.randn(count, generator=generator) * scale).to(dtype)
    small = torch.randint(0, 20, (count,), generator=generator)
    bits = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, small, bits).to(torch.int64).to(dtype)


def inputs_of(op: str, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    """`count` elements: all pairs of special values first, as many as fit, then random ones."""
    generator = torch.Generator().manual_seed(len(op))
    arity = ops.OPS[op].arity
    special = specials(dtype)
    pairs = torch.cartesian_prod(special, special)[: count - 300]
    first = pairs[:, 0] if arity > 1 else special
    rest = count - len(first)
    a = torch.cat([first, random_values(dtype, rest, generator)])
    b = torch.cat([pairs[:, 1], random_values(dtype, count - len(pairs), generator)])
    c = random_values(dtype, count, generator)
    if "polynomial" in op:
        b = torch.arange(count).remainder(8).to(dtype)
    if op == "polygamma":
        b = torch.full((count,), 2, dtype=dtype)
    if op in ("igamma", "igammac", "zeta", "polygamma"):
        a, b = a.abs().clamp(0.01, 50), b.abs().clamp(0.01, 50)
    if op in ("shl", "shr") and dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no reference for more
        b = b.to(torch.int64).remainder(8 * dtype.itemsize).to(dtype)
    if op == "gcd" and dtype.is_signed:  # the most negative number has no absolute value
        a, b = (torch.where(x == torch.iinfo(dtype).min, torch.zeros_like(x), x) for x in (a, b))
    if op == "where":
        return random_values(torch.bool, count, generator), a, c
    return (a, b, c)[:arity]


def divided(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer division with what torch refuses: by zero gives zero, the smallest integer by -1 wraps."""
    low = torch.iinfo(a.dtype).min
    zero = b == 0
    wraps = (a == low) & (b == b.new_tensor(-1)) if low < 0 else torch.zeros_like(zero)
    result = apply(op, a, where(zero | wraps, torch.ones_like(b), b))
    result = where(zero, torch.zeros_like(a), result)
    return where(wraps, a if op in ("floordiv", "truncdiv") else torch.zeros_like(a), result)


def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.where, which torch 2.11 does not have for wide unsigned integers."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(a.dtype, a.dtype)
    return torch.where(condition, a.view(signed), b.view(signed)).view(a.dtype)


def expected(op: str, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if op in ("floordiv", "truncdiv", "remainder", "fmod") and not args[0].is_floating_point():
        return divided(op, *args)
    if op == "where":
        return where(*args)
    result = apply(op, *args)
    if op in ("fmod", "remainder"):  # eager's vectors give NaN where the quotient overflows, its scalars do not
        with np.errstate(invalid="ignore"):
            exact = torch.from_numpy(getattr(np, op)(args[0].numpy(), args[1].numpy()))
        result = torch.where((args[0] / args[1]).isinf(), exact, result)
    return result


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance from a float64 result in units in the last place of `got`'s dtype; 0 where both are NaN or the same infinity."""
    near = want.to(got.dtype)
    below = torch.nextafter(near, torch.zeros_like(near))
    spacing = torch.where(near == 0, torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps, (near - below).abs())
    distance = (got.double() - want).abs() / spacing.double()
    same = (got == near) | (got.isnan() & near.isnan())
    return torch.where(same & (near.isinf() | near.isnan() | (distance > 1e30) | distance.isnan()), 0.0, distance).nan_to_num(
        1e30
    )
