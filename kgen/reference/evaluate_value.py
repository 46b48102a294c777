"""Evaluates scalar values over a whole iteration space with plain torch operations; no code generator is involved.

Random numbers
--------------
`rand`, `randn` and `randbits` are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with::

    key     = (low 32 bits of seed, high 32 bits of seed)
    counter = (low 32 bits of counter, high 32 bits of counter, 0, 0)

giving block `counter` of four 32-bit words w0..w3. Element c (unsigned) of a seed is, with ``u = float32(w >> 8) * 2**-24``:

* ``rand     = u`` of word c % 4 of block c // 4, in [0, 1);
* ``randn    = sqrt(-2 * log(u[2p] + 2**-24)) * cos(2 * pi * u[2p + 1])`` of block c // 4, where p = c // 2 % 2, with sin for
  cos where c is odd, in float32;
* ``randbits = int64(w[2p] | w[2p + 1] << 32)`` of block c // 2, where p = c % 2.

An element's number depends on nothing else, so it is the same in every loop order, tiling and back end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Apply, Atom, Expr, FloorDiv, Indirect, Mod, Size, Var
from kgen.ir.index import evaluate as evaluate_index
from kgen.ir.values import Value

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Policy:
    """How numbers are computed. With `float64` all float arithmetic and float32 intermediates are in float64, which makes
    a nearly exact oracle; roundings that the IR spells out (`round_to`, 16-bit stores) stay. `check_vendor` compares every
    contraction with the library call that it stands for."""

    float64: bool = False
    check_vendor: bool = True

    def real(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of compute dtype `dtype` are held."""
        return torch.float64 if self.float64 and dtype is torch.float32 else dtype


FAST = Policy()
EXACT = Policy(float64=True)


def evaluate_value(
    value: Value,
    variables: Sequence[Var],
    env: Mapping[str, Tensor],
    sizes: Mapping[Size, int] | None = None,
    policy: Policy = FAST,
) -> Tensor:
    """The value at every point of `variables`, as a tensor with one dimension a variable, outermost first.

    `env` gives each buffer that the value loads as a tensor of the buffer's logical shape. Raises IndexError when a lane
    that no mask switches off reads outside its buffer.
    """
    points = Points(variables, env, sizes or {}, policy)
    return points.value(value).expand(points.extents)


