"""Random numbers in Triton kernels: the same for every tiling, and as cheap as their blocks where neighbours share one."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kgen.capture.rng import KINDS
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Blocks, Tiling
from kgen.only import Only, only
from kgen.reference.evaluate_value import RANDOM
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Gpu, choose_tiles
from kgen.templates.triton.codegen.interpret import patched
from tests.codegen import options_for, rendered
from tests.kernels import plans
from tests.rendering import gpu_call
from tests.slow import slow_but

SEEDS = torch.tensor([11, -7 << 33])


def line(kind: str, seeds: Tensor) -> Tensor:
    return torch.ops.kgen.rand([600], seeds, 1, kind, KINDS[kind])


def rows(kind: str, seeds: Tensor, width: int = 36) -> tuple[Tensor, Tensor]:
    made = torch.ops.kgen.rand([20, width], seeds, 1, kind, KINDS[kind])
    return made, made.amax(-1)


def odd_rows(kind: str, seeds: Tensor) -> tuple[Tensor, Tensor]:
    return rows(kind, seeds, 37)


def columns(kind: str, seeds: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.ops.kgen.rand([20, 36], seeds, 1, kind, KINDS[kind])
    return made, made.amax(0)


def two_loops(kind: str, seeds: Tensor, chosen: Tensor, width: int = 12) -> Tensor:
    made = torch.ops.kgen.rand([25, width], seeds, 1, kind, KINDS[kind])
    return torch.where(chosen[:, None], made, made + 1)


def two_odd_loops(kind: str, seeds: Tensor, chosen: Tensor) -> Tensor:
    return two_loops(kind, seeds, chosen, 10)


def plane(kind: str, seeds: Tensor, turned: Tensor) -> Tensor:
    return torch.ops.kgen.rand([20, 24], seeds, 1, kind, KINDS[kind]) + turned.t()


ALL, NONE = torch.ones(25, dtype=torch.bool), torch.zeros(24, 20, dtype=torch.bool)
# function, inputs but the seeds, tiles with the loops they walk (True: full rows in registers) and whether they share blocks
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[tuple[Blocks, bool, bool], ...]]] = {
    "line": (line, (), ((Blocks(64), True, True), (Blocks(512), True, True), (Blocks(2), True, False))),
    "rows": (rows, (), (
        (Blocks(1, r=64), True, True), (Blocks(4, r=64), True, True), (Blocks(2, r=16), False, True),
        (Blocks(8, r=2), False, False),
    )),
    "odd rows": (odd_rows, (), ((Blocks(4, r=64), True, False), (Blocks(1, r=16), False, False))),
    "columns": (columns, (), ((Blocks(8, r=32), True, True), (Blocks(4, r=8), False, True), (Blocks(2, r=8), False, False))),
    "two loops": (two_loops, (ALL,), ((Blocks(64), True, True), (Blocks(8), True, True))),
    "two odd loops": (two_odd_loops, (ALL,), ((Blocks(64), True, False),)),
    "plane": (plane, (NONE,), ((Blocks(16, 16), True, True), (Blocks(8, 32), True, True), (Blocks(2, 2), True, False))),
}  # fmt: skip


def tiled(f: Callable[..., Any], *args: Tensor) -> tuple[Tiling, ir.Graph]:
    plan = plans(f, *args).forward
    [kernel] = plan.kernels
    assert plan.graph is not None
    return choose_tiles(kernel, plan.graph, Sizes(plan.graph.size_hints), Gpu()), plan.graph


def loaded(made: KernelCall, folder: Path) -> Any:
    path = folder / f"{made.launch.name}.py"
    path.write_text(made.launch.source)
    spec = importlib.util.spec_from_file_location(made.launch.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, made.launch.name)


def interpreted(tiling: Tiling, graph: ir.Graph, inputs: tuple[Tensor, ...], folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The source, and what the kernel writes."""
    made = gpu_call(tiling, graph)
    names = [g.buffer for g in graph.inputs if g.buffer]
    found = dict(zip(names, inputs, strict=True))
    sizes = Sizes(graph.size_hints)
    for name in made.buffers:
        if name not in found:
            buffer = graph.buffers[name]
            found[name] = torch.zeros([sizes.of(s) for s in buffer.sizes], dtype=buffer.dtype)
    with patched():
        loaded(made, folder)[tuple(sizes.of(e) for e in made.grid)](*(found[name] for name in made.buffers))
    return made.launch.source, {name: found[name] for name in made.buffers if name not in names}


