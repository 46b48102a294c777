"""Few columns of many rows, which may be several loops: shares may have unequal lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.device import Gpu
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel
from kgen.scheduler import choose_tiles
from tests.matmuls import compiled, error
from tests.scheduler.selection.test_safe_choices import planned


def squares_and_their_columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    made = (x.view(y.shape) * y).view(x.shape)
    return made, made.sum(0)


@pytest.mark.parametrize(
    ("images", "rows", "columns"), [(32, 197, 3072), (16, 211, 64), (3, 2048, 64)], ids=["a prime", "two", "one that divides"]
)
def test_it_is_shared_out(images: int, rows: int, columns: int) -> None:
    x, y = torch.empty(images * rows, columns), torch.empty(images, rows, columns)
    partial, joined = planned(squares_and_their_columns, x, y).kernels
    share = partial.outer[0]
    assert share.extent.as_int() >= images
    assert joined.inner == (share,)


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [16 * 211, 4001])
def test_values(rows: int) -> None:
    """No number divides 4001: what is stored at each point of the last share is left out past its end."""
    images = 16 if rows % 16 == 0 else 1
    x, y = torch.randn(rows, 8), torch.randn(images, rows // images, 8)
    found, wanted = compiled(squares_and_their_columns, x, y), squares_and_their_columns(x.double(), y.double())
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-6


def instance_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Images and channels are one loop of the norm, neighbouring channels neighbours in memory."""
    return F.relu(F.instance_norm(x, weight=weight[0], bias=weight[1]))


def test_channels_of_images_are_shared_out() -> None:
    x = torch.empty(8, 128, 128, 128).to(memory_format=torch.channels_last)
    partial, joined, last = planned(instance_norm, x, torch.empty(2, 128)).kernels
    assert joined.inner == (partial.outer[0],)
    assert not last.inner


@pytest.mark.interpret
def test_values_of_channels_of_images() -> None:
    x, weight = torch.randn(2, 32, 64, 64).to(memory_format=torch.channels_last), torch.randn(2, 32)
    assert error(compiled(instance_norm, x, weight), instance_norm(x.double(), weight.double())) < 1e-6


def group_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Groups of 10 neighbouring channels: no tile of a power of two of them holds whole groups."""
    return F.silu(F.group_norm(x, x.shape[1] // 10, weight[0], weight[1]))


def test_channels_of_groups_have_partial_results() -> None:
    x = torch.empty(8, 320, 64, 64).to(memory_format=torch.channels_last)
    partial, joined, last = planned(group_norm, x, torch.empty(2, 320)).kernels
    share, channel = joined.inner
    assert partial.outer[0] is share
    assert partial.outer[-1] is channel
    assert channel.extent.as_int() == 10
    assert not last.inner


def sums_of_groups(x: Tensor) -> Tensor:
    return (x * 2).view(*x.shape[:-1], -1, 10).sum((1, 2, 4))


def test_few_rows_have_no_partial_results() -> None:
    """Each of its partial results would be of fewer numbers than a cache line holds."""
    (kernel,) = planned(sums_of_groups, torch.empty(4096, 4, 4, 320)).kernels
    assert "share" not in {v.name for v in kernel.inner}


@pytest.mark.interpret
def test_values_of_channels_of_groups() -> None:
    x = torch.randn(1, 40, 64, 64).add(3).to(memory_format=torch.channels_last)
    weight = torch.randn(2, 40)
    assert error(compiled(group_norm, x, weight), group_norm(x.double(), weight.double())) < 1e-6


@pytest.mark.interpret
def test_values_of_sums_of_groups() -> None:
    x = torch.randn(1, 64, 65, 40)
    assert error(compiled(sums_of_groups, x), sums_of_groups(x.double())) < 1e-6


def test_columns_of_groups_are_read_past_the_ends_of_groups() -> None:
    """Channels of a sum for each of them, whose statistics are their group's: one run of neighbours, ten after ten."""
    graph = planned(scaled_sums, torch.empty(8, 64, 64, 320), torch.empty(8, 32))
    tiling = choose_tiles(graph.kernels[0], graph.graph, Sizes({}), Gpu())
    assert tiling.x[-1].extent.as_int() == 320
    assert tiling.blocks.x == 64


