"""Matmuls by warps with parts of their own, in Gluon: what compiles for a GPU that is not here, what is refused, and on a GPU
whether it is right. Triton's interpreter does not run these kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import rendered
from launch_kernels import MEMORY
from matmuls import error
from slow import slow_but
from torch import Tensor

from kgen import pipeline
from kgen.build import triton
from kgen.host.interpret import Interpreted
from kgen.ir.plan import Schedule, members
from kgen.only import Only, only
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.scheduler import Gpu, Options
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.templates.contract import Config
from kgen.verdict import Reason
from tests.kernels import plans
from tests.templates.triton.test_hopper_matmuls import CASES as ALL
from tests.templates.triton.test_hopper_matmuls import r

NAME = "triton_matmul_warp_specialized"
bf, h = torch.bfloat16, torch.float16

# What it leaves to others, and why.
REFUSED = {
    "misaligned_part": "multiple of 16 bytes",
    "odd_columns": "multiples of 16 bytes",
    "cast": "is computed",
    "gathered": "through indices",
    "integers": "16 bits",
    "fp32": "no multiplication",
}
CASES = {name: (fn, args) for name, (fn, args, _) in ALL.items() if name not in REFUSED}


def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy.t() @ x, dy.sum(0)


def two_reads(x: Tensor, w: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Two tiles are read and two are written, one of them in float32."""
    t = x @ w + y
    return t * z, t.float()