@pytest.mark.every(4)
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("case", "kind"), slow_but(lambda case, kind: kind == next(iter(KINDS)) or case == "plane", itertools.product(CASES, KINDS))
)
def test_numbers_do_not_depend_on_tiles(case: str, kind: str, tmp_path: Path) -> None:
    f, others, tiles = CASES[case]
    inputs = (SEEDS, *others)
    tiling, graph = tiled(lambda *args: f(kind, *args), *inputs)
    shape = f(kind, *inputs)
    first = shape[0] if isinstance(shape, tuple) else shape
    want = RANDOM[kind](SEEDS[1], torch.arange(first.numel())).reshape(first.shape)
    results = []
    for blocks, persistent, shares in tiles:
        source, made = interpreted(replace(tiling, blocks=blocks, persistent=persistent), graph, inputs, tmp_path)
        assert ("_of_adjacent" in source) == shares
        [result] = [x for x in made.values() if x.shape == first.shape]
        results.append(result)
    for result in results:
        assert torch.equal(result, results[0])
    if kind == "randn":
        torch.testing.assert_close(results[0], want, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(results[0], want)


def dropped(x: Tensor, seeds: Tensor) -> Tensor:
    return x * (torch.ops.kgen.rand(x.shape, seeds, 0, "rand", torch.float32) > 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("among", ["points", "rows"])
def test_a_thread_computes_a_block_once(among: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Ten rounds of two multiplications for four elements, and no element goes to another thread. Of points in a line the
    compiler finds that by itself, of rows it does not."""
    x = torch.zeros((1 << 20,) if among == "points" else (2048, 1024), dtype=dtype)
    tiling, graph = tiled(lambda seeds, x: dropped(x if among == "points" else x.softmax(-1), seeds), SEEDS, x)
    made = gpu_call(tiling, graph)
    launch = made.launch
    code = ASTSource(
        loaded(made, tmp_path), dict(zip(launch_parameters(launch.source), launch.signature, strict=True)),
        attrs={(i,): [["tt.divisibility", 16]] for i, aligned in enumerate(launch.divisible) if aligned},
    )  # fmt: skip
    options = {"enable_fp_fusion": False, "num_warps": launch.num_warps}
    compiled = triton.compile(code, target=GPUTarget("cuda", 90, 32), options=options)
    points = tiling.blocks.x * tiling.blocks.r // (32 * tiling.blocks.warps)
    assert points >= 16 // dtype.itemsize
    assert compiled.metadata.shared <= (0 if among == "points" else 64)  # a row's maximum and sum of each warp
    assert compiled.asm["ptx"].count("mul.hi.u32") <= 20 * points // 4


@pytest.mark.interpret
def test_rows_of_one_block(tmp_path: Path) -> None:
    """Many 16-bit points a thread, but no second block along the row."""
    x = torch.ones(64, 4, dtype=torch.bfloat16)
    tiling, graph = tiled(lambda seeds, x: dropped(x, seeds).amax(-1), SEEDS, x)
    small = replace(tiling, blocks=Blocks(64, r=4, warps=1), persistent=True)
    source, made = interpreted(small, graph, (SEEDS, x), tmp_path)
    assert "rand_of_adjacent" in source
    [result] = made.values()
    kept = RANDOM["rand"](SEEDS[0], torch.arange(256)).reshape(64, 4) > 0.5
    assert torch.equal(result, kept.any(-1).to(torch.bfloat16))


def launch_parameters(source: str) -> list[str]:
    return source[source.index("(", source.index("def ")) + 1 : source.index("):")].split(", ")


# ---- in templates -----------------------------------------------------------------------------------------------------


def chances(seeds: Tensor, *shape: int) -> Tensor:
    return torch.ops.kgen.rand(list(shape), seeds, 1, "rand", KINDS["rand"])


def dropped_elements(seeds: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (chances(seeds, x.shape[0], w.shape[1]) > 0.4)


def dropped_columns(seeds: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (chances(seeds, w.shape[1], x.shape[0]).mT > 0.4)


def dropped_rows(seeds: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (chances(seeds, x.shape[0], 1) > 0.4)


# function, columns, the text of its random numbers
EPILOGUES: dict[str, tuple[Callable[..., Tensor], int, str]] = {
    "rows": (dropped_elements, 44, "lib.rand_of_adjacent("),
    "columns": (dropped_columns, 44, "tl.trans(lib.rand_of_adjacent("),
    "odd rows": (dropped_elements, 37, "lib.rand("),
    "a number for each row": (dropped_rows, 44, "lib.rand("),
}


def source(function: Callable[..., Tensor], template: Only, *args: Tensor) -> str:
    options = options_for(True, template)
    plan = plans(function, *args, options=options).forward
    [kernel] = [k for k in plan.kernels if template.template in str(getattr(k, "choice", ""))]
    made = rendered(kernel, plan, "kernel", options).launch
    assert isinstance(made, TritonKernel)
    return made.source


@pytest.mark.interpret
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_tiles"])
@pytest.mark.parametrize("case", EPILOGUES)
def test_epilogues_make_the_same_numbers_by_blocks(case: str, template: str) -> None:
    function, width, text = EPILOGUES[case]
    args = [SEEDS, *(torch.randn(n, k, generator=torch.Generator().manual_seed(n)) for n, k in ((52, 24), (24, width)))]
    which = Only(template, lambda configs: configs[0])
    assert text in source(function, which, *args)
    torch._dynamo.reset()
    with only(template, which.pick):
        got = torch.compile(function, backend="kgen", options={"gpu_interpreter": True, "cache": False})(*args)
    torch.testing.assert_close(got, function(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
def test_grouped_matmuls_make_numbers_by_blocks_along_columns() -> None:
    """Groups begin at any row."""

    def function(seeds: Tensor, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=ends) * (chances(seeds, len(x), w.shape[2]) > 0.4)

    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((35, 24), (3, 24, 40)))
    args = SEEDS, x.to(torch.bfloat16), w.to(torch.bfloat16), torch.tensor([3, 20, 35], dtype=torch.int32)
    which = Only("triton_grouped_matmul", lambda configs: configs[-1])
    assert "= lib.rand_of_adjacent(" in source(function, which, *args)
    torch._dynamo.reset()
    with only(which.template, which.pick):
        got = torch.compile(function, backend="kgen", options={"gpu_interpreter": True, "cache": False})(*args)
    torch.testing.assert_close(got, function(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", [None, F.gelu], ids=["bare", "gelu"])
@pytest.mark.parametrize("sizes", [(8192, 768, 3072), (16384, 4096, 1024)])
def test_random_numbers_are_no_cheap_epilogue(
    sizes: tuple[int, int, int], activation: Callable[[Tensor], Tensor] | None
) -> None:
    """A kernel of their own makes them by blocks while memory has to be waited for; a matmul's program waits for them."""
    m, k, n = sizes

    def function(seeds: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w if activation is None else activation(x @ w)
        return y * (chances(seeds, m, n) > 0.1)

    args = [SEEDS, torch.empty(m, k, dtype=torch.bfloat16), torch.empty(k, n, dtype=torch.bfloat16)]
    plan = plans(function, *args, options=options_for(True)).forward
    assert len(plan.calls) == 1
    assert len(plan.kernels) == 1