def scaled_sums(x: Tensor, scale: Tensor) -> Tensor:
    return (x.view(8, 64, 64, 32, 10) * scale[:, None, None, :, None]).sum((1, 2)).view(8, 320)


@pytest.mark.parametrize(("rows", "one_kernel"), [(512, True), (600, False)])
def test_columns_that_are_read_again_stay_in_registers(rows: int, one_kernel: bool) -> None:
    plan = planned(lambda x: torch.softmax(x, -2), torch.empty(64, rows, 512))
    tilings = [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in plan.kernels]
    assert (len(tilings) == 1 and tilings[0].persistent) == one_kernel
    assert not one_kernel or (tilings[0].blocks.x, tilings[0].blocks.r) == (16, 512)


def test_rows_with_two_reductions_have_fewer_warps() -> None:
    """Each is a point where all warps wait."""
    x = torch.empty(8192, 5120)
    warps = []
    for fn in (lambda x: x * x.square().mean(-1, keepdim=True), lambda x: torch.softmax(x, -1)):
        plan = planned(fn, x)
        [kernel] = plan.kernels
        warps.append(choose_tiles(kernel, plan.graph, Sizes({}), Gpu()).blocks.warps)
    assert warps == [8, 4]


@pytest.mark.interpret
def test_values_of_columns_in_registers() -> None:
    x = torch.randn(2, 300, 40)
    assert error(compiled(lambda x: torch.softmax(x, -2), x), torch.softmax(x.double(), -2)) < 1e-6


def balanced(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x - x.amax(-1, keepdim=True)
        x = x - x.amax(-2, keepdim=True)
    return x.sigmoid()


@pytest.mark.parametrize(("images", "stored"), [(64, 1), (1, 2)], ids=["large", "small"])
def test_large_tensors_are_computed_again_from_rows_and_columns(images: int, stored: int) -> None:
    """All that reads memory of their size is the first tensor, whatever the number of steps."""
    plan = planned(balanced, torch.empty(images, 512, 512))
    made = [out for k in plan.kernels for s in k.statements for out, kept in zip(s.outs, s.stored, strict=True) if kept]
    large = [
        out for out in made if plan.graph.buffers[out].sizes[-1].as_int() == 512 == plan.graph.buffers[out].sizes[-2].as_int()
    ]
    assert len(large) == stored


def of_channels(x: Tensor) -> Tensor:
    return x.sum((0, 2, 3, 4))


@pytest.mark.interpret
def test_short_runs_of_few_points_are_one_share() -> None:
    """Images are the fastest loop, three of them: each has partial results, and there is no work for several shares."""
    x = torch.randn(6, 9, 10, 2, 3).permute(4, 3, 2, 1, 0)
    partial, _ = planned(of_channels, torch.empty_strided(x.shape, x.stride())).kernels
    assert [v.extent.as_int() for v in partial.outer] == [1, 2, 3]
    assert error(compiled(of_channels, x), of_channels(x.double())) < 1e-6


def stored_and_summed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x) * 0.5 + y
    return made, made.square().sum()


def stored_and_its_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x)
    return made, made.amax((1, 2))


@pytest.mark.parametrize("rows", [3001, 511, 67], ids=["a prime beyond what is wanted", "no near divisor", "few shares"])
def test_stores_beside_sums_of_awkward_sizes(rows: int) -> None:
    """Nothing of a share may be left out: where no number near to what is wanted divides a loop, another one does."""
    x = torch.empty(rows, 2047)
    partial, joined = planned(stored_and_summed, x, x).kernels
    assert joined.inner == (partial.outer[0],)


def test_a_divisor_above_what_is_wanted_is_taken() -> None:
    partial, _ = planned(stored_and_its_maxima, torch.empty(16, 511, 511)).kernels
    assert partial.outer[0].extent.as_int() == 73


@pytest.mark.interpret
def test_values_of_stores_beside_sums() -> None:
    x, y = torch.randn(211, 307), torch.randn(211, 307)
    for got, want in zip(compiled(stored_and_summed, x, y), stored_and_summed(x.double(), y.double()), strict=True):
        assert error(got, want) < 1e-6