def side_by_side(x: Tensor, w: Tensor, v: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return torch.relu(x @ w + b), x @ v, 0.5 * (x @ u)


def one_reads_a_tile(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w + y, torch.relu(x @ v)


def one_is_transposed(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, torch.relu(x @ v.t())


def one_is_wider(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, torch.relu(x @ v).float()


CASES |= {
    "side_by_side": (side_by_side, [r(200, 96), r(96, 264), r(96, 136), r(96, 136), r(264)]),
    "operand_reduction": (gradients, [r(96, 200), r(96, 264)]),
    "sums_of_columns": (lambda x, w: (x @ w, w.sum(0)), [r(200, 96), r(96, 264)]),
    "two_reads": (two_reads, [r(200, 96), r(96, 264), r(200, 264), r(200, 264)]),
    "as_it_is_and_transposed": (lambda x, w, y: x @ w + y + 2 * y.t(), [r(256, 96), r(96, 256), r(256, 256)]),
    "saved_gelu": (lambda dy, w, u: torch.ops.aten.gelu_backward(dy @ w, u), [r(200, 96), r(96, 264), r(200, 264)]),
    "softmax": (lambda x, w: torch.softmax(x @ w, -1), [r(200, 96) * 0.1, r(96, 256)]),
    "dropout": (lambda x, w: F.dropout(x @ w, 0.5), [r(200, 96), r(96, 264)]),
    "bytes": (lambda x, w, m: (x @ w) * m, [r(200, 96), r(96, 264), torch.arange(200 * 264).to(torch.int8).view(200, 264)]),
    "tf32": (
        lambda x, w: torch.relu(F.linear(x, w)),
        [r(200, 96, dtype=torch.float32), r(264, 96, dtype=torch.float32)],
    ),
}


def first(configs: Sequence[Config]) -> Sequence[Config]:
    """One of each kind: warps that share a tile or take turns, and operands of the epilogue prefetched or not."""
    kinds = {(c.PROGRAMS, c.COOPERATIVE, c.PREFETCH, c.EPILOGUE_SUBTILES): c for c in reversed(configs)}
    return list(kinds.values())


@dataclass
class Made:
    """A kernel, its configuration, and the bytes of shared memory that it said it needs."""

    config: Config
    kernel: TritonKernel
    shared: int


def offered(fn: Callable[..., Any], args: list[Tensor], pick: Callable[[Sequence[Config]], Config]) -> tuple[Schedule, Options]:
    options = Options(gpu_everywhere=True, only=Only(NAME, pick))
    return plans(fn, *args, options=options).forward, options


def configurations(fn: Callable[..., Any], args: list[Tensor]) -> list[Config]:
    """Those on offer."""
    found: list[Config] = []

    def notes(configs: Sequence[Config]) -> Config:
        found[:] = configs
        return configs[0]

    offered(fn, args, notes)
    return found


def kernels(fn: Callable[..., Any], args: list[Tensor], some: Callable[..., Sequence[Config]]) -> list[Made]:
    """The matmul's kernel under some of the configurations on offer."""
    made: list[Made] = []
    for config in some(configurations(fn, args)):
        plan, options = offered(fn, args, lambda _, config=config: config)
        [step] = [step for step in plan.kernels if members(step)[0].choice is not None]
        one = members(step)[0]  # of several, all need as much
        problem = chosen_problem(one, plan.graph, options.device(plan.graph, contraction_of(one)))
        call = rendered(step, plan, "kernel", options)
        made.append(Made(config, call.launch, problem.template.resources(problem, config).shared))
    return made


def waits_before_memory(cubin: bytes) -> bool:
    """Whether a wait for the kernel before stands in front of all accesses to memory, but for those of other warps, which wait
    at a barrier for the warps that wait."""
    before, wait, _ = triton.dumped(cubin, "-sass").partition("ACQBULK")
    found = re.search(MEMORY, before)
    return bool(wait) and (found is None or "BAR.SYNC" in before[: found.start()])


@pytest.mark.ptx
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("rows_by_rows", "gate_and_up", "two_reads"), CASES))
def test_compiles(name: str, tf32: None) -> None:
    made = kernels(*CASES[name], first)
    assert made
    built = triton.compile_kernels([one.kernel for one in made], 90)
    for one, found in zip(made, built, strict=True):
        assert found.stack <= 16, f"{one.config}: {found.stack} bytes of stack\n{one.kernel.source}"
        assert 0.9 * one.shared - 4096 < found.shared <= one.shared
        assert found.warps == 12
        assert found.early
        assert waits_before_memory(found.cubin)


def gathered_residual(x: Tensor, w: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    return x @ w + table[tokens]


@pytest.mark.ptx
def test_a_gathered_residual_has_registers() -> None:
    """Each thread holds the addresses of its rows beside the sums and what it reads: of 128 sums, 1,176 bytes were spilled."""
    args = [r(256, 256, dtype=bf), r(256, 256, dtype=bf), r(1000, 256, dtype=bf), torch.arange(256)]
    made = kernels(gathered_residual, args, lambda configs: configs)
    assert made
    for one, found in zip(made, triton.compile_kernels([one.kernel for one in made], 90), strict=True):
        assert found.stack <= 64, one.config


@pytest.mark.ptx
def test_what_differs_by_the_batch_is_one_row() -> None:
    """Its index is a number, and so is the index of a table that it looks up."""

    def gated(x: Tensor, w: Tensor, gates: Tensor, tokens: Tensor) -> Tensor:
        return F.linear(x, w) * torch.sigmoid(gates[tokens])[:, None] + gates[tokens][:, None, :1]

    args = [r(3, 256, 128, dtype=bf), r(256, 128, dtype=bf), r(10, 256, dtype=bf), torch.arange(3)]
    made = kernels(gated, args, lambda configs: configs[::5])
    assert made
    assert all(re.search(r"x0 = \(\(.*\) // 256\)", one.kernel.source) for one in made)
    for one, found in zip(made, triton.compile_kernels([one.kernel for one in made], 90), strict=True):
        assert found.stack <= 64, one.config


@pytest.mark.ptx
def test_wide_tiles_of_integers_compile() -> None:
    """Triton writes no multiplication of 256 columns of integers."""
    args = [r(128, 128).mul(9).to(torch.int8), r(256, 128).mul(9).to(torch.int8)]

    def wide(configs: Sequence[Config]) -> list[Config]:
        return [next(c for c in configs if c.BLOCK_N == 256)]

    [one] = kernels(lambda x, w: torch._int_mm(x, w.t()), args, wide)
    [found] = triton.compile_kernels([one.kernel], 90)
    assert found.stack == 0


def test_equal_layers_share_a_kernel() -> None:
    """Whatever their buffers are called, in shared memory too, where tiles of the epilogue come to and leave from."""

    def two_layers(x: Tensor, w: Tensor, y: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        first = x @ w + y
        second = first @ v + z
        return first, torch.relu(first), second, torch.relu(second)

    args = [r(256, 256, dtype=bf) for _ in range(5)]
    for config in first(configurations(two_layers, args)):
        plan, options = offered(two_layers, args, lambda _, config=config: config)
        steps = [step for step in plan.kernels if members(step)[0].choice is not None]
        assert len(steps) == 2
        one, other = (rendered(step, plan, f"k{k}", options).launch for k, step in enumerate(steps))
        assert one.source != other.source
        assert one.identity == other.identity, config


def test_a_matrix_is_read_twice_by_one_descriptor() -> None:
    """As it is and transposed: each tile has memory of its own, fetched from its own place."""
    fn, args = CASES["as_it_is_and_transposed"]
    prefetch = [
        one.kernel.source for one in kernels(fn, args, lambda configs: [c for c in configs if c.PREFETCH and c.BLOCK_N == 128])
    ]
    assert prefetch
    for source in prefetch:
        assert len(set(re.findall(r"ws.fetch\(\w+, (\[.*\]), arrived", source))) == 2
        assert len(set(re.findall(r"(epilogue_tile_\w+)\.index\(.*load\(layout\)", source))) == 2


@pytest.mark.ptx
def test_sums_of_a_length_of_the_call() -> None:
    """The gradient of a weight, for any number of rows: loops have 64 bits, stages 32."""
    dy, x = r(96, 200), r(96, 264)
    for t in (dy, x):
        torch._dynamo.mark_dynamic(t, 0)
    found: list[TritonKernel] = []

    def keep(one: Any, *_: Any) -> tuple[()]:
        found.append(one.kernel)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline, "scheduler_options", lambda graph, config: Options(gpu_everywhere=True, only=Only(NAME, lambda c: c[0]))
        )
        patch.setattr(Interpreted, "__call__", keep)
        torch._dynamo.reset()
        torch.compile(gradients, backend="kgen", options={"gpu_interpreter": True, "cache": False})(dy, x)
    [kernel] = found
    assert "i64" in kernel.signature
    assert triton.compile_kernels([kernel], 90)[0].stack == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    fn, args, _ = ALL[name]
    plan, _ = offered(fn, args, lambda configs: configs[0])
    [verdict] = [v for v in plan.verdicts if v.reason is Reason.NO_TEMPLATE]
    assert REFUSED[name] in verdict.detail


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (one_reads_a_tile, [(200, 96), (96, 264), (96, 136), (200, 264)]),
        (one_is_transposed, [(200, 96), (96, 264), (136, 96)]),
        (one_is_wider, [(200, 96), (96, 264), (96, 136)]),
    ],
)
def test_what_is_not_made_side_by_side(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    """Matmuls whose tiles would not take each other's places in shared memory are kernels of their own."""
    plan, _ = offered(fn, [r(*shape) for shape in shapes], lambda configs: configs[0])
    assert [len(members(step)) for step in plan.kernels if members(step)[0].choice is not None] == [1, 1]
    plan, _ = offered(side_by_side, CASES["side_by_side"][1], lambda configs: configs[0])
    assert [len(members(step)) for step in plan.kernels] == [3]


def test_the_interpreter_gets_none() -> None:
    """Nor do GPUs with other multiplications."""
    fn, args = CASES["rows_by_rows"]
    for options in (Options(gpu_everywhere=True, interpreted=True), Options(gpu_everywhere=True, gpu=Gpu(arch=80))):
        plan = plans(fn, *args, options=replace(options, only=Only(NAME, lambda configs: configs[0]))).forward
        assert not plan.kernels or members(plan.kernels[0])[0].choice is None


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_agrees_with_eager(name: str) -> None:
    """Each kind of configuration, several times: with barriers missing, results would differ from call to call."""
    fn, args = CASES[name]
    args = [a.cuda() for a in args]
    want = fn(*args)
    for config in first(configurations(fn, args)):
        torch._dynamo.reset()
        with only(NAME, lambda _, config=config: config):
            step = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False, "poison": True})
            results = [step(*args) for _ in range(4)]
        for got in results:
            for one, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
                assert error(one, right) < (4e-3 if one.dtype is bf else 1e-3), config


