"""Calls of the library's attention, and what they mean as a program: scores, a function of these, softmax, contraction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.program import Contract, Program, Softmax
from kgen.ir.values import Value
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.contraction import loaded
from kgen.lowering.tensor import Tensor, at

ATTENTION = Program(
    (("b", "m", "d"), ("b", "n", "d"), ("b", "n", "v")),
    (
        Contract("scores", 0, 1, ("b", "m", "n")),
        Softmax("weights", "scores", "n", ("b", "m", "n"), logsumexp=True),
        Contract("out", "weights", 2, ("b", "m", "v")),
    ),
).canonical
SCORES, WEIGHTS = ATTENTION.middles[0].name, ATTENTION.seconds[0].name
# What calls make of the log-sum-exp of a row without any key that counts.
ROWS_WITHOUT_KEYS = {"aten::_scaled_dot_product_flash_attention_for_cpu": 0.0}


def attention(b: Builder, *args: Any, **kwargs: Any) -> Any:
    """A call that stays one unless a template takes what it means."""
    names = [argument.name for argument in b.current.target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for tensor in (given["query"], given["key"]):
        if tensor.device.type == "cpu":  # torch's kernel divides by both lengths; eager calls others where one is 0
            b.symbols.ensure_positive(tensor.sizes[-2])

    def wrap(call: ir.Extern) -> ir.Node:
        passed = {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}
        return ir.Attention(call, b.origin, _meaning(b, call, given, passed))

    return fallback.extern(b, b.current, args, kwargs, "attention without a template", wrap)


def backward(b: Builder, *args: Any, **kwargs: Any) -> Any:
    return fallback.extern(
        b, b.current, args, kwargs, "attention without a template", lambda call: ir.Attention(call, b.origin)
    )


@dataclass(frozen=True, slots=True)
class _Loops:
    """Two loops of the batch, rows of queries, of keys, elements of these, and of values. `shared` neighbouring heads of
    queries have one of keys and of values."""

    batch: tuple[Var, Var]
    m: Var
    n: Var
    d: Var
    v: Var
    shared: int

    def at(self, *rest: Var) -> tuple[Expr, ...]:
        return tuple(v.expr() for v in (*self.batch, *rest))

    def of_keys(self, *rest: Var) -> tuple[Expr, ...]:
        b, h = self.batch
        return b.expr(), ix.floordiv(h.expr(), ix.constant(self.shared)), *(v.expr() for v in rest)

    @property
    def axes(self) -> tuple[tuple[str, Expr], ...]:
        """In the order in which the program names them."""
        loops = ix.position_in(self.batch), *(v.expr() for v in (self.m, self.d, self.n, self.v))
        return tuple(zip(ATTENTION.axes, loops, strict=True))


def _meaning(b: Builder, call: ir.Extern, given: Mapping[str, Any], passed: Mapping[str, Any]) -> ir.Operation | None:
    """The call as an operation; None where it draws random numbers, or makes more than the result."""
    tensors = [given["query"], given["key"], given["value"]]
    mask = given.get("attn_mask", given.get("attn_bias"))
    name = "attn_mask" if given.get("attn_mask") is not None else "attn_bias"
    scale = _scale(given.get("scale"), tensors[0])
    loops = _loops(tensors)
    alone = call.outs[0] is not None and not any(call.outs[2:]) and b.numerics != "eager"
    if loops is None or scale is None or given.get("dropout_p") or not alone or not _fits(mask, loops):
        return None
    seconds = _logsumexp(b, call, loops, mask is not None)
    if seconds is None:
        return None
    indices = (loops.at(loops.m, loops.d), loops.of_keys(loops.n, loops.d), loops.of_keys(loops.n, loops.v))
    values = [at(tensor, place) for tensor, place in zip(tensors, indices, strict=True)]
    stored = [loaded(passed[word], place) for word, place in zip(("query", "key", "value"), indices, strict=True)]

    def score(read: Callable[[tuple[Expr, ...]], Value]) -> Value:
        made = vs.call("mul", vs.step_result(SCORES, tensors[0].dtype), vs.const(scale, tensors[0].dtype))
        if mask is not None:
            made = vs.call("add", made, vs.cast(read(_mask_place(mask, loops)), made.dtype))
        if given.get("is_causal"):
            made = vs.where(vs.compare("le", loops.n.expr(), loops.m.expr()), made, vs.const(-math.inf, made.dtype))
        return made

    slot = score(lambda place: at(mask, place))
    kinds = (*(tensor.dtype for tensor in tensors), slot.dtype)
    return ir.Operation(
        call.outs[:1], (*loops.batch, loops.m, loops.v), (loops.n, loops.d), (*values, slot), kinds, loops.axes, ATTENTION.key,
        (("safe", True),), call, b.origin, (*stored, score(lambda place: loaded(passed[name], place))), ATTENTION,
        seconds=seconds,
    )  # fmt: skip


def _logsumexp(b: Builder, call: ir.Extern, loops: _Loops, masked: bool) -> tuple[ir.Second, ...] | None:
    """The log-sum-exp, where somebody reads it; None where the call has another one. Calls disagree on rows without keys."""
    out = call.outs[1] if len(call.outs) > 1 else None
    if out is None:
        return ()
    name = call.target._schema.name
    buffer, rows = b.graph.buffers[out], (*loops.batch, loops.m)
    if [*buffer.sizes] != [v.extent for v in rows] or (masked and name not in ROWS_WITHOUT_KEYS):
        return None
    value = vs.step_result(WEIGHTS, torch.float32)
    if name in ROWS_WITHOUT_KEYS:
        empty = vs.call("eq", value, vs.const(-math.inf, value.dtype))
        value = vs.where(empty, vs.const(ROWS_WITHOUT_KEYS[name], value.dtype), value)
    return (ir.Second(WEIGHTS, out, value, tuple(v.expr() for v in rows)),)


def _scale(given: Any, query: Tensor) -> float | None:
    """The factor of the scores, where it is known now."""
    size = query.sizes[-1].as_int()
    if given is None and size:
        return 1 / math.sqrt(size)
    return given if isinstance(given, float) else None


def _loops(tensors: list[Tensor]) -> _Loops | None:
    """The loops, where the tensors have two dimensions of a batch in common, heads of keys perhaps fewer times."""
    query, key, value = tensors
    if any(t.rank != 4 or t.sizes[0] is not query.sizes[0] or t.dtype != query.dtype for t in tensors):
        return None
    shared = _shared(query, key)
    if shared is None or key.sizes[1] is not value.sizes[1]:
        return None
    b, h = (ix.var(name, size) for name, size in zip("bh", query.sizes, strict=False))
    m, n, d, v = (ix.var(name, t.sizes[k]) for name, t, k in (("m", query, 2), ("n", key, 2), ("d", query, 3), ("v", value, 3)))
    return _Loops((b, h), m, n, d, v, shared) if ix.lower_bound(n.extent) >= 1 else None


def _shared(query: Tensor, key: Tensor) -> int | None:
    """How many neighbouring heads of queries have one of keys."""
    if query.sizes[1] is key.sizes[1]:
        return 1
    heads, fewer = query.sizes[1].as_int(), key.sizes[1].as_int()
    return heads // fewer if heads and fewer and heads % fewer == 0 else None


def _fits(mask: Tensor | None, loops: _Loops) -> bool:
    """Whether a mask is of floating-point numbers, and spreads over the scores."""
    if mask is None:
        return True
    wanted = (*loops.batch, loops.m, loops.n)[4 - mask.rank :]
    spreads = mask.rank <= 4 and all(size == 1 or size is v.extent for size, v in zip(mask.sizes, wanted, strict=True))
    return spreads and mask.dtype.is_floating_point


def _mask_place(mask: Tensor, loops: _Loops) -> tuple[Expr, ...]:
    wanted = (*loops.batch, loops.m, loops.n)[4 - mask.rank :]
    return tuple(ix.ZERO if size == 1 else v.expr() for size, v in zip(mask.sizes, wanted, strict=True))


_CALLS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)

RULES: dict[str, Callable[..., Any]] = {
    **{f"aten._scaled_dot_product_{name}": attention for name in _CALLS},
    **{f"aten._scaled_dot_product_{name}_backward": backward for name in _CALLS},
}
