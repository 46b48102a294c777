"""Kernels in Gluon whose warp groups wait for each other: all of them come to their end, whatever the number of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from codegen import rendered
from torch import Tensor
from warp_barriers import WaitsForever, run

import tests.templates.triton.test_full_row_matmuls as rows
import tests.templates.triton.test_warp_specialized_matmuls as warp_specialized
from kgen.ir.plan import members
from kgen.only import Only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Gpu, Options
from kgen.templates.contract import Config
from tests.kernels import plans
from tests.slow import slow_but

pytestmark = pytest.mark.none
COMPUTE_UNITS = Gpu(arch=90).compute_units


def kernels(name: str, fn: Callable[..., Any], args: Sequence[Tensor], every: bool = True) -> list[tuple[Config, TritonKernel]]:
    """The matmul's kernel under the configurations on offer, or under the first and the last."""
    seen: list[Config] = []

    def planned(choose: Callable[[Sequence[Config]], Config]) -> Any:
        return plans(fn, *args, options=Options(gpu_everywhere=True, gpu=Gpu(arch=90), only=Only(name, choose))).forward

    planned(lambda configs: seen.extend(configs) or configs[0])
    made = []
    for config in dict.fromkeys(seen if every else (seen[0], seen[-1])):
        plan = planned(lambda configs, config=config: config if config in configs else configs[0])
        [step] = [s for s in plan.kernels if members(s)[0].choice is not None]
        made.append((config, rendered(step, plan, "kernel", rows.OPTIONS).launch))
    return made


def programs_of(config: Config, length: int) -> list[int]:
    """The first program of a matrix, and its last one, which may have fewer tiles."""
    return [0, (length - 1) // config.BLOCK_M // config.TILES]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.every(2)
@pytest.mark.parametrize("length", slow_but(lambda n: n in (1, 33, 1009), [1, 16, 33, 80, 100, 1009]))
def test_full_rows(length: int) -> None:
    """A group may have a tile less than the other one, or none."""
    for batch in (1, 70):
        for config, kernel in kernels(rows.NAME, rows.softmax, (empty(batch, length, 64), empty(batch, 512, 64))):
            run(kernel, programs_of(config, length))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", rows.CASES)
def test_full_rows_of_all_kinds(name: str) -> None:
    fn, args = rows.CASES[name]
    for config, kernel in kernels(rows.NAME, fn, args, every=False):
        run(kernel, programs_of(config, args[0].shape[-3] if "heads" in name else args[0].shape[-2]))


@pytest.mark.every(5)
@pytest.mark.parametrize("name", warp_specialized.CASES)
def test_parts_of_their_own(name: str, tf32: None) -> None:
    fn, args = warp_specialized.CASES[name]
    for _, kernel in kernels(warp_specialized.NAME, fn, args, every=False):
        run(kernel, [0, 1, COMPUTE_UNITS - 1], orders=3)


def matmul(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x @ w) + y


@pytest.mark.every(2)
@pytest.mark.parametrize("length", slow_but(lambda n: n in (1, 4100), [1, 1024, 4100, 9000]))
def test_parts_of_their_own_with_many_tiles(length: int) -> None:
    for _, kernel in kernels(warp_specialized.NAME, matmul, (empty(length, 200), empty(200, 1024), empty(length, 1024))):
        run(kernel, [0, COMPUTE_UNITS - 1], orders=3)


def masked() -> TritonKernel:
    return kernels(rows.NAME, *rows.CASES["masked"], every=False)[0][1]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("ws.pingpong_arrive(order, group, PROGRAMS)", "pass"),
        ("ws.release_read(free, stage)", "pass"),
        ("ws.expect(ready, stage, ", "ws.expect(ready, stage, 16 + "),
        ("if count > 0:", "if True:"),
    ],
)
def test_what_is_left_out_is_found(line: str, instead: str) -> None:
    """A turn that is not passed, memory not given back, bytes that never come, and a turn passed by a group that had none."""
    _, kernel = kernels(rows.NAME, rows.softmax, (empty(1, 16, 64), empty(1, 512, 64)))[0]
    if "order" in line or "free" in line:
        _, kernel = next(pair for pair in kernels(rows.NAME, *rows.CASES["read behind a reduction"]) if pair[0].TILES > 3)
    assert line in kernel.source
    changed = replace(kernel, source=kernel.source.replace(line, instead))
    with pytest.raises(WaitsForever):
        run(changed, [0], orders=10)
