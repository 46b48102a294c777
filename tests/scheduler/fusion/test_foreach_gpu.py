"""Batches on a GPU: which loops share a launch, that the results are eager's, and what the compiler makes of the branches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton_kernels as tk
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.ir.index import Sizes
from kgen.ir.plan import ComboKernel, Schedule
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Gpu, Options, choose_combo_tiles
from kgen.scheduler.fusion import combo_kernels
from kgen.verdict import Reason
from tests.kernels import plans
from tests.rendering import combo_call
from tests.scheduler.fusion.test_combo_kernels import HAZARDS, ODD, _copied, adam, adam_state, batches, independent

r = torch.randn
GPU = Options(gpu_everywhere=True)


def plan(f: Callable[..., Any], *args: Any) -> Schedule:
    return plans(f, *args, options=GPU).forward


def rendered(made: Schedule, gpu: Gpu | None = None) -> list[KernelCall]:
    """The batches of a plan as Triton kernels."""
    sizes = Sizes(made.graph.size_hints)
    found = []
    for step in batches(made):
        tilings = choose_combo_tiles(step, made.graph, sizes, gpu or Gpu())
        found.append(combo_call(step, tilings, made.graph))
    return found


def source(made: Schedule, at: int = 0) -> str:
    launch = rendered(made)[at].launch
    assert launch is not None
    return launch.source


def check(f: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[str]:
    """Compares results and changed arguments with eager's; gives the kernels' names."""
    torch._dynamo.reset()
    expected_args, actual_args = _copied(args), _copied(args)
    expected = f(*expected_args)
    options = {"gpu_interpreter": True}
    with torch.no_grad():
        actual = torch.compile(f, backend="kgen", dynamic=dynamic, fullgraph=True, options=options)(*actual_args)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_args, expected_args)
    with kgen.config.override(gpu_interpreter=True):
        return [k.name for k in kgen.explain(f, *_copied(args), print_report=False).kernels]


# ---- what joins -----------------------------------------------------------------------------------------------------


def pointers(made: Schedule, step: ComboKernel) -> int:
    return len({combo_kernels.address(made.graph, name) for name in combo_kernels.reads(step) | combo_kernels.writes(step)})


def test_a_step_over_a_hundred_tensors_is_two_launches() -> None:
    """All counters, then the parameters with five pointers each: versions of a storage share one."""
    made = plan(adam, *adam_state([(256, 1024)] * 100))
    assert [len(b.members) for b in batches(made)] == [100, 100]
    assert len(made.kernels) == 2
    assert [pointers(made, b) for b in batches(made)] == [200, 500]
    assert [len(call.buffers) for call in rendered(made)] == [200, 500]


def test_equal_sizes_are_constants_and_others_are_chosen_with_the_pointers() -> None:
    def bump(xs: list[Tensor]) -> None:
        torch._foreach_add_(xs, 1.0)

    one_body = source(plan(bump, [r(4096) for _ in range(4)]))
    assert "x0<4096" in one_body
    assert "in_x" not in one_body
    several = source(plan(bump, [r(1024 * k) for k in range(1, 5)]))
    assert several.count("@triton.jit") == 2
    assert "len0 = 2048" in several
    odd = source(plan(bump, [r(1024), r(2048), r(1001), r(1003)]))  # sizes that would keep the others from vectors
    assert odd.count("@triton.jit") == 3


def test_views_of_an_input_share_its_pointer() -> None:
    def parts(flat: Tensor) -> list[Tensor]:
        return torch._foreach_mul([flat[16:80], flat[64:160], flat[130:190:2]], 2.0)

    [call] = rendered(plan(parts, r(200)))
    assert call.launch is not None
    assert len(call.buffers) == 4
    assert "step0 = 64" in call.launch.source


def test_large_kernels_join_only_their_likes_and_huge_ones_nobody() -> None:
    middle, huge = torch.empty(combo_kernels.GPU_SMALL + 8), torch.empty(combo_kernels.GPU_FULL + 8)
    assert len(batches(plan(lambda x, y: (x.exp(), y.exp()), middle, middle.clone()))) == 1
    assert not batches(plan(lambda x, y: (x.exp(), y.sin()), middle, middle.clone()))
    assert not batches(plan(lambda x, y: (x.exp(), y.exp()), huge, huge.clone()))
    small = torch.empty(1000)
    assert len(batches(plan(lambda x, y: (x.exp(), y.sin()), small, small.clone()))) == 1


def test_a_gpu_and_the_cpu_keep_their_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of two devices, as the scheduler sees them."""
    args = r(100), r(200)
    assert len(batches(plan(lambda x, y: (x.exp(), y.sin()), *args))) == 1
    home = combo_kernels._Batches._home
    monkeypatch.setattr(combo_kernels._Batches, "_home", lambda self, kernel: (home(self, kernel), kernel.name))
    assert not batches(plan(lambda x, y: (x.exp(), y.sin()), *args))


