"""Reductions give the same bits in every run at one number of threads, also where threads share a row.

Every pattern is large enough to run in parallel (`WAKE` and `SPLIT_ROW` in templates/cpp/kernels/loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from codegen import tensors

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

RUNS = 100


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _ints(top: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(7))


PATTERNS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "sum": (lambda x: x.sum(), (_rand(400_003),)),
    "sum of rows": (lambda x: x.sum(-1), (_rand(301, 1031),)),
    "sum of columns": (lambda x: x.sum(0), (_rand(1031, 301),)),
    "sum of a few columns": (lambda x: x.sum(0), (_rand(60_001, 5),)),
    "sum of the middle": (lambda x: x.sum(1), (_rand(30, 400, 33),)),
    "few long rows": (lambda x: (x.sum(-1), x.mean(-1), x.amax(-1)), (_rand(3, 100_003),)),
    "mean and var": (torch.var_mean, (_rand(300_007),)),
    "var of rows": (lambda x: torch.var_mean(x, -1), (_rand(301, 1031),)),
    "var of columns": (lambda x: torch.var_mean(x, 0), (_rand(3001, 97),)),
    "softmax": (lambda x: x.softmax(-1), (_rand(301, 1031),)),
    "softmax of columns": (lambda x: x.softmax(0), (_rand(1031, 301),)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (1031,), w), (_rand(301, 1031), _rand(1031))),
    "argmax": (lambda x: (x.argmax(), x.argmin(-1)), (_ints(9, 3, 100_003).float(),)),
    "prod": (lambda x: (x * 0.01 + 1).prod(), (_rand(300_007),)),
    "logsumexp": (lambda x: (x.logsumexp(-1), x.flatten().logsumexp(0)), (_rand(301, 1031),)),
    "norms": (lambda x: (x.norm(), x.norm(dim=0), x.norm(p=1), x.norm(p=3, dim=1)), (_rand(301, 1031),)),
    "any and all": (lambda x: ((x > 4).any(), (x < 4).all(), (x > 3).any(0)), (_rand(301, 1031),)),
    "cross_entropy": (F.cross_entropy, (_rand(301, 1031), _ints(1031, 301))),
    "scatter_add": (lambda x, i, v: x.index_add(0, i, v), (_rand(100, 65), _ints(100, 5000), _rand(5000, 65))),
    "scatter_add of numbers": (lambda x, i, v: x.scatter_add(0, i, v), (_rand(50), _ints(50, 200_003), _rand(200_003))),
    "cumsum": (lambda x: (x.cumsum(-1), x.cumsum(0)), (_rand(301, 1031),)),
    "cumsum of one row": (lambda x: x.cumsum(-1), (_rand(300_007),)),
    "sums that share a loop": (lambda x: (x.exp().sum(), (x * x).sum(), x.amax()), (_rand(301, 1031),)),
}


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_run_gives_the_same_bits(name: str, threads: int) -> None:
    fn, args = PATTERNS[name]
    compiled = torch.compile(fn, backend="kgen")
    with torch.no_grad():
        first = [t.clone() for t in tensors(compiled(*args))]
        for run in range(RUNS):
            for position, (a, b) in enumerate(zip(tensors(compiled(*args)), first, strict=True)):
                assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b))), (
                    f"result {position} of run {run} differs on {threads} threads"
                )