@pytest.mark.gpu
@pytest.mark.parametrize(("together", "prefetch"), [(True, False), (True, True), (False, True)])
def test_many_tiles(together: bool, prefetch: bool) -> None:
    """More tiles than SMs, twice over, so that stages and ping-pong barriers are reused; results are equal bit by bit."""
    x, w, y = (r(*sizes, dtype=bf).cuda() for sizes in ((3000, 520), (520, 5000), (3000, 5000)))

    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x @ w) + y

    def pick(configs: Sequence[Config]) -> Config:
        return next(c for c in configs if (together, prefetch) == (c.COOPERATIVE, c.PREFETCH))

    torch._dynamo.reset()
    with only(NAME, pick):
        step = torch.compile(fn, backend="kgen", options={"cache": False, "poison": True})
        results = [step(x, w, y) for _ in range(20)]
    assert error(results[0], torch.relu(x.double() @ w.double()) + y) < 4e-3
    assert all(torch.equal(results[0], one) for one in results)


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
def test_many_tiles_side_by_side(together: bool) -> None:
    """Tiles of all three come round more than once, and for lengths of the call."""
    args = [r(*sizes, dtype=bf).cuda() for sizes in ((3000, 520), (520, 3000), (520, 1000), (520, 1000), (3000,))]
    torch._dynamo.reset()
    with only(NAME, lambda configs: next(c for c in configs if together == c.COOPERATIVE)):
        step = torch.compile(side_by_side, backend="kgen", options={"cache": False, "poison": True})
        for rows in (3000, 1700, 72):
            x = args[0][:rows].clone()
            torch._dynamo.mark_dynamic(x, 0)
            results = [step(x, *args[1:]) for _ in range(10)]
            for k, want in enumerate(side_by_side(*(a.double() for a in (x, *args[1:])))):
                assert error(results[0][k], want) < 4e-3
                assert all(torch.equal(results[0][k], one[k]) for one in results)


@pytest.mark.gpu
def test_sizes_of_the_call() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w)

    torch._dynamo.reset()
    with only(NAME, lambda configs: configs[0]):
        step = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False})
        for rows in (72, 2000, 17):
            x, w = r(rows, 400).cuda(), r(400, 136).cuda()
            torch._dynamo.mark_dynamic(x, 0)
            assert error(step(x, w), fn(x, w)) < 1e-3
