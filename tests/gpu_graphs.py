"""Graphs that between them use every template of the GPU back end: run in Triton's interpreter, compiled for GPUs that are not
here, and run on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import copied, gradients, near, tensors
from torch import Tensor

import kgen.report.record
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, Tiling, members
from kgen.scheduler import Gpu, choose_tiles
from kgen.scheduler.fusion import cost
from kgen.scheduler.tiling import tiles
from kgen.scheduler.transforms import split_reduction, split_scan

f16, bf16, f32, i8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
F8 = torch.float8_e4m3fn


class Maker:
    """Example arguments, the same ones on every device."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(11)

    def __call__(self, *shape: int, dtype: torch.dtype = f32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def ints(self, top: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, top, shape, generator=self.generator).to(dtype).to(self.device)

    def ties(self, *shape: int) -> Tensor:
        """Few distinct numbers, some NaN in every second row."""
        made = torch.randint(-2, 3, shape, generator=self.generator).float()
        made[::2][torch.rand(made[::2].shape, generator=self.generator) < 0.05] = float("nan")
        return made.to(self.device)


@dataclass(frozen=True)
class Graph:
    """`kinds` are the templates that its kernels must use between them; `loops` the walks over rows in all kernels, where that
    is the point. `short`: rows of more than 16 points are long, so that small inputs are walked in steps."""

    fn: Callable[..., Any]
    inputs: Callable[[Maker], Sequence[Tensor]]
    kinds: frozenset[str]
    loops: int | None = None
    short: bool = False
    backward: bool = False


def kinds_of(plan: Schedule) -> set[str]:
    """The templates that the kernels of a schedule use."""
    return {_kind(step, tiling) for step, tiling in tilings(plan)}


def tilings(plan: Schedule) -> Iterator[tuple[Kernel, Tiling]]:
    for kernel in (kernel for step in plan.kernels for kernel in members(step)):
        if kernel.target == "triton":
            yield kernel, choose_tiles(kernel, plan.graph, Sizes(plan.graph.size_hints), Gpu())


def _kind(step: Kernel, tiling: Tiling) -> str:
    if not tiling.kernel.inner:
        return "plane" if tiling.y else "points"
    form = "rows" if tiling.persistent else "loop"
    if any(s.kind == "scan" for s in step.statements):
        return f"scan in {form}"
    return "partial" if "_partial" in step.name else form


@contextmanager
def short_rows() -> Iterator[None]:
    """Rows of more than 16 points are walked, 16 points a step (or four columns)."""
    with pytest.MonkeyPatch.context() as patch:
        limits = replace(cost.LIMITS["triton"], long_row=16, max_row=16, min_rows=1)
        patch.setitem(cost.LIMITS, "triton", limits)
        holds = tiles.persistent
        patch.setattr(tiles, "persistent", lambda kernel, _limit=0: holds(kernel, 16))
        patch.setattr(tiles, "REDUCTION_POINTS", 4)
        yield


@contextmanager
def short_shares() -> Iterator[None]:
    """Rows are cut in two kernels from 32 points on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_reduction, "MIN_CHUNK", 16)
        patch.setattr(split_scan, "MIN_CHUNK", 8)
        patch.setattr(split_scan, "SHORTEST", 8)
        yield


@contextmanager
def wide_indices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_fits_32", lambda kernel: False)
        yield


@dataclass
class Ran:
    """What was compiled: the templates that kernels use, and the text of each kernel."""

    kinds: set[str]
    texts: list[str]
    results: Any

    @property
    def loops(self) -> int:
        return sum(text.count("for start in range") for text in self.texts)


def run(fn: Callable[..., Any], *args: Any, backward: bool = False, dynamic: bool | None = None, **options: Any) -> Ran:
    """Compiles and calls twice: results and changed arguments agree with eager's, and both calls give the same bits."""
    ours, again, theirs = copied(args), copied(args), copied(args)
    with kgen.report.record.recording() as recorder:
        compiled = torch.compile(fn, backend="kgen", fullgraph=True, dynamic=dynamic, options={"cache": False, **options})
        got = _called(compiled, ours, backward)
    want, repeated = _called(fn, theirs, backward), _called(compiled, again, backward)
    reference = gradients(fn) if backward else fn
    near(reference)(args, [got, _arithmetic(ours)], [want, _arithmetic(theirs)])
    for a, b in zip(tensors([got, *ours]), tensors([repeated, *again]), strict=True):
        assert torch.equal(_bits(a), _bits(b)), "a second call gives other bits"
    plans = [graph.plan for graph in recorder.graphs]
    texts = [call.launch.source for graph in recorder.graphs for call in graph.units.calls.values() if call.launch is not None]
    return Ran({kind for plan in plans for kind in kinds_of(plan)}, texts, got)


def _called(fn: Callable[..., Any], args: Sequence[Any], backward: bool) -> Any:
    if backward:
        return gradients(fn)(*args)
    with torch.no_grad():
        return fn(*args)


def _arithmetic(args: Sequence[Tensor]) -> list[Tensor]:
    """Arguments after the call; those in eight bits have no operators to compare them with."""
    return [a.float() if a.dtype is F8 else a for a in args]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


# ---- the graphs -----------------------------------------------------------------------------------------------------


def _kinds(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(","))


def _masks(x: Tensor, m: Tensor) -> Tensor:
    return torch.cat([F.pad(x, (1, 2), value=3.0), x.where(x > 0, -x), x.masked_fill(m, 0), x.triu(1), x.flip(0)], 1) * 2


def _gathers(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    grid = i[:, None].expand(-1, x.shape[1]) % x.shape[0]
    return x[i] * 2, x.gather(0, grid) + v, x[:, i % 4], F.embedding(i, x).mean(0), x.index_select(1, i % 5)


def _scatters(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    whole = (v * 8).round()  # sums of integers do not depend on their order
    return (
        x.round().index_put((i,), whole, accumulate=True),
        x.round().index_add(0, i, whole),
        x.round().scatter_add(0, i[:, None].expand_as(v), whole),
        torch.zeros_like(x, dtype=torch.int32).index_put((i,), whole.int(), accumulate=True),
        x.index_copy(0, 4 - torch.arange(2, device=x.device) * 3, v[:2]),
        x.index_fill(0, i, 1.0),
    )


def _scatters_into_one(x: Tensor) -> tuple[Tensor, ...]:
    """What is added neither differs along the index nor has another place there."""
    row = x.round().sum(1, keepdim=True)
    everywhere = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    column = (x[:1] * 4).round() + 1
    return (
        row.scatter_add(1, everywhere, row.expand_as(x)),
        row.index_add(1, everywhere[0], row.expand_as(x)),
        column.scatter_add(0, everywhere, column.expand_as(x)),
        column.index_put((everywhere[:, 0],), column.expand_as(x), accumulate=True),
        row.long().scatter_reduce(1, everywhere, row.long().expand_as(x), "amax"),
        row.sum(0, keepdim=True).index_add(0, everywhere[:, 0], row.sum(0, keepdim=True).expand(x.shape[0], 1)),
    )


def _in_place(x: Tensor, v: Tensor) -> Tensor:
    x[1] = v
    x[:, 2:4] += 1
    x.t()[0].mul_(2)
    x.copy_(x.relu())
    return x.sum(1)


def _mixed(b: Tensor, h: Tensor, small: Tensor, flags: Tensor, f: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    return (
        b * h.float() + f, (small + flags) * 2, (b + f).to(bf16), (h * 2).to(F8).view(i8), e.float() * f, flags & (f > 0),
        (small // 3).to(h.dtype) + h, b.sum(0), small.sum(), flags.any(0),
    )  # fmt: skip


def _views(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x[2:, 1::2] + 1,
        x[:, 3].exp(),
        x.unfold(1, 3, 2).sum(-1),
        x.diagonal() * 2,
        x[1:, 1:].t().contiguous(),
        x[3:5].sum(0),
    )


def _statistics(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(-1), *torch.var_mean(x, -1), x.amax(-1), (x > 2).any(-1), (x > -9).all(-1), x.norm(dim=-1))


def _arg_reductions(x: Tensor) -> tuple[Tensor, ...]:
    return (x.argmax(-1), x.argmin(-1), *x.max(-1), *x.min(-1))


def _losses(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.layer_norm(x, (x.shape[-1],), w) * 3, y) + F.huber_loss(x, x.detach().round())


def _empty(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x + 1, x.sum(0), x.sum(1), torch.cat([x, y]), y[:0].exp(), x.t() @ y[:0], x.cumsum(0), (x > 0).any()


def _offset_input(m: Maker) -> Tensor:
    return m(9, 40)[1:, 3:37]


GRAPHS: dict[str, Graph] = {
    "chain": Graph(lambda x: ((x * 2 + 1).tanh() * x, x.exp()), lambda m: [m(33, 70)], _kinds("points")),
    "broadcast": Graph(lambda x, y, z: (x * y).relu() - z, lambda m: [m(31, 67), m(67), m(31, 1)], _kinds("points")),
    "transposed": Graph(lambda x, y: x + y.t(), lambda m: [m(70, 45), m(45, 70)], _kinds("plane")),
    "transposed_bf16": Graph(lambda x, y: (x + y.t()).relu(), lambda m: [m(70, 45, dtype=bf16), m(45, 70)], _kinds("plane")),
    "permuted": Graph(lambda x, y: x * y.permute(2, 1, 0), lambda m: [m(20, 3, 33), m(33, 3, 20)], _kinds("plane")),
    "masks": Graph(_masks, lambda m: [m(7, 5), m(7, 5) > 0], _kinds("points")),
    "offset_views": Graph(_views, lambda m: [_offset_input(m)], _kinds("points")),
    "mixed_dtypes": Graph(
        _mixed,
        lambda m: [
            m(9, 33, dtype=bf16),
            m(9, 33, dtype=f16),
            m.ints(9, 9, 33, dtype=i8),
            m(9, 33) > 0,
            m(9, 33),
            m(9, 33).to(F8),
        ],
        _kinds("rows"),
    ),
    "in_place": Graph(_in_place, lambda m: [m(4, 6), m(6)], _kinds("points")),
    "gathers": Graph(_gathers, lambda m: [m(8, 6), m.ints(8, 5), m(5, 6)], _kinds("points")),
    "scatters": Graph(_scatters, lambda m: [m(8, 6), m.ints(8, 5), m(5, 6)], _kinds("points")),
    "scatters_into_one": Graph(_scatters_into_one, lambda m: [m(9, 21)], _kinds("rows")),
    "long_scatters_into_one": Graph(_scatters_into_one, lambda m: [m(9, 77)], _kinds("loop"), short=True),
    "empty": Graph(_empty, lambda m: [m(0, 5), m(3, 5)], _kinds("points")),
    # rows in registers
    "softmax": Graph(lambda x: x.softmax(-1), lambda m: [m(300, 77)], _kinds("rows")),
    "statistics": Graph(_statistics, lambda m: [m(5, 77) * 2 + 1], _kinds("rows")),
    "layer_norm": Graph(lambda x, w: F.layer_norm(F.gelu(x), (77,), w), lambda m: [m(5, 77), m(77)], _kinds("rows")),
    "rms_norm_bf16": Graph(lambda x, w: F.rms_norm(x, (96,), w), lambda m: [m(6, 96, dtype=bf16), m(96)], _kinds("rows")),
    "columns": Graph(lambda x: (x.sum(0), x.amax(0)), lambda m: [m(37, 45)], _kinds("rows")),
    "arg_reductions": Graph(_arg_reductions, lambda m: [m.ties(6, 70)], _kinds("rows")),
    "scans": Graph(
        lambda x, n: (x.cumsum(-1), n.cumsum(0), *x.cummax(-1), x.logcumsumexp(-1), x.cumprod(0)),
        lambda m: [m(5, 40), m.ints(9, 5, 40)],
        _kinds("scan in rows"),
    ),
    # rows that are walked
    "long_softmax": Graph(lambda x: x.softmax(-1), lambda m: [m(5, 77)], _kinds("loop"), loops=2, short=True),
    "long_logsumexp": Graph(lambda x: x.logsumexp(-1), lambda m: [m(5, 77)], _kinds("loop"), loops=1, short=True),
    "long_cross_entropy": Graph(
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        lambda m: [m(40, 77), m.ints(77, 40)],
        _kinds("loop"),
        1,
        short=True,
    ),
    "long_statistics": Graph(_statistics, lambda m: [m(5, 77) * 2 + 1], _kinds("loop"), short=True),
    "long_layer_norm": Graph(
        lambda x, w: F.layer_norm(x, (77,), w), lambda m: [m(5, 77) + 3, m(77)], _kinds("loop"), 2, short=True
    ),
    "long_columns": Graph(lambda x: (x.sum(0), x.amax(0), x.softmax(0)), lambda m: [m(77, 21)], _kinds("loop"), short=True),
    "long_arg_reductions": Graph(_arg_reductions, lambda m: [m.ties(6, 70)], _kinds("loop"), short=True),
    "long_scans": Graph(
        lambda x, n: (x.cumsum(-1), n.cumsum(0), *x.cummax(-1), *x.cummin(0), x.logcumsumexp(-1)),
        lambda m: [m(20, 40), m.ints(9, 20, 40)],
        _kinds("scan in loop"),
        short=True,
    ),
    # few long rows, which two kernels share
    "split_exact": Graph(_statistics, lambda m: [m(2, 32768) + 0.5], _kinds("partial, rows")),
    "split_ragged": Graph(
        lambda x: (x.sum(-1), x.amax(-1), (x > 3).any(-1), x.norm(dim=-1)), lambda m: [m(3, 32801)], _kinds("partial, rows")
    ),
    "split_places": Graph(
        lambda x: (x.argmax(), x.argmin(-1), *x.max(-1)), lambda m: [m.ties(3, 32771)], _kinds("partial, rows")
    ),
    "split_columns": Graph(lambda x: x.sum(0), lambda m: [m(20000, 5)], _kinds("partial")),
    # training
    "depthwise_filters": Graph(
        lambda x, w: F.conv1d(x, w, padding=3, groups=w.shape[0]),  # for taps along two dimensions a GPU's library has kernels
        lambda m: [m(4, 3, 9001), m(3, 1, 5)],
        _kinds("partial"),
        backward=True,
    ),
    "loss": Graph(_losses, lambda m: [m(12, 35), m.ints(35, 12), m(35)], _kinds("rows"), backward=True),
    "long_loss": Graph(_losses, lambda m: [m(12, 35), m.ints(35, 12), m(35)], _kinds("loop"), short=True, backward=True),
    "attention": Graph(
        lambda q, k, v: ((q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v).tanh(),
        lambda m: [m(2, 9, 8), m(2, 9, 8), m(2, 9, 8)],
        _kinds("points"),  # a row is in one tile of the matmul
        backward=True,
    ),
}
