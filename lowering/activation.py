"""Activation functions and their gradients, for graphs in which they arrive whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.pointwise import Operand, at_least, clamp, formula, number, pointwise
from kgen.lowering.tensor import Tensor, promote


def _positive(x: Value) -> Value:
    return vs.call("gt", x, number(0, x))


def _mul(*factors: Value) -> Value:
    total = factors[0]
    for factor in factors[1:]:
        total = vs.call("mul", total, factor)
    return total


relu = at_least(0)


def hardtanh(b: Builder, x: Tensor, min_val: Operand = -1, max_val: Operand = 1) -> Tensor:
    if not x.dtype.is_floating_point:  # limits are truncated, not the input promoted
        min_val, max_val = (int(v) if isinstance(v, float) else v for v in (min_val, max_val))
    return clamp(b, x, min_val, max_val)


def leaky_relu(b: Builder, x: Tensor, negative_slope: Operand = 0.01) -> Tensor:
    return pointwise(lambda p, s: vs.where(_positive(p), p, _mul(p, s)), x, negative_slope, compute=x.dtype)


def leaky_relu_backward(b: Builder, grad: Tensor, x: Tensor, negative_slope: Operand, self_is_result: bool) -> Tensor:
    kind = promote(grad, x)
    return pointwise(lambda g, p, s: vs.where(_positive(p), g, _mul(g, s)), grad, x, negative_slope, compute=kind)


def elu(b: Builder, x: Tensor, alpha: Operand = 1, scale: Operand = 1, input_scale: Operand = 1) -> Tensor:
    def body(p: Value, a: Value, s: Value, i: Value) -> Value:
        negative = _mul(vs.call("expm1", _mul(p, i)), _mul(a, s))
        return vs.where(_positive(p), _mul(p, s), negative)

    return pointwise(body, x, alpha, scale, input_scale, compute=x.dtype)


def elu_backward(
    b: Builder, grad: Tensor, alpha: Operand, scale: Operand, input_scale: Operand, is_result: bool, x: Tensor
) -> Tensor:
    def body(g: Value, p: Value, a: Value, s: Value, i: Value) -> Value:
        if is_result:
            negative = _mul(g, i, vs.call("add", p, _mul(a, s)))
        else:
            negative = _mul(g, i, _mul(a, s), vs.call("exp", _mul(p, i)))
        return vs.where(_positive(p), _mul(g, s), negative)

    return pointwise(body, grad, x, alpha, scale, input_scale, compute=promote(grad, x))


def _tanh_argument(x: Value) -> Value:
    cubic = _mul(number(0.044715, x), x, x, x)
    return _mul(number(math.sqrt(2 / math.pi), x), vs.call("add", x, cubic))


def gelu(b: Builder, x: Tensor, approximate: str = "none") -> Tensor:
    """The tanh form as ``x * sigmoid(2u)``, which is ``x/2 * (1 + tanh(u))`` with one exponential."""

    def body(p: Value) -> Value:
        if approximate == "tanh":
            return _mul(p, vs.call("sigmoid", _mul(_tanh_argument(p), number(2, p))))
        return _mul(_mul(p, number(0.5, p)), vs.call("add", number(1, p), vs.call("erf", _mul(p, number(math.sqrt(0.5), p)))))

    return pointwise(body, x)


def gelu_backward(b: Builder, grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    def exact(p: Value) -> Value:
        cdf = _mul(number(0.5, p), vs.call("add", number(1, p), vs.call("erf", _mul(p, number(math.sqrt(0.5), p)))))
        density = _mul(number(1 / math.sqrt(2 * math.pi), p), vs.call("exp", _mul(number(-0.5, p), _mul(p, p))))
        return vs.call("add", cdf, _mul(p, density))

    def by_tanh(p: Value) -> Value:
        # d/dx x*s(2u) = s + x * s * (1 - s) * 2u', with u' = sqrt(2/pi) * (1 + 3 * 0.044715 x^2)
        s = vs.call("sigmoid", _mul(_tanh_argument(p), number(2, p)))
        slope = vs.call("add", number(1, p), _mul(number(3 * 0.044715, p), _mul(p, p)))
        inner = _mul(number(2 * math.sqrt(2 / math.pi), p), slope)
        return vs.call("add", s, _mul(p, _mul(s, vs.call("sub", number(1, p), s)), inner))

    derivative = by_tanh if approximate == "tanh" else exact
    return pointwise(lambda g, p: _mul(g, derivative(p)), grad, x)


def _silu(x: Value) -> Value:
    return _mul(x, vs.call("sigmoid", x))


def _silu_backward(grad: Value, x: Value) -> Value:
    s = vs.call("sigmoid", x)
    rest = vs.call("add", number(1, x), _mul(x, vs.call("sub", number(1, x), s)))
    return _mul(grad, s, rest)


def softplus(b: Builder, x: Tensor, beta: Operand = 1, threshold: Operand = 20) -> Tensor:
    def body(p: Value, scale: Value, limit: Value) -> Value:
        scaled = _mul(p, scale)
        soft = vs.call("truediv", vs.call("log1p", vs.call("exp", scaled)), scale)
        return vs.where(vs.call("gt", scaled, limit), p, soft)

    return pointwise(body, x, beta, threshold, compute=x.dtype)


def softplus_backward(b: Builder, grad: Tensor, x: Tensor, beta: Operand, threshold: Operand) -> Tensor:
    def body(g: Value, p: Value, scale: Value, limit: Value) -> Value:
        scaled = _mul(p, scale)
        z = vs.call("exp", scaled)
        soft = vs.call("truediv", _mul(g, z), vs.call("add", z, number(1, z)))
        return vs.where(vs.call("gt", scaled, limit), g, soft)

    return pointwise(body, grad, x, beta, threshold, compute=promote(grad, x))


def _mish(x: Value) -> Value:
    return _mul(x, vs.call("tanh", vs.call("log1p", vs.call("exp", x))))


def _relu6(x: Value) -> Value:
    return vs.call("minimum", vs.call("maximum", x, number(0, x)), number(6, x))


def _hardsigmoid(x: Value) -> Value:
    return vs.call("truediv", _relu6(vs.call("add", x, number(3, x))), number(6, x))


def _hardswish(x: Value) -> Value:
    return vs.call("truediv", _mul(x, _relu6(vs.call("add", x, number(3, x)))), number(6, x))


def _hardswish_backward(grad: Value, x: Value) -> Value:
    middle = _mul(grad, vs.call("add", vs.call("truediv", x, number(3, x)), number(0.5, x)))
    inside = vs.where(vs.call("lt", x, number(3, x)), middle, grad)
    return vs.where(vs.call("le", x, number(-3, x)), number(0, grad), inside)


def threshold(b: Builder, x: Tensor, limit: Operand, value: Operand) -> Tensor:
    return pointwise(lambda p, t, v: vs.where(vs.call("le", p, t), v, p), x, limit, value, compute=x.dtype)


def threshold_backward(b: Builder, grad: Tensor, x: Tensor, limit: Operand) -> Tensor:
    kind = promote(grad, x)
    return pointwise(lambda g, p, t: vs.where(vs.call("le", p, t), number(0, g), g), grad, x, limit, compute=kind)


def hardtanh_backward(b: Builder, grad: Tensor, x: Tensor, min_val: Operand, max_val: Operand) -> Tensor:
    def body(g: Value, p: Value, low: Value, high: Value) -> Value:
        outside = vs.call("or", vs.call("le", p, low), vs.call("ge", p, high))
        return vs.where(outside, number(0, g), g)

    return pointwise(body, grad, x, min_val, max_val, compute=promote(grad, x))


def _shrunk(x: Value, lambd: Value) -> Value:
    """softshrink; NaN stays."""
    low = vs.where(vs.call("lt", x, vs.call("neg", lambd)), vs.call("add", x, lambd), _mul(x, number(0, x)))
    return vs.where(vs.call("gt", x, lambd), vs.call("sub", x, lambd), low)


def hardshrink(b: Builder, x: Tensor, lambd: Operand = 0.5) -> Tensor:
    def body(p: Value, limit: Value) -> Value:
        inside = vs.call("and", vs.call("ge", p, vs.call("neg", limit)), vs.call("le", p, limit))
        return vs.where(inside, number(0, p), p)

    return pointwise(body, x, lambd, compute=x.dtype)


def shrink_backward(b: Builder, grad: Tensor, x: Tensor, lambd: Operand) -> Tensor:
    """The gradient of softshrink and of hardshrink."""

    def body(g: Value, p: Value, limit: Value) -> Value:
        inside = vs.call("and", vs.call("ge", p, vs.call("neg", limit)), vs.call("le", p, limit))
        return vs.where(inside, number(0, g), g)

    return pointwise(body, grad, x, lambd, compute=promote(grad, x))


def _sigmoid_backward(grad: Value, out: Value) -> Value:
    return _mul(grad, _mul(vs.call("sub", number(1, out), out), out))


def _tanh_backward(grad: Value, out: Value) -> Value:
    return _mul(grad, vs.call("sub", number(1, out), _mul(out, out)))


def prelu_kernel(b: Builder, x: Tensor, weight: Tensor) -> Tensor:
    return pointwise(lambda p, w: vs.where(_positive(p), p, _mul(p, w)), x, weight)


def rrelu_backward(
    b: Builder, grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> Tensor:
    if training and upper - lower > 1e-6:
        return pointwise(_mul, grad, noise)
    return leaky_relu_backward(b, grad, x, (lower + upper) / 2, self_is_result)


RULES: dict[str, Callable[..., Any]] = {
    "aten.relu": relu,
    "aten.hardtanh": hardtanh,
    "aten.hardtanh_backward": hardtanh_backward,
    "aten.leaky_relu": leaky_relu,
    "aten.leaky_relu_backward": leaky_relu_backward,
    "aten.elu": elu,
    "aten.elu_backward": elu_backward,
    "aten.gelu": gelu,
    "aten.gelu_backward": gelu_backward,
    "aten.silu": formula(_silu),
    "aten.silu_backward": formula(_silu_backward),
    "aten.softplus": softplus,
    "aten.softplus_backward": softplus_backward,
    "aten.mish": formula(_mish),
    "aten.hardsigmoid": formula(_hardsigmoid),
    "aten.hardswish": formula(_hardswish),
    "aten.hardswish_backward": formula(_hardswish_backward),
    "aten.threshold": threshold,
    "aten.threshold_backward": threshold_backward,
    "aten.softshrink": lambda b, x, lambd=0.5: pointwise(_shrunk, x, lambd, compute=x.dtype),
    "aten.softshrink_backward": shrink_backward,
    "aten.hardshrink": hardshrink,
    "aten.hardshrink_backward": shrink_backward,
    "aten.sigmoid_backward": formula(_sigmoid_backward),
    "aten.tanh_backward": formula(_tanh_backward),
    "aten._prelu_kernel": prelu_kernel,
    "aten.rrelu_with_noise_backward": rrelu_backward,
}