class Points:
    """All points of an iteration space at once: lane arithmetic on tensors with one (broadcastable) dimension a variable."""

    def __init__(self, variables: Sequence[Var], env: Mapping[str, Tensor], sizes: Mapping[Size, int], policy: Policy) -> None:
        self.env, self.sizes, self.policy = env, sizes, policy
        self.rank = len(variables)
        self.extents = [int_of(v.extent, sizes) for v in variables]
        self.empty = any(n <= 0 for n in self.extents)
        self._lanes = {v: self._axis(k) for k, v in enumerate(variables)}
        self._values: dict[Value, Tensor] = {}
        self._exprs: dict[Expr, Tensor] = {}

    def _axis(self, position: int) -> Tensor:
        shape = [1] * self.rank
        shape[position] = self.extents[position]
        return torch.arange(self.extents[position]).reshape(shape)

    def _literal(self, number: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(number, dtype=dtype).reshape((1,) * self.rank)

    # ---- indices ----------------------------------------------------------------------------------------------------

    def index(self, expr: Expr) -> Tensor:
        """An index expression at every point, int64, broadcastable."""
        hit = self._exprs.get(expr)
        if hit is None:
            hit = self._literal(0, torch.int64)
            for mono, coef in expr.terms:
                term = self._literal(coef, torch.int64)
                for atom in mono:
                    term = term * self._atom(atom)
                hit = hit + term
            self._exprs[expr] = hit
        return hit

    def _atom(self, atom: Atom) -> Tensor:
        if isinstance(atom, Var):
            if atom not in self._lanes:
                raise KeyError(f"loop variable {atom} < {atom.extent} does not belong to the iteration space")
            return self._lanes[atom]
        if isinstance(atom, Size):
            return self._literal(self.sizes[atom], torch.int64)
        if isinstance(atom, Indirect):
            return self.value(atom.value).to(torch.int64)
        if isinstance(atom, FloorDiv | Mod):
            # a divisor is positive wherever a point exists; a size of zero must not trap while lanes are set up
            num, den = self.index(atom.num), self.index(atom.den).clamp(min=1)
            return torch.div(num, den, rounding_mode="floor") if isinstance(atom, FloorDiv) else torch.remainder(num, den)
        assert isinstance(atom, Apply)
        return _APPLY[atom.fn](*(self.index(a) for a in atom.args)).to(torch.int64)

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, root: Value) -> Tensor:
        """A value at every point, in its compute dtype (see `Policy.real`), broadcastable to the extents."""
        if self.empty:  # nothing may be read: an index that is right for every point can be wrong when there is none
            return torch.empty(self.extents, dtype=self.policy.real(root.dtype))
        if root not in self._values:
            for value in vs.topological([root]):
                if value not in self._values:
                    self._values[value] = self._compute(value)
        return self._values[root]

    def _compute(self, value: Value) -> Tensor:
        args = [self._values[a] for a in value.args]
        structural = _STRUCTURAL.get(value.op)
        if structural is not None:
            return structural(self, value, *args)
        if self.policy.float64 and value.op == "nextafter":  # the one operation whose meaning is the format's own spacing
            return apply("nextafter", *(a.to(value.dtype) for a in args)).to(torch.float64)
        return apply(value.op, *args)

    def _const(self, value: Value) -> Tensor:
        return self._literal(value.attr, self.policy.real(value.dtype))

    def _index(self, value: Value) -> Tensor:
        return self.index(value.attr).to(value.dtype)

    def _load(self, value: Value, mask: Tensor | None = None) -> Tensor:
        buffer, index, _ = value.attr
        lanes = [self.index(e) for e in index]
        return gather(self.env[buffer], lanes, mask, (1,) * self.rank, buffer).to(self.policy.real(value.dtype))

    def _step(self, value: Value) -> Tensor:
        return self.env[value.attr]

    def _cast(self, value: Value, arg: Tensor) -> Tensor:
        return arg.to(self.policy.real(value.dtype))

    def _round_to(self, value: Value, arg: Tensor) -> Tensor:
        return arg.to(value.attr).to(arg.dtype)

    def _bitcast(self, value: Value, arg: Tensor) -> Tensor:
        return arg.to(value.args[0].dtype).view(value.dtype).to(self.policy.real(value.dtype))

    def _assert(self, value: Value, arg: Tensor, holds: Tensor) -> Tensor:
        if not bool(holds.all()):
            kind, message = _FAILURES[value.attr]
            raise kind(message)
        return arg

    def _random(self, value: Value, seed: Tensor, counter: Tensor) -> Tensor:
        return RANDOM[value.op](seed, counter).to(self.policy.real(value.dtype))


# What eager raises for the failures of `ops.FAILURES`.
_FAILURES: dict[str, tuple[type[Exception], str]] = {
    "index": (IndexError, "index out of range"), "division": (RuntimeError, "ZeroDivisionError"),
}  # fmt: skip

_STRUCTURAL: dict[str, Callable[..., Tensor]] = {
    "const": Points._const, "index": Points._index, "load": Points._load, "step": Points._step, "cast": Points._cast,
    "round_to": Points._round_to, "bitcast": Points._bitcast, "assert": Points._assert, "rand": Points._random,
    "randn": Points._random, "randbits": Points._random,
}  # fmt: skip

_APPLY: dict[str, Callable[..., Tensor]] = {
    "min": torch.minimum, "max": torch.maximum, "pow": torch.pow, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "select": lambda c, a, b: torch.where(c != 0, a, b),
}  # fmt: skip


def int_of(expr: Expr | int, sizes: Mapping[Size, int]) -> int:
    """A size expression as a number."""
    if isinstance(expr, int):
        return expr
    literal = expr.as_int()
    return literal if literal is not None else int(evaluate_index(expr, lambda atom: sizes[atom]))  # type: ignore[index]