def made_and_its_statistics(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = x * y
    spread, mean = torch.var_mean(made, 0)
    return made, made.sum(0), mean, spread


def test_statistics_of_a_prime_number_of_rows_are_shared_out() -> None:
    """Points of shares are counted, so shares are equal. The kernel that joins them reads the row that is left over."""
    x = torch.empty(4001, 1003)
    partial, joined, *_ = planned(made_and_its_statistics, x, x).kernels
    share, (own,) = partial.outer[0].extent.as_int(), joined.inner
    assert share is not None
    assert share > 8
    assert own.extent.as_int() == share + 4001 % share


def test_statistics_of_what_is_overwritten_stay_with_one_program() -> None:
    """The kernel that joins shares would read the points that are left over after it has stored them."""

    def fn(x: Tensor) -> Tensor:
        return torch.var(x.mul_(2), 0)

    kernels = planned(fn, torch.empty(4001, 1003)).kernels
    assert not any(v.name == "share" for k in kernels for v in (*k.outer, *k.inner))


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [4001, 3999])
def test_values_of_statistics_of_awkward_numbers_of_rows(rows: int) -> None:
    x, y = torch.randn(rows, 5).add(3), torch.randn(rows, 5)
    found, wanted = compiled(made_and_its_statistics, x, y), made_and_its_statistics(x.double(), y.double())
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-6