def test_symbolic_sizes_stay_alone_and_a_verdict_says_so() -> None:
    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.exp(), y.sin()]

    with kgen.config.override(gpu_interpreter=True):
        torch._dynamo.reset()
        args = [r(100), r(200)]
        for x in args:
            torch._dynamo.mark_dynamic(x, 0)
        report = kgen.explain(f, *args, print_report=False)
    assert len(report.kernels) == 2
    assert [v.reason for v in report.verdicts] == [Reason.SYMBOLIC]


@pytest.mark.parametrize("name", HAZARDS)
def test_members_touch_nothing_that_another_one_writes(name: str) -> None:
    f, args = HAZARDS[name]
    independent(plan(f, *args))


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name: str) -> None:
    f, args = HAZARDS[name]
    check(f, *args)


@pytest.mark.interpret
def test_adam_step() -> None:
    assert len(check(adam, *adam_state([(33, 5), (256,), (16, 16), (1000,), (7,), (600,), (256,)]))) == 2
    check(adam, *adam_state(ODD))


@pytest.mark.interpret
def test_low_precision_parameters_with_wide_state() -> None:
    def sgd(parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor], rate: Tensor) -> None:
        for p, g, m in zip(parameters, gradients, momenta, strict=True):
            m.mul_(0.9).add_(g.float())
            p.copy_(p.float() - rate * m)

    shapes = [(64, 9), (512,), (100,), (3, 4, 5), (4096,)]
    kinds = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.bfloat16)
    for flavour in (kinds, (torch.bfloat16,) * 5):
        torch.manual_seed(0)
        low = [[r(s).to(k) for s, k in zip(shapes, flavour, strict=True)] for _ in range(2)]
        assert len(check(sgd, *low, [r(s) for s in shapes], torch.tensor(0.1))) == 1


@pytest.mark.interpret
def test_strides() -> None:
    base = r(40, 60)
    xs = [
        base.t(), base[::2, ::3], r(60).expand(40, 60), r(8, 9, 10).permute(2, 0, 1), r(40, 1), base.flip(0),
        r(30, 16)[:, 3:11], r(50, 70).t(), r(90, 40).t(),
    ]  # fmt: skip
    ys = [
        r(60, 40), r(20, 20), r(40, 60), r(10, 8, 9).permute(0, 2, 1).transpose(1, 2), r(1, 60), r(()), r(30, 8),
        r(70, 50), r(40, 90),
    ]  # fmt: skip
    check(torch._foreach_mul, xs, ys)
    check(lambda x, y: [a * b + 1 for a, b in zip(x, y, strict=True)], xs, ys)


@pytest.mark.interpret
def test_dtypes() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    xs = [(r(100 + 7 * k) * 5).to(kind) for k, kind in enumerate(kinds)]
    check(lambda x: [a + a for a in x], xs)
    check(lambda x: [torch.where(a > 1, a, 0) for a in x], xs)
    check(lambda x, y: (x + x, y.float() + y.float()), r(100).bfloat16(), r(100).bfloat16())


@pytest.mark.interpret
def test_every_point_runs_once() -> None:
    """In place, so that a point done twice or left out shows."""

    def bump(xs: list[Tensor]) -> None:
        torch._foreach_add_(xs, 1.0)

    xs = [torch.zeros(n) for n in (10_003, 7, 1, 5_000, 16, 31, 2_048, 3)] + [torch.zeros(30, 70).t(), torch.zeros(())]
    assert len(check(bump, xs)) == 1


@pytest.mark.interpret
def test_gathers_and_positions() -> None:
    def f(xs: list[Tensor], at: list[Tensor]) -> list[Tensor]:
        return [x[i] + torch.arange(i.numel()) % 7 for x, i in zip(xs, at, strict=True)]

    xs, at = [r(50), r(70), r(90)], [torch.randint(50, (n,)) for n in (10, 20, 30)]
    assert len(check(f, xs, at)) == 1