def gather(source: Tensor, lanes: Sequence[Tensor], mask: Tensor | None, least: tuple[int, ...], name: str) -> Tensor:
    """``source[lanes]``, 0 where `mask` is false; `least` is a shape that the result broadcasts with at least."""
    if source.dim() != len(lanes):
        raise IndexError(f"{len(lanes)} indices into {name}, which has {source.dim()} dimensions")
    shapes = [least, *(lane.shape for lane in lanes), *([] if mask is None else [mask.shape])]
    shape = [max(extents) for extents in zip(*shapes, strict=True)]  # broadcasts, as no extent is zero here
    safe = []
    for dim, (lane, extent) in enumerate(zip(lanes, source.shape, strict=True)):
        outside = (lane < 0) | (lane >= extent)
        if mask is not None:
            outside = outside & mask
            lane = torch.where(mask, lane, 0)
        if bool(outside.any()):
            worst = lane.expand_as(outside)[outside][0].item()
            raise IndexError(f"index {worst} is out of bounds for dimension {dim} of {name} with size {extent}")
        safe.append(lane)
    if source.numel() == 0:
        return torch.zeros(shape, dtype=source.dtype)
    found = source[tuple(safe)] if safe else source.reshape(least)
    return found if mask is None else torch.where(mask, found, torch.zeros((), dtype=found.dtype))


# ---- scalar operations ----------------------------------------------------------------------------------------------

# torch has storage and copies for these, but little arithmetic; numpy has all of it, wrapping as the IR wants.
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "floordiv": np.floor_divide, "truncdiv": np.floor_divide, "remainder": np.remainder, "fmod": np.fmod, "gcd": np.gcd,
    "ipow": np.power, "neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square,
    "signbit": lambda a: np.zeros_like(a, dtype=bool),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "invert": np.invert, "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip


def apply(op: str, *args: Tensor) -> Tensor:
    """One operation of `ops.OPS` on tensors of compute dtypes, elementwise."""
    if op in _NUMPY and args[0].dtype in WIDE_UNSIGNED:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.array(_NUMPY[op](*(a.numpy() for a in args))))
    return ops.OPS[op].reference(*args)


# ---- random numbers -------------------------------------------------------------------------------------------------


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10, as int64 tensors; see the module docstring."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    seeds, counters = np.broadcast_arrays(seed.numpy().astype(np.uint64), counter.numpy().astype(np.uint64))
    k0, k1 = seeds & low32, seeds >> shift
    c0, c1 = counters & low32, counters >> shift
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low32, (p0 >> shift) ^ c3 ^ k1, p0 & low32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low32, (k1 + np.uint64(0xBB67AE85)) & low32
    w0, w1, w2, w3 = (torch.from_numpy(np.array(c).astype(np.int64)) for c in (c0, c1, c2, c3))
    return w0, w1, w2, w3


def _words(seed: Tensor, counter: Tensor, per_block: int) -> tuple[Tensor, ...]:
    """The words of the block that holds a counter, of blocks that serve `per_block` counters each."""
    return philox(
        seed, torch.from_numpy(np.asarray(counter.numpy().astype(np.uint64) // np.uint64(per_block)).astype(np.int64))
    )


def _select(place: Tensor, choices: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(choices).gather(0, place.expand_as(choices[0])[None])[0]


def _uniform(word: Tensor) -> Tensor:
    return (word >> 8).to(torch.float32) * 2.0**-24


def _rand(seed: Tensor, counter: Tensor) -> Tensor:
    return _uniform(_select(counter & 3, _words(seed, counter, 4)))


def _randn(seed: Tensor, counter: Tensor) -> Tensor:
    w0, w1, w2, w3 = _words(seed, counter, 4)
    pair = counter >> 1 & 1
    angle = 2 * math.pi * _uniform(_select(pair, (w1, w3)))
    return torch.sqrt(-2 * torch.log(_uniform(_select(pair, (w0, w2))) + 2.0**-24)) * _select(
        counter & 1, (torch.cos(angle), torch.sin(angle))
    )


def _randbits(seed: Tensor, counter: Tensor) -> Tensor:
    w0, w1, w2, w3 = _words(seed, counter, 2)
    return _select(counter & 1, (w0 | w1 << 32, w2 | w3 << 32))


# (seed, counter) -> the numbers, as int64 or float32
RANDOM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"rand": _rand, "randn": _randn, "randbits": _randbits}