def added_and_its_statistics(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is added to a table row by row, and has statistics."""
    y = torch.tanh(x) * 2
    return torch.zeros(300, x.shape[1], device=x.device).index_add(0, at, y), *torch.var_mean(y, 0)


@pytest.mark.parametrize("rows", [100_003, 100_001], ids=["a prime", "11 divides it"])
def test_statistics_beside_updates_have_a_kernel_of_their_own(rows: int) -> None:
    """No share of theirs may end early, and nothing may be added again."""
    plan = planned(added_and_its_statistics, torch.empty(rows, 96), torch.empty(rows, dtype=torch.int64))
    points = next(step for step in plan.kernels if any(s.kind == "scatter" for s in step.statements))
    assert not points.inner
    partial = next(step for step in plan.kernels if any(s.op == "welford" for s in step.statements))
    shares = partial.outer[0].extent.as_int()
    assert shares is not None
    assert shares > 100


@pytest.mark.interpret
def test_values_of_statistics_beside_updates() -> None:
    args = torch.randn(20_011, 8), torch.randint(0, 300, (20_011,))
    for found, exact in zip(compiled(added_and_its_statistics, *args), added_and_its_statistics(*args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def counted_and_averaged(labels: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """A confusion matrix, and how much is right: the updates and the sum read the same data in one kernel."""
    counts = torch.zeros(49).index_add(0, labels * 7 + found, torch.ones_like(found, dtype=torch.float32))
    return counts, (labels == found).float().mean()


def masked_and_summed(rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Updates with a mask, at indices of which none is 0."""
    table = torch.ops.aten.embedding_dense_backward(grad, rows + 3, 9, 5, False)
    return table, grad.sum((0, 1))


@pytest.mark.parametrize("rows", [100000, 100003], ids=["shares of equal lengths", "a ragged last share"])
def test_updates_beside_a_sum_are_shared_out(rows: int) -> None:
    args = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    [update] = [k for k in planned(counted_and_averaged, *args).kernels if any(s.kind == "scatter" for s in k.statements)]
    [share] = update.outer
    assert (share.extent.as_int() or 0) > 8


def test_a_value_that_is_set_stays_with_one_program() -> None:
    def fn(at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(9).index_put((at,), x), x.sum()

    for kernel in planned(fn, torch.zeros(100000, dtype=torch.int64), torch.empty(100000)).kernels:
        assert not any(s.kind == "scatter" and s.inner for s in kernel.statements) or not kernel.outer


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [20000, 20011])
def test_values_of_updates_beside_a_sum(rows: int) -> None:
    labels, found = torch.randint(0, 7, (rows,)), torch.randint(0, 7, (rows,))
    for got, want in zip(compiled(counted_and_averaged, labels, found), counted_and_averaged(labels, found), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [20000, 20011])
def test_values_of_updates_with_masks(rows: int) -> None:
    at, grad = torch.randint(0, 6, (rows,)), torch.randn(rows, 1)
    for got, want in zip(compiled(masked_and_summed, at, grad), masked_and_summed(at, grad.double()), strict=True):
        assert error(got, want) < 1e-5


def gathered_and_summed(at: Tensor, table: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Two readers of one value of which the indices are data: it stays in registers, and is checked."""
    rows = table[at] * grad
    return torch.zeros(40, 3).index_add(0, at, rows.sin()), (rows * grad).sum(0)


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [20000, 20011])
def test_what_is_read_in_a_ragged_last_share_is_inside(rows: int) -> None:
    args = torch.randint(0, 40, (rows,)), torch.randn(40, 3), torch.randn(rows, 3)
    for got, want in zip(compiled(gathered_and_summed, *args), gathered_and_summed(*args), strict=True):
        assert error(got, want.double()) < 1e-5


def test_values_in_registers_read_nothing_past_the_end() -> None:
    args = torch.zeros(100003, dtype=torch.int64), torch.empty(40, 3), torch.empty(100003, 3)
    partial = [k for k in planned(gathered_and_summed, *args).kernels if k.name.endswith("partial")]
    found = [s for k in partial for s in k.statements if s.kind == "pointwise"]
    guarded = [load.args for s in found for load in vs.loads([s.value])]
    assert guarded
    assert all(guarded)


def stored_and_its_sum(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    made = x[..., at] * 2
    return made, made.sum()


def test_rows_are_cut_where_nothing_divides_their_number() -> None:
    """Else each plane of 241 rows was one program: 48 of them for a GPU."""
    partial, joined = planned(stored_and_its_sum, torch.empty(48, 241, 500), torch.empty(300, dtype=torch.int64)).kernels
    assert partial.outer[0].extent.as_int() == 480
    assert joined.inner == (partial.outer[0],)


@pytest.mark.interpret
def test_values_of_cut_rows() -> None:
    x, at = torch.randn(6, 67, 500), torch.randint(500, (320,))
    for got, want in zip(compiled(stored_and_its_sum, x, at), stored_and_its_sum(x.double(), at), strict=True):
        assert error(got, want) < 1e-5


def sums_of_two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), (x * y).sum(0)


@pytest.mark.parametrize(("fn", "shares"), [(sums_of_two, 2048), (lambda x, y: torch.var_mean(x * y, 0), 512)])
def test_few_columns_have_many_shares(fn: Callable[..., Any], shares: int) -> None:
    """Of means, whose shares are joined in two walks, no more than registers hold."""
    partial, _ = planned(fn, torch.empty(32 * 112 * 112, 64), torch.empty(32 * 112 * 112, 64)).kernels
    assert partial.outer[0].extent.as_int() == shares


def test_means_of_columns_have_fewer_programs() -> None:
    x = torch.empty(32 * 28 * 28, 512)
    sums, _ = planned(lambda x: x.sum(0), x).kernels
    means, _ = planned(lambda x: torch.var_mean(x, 0), x).kernels
    assert sums.outer[0].extent.as_int() == 2 * (means.outer[0].extent.as_int() or 0) == 256


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """As in a negative log-likelihood."""
    return logits.gather(1, labels[:, None]).sum()


def test_gathered_points_are_worth_more_programs() -> None:
    """Each waits for a sector of its own, and one program does not run the kernel that joins shares as well."""
    first, second = planned(picked, torch.randn(16384, 256), torch.zeros(16384, dtype=torch.int64)).kernels
    assert isinstance(first, Kernel)
    assert isinstance(second, Kernel)
    assert [v.extent.as_int() for v in (*first.outer, *first.inner)] == [16, 1024]
    [plain] = planned(lambda x: x.sum(), torch.randn(4096)).kernels
    assert isinstance(plain, Kernel)
    assert [v.extent.as_int() for v in plain.inner] == [4096]


@pytest.mark.interpret
def test_a_sum_of_gathered_points() -> None:
    logits, labels = torch.randn(5000, 12), torch.randint(12, (5000,))
    torch.testing.assert_close(compiled(picked, logits, labels), picked(logits, labels), rtol=1e-4, atol=1e-3)