@pytest.mark.interpret
def test_members_are_listed() -> None:
    with kgen.config.override(gpu_interpreter=True):
        report = kgen.explain(adam, *adam_state([(10,), (20, 3)]), print_report=False)
    assert [k.loops for k in report.kernels] == ["member<2", "member<2"]
    assert all("_form0(program" in k.source for k in report.kernels)
    assert report.bytes_moved >= report.bytes_minimal


def test_names_and_places_of_parameters_do_not_count_in_the_key() -> None:
    """Equal groups of tensors share machine code."""

    def swap(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
        a.add_(b)
        c.add_(d)

    def other(first: Tensor, second: Tensor, third: Tensor, unused: Tensor, fourth: Tensor) -> None:
        first.add_(second)
        third.add_(fourth)

    keys = []
    for made in (plan(swap, *(r(64) for _ in range(4))), plan(other, *(r(64) for _ in range(5)))):
        [call] = rendered(made)
        assert call.launch is not None
        keys.append([line for line in call.launch.key.splitlines() if not line.startswith("#")])
    assert keys[0] == keys[1]


# ---- what the compiler makes of it ----------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [90, 80])
def test_a_large_batch_compiles_to_branches_quickly(arch: int) -> None:
    """Without a stack: what loads all members' pointers and selects among them spills hundreds of registers."""
    made = plan(adam, *adam_state([(64 * (1 + k % 5), 1024) for k in range(60)]))
    kernels = [call.launch for call in rendered(made) if call.launch is not None]
    assert [len(k.signature) for k in kernels] == [120, 300]
    triton.prestart()
    start = time.perf_counter()
    compiled = triton.compile_kernels(kernels, arch)
    assert [made.stack for made in compiled] == [0, 0]
    assert all(made.registers <= 96 for made in compiled)
    assert time.perf_counter() - start < 60  # a hang, not a measurement


@pytest.mark.ptx
def test_accesses_are_vectors_and_each_leaf_loads_its_own_pointers(tmp_path: Any) -> None:
    made = plan(adam, *adam_state([(64 * (1 + k % 5), 1024) for k in range(12)]))
    launch = rendered(made)[1].launch
    assert launch is not None
    ptx = tk.ptx_of(launch, tmp_path, 90)
    wide = [m for m in re.findall(r"(?:ld|st)\.global\S*", ptx) if ".v4." in m]
    narrow = [m for m in re.findall(r"(?:ld|st)\.global\S*", ptx) if ".v4." not in m]
    assert len(wide) % 7 == 0
    assert wide
    assert len(narrow) == 1  # the rate
    assert not re.search(r"selp\.b64", ptx)  # of pointers; numbers may be chosen
    blocks = re.split(r"\n\$L\w+:|\bbra\b", ptx[ptx.index(".entry") :])
    assert max(len(re.findall(r"ld\.param", block)) for block in blocks) == 5


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [[(256, 1024)] * 100, [(n,) for n in range(1, 4000, 37)], [(33, 5), (7,), (1000,)]])
def test_adam_step_on_a_gpu(shapes: list[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    state = [[t.cuda() for t in tensors] for tensors in adam_state(shapes)]
    expected, actual = _copied(state), _copied(state)
    compiled = torch.compile(adam, backend="kgen", fullgraph=True)
    for _ in range(3):
        adam(*expected)
        compiled(*actual)
    torch.testing.assert_close(actual, expected)


def test_members_with_short_sums_have_steps_as_short() -> None:
    """The gradients of keys and values that two query heads share: no tile is mostly beyond the end of its rows."""

    def f(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.sum(2), values.sum(2)

    grown = [r(2, 4, 2, 64, 32) for _ in range(2)]
    made = plan(f, *grown)
    [step] = batches(made)
    for one in choose_combo_tiles(step, made.graph, Sizes(made.graph.size_hints), Gpu()):
        assert (one.blocks.r, one.blocks.warps) == (2, 4)
    check(f, *grown)


@pytest.mark.parametrize("count", [24, pytest.param(48, marks=pytest.mark.slow)])
def test_members_with_columns_keep_their_tiles(count: int) -> None:
    """Columns of neighbours are read in whole sectors, and as long as they are."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.sum(1), b.sum(1)

    tall = [r(64, count, 96) for _ in range(2)]
    made = plan(f, *tall)
    [step] = batches(made)
    for one in choose_combo_tiles(step, made.graph, Sizes(made.graph.size_hints), Gpu()):
        assert one.blocks.r < 2 * count
        assert one.blocks.x >= 16
    check(f, *tall)
