"""Every family of operators becomes generated kernels, by `kgen.coverage()` and through `torch.compile`.

The families are those of the op tables, whose every row `test_codegen` checks in the same way on the schedule; here by the
user's door, and with the backward of what has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import elementwise_rows, indexing_rows
from torch import Tensor

import kgen

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def _rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _ints(top: int, *shape: int) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(3))


def pointwise(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    y = x.abs() + 0.5
    return (
        torch.exp(x) * torch.log(y) + torch.sqrt(y) - torch.rsqrt(y),
        torch.sin(x) + torch.cos(x) * torch.tanh(x),
        torch.erf(x) + torch.lgamma(y),
        F.gelu(x) + F.silu(x) + F.mish(x) + F.elu(x) + F.softplus(x),
        torch.atan2(x, y) + torch.hypot(x, y) + torch.pow(y, 1.7),
        torch.floor(x) + torch.round(x) + torch.frac(x) + torch.fmod(x, y),
        torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y) + x.clamp(-1, 1),
        torch.where(x > 0, x, y).nan_to_num(),
        torch.logaddexp(x, y) + torch.xlogy(x, y) + torch.special.i0(x) + torch.digamma(y),
        (n & 5) | (n ^ 3) << 1,
        (n // 3) + n % 5 + torch.gcd(n, n + 4),
        (n > 3) & ~(x > 0) | (n == 2),
        torch.sign(x) * torch.signbit(x),
    )


def conversions(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)
    return (*(x.to(d) for d in dtypes), *(n.to(d) for d in (*dtypes, torch.uint8)), x.view(torch.int32) ^ 1, n.float() / 3)


def creation(x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[0]
    return (
        x + torch.arange(x.shape[1]),
        torch.full((n, 2), 1.5) + torch.zeros(2),
        torch.ones_like(x) * 2,
        torch.linspace(0, 1, n) + 1,
        torch.eye(n) + 1,
        x.new_full((3,), 2),
        torch.tril(torch.ones(n, n)),
        torch.rand(n) < 2,
        torch.randn(n, 3).isfinite(),
        F.dropout(x, 0.5, True).abs() < 9 + x.abs() * 2,
        torch.rand_like(x) < 1,
        torch.bernoulli(torch.full((n,), 0.5)) <= 1,
        torch.randint(0, 5, (n,)) < 5,
    )


def reductions(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return (
        x.sum(),
        x.sum(0),
        x.mean(-1),
        x.amax(1),
        x.amin(0),
        x.argmax(1),
        x.argmin(),
        (x > 0).any(0),
        (x > 9).all(),
        n.prod(0),
        x.std(1),
        torch.var_mean(x, 0)[1],
        x.logsumexp(1),
        x.norm(),
        torch.linalg.vector_norm(x, 1, 0),
        torch.linalg.vector_norm(x, float("inf"), 1),
        n.sum(),
        x.nansum(0),
        torch.count_nonzero(n, 1),
        *x.max(0),
        *torch.aminmax(x, dim=1),
        x.nanmean(0),
    )


def normalisations(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    image = x.reshape(4, 6, 5, 7)
    return (
        x.softmax(-1),
        x.log_softmax(0),
        F.layer_norm(x, x.shape[-1:], w, w),
        F.rms_norm(x, x.shape[-1:], w),
        F.group_norm(image, 3),
        F.instance_norm(image),
        F.batch_norm(image, None, None, training=True),
        F.batch_norm(image, w[:6], w[:6].abs()),
        F.normalize(x),
        F.softmin(x, 0),
        F.cross_entropy(x, w[:24].abs().long() % 35),
        F.mse_loss(x, x * 2),
        F.kl_div(x.log_softmax(1), x.softmax(1)),
    )


def scans(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(1), x.cumprod(0), x.logcumsumexp(1), *x.cummax(0), *x.cummin(1), n.cumsum(0), (x > 0).cumsum(1)


def views(x: Tensor) -> tuple[Tensor, ...]:
    parts = (
        x.reshape(-1, 2),
        x.permute(2, 0, 1),
        x[1:, ::2],
        x[:, 0].expand(3, 4, 6),
        x.select(1, 2),
        x.flip(0, 2),
        x.roll((1, 2), (0, 1)),
        x.as_strided((2, 3), (1, 5)),
        x.diagonal(0, 0, 1),
        x.unfold(2, 3, 2),
        x.squeeze(),
        x.unsqueeze(1),
        x.rot90(),
        x.narrow(2, 1, 3),
        *x.chunk(2, 2),
        *x.unbind(0),
        x.repeat(2, 1, 1),
        x.tile(2),
        x.movedim(0, 2),
        x.unflatten(2, (2, 3)),
        x.repeat_interleave(2, 1),
    )
    return tuple(p.sin() for p in parts)


def indexing(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    grid = i[:, None].expand(-1, x.shape[1])
    return (
        x[i],
        x[:, i % 6],
        x[i, i % 6],
        x.gather(0, grid),
        x.index_select(0, i),
        F.embedding(i, x),
        x.take(i),
        x.masked_fill(x > 0, 2),
        torch.take_along_dim(x, grid, 0),
        x.where(x > 0, 0.0),
        F.one_hot(i, 8),
        x.triu(1),
        x.tril(),
        torch.searchsorted(x[0].cumsum(0), x[1]),
    )


def scatters(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    grid = i[:, None].expand(-1, x.shape[1])
    return (
        x.index_put((i,), v),
        x.index_put((i,), v, accumulate=True),
        x.scatter(0, grid, v),
        x.scatter_add(0, grid, v),
        x.index_add(0, i, v),
        x.scatter_reduce(0, grid, v, "amax"),
        x.scatter_reduce(0, grid, v, "mean"),
        x.index_copy(0, i, v),
        x.index_fill(0, i, 1.0),
        x.select_scatter(v[0], 0, 1),
        x.slice_scatter(v[:2], 0, 2, 4),
        x.diagonal_scatter(v[0], 0),
        x.masked_scatter(x > 0, v.repeat(3, 1)),
    )


def concatenations(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.cat([x, y.exp()], 1),
        torch.stack([x, x * 2]),
        F.pad(x, (1, 2), value=3.0),
        F.pad(x[None], (2, 1), mode="reflect"),
        F.pad(x[None], (1, 1), mode="replicate"),
        *(p + 1 for p in x.split([1, 3])),
        torch.hstack([x, y]),
        torch.block_diag(x, y),
        torch.cat([x.narrow(0, 0, 0), x]),
        *torch.meshgrid(x[0], y[0], indexing="ij"),
        F.pad(x[None], (1, 1), mode="circular"),
    )


def pooling(x: Tensor) -> tuple[Tensor, ...]:
    return (
        F.max_pool2d(x, 3, 2, 1),
        F.max_pool2d(x, 2, return_indices=True)[1],
        F.avg_pool2d(x, 2),
        F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        F.adaptive_avg_pool2d(x, (3, 2)),
        F.adaptive_avg_pool2d(x, 1),
        F.adaptive_max_pool2d(x, 2),
        F.max_pool1d(x[0], 2),
        F.avg_pool1d(x[0], 3),
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, (9, 11), mode="bilinear"),
        F.interpolate(x, (9, 11), mode="bicubic"),
        F.interpolate(x[0], 13, mode="linear"),
        F.pixel_shuffle(x, 2),
        F.unfold(x, 2),
        F.lp_pool2d(x, 2, 2),
    )


def writes(x: Tensor, v: Tensor) -> Tensor:
    x[1] = v
    x[:, 2:4] += 1
    x.t()[0].mul_(2)
    x.copy_(x.relu())
    x.masked_fill_(x > 2, 0)
    return x.sum()


def foreach(x: Tensor, y: Tensor) -> list[Tensor]:
    pair = torch._foreach_add([x, y], 1)
    return torch._foreach_addcmul(torch._foreach_mul(pair, 2), pair, pair, 0.5) + torch._foreach_norm(pair)


FAMILIES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (pointwise, (_rand(5, 7), _ints(9, 5, 7))),
    "conversions": (conversions, (_rand(5, 7) * 3, _ints(9, 5, 7))),
    "creation": (creation, (_rand(5, 7),)),
    "reductions": (reductions, (_rand(9, 35), _ints(4, 9, 35))),
    "normalisations": (normalisations, (_rand(24, 35), _rand(35))),
    "scans": (scans, (_rand(6, 9), _ints(9, 6, 9))),
    "views": (views, (_rand(4, 5, 6),)),
    "indexing": (indexing, (_rand(8, 6), _ints(8, 5))),
    "scatters": (scatters, (_rand(8, 6), torch.tensor([0, 7, 3]), _rand(3, 6))),
    "concatenations": (concatenations, (_rand(4, 5), _rand(4, 5))),
    "pooling": (pooling, (_rand(2, 4, 6, 8),)),
    "writes": (writes, (_rand(4, 5), _rand(5))),
    "foreach": (foreach, (_rand(4, 5), _rand(3))),
}


def run_counted(f: Callable[..., Any], *args: Tensor) -> Any:
    kgen.coverage_reset()
    return torch.compile(f, backend="kgen", fullgraph=True, options={"cache": False})(*args)


# Not operators of the user's: the draw of a graph's random seeds, and the range check that F.one_hot asks for.
SERVICES = {"kgen.seeds.default", "aten._assert_async.msg"}


def assert_only_kernels() -> None:
    found = kgen.coverage()
    assert set(found["externs"]) <= SERVICES
    assert found["kernels"] > 0
    assert found["graphs"] > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_forward(name: str) -> None:
    f, args = FAMILIES[name]
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    with torch.no_grad():
        got = run_counted(f, *ours)
        assert_only_kernels()
        torch.testing.assert_close((got, ours), (f(*theirs), theirs), rtol=2e-5, atol=2e-5, equal_nan=True)


CLASSES, WORDS, TWO_ROWS = _ints(35, 24), _ints(10, 7), _ints(10, 2, 3)
TRAINED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "normalisations": (
        lambda x, w: (
            F.layer_norm(x, (35,), w).sum()
            + (x.softmax(-1) * x).sum()
            + F.rms_norm(x, (35,), w).mean()
            + (F.group_norm(x.reshape(4, 6, 5, 7), 3) ** 3).sum()
            + (F.batch_norm(x, None, None, training=True) ** 3).sum()
        ),
        (_rand(24, 35), _rand(35)),
    ),
    "loss": (lambda x: F.cross_entropy(x, CLASSES) + F.huber_loss(x, x.detach() * 2), (_rand(24, 35),)),
    "embedding": (lambda w: (F.embedding(WORDS, w) ** 2).sum() + w[WORDS].sum() + w.gather(0, TWO_ROWS).sum(), (_rand(10, 3),)),
    "pooling": (
        lambda x: (
            (F.max_pool2d(x, 3, 2, 1) ** 2).sum()
            + (F.avg_pool2d(x, 2) ** 2).sum()
            + F.adaptive_avg_pool2d(x, 3).exp().sum()
            + (F.interpolate(x, scale_factor=2, mode="bilinear") ** 2).sum()
            + (F.interpolate(x, scale_factor=2) ** 3).sum()
        ),
        (_rand(2, 3, 8, 9),),
    ),
    "shapes": (
        lambda x: (
            (torch.cat([x, x.flip(0)]).cumsum(0) ** 2).sum()
            + (F.pad(x, (1, 2)).unfold(1, 2, 1) ** 2).sum()
            + x.amax(0).sum()
            + (x.roll(1, 0) * x.repeat(1, 1)).sum()
            + x.std(1).sum()
            + (x.tril() ** 2).sum()
            + F.dropout(x, 0.0, True).prod(1).sum()
        ),
        (_rand(6, 9),),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_backward(name: str) -> None:
    f, args = TRAINED[name]
    ours, theirs = ([a.clone().requires_grad_() for a in args] for _ in range(2))
    run_counted(f, *ours).backward()
    assert_only_kernels()
    f(*theirs).backward()
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_whole_table(part: int) -> None:
    """Every operator of the tables, fifteen a graph."""
    rows = [*elementwise_rows([torch.float32]), *(r for r in indexing_rows([torch.float32]) if not r.externs)][part::30]

    def every(samples: list[Any]) -> list[Any]:
        return [row.fn(*sample) for row, sample in zip(rows, samples, strict=True) if row.externs is not None]

    with torch.no_grad():
        run_counted(every, [row.samples[0] for row in rows])
    assert_only_kernels()
