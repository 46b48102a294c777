"""Elementwise operators: arithmetic, extremes, selection and type conversion.

`pointwise` is what every elementwise family builds on: it broadcasts, promotes, and applies scalar operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.tensor import Tensor, broadcast, broadcast_sizes, convert, element_in, promote, rounded

Operand = Tensor | Expr | int | float | bool
Rule = Callable[..., Tensor]


# ---- the frame of every elementwise rule ----------------------------------------------------------------------------


def device_of(*items: Any) -> torch.device:
    """The device of the first tensor with dimensions, else of the first tensor (0-d CPU tensors mix with any device)."""
    tensors = [i for i in items if isinstance(i, Tensor)]
    return next((t.device for t in tensors if t.rank), tensors[0].device if tensors else torch.device("cpu"))


def as_tensor(item: Operand, device: torch.device) -> Tensor:
    """A number as a 0-d tensor that is weak in type promotion."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, Expr):
        return Tensor((), torch.int64, device, vs.index_value(item), weak=True)
    dtype = torch.bool if isinstance(item, bool) else torch.int64 if isinstance(item, int) else torch.get_default_dtype()
    return Tensor((), dtype, device, vs.const(item, dtype), weak=True)


def value_in(tensor: Tensor | Operand, dtype: torch.dtype) -> Value:
    """The element converted to the compute dtype of `dtype` (no rounding to a narrow float: promotion widens)."""
    if isinstance(tensor, Tensor):
        return element_in(tensor, dtype)
    if isinstance(tensor, Expr):
        return vs.index_value(tensor, ops.compute_dtype(dtype))
    return vs.const(tensor, dtype)


def rounded_in(operand: Operand, dtype: torch.dtype) -> Value:
    """`value_in`, rounded to the operand's own type and to `dtype` where these are narrow floats: eager compares, and divides
    with a remainder, what it has stored, so ``bf16(0.1) == 0.1`` holds, and ``x == x.max()`` somewhere although the maximum was
    stored and `x` was not."""
    if isinstance(operand, Tensor):
        operand = rounded(operand)
    if dtype not in ops.NARROW_FLOATS:
        return value_in(operand, dtype)
    if isinstance(operand, int | float):
        return vs.const(torch.tensor(operand, dtype=dtype).item(), dtype)
    return vs.cast(value_in(operand, dtype), dtype)


def pointwise(
    body: Callable[..., Value],
    *operands: Operand,
    compute: torch.dtype | None = None,
    result: torch.dtype | None = None,
    convert_operand: Callable[[Operand, torch.dtype], Value] = value_in,
) -> Tensor:
    """Broadcasts the operands, converts them to `compute` (default: their promoted type), and applies `body` to the values.
    The result has dtype `result` (default: `compute`)."""
    device = device_of(*operands)
    compute = compute or promote(*operands)
    sizes = broadcast_sizes(*(o.sizes for o in operands if isinstance(o, Tensor)))
    values = [convert_operand(broadcast(o, sizes) if isinstance(o, Tensor) else o, compute) for o in operands]
    out = result or compute
    return Tensor(sizes, out, device, vs.cast(body(*values), ops.compute_dtype(out)))


def to_float(dtype: torch.dtype) -> torch.dtype:
    """Integers and bools compute as the default float in functions that have no integer result."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result computed in float32 as the narrower tensor that the user sees: the store rounds."""
    return x.with_value(vs.cast(x.value, ops.compute_dtype(dtype)), dtype)


def number(value: float, like: Value) -> Value:
    """A literal of the type of another value."""
    return vs.const(value, like.dtype)


def is_float(value: Value) -> bool:
    return value.dtype.is_floating_point


def same_type(op: str) -> Rule:
    """A rule for an operator whose result has its arguments' promoted type."""
    return lambda b, *args: pointwise(lambda *v: vs.call(op, *v), *args)


def float_result(op: str) -> Rule:
    """A rule for an operator that turns integers into floats."""
    return lambda b, *args: pointwise(lambda *v: vs.call(op, *v), *args, compute=to_float(promote(*args)))


def formula(body: Callable[..., Value]) -> Rule:
    """A rule that applies `body` to its operands in their promoted type."""
    return lambda b, *args: pointwise(body, *args)


def float_formula(body: Callable[..., Value]) -> Rule:
    """`formula` for functions that turn integers into floats."""
    return lambda b, *args: pointwise(body, *args, compute=to_float(promote(*args)))


