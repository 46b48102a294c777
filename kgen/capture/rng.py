"""Random numbers as a pure function of seeds, so that kernels may compute them anywhere, twice, and in any order.

A graph draws one tensor of seeds a device from torch's default generator (`kgen::seeds`, so torch.manual_seed works), and
each random operator becomes `kgen::rand` of one of those seeds: the value of an element depends on its seed and on its logical
linear index only, never on tiling. The backward graph gets the seeds and computes a dropout mask again instead of reading it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key = the seed's low and high word
and counter = (b low, b high, 0, 0) gives block b, four words. Random numbers cost what their blocks cost, so neighbours share
one. Let pair q be the words (w0, w1) = (2 (q % 2), 2 (q % 2) + 1) of block q // 2. Element i, an unsigned number, is

- rand:     float32 in [0, 1): (w >> 8) * 2**-24 for w = w(i % 2) of pair i // 2, which is word i % 4 of block i // 4
- randn:    float32, of pair i // 2 (Box and Muller): sqrt(-2 ln(((w0 >> 8) + 1) * 2**-24)) times the cosine, for odd i the
            sine, of 2 pi (w1 >> 8) * 2**-24
- randbits: int64: w0 | w1 << 32 of pair i

Other dtypes and distributions are made of these with ordinary operators while rewriting. Operators that are given a generator
of their own are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from kgen.capture import torch_adapter
from kgen.capture.seeds import seeds

__all__ = ["KINDS", "RAND", "RULES", "replace_random"]

aten = torch.ops.aten

KINDS = {"rand": torch.float32, "randn": torch.float32, "randbits": torch.int64}

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("rand(SymInt[] size, Tensor seeds, int index, str kind, ScalarType dtype) -> Tensor")
RAND = torch.ops.kgen.rand.default


def _fake_rand(size: Sequence[Any], seeds: torch.Tensor, index: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=seeds.device)


def _reference_rand(size: Sequence[int], seeds: torch.Tensor, index: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    assert dtype == KINDS[kind]
    counter = torch.arange(math.prod(size), dtype=torch.int64, device=seeds.device)
    seed, odd = seeds[index], counter % 2 == 1
    if kind == "randbits":
        w0, w1 = _pair(seed, counter)
        made = w0 | (w1 << 32)
    elif kind == "rand":
        w0, w1 = _pair(seed, counter // 2)
        made = (torch.where(odd, w1, w0) >> 8).to(dtype) * 2.0**-24
    else:
        w0, w1 = _pair(seed, counter // 2)
        radius = ((((w0 >> 8) + 1).to(dtype) * 2.0**-24).log() * -2.0).sqrt()
        angle = (w1 >> 8).to(dtype) * (2.0**-24 * 2.0 * math.pi)
        made = radius * torch.where(odd, angle.sin(), angle.cos())
    return made.reshape(size)


torch.library.register_fake("kgen::rand", _fake_rand, lib=_library)
for _key in ("CPU", "CUDA"):
    _library.impl("rand", _reference_rand, _key)


def _pair(seed: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w0, w1, w2, w3 = _philox(seed, number // 2)
    odd = number % 2 == 1
    return torch.where(odd, w2, w0), torch.where(odd, w3, w1)


def _philox(seed: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The words of each counter's block, as int64 in [0, 2**32)."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, (seed >> 32) & low
    c0, c1 = counter & low, (counter >> 32) & low
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    for _ in range(10):
        hi0, lo0 = _multiply(c0, 0xD2511F53)
        hi1, lo1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 by 32 bit multiplication; in halves, because torch has no unsigned 64-bit shift."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + ((a0 * b0) >> 16)
    carry = (middle & 0xFFFF) + a0 * b1
    return a1 * b1 + (middle >> 16) + (carry >> 16), (a * b) & 0xFFFFFFFF


# ---- the rewrite -------------------------------------------------------------------------------------------------------


def replace_random(gm: GraphModule) -> GraphModule:
    """Random operators of the default generator become functions of seeds. On a joint graph, before it is split, so that
    forward and backward agree."""
    found = [n for n in gm.graph.nodes if n.target in RULES and n.kwargs.get("generator") is None]
    if found:
        writer = _Writer(gm)
        for node in found:
            writer.replace(node)
        writer.finish()
    return gm


class _Writer:
    """Writes replacement nodes before the node that it replaces, and computes their meta."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.gm = gm
        self.seeds: dict[torch.device, Node] = {}
        self.used: dict[torch.device, int] = {}
        self.node: Any = None

    def replace(self, node: Node) -> None:
        self.node = node
        with self.graph.inserting_before(node):
            made = RULES[node.target](self, *node.args, **{k: v for k, v in node.kwargs.items() if k != "generator"})
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def finish(self) -> None:
        for device, node in self.seeds.items():
            node.args = (self.used[device], device)
            node.meta["val"] = torch_adapter.fake_result(node)
        self.graph.lint()
        self.gm.recompile()

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.node.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
        made.meta["val"] = torch_adapter.fake_result(made)
        return made

    def base(self, kind: str) -> Node:
        """`kind` numbers in the shape, and the stride order, of the node being replaced."""
        value = self.node.meta["val"]
        order = torch_adapter.stride_order(value)
        sizes = self._sizes(value)
        seeds = self._seeds(value.device)
        index = self.used[value.device]
        self.used[value.device] += 1
        made = self.call(RAND, [sizes[d] for d in order], seeds, index, kind, KINDS[kind])
        if made.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE:
            # the partitioner knows no operators of ours and would save the numbers; recomputing them needs only the seeds
            made.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        if order != tuple(range(len(order))):
            made = self.call(aten.permute.default, made, [order.index(d) for d in range(len(order))])
        return made

    def _sizes(self, value: torch.Tensor) -> list[Any]:
        for argument in (*self.node.args, *self.node.kwargs.values()):
            if isinstance(argument, list | tuple) and len(argument) == value.dim():
                return list(argument)
        like = self.node.args[0] if self.node.args else None
        return [
            self.call(aten.sym_size.int, like, d) if isinstance(size, torch.SymInt) else size
            for d, size in enumerate(value.shape)
        ]

    def _seeds(self, device: torch.device) -> Node:
        if device not in self.seeds:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(first):
                made = self.graph.call_function(seeds, (1, device))
            like = self.node.meta["val"]
            made.meta = {"val": torch_adapter.fake_like(like, (1,), torch.int64), "recompute": CheckpointPolicy.MUST_SAVE}
            self.seeds[device], self.used[device] = made, 0
        return self.seeds[device]

    def uniform(self, dtype: torch.dtype) -> Node:
        """Numbers in [0, 1), of 16 bits those of float32 rounded: as in eager on a GPU, small ones are as fine as their type,
        so that `rand < .01` holds for 1% of them. What would round up to 1 is the number before."""
        if dtype == torch.float32:
            return self.base("rand")
        if dtype == torch.float64:
            bits = self.call(aten.bitwise_and.Scalar, self.base("randbits"), 2**53 - 1)
            return self.call(aten.mul.Tensor, self.to(bits, dtype), 2.0**-53)
        rounded = self.to(self.base("rand"), dtype)
        return self.call(aten.clamp_max.default, rounded, 1.0 - torch.finfo(dtype).eps / 2)

    def normal(self, dtype: torch.dtype) -> Node:
        return self.to(self.base("randn"), dtype)

    def to(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype == dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute a distribution in."""
        return torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32

    def numbers(self, make: Callable[[torch.dtype], Node], dtype: torch.dtype) -> Node:
        """What `make` gives of a dtype; of a complex result, for each of its parts."""
        if not self.dtype.is_complex:
            return make(dtype)
        real = self.wide if dtype == self.wide else self.dtype.to_real()
        return self.call(aten.complex.default, make(real), make(real))


def _rand(w: _Writer, *_: Any, **__: Any) -> Node:
    return w.numbers(w.uniform, w.dtype)


def _randn(w: _Writer, *_: Any, **__: Any) -> Node:
    return w.to(_gauss(w, 0.0, 1.0), w.dtype) if w.dtype.is_complex else w.normal(w.dtype)


def _integers(w: _Writer, low: Any, high: Any) -> Node:
    bits = w.call(aten.bitwise_and.Scalar, w.base("randbits"), 2**63 - 1)
    span = high - low if isinstance(low, int) and isinstance(high, int) else w.call(_sub_sizes, high, low)
    return w.to(w.call(aten.add.Tensor, w.call(aten.remainder.Scalar, bits, span), low), w.dtype)


def _sub_sizes(a: Any, b: Any) -> Any:
    return a - b


def _randint(w: _Writer, high: Any, *_: Any, **__: Any) -> Node:
    return _integers(w, 0, high)


def _randint_low(w: _Writer, low: Any, high: Any, *_: Any, **__: Any) -> Node:
    return _integers(w, low, high)


def _randint_like(w: _Writer, _like: Any, high: Any, *_: Any, **__: Any) -> Node:
    return _integers(w, 0, high)


def _randint_like_low(w: _Writer, _like: Any, low: Any, high: Any, *_: Any, **__: Any) -> Node:
    return _integers(w, low, high)


def _bernoulli_p(w: _Writer, _like: Any, p: float = 0.5) -> Node:
    return w.to(w.call(aten.lt.Scalar, w.uniform(torch.float32), p), w.dtype)


def _bernoulli(w: _Writer, p: Any) -> Node:
    return w.to(w.call(aten.lt.Tensor, w.uniform(w.wide), p), w.dtype)


def _uniform(w: _Writer, _like: Any, low: float = 0.0, high: float = 1.0) -> Node:
    def part(dtype: torch.dtype) -> Node:
        return w.call(aten.add.Tensor, w.call(aten.mul.Tensor, w.uniform(dtype), high - low), low)

    return w.numbers(part, w.dtype)


def _normal(w: _Writer, _like: Any, mean: float = 0.0, std: float = 1.0, *_: Any, **__: Any) -> Node:
    return w.to(_gauss(w, mean, std), w.dtype)


def _normal_sized(w: _Writer, mean: float, std: float, *_: Any, **__: Any) -> Node:
    return w.to(_gauss(w, mean, std), w.dtype)


def _gauss(w: _Writer, mean: float, std: float) -> Node:
    """Of complex numbers, the variance is that of both parts together, and each part has the mean, as in eager."""
    each = std * math.sqrt(0.5) if w.dtype.is_complex else std

    def part(dtype: torch.dtype) -> Node:
        return w.call(aten.add.Tensor, w.call(aten.mul.Tensor, w.normal(dtype), each), mean)

    return w.numbers(part, w.wide)


def _log_of_uniform(w: _Writer) -> Node:
    """ln(1 - u): finite, because u < 1."""
    return w.call(aten.log1p.default, w.call(aten.neg.default, w.uniform(w.wide)))


def _exponential(w: _Writer, _like: Any, rate: float = 1.0) -> Node:
    return w.to(w.call(aten.mul.Tensor, _log_of_uniform(w), -1.0 / rate), w.dtype)


def _geometric(w: _Writer, _like: Any, p: float) -> Node:
    trials = w.call(aten.ceil.default, w.call(aten.mul.Tensor, _log_of_uniform(w), 1.0 / math.log1p(-p)))
    return w.to(w.call(aten.clamp_min.default, trials, 1.0), w.dtype)


def _cauchy(w: _Writer, _like: Any, median: float = 0.0, sigma: float = 1.0) -> Node:
    angle = w.call(aten.mul.Tensor, w.call(aten.add.Tensor, w.uniform(w.wide), -0.5), math.pi)
    spread = w.call(aten.mul.Tensor, w.call(aten.tan.default, angle), sigma)
    return w.to(w.call(aten.add.Tensor, spread, median), w.dtype)


def _log_normal(w: _Writer, _like: Any, mean: float = 1.0, std: float = 2.0) -> Node:
    return w.to(w.call(aten.exp.default, _gauss(w, mean, std)), w.dtype)


RULES: dict[Any, Callable[..., Node]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.default: _bernoulli,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
    aten.normal.float_float: _normal_sized,
    aten.exponential.default: _exponential,
    aten.geometric.default: _geometric,
    aten.cauchy.default: _cauchy,
    aten.log_normal.default: _log_normal,
}