def identity(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _is_one(alpha: Operand) -> bool:
    return isinstance(alpha, int | float) and alpha == 1


def _scaled(value: Value, alpha: Operand, kind: torch.dtype) -> Value:
    return value if _is_one(alpha) else vs.call("mul", value, value_in(alpha, kind))


def add(b: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Tensor:
    kind = promote(x, y)
    if kind is torch.bool:
        return pointwise(lambda p, q: vs.call("or", p, vs.call("and", q, value_in(alpha, kind))), x, y)
    return pointwise(lambda p, q: vs.call("add", p, _scaled(q, alpha, kind)), x, y)


def sub(b: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Tensor:
    if any(isinstance(o, Tensor) and o.dtype is torch.bool for o in (x, y)):  # tracing lets a number less a bool pass
        raise Refused("a difference of bools, for which eager raises")
    kind = promote(x, y)
    return pointwise(lambda p, q: vs.call("sub", p, _scaled(q, alpha, kind)), x, y)


def rsub(b: Builder, x: Operand, y: Operand, alpha: Operand = 1) -> Tensor:
    return sub(b, y, x, alpha=alpha)


def mul(b: Builder, x: Operand, y: Operand) -> Tensor:
    return pointwise(lambda p, q: vs.call("and" if p.dtype is torch.bool else "mul", p, q), x, y)


def div(b: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    kind = promote(x, y)
    whole = rounding_mode == "trunc"
    inverse = None if rounding_mode == "floor" else _inverse(x, y, kind if whole else to_float(kind), whole)
    if inverse is not None:
        return _times(x, inverse, whole)
    if rounding_mode is None:
        return pointwise(lambda p, q: vs.call("truediv", p, q), x, y, compute=to_float(kind))
    if rounding_mode == "trunc" and kind in ops.NARROW_FLOATS:  # eager rounds the quotient before it cuts it off
        return pointwise(
            lambda p, q: vs.call("trunc", vs.cast(vs.call("truediv", p, q), kind)), x, y, convert_operand=rounded_in
        )
    return _exact_division("floordiv" if rounding_mode == "floor" else "truncdiv", x, y)


def _inverse(x: Operand, y: Operand, kind: torch.dtype, whole: bool) -> float | None:
    """By what eager's kernels for GPUs multiply where they divide by a number: rounded from double precision, or for the
    `whole` part from the type that they compute in. Quotients that become whole numbers show it: many are between two."""
    if not isinstance(x, Tensor) or x.device.type != "cuda" or not kind.is_floating_point or not isinstance(y, int | float):
        return None
    wide = torch.float64 if kind is torch.float64 else torch.float32
    divided_in = wide if whole else torch.float64
    return float((torch.tensor(1.0, dtype=divided_in) / torch.tensor(float(y), dtype=divided_in)).to(wide))


def _times(x: Operand, factor: float, whole: bool) -> Tensor:
    """A multiple in floats, or the `whole` part of that."""

    def body(p: Value) -> Value:
        made = vs.call("mul", p, number(factor, p))
        return vs.call("trunc", made) if whole else made

    return pointwise(body, x, compute=to_float(promote(x, factor)))


def _exact_division(op: str, x: Operand, y: Operand) -> Tensor:
    """Divisions whose result jumps: both operands are first rounded to the type that eager divides in."""
    if promote(x, y) is torch.bool:
        raise Refused("division of bools")
    raises = device_of(x, y).type == "cpu"  # eager's kernels for GPUs give any number
    return pointwise(lambda p, q: vs.call(op, p, _not_zero(q) if raises else q), x, y, convert_operand=rounded_in)


def _not_zero(divisor: Value) -> Value:
    """An integer divisor that must not be zero."""
    if is_float(divisor) or (divisor.op == "index" and divisor.attr.bounds()[0] > 0):
        return divisor
    return vs.asserted(divisor, vs.call("ne", divisor, number(0, divisor)), "division")


def exact_division(op: str) -> Rule:
    return lambda b, x, y: _exact_division(op, x, y)


def neg(b: Builder, x: Tensor) -> Tensor:
    return pointwise(lambda p: vs.call("neg", p), x)


def absolute(b: Builder, x: Tensor) -> Tensor:
    return x if x.dtype in _UNSIGNED else pointwise(lambda p: vs.call("abs", p), x)


def sign(b: Builder, x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else pointwise(lambda p: vs.call("sign", p), x)


def signbit(b: Builder, x: Tensor) -> Tensor:
    if x.dtype in _UNSIGNED:
        return x.with_value(vs.const(False, torch.bool), torch.bool)
    return pointwise(lambda p: vs.call("signbit", p), x, result=torch.bool)


_UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def on_floats(op: str) -> Rule:
    """A rule for roundings, of what eager has stored: integers stay as they are."""
    return lambda b, x: pointwise(lambda p: vs.call(op, p), rounded(x)) if x.dtype.is_floating_point else x


def round_decimals(b: Builder, x: Tensor, *, decimals: int = 0) -> Tensor:
    if not x.dtype.is_floating_point or decimals == 0:
        return on_floats("round")(b, x)
    scale = float(10 ** abs(decimals))
    first, second = ("truediv", "mul") if decimals < 0 else ("mul", "truediv")

    def body(p: Value) -> Value:
        return vs.call(second, vs.call("round", vs.call(first, p, number(scale, p))), number(scale, p))

    return pointwise(body, x)


def addcmul(b: Builder, x: Tensor, y: Tensor, z: Tensor, value: Operand = 1) -> Tensor:
    kind = promote(x, y, z)
    return pointwise(lambda p, q, r: vs.call("add", p, vs.call("mul", _scaled(q, value, kind), r)), x, y, z)


def addcdiv(b: Builder, x: Tensor, y: Tensor, z: Tensor, value: Operand = 1) -> Tensor:
    kind = promote(x, y, z)
    if not kind.is_floating_point:
        raise Refused("addcdiv of integers")
    return pointwise(lambda p, q, r: vs.call("add", p, vs.call("truediv", _scaled(q, value, kind), r)), x, y, z)


def lerp(b: Builder, start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    """Two formulas, as in eager, so that both ends are met exactly."""
    kind = promote(start, end)

    def body(s: Value, e: Value, w: Value) -> Value:
        gap = vs.call("sub", e, s)
        near_end = vs.call("sub", e, vs.call("mul", gap, vs.call("sub", number(1, w), w)))
        near_start = vs.call("add", s, vs.call("mul", w, gap))
        return vs.where(vs.call("lt", vs.call("abs", w), number(0.5, w)), near_start, near_end)

    return pointwise(body, start, end, weight, compute=kind)


# ---- extremes -------------------------------------------------------------------------------------------------------


def extreme(op: str, on_bool: str) -> Rule:
    """maximum and minimum; NaN wins."""
    return lambda b, x, y: pointwise(lambda p, q: vs.call(on_bool if p.dtype is torch.bool else op, p, q), x, y)


def at_least(lowest: int) -> Rule:
    """The larger one of an operand and a number, which gets the operand's type; NaN stays."""
    larger = extreme("maximum", "or")
    return lambda b, x: larger(b, x, float(lowest) if x.dtype.is_floating_point else lowest)


def extreme_number(op: str, on_integer: str, on_bool: str) -> Rule:
    """fmax and fmin; NaN loses."""

    def body(p: Value, q: Value) -> Value:
        return vs.call(op if is_float(p) else on_bool if p.dtype is torch.bool else on_integer, p, q)

    return formula(body)


def _fits(number: int, kind: torch.dtype) -> bool:
    """Whether eager converts a number to a type. Unsigned ones take what is negative: it wraps."""
    if kind.is_floating_point or kind is torch.bool:
        return True
    info = torch.iinfo(kind)
    return (info.min or -info.max) <= number <= info.max


def clamp(b: Builder, x: Tensor, low: Operand | None = None, high: Operand | None = None) -> Tensor:
    bounds = [o for o in (low, high) if o is not None]
    kind = promote(x, *bounds)
    if any(isinstance(o, int) and not _fits(o, kind) for o in bounds):
        raise Refused("a limit that its type does not have, for which eager raises")
    above, below = ("or", "and") if kind is torch.bool else ("maximum", "minimum")

    def body(p: Value, *limits: Value) -> Value:
        left = list(limits)
        if low is not None:
            p = vs.call(above, p, left.pop(0))
        return vs.call(below, p, left.pop(0)) if left else p

    return pointwise(body, x, *bounds)


# ---- selection and conversion ---------------------------------------------------------------------------------------


def where(b: Builder, cond: Tensor, x: Operand, y: Operand) -> Tensor:
    kind = promote(x, y)
    sizes = broadcast_sizes(*(t.sizes for t in (cond, x, y) if isinstance(t, Tensor)))
    test = vs.cast(broadcast(cond, sizes).value, torch.bool)
    yes, no = (value_in(broadcast(t, sizes) if isinstance(t, Tensor) else t, kind) for t in (x, y))
    return Tensor(sizes, kind, device_of(x, y, cond), vs.where(test, yes, no))


def masked_fill(b: Builder, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    sizes = broadcast_sizes(x.sizes, mask.sizes)
    test = vs.cast(broadcast(mask, sizes).value, torch.bool)
    filler = value_in(broadcast(value, sizes) if isinstance(value, Tensor) else value, x.dtype)
    return Tensor(sizes, x.dtype, x.device, vs.where(test, filler, broadcast(x, sizes).value))


def fill(b: Builder, x: Tensor, value: Operand) -> Tensor:
    element = value_in(broadcast(value, x.sizes) if isinstance(value, Tensor) else value, x.dtype)
    return x.with_value(element)


def to_copy(
    b: Builder, x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, layout: Any = None, **_: Any
) -> Tensor:
    if device is not None and torch.device(device) != x.device:
        moved = b.constant_on(x, torch.device(device)) if torch.device(device).index is not None else None
        if moved is None:
            raise Refused("copy between devices")
        x = moved
    if layout not in (None, torch.strided):
        raise Refused(f"layout {layout}")
    return convert(x, dtype or x.dtype)


def bitcast(b: Builder, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``view(dtype)`` between dtypes of one width."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize != dtype.itemsize:
        raise Refused("view as a dtype of another width")
    if torch.bool in (x.dtype, dtype) or {x.dtype, dtype} & {torch.float8_e4m3fn, torch.float8_e5m2}:
        raise Refused("reinterpretation of a one-byte dtype")
    return x.with_value(_from_bits(_to_bits(x), dtype), dtype)


def _to_bits(x: Tensor) -> Value:
    """The element's bits: as they lie in the compute dtype, bfloat16 as the upper half of a float32."""
    if x.dtype is torch.float16:
        raise Refused("reinterpretation of float16")
    if x.dtype is not torch.bfloat16:
        return x.value
    wide = vs.bitcast(vs.cast(x.value, torch.bfloat16), torch.int32)
    return vs.cast(vs.call("shr", wide, vs.const(16, torch.int32)), torch.int16)


def _from_bits(bits: Value, dtype: torch.dtype) -> Value:
    if dtype is torch.float16:
        raise Refused("reinterpretation of float16")
    if dtype is not torch.bfloat16:
        return vs.bitcast(bits, dtype)
    wide = vs.call("shl", vs.cast(bits, torch.int32), vs.const(16, torch.int32))
    # rounding is exact here; it tells everybody that the value already has the narrow format
    return vs.cast(vs.bitcast(wide, torch.float32), torch.bfloat16)


def stays_real(b: Builder, x: Tensor) -> Tensor:
    """Operators of complex numbers that do nothing to real ones."""
    return x


RULES: dict[str, Callable[..., Any]] = {
    "aten.add": add,
    "aten.sub": sub,
    "aten.rsub": rsub,
    "aten.mul": mul,
    "aten.div": div,
    "aten.true_divide": div,
    "aten.neg": neg,
    "aten._neg_view": neg,  # a bit of the view in eager, which no kernel looks at
    "aten.abs": absolute,
    "aten.sign": sign,
    "aten.sgn": sign,
    "aten.signbit": signbit,
    "aten.round": round_decimals,
    "aten.square": formula(lambda p: vs.call("mul", p, p)),
    "aten.addcmul": addcmul,
    "aten.addcdiv": addcdiv,
    "aten.lerp": lerp,
    "aten.floor_divide": exact_division("floordiv"),
    "aten.remainder": exact_division("remainder"),
    "aten.fmod": exact_division("fmod"),
    "aten.maximum": extreme("maximum", "or"),
    "aten.minimum": extreme("minimum", "and"),
    **{f"{space}.fmax": extreme_number("fmax", "maximum", "or") for space in ("aten", "prims")},
    **{f"{space}.fmin": extreme_number("fmin", "minimum", "and") for space in ("aten", "prims")},
    "aten.clamp": clamp,
    "aten.clamp_min": clamp,
    "aten.clamp_max": lambda b, x, high: clamp(b, x, None, high),
    "aten.where": where,
    "aten.masked_fill": masked_fill,
    "aten.fill": fill,
    "aten.zero": lambda b, x: fill(b, x, 0),
    "aten.view.dtype": bitcast,
    "prims.convert_element_type": lambda b, x, dtype: convert(x, dtype),
    "prims.fma": lambda b, x, y, z: pointwise(lambda p, q, r: vs.call("fma", p, q, r), x, y, z),
    "aten.clone": identity,
    "prims.copy_strided": identity,
    **{
        f"aten.{name}": stays_real
        for name in ["conj", "_conj", "conj_physical", "_conj_physical", "resolve_conj", "resolve_neg", "real"]
    },
    **{f"aten.{name}": on_floats(name) for name in ("floor", "ceil", "trunc")},
}
