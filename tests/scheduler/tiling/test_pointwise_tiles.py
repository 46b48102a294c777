"""The loops of elementwise kernels on a GPU: along which memory is read, and along which it is written."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel
from kgen.scheduler import choose_tiles
from kgen.scheduler.tiling.loops import Touch
from kgen.scheduler.tiling.tiles import _interleaved
from tests.matmuls import compiled
from tests.rendering import gpu_call, texts_of_a_gpu
from tests.scheduler.selection.test_safe_choices import planned


def in_order(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


def filters(*sizes: int) -> Tensor:
    return torch.randn(sizes).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("channels", "taps"), [(96, 3), (768, 3), (96, 5)], ids=["3x3", "many", "5x5"])
def test_taps_are_stored_side_by_side(channels: int, taps: int) -> None:
    """Along channels each thread would store into a sector of its own."""
    plan = planned(in_order, filters(64, channels, taps, taps))
    tiling = choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu())
    assert [v.extent.as_int() for v in tiling.x] == [64, channels, taps * taps]
    assert not tiling.y


def test_one_tap_leaves_the_channels_innermost() -> None:
    plan = planned(in_order, filters(64, 96, 1, 1))
    tiling = choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu())
    assert [v.extent.as_int() for v in tiling.x] == [64 * 96]


def test_parts_of_rows_are_stored_side_by_side() -> None:
    """What has its channels first is read in streams: along them each thread would store into a sector of its own."""

    def joined(x: Tensor, y: Tensor) -> Tensor:
        y = y[:, None].expand(-1, 48, -1).flatten(0, 1)
        return torch.cat([x.t(), y.sin(), y.cos()], 1)

    made = texts_of_a_gpu(joined, torch.empty(12, 8192 * 48), torch.empty(8192, 12))
    [text] = made.kernels.values()
    assert "xi % (12)" in text


@pytest.mark.interpret
def test_values() -> None:
    x = filters(10, 20, 3, 3)
    torch.testing.assert_close(compiled(in_order, x), in_order(x))


@pytest.mark.parametrize(
    ("length", "dtype", "points"),
    [
        (8_000_000, torch.float32, 0),
        (8_000_004, torch.float32, 4),
        (8_000_001, torch.float32, 1),
        (8_000_001, torch.bfloat16, 2),
        (8_000_001, torch.uint8, 4),
    ],
)
def test_threads_have_as_many_neighbours_as_are_masked_together(length: int, dtype: torch.dtype, points: int) -> None:
    """A tensor that ends inside of a vector is loaded element by element, and neighbours should be loaded side by side."""
    plan = planned(lambda x: x + 1, torch.empty(length, dtype=dtype))
    text = gpu_call(choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu()), plan.graph).launch.source
    assert ("tl.max_contiguous(" in text) == bool(points)
    assert f"tl.max_contiguous(tl.multiple_of(xi, {points}), {points})" in text or not points


def multiples(x: Tensor) -> Tensor:
    return torch.stack([x * k for k in range(17)], 1)


@pytest.mark.ptx
@pytest.mark.parametrize("length", [500_009, 500_016])
def test_rows_of_odd_lengths_are_stored_in_no_vectors(length: int, tmp_path: Path) -> None:
    """Rows of 17 numbers begin between vectors, wherever in them a program begins."""
    plan = planned(multiples, torch.empty(length, dtype=torch.int64))
    launch = gpu_call(choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu()), plan.graph).launch
    assert "lib.side_by_side_4" in launch.source
    [made] = triton.compile_kernels([launch], 90)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.cubin)
    package = importlib.util.find_spec("triton")
    assert package is not None
    assert package.origin is not None
    tool = Path(package.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "STG.E.64" in text
    assert "STG.E.128" not in text


def shuffled(x: Tensor) -> Tensor:
    """Channels of channels-last images as pixels."""
    return F.pixel_shuffle(x * 2, 2).contiguous()


def test_pixels_that_were_channels_are_read_in_full_sectors() -> None:
    """Along a row of the result each thread would read two numbers of a sector."""
    plan = planned(shuffled, filters(2, 128, 60, 83).to(torch.bfloat16))
    tiling = choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu())
    assert [v.extent.as_int() for v in tiling.x] == [166]
    assert tiling.y[-1].extent.as_int() == 32


@pytest.mark.interpret
def test_values_of_pixels_that_were_channels() -> None:
    x = filters(2, 128, 5, 9)
    torch.testing.assert_close(compiled(shuffled, x), shuffled(x))


def test_a_plane_takes_neighbours_with_its_rows() -> None:
    """Pairs along another axis would leave every other element of a sector to another program."""
    rows, columns, pair = ix.var("rows", 784), ix.var("columns", 32), ix.var("pair", 2)
    kernel = Kernel("pairs", (rows, pair, columns), (), 0, ())
    stored = 64 * rows.expr() + 2 * columns.expr() + pair.expr()
    turned = rows.expr() + 784 * (2 * columns.expr() + pair.expr())
    angle = 32 * rows.expr() + columns.expr()
    moved = ((stored, 64, True), (turned, 64, True), (angle, 32, False))
    touches = [Touch("x", at, 4, 4 * number, False, store) for at, number, store in moved]
    assert _interleaved(kernel, rows, touches, Sizes({})) == (pair,)
    assert _interleaved(kernel, rows, [*touches[1:]], Sizes({})) == ()


def turned_and_masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).contiguous(memory_format=torch.channels_last)


def test_a_plane_goes_on_past_the_ends_of_rows() -> None:
    """Rows of 129 columns would be three tiles of 64, of which the last has one column."""
    plan = planned(turned_and_masked, torch.empty(8, 64, 127, 129), torch.empty(8, 1, 127, 129))
    [tiling] = [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in plan.kernels]
    assert [v.extent.as_int() for v in tiling.x] == [127 * 129]
    assert [v.extent.as_int() for v in tiling.y] == [8, 64]


@pytest.mark.parametrize(("columns", "width"), [(85, 32), (64, 64), (128, 64), (129, 64), (197, 64)])
def test_planes_of_rows_that_fill_few_tiles_are_narrower(columns: int, width: int) -> None:
    """A detector's 85 columns filled two tiles of 64 to two thirds, and each point is arithmetic."""
    plan = planned(lambda x: x.mT.sigmoid().contiguous(), torch.empty(24, columns, 6320).half())
    [tiling] = [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in plan.kernels]
    assert (tiling.blocks.x, tiling.blocks.y) == (width, 128)


@pytest.mark.interpret
def test_values_past_the_ends_of_rows() -> None:
    x, mask = torch.randn(2, 16, 7, 19), torch.randn(2, 1, 7, 19)
    torch.testing.assert_close(compiled(turned_and_masked, x, mask), turned_and_masked(x, mask))


def blended(x: Tensor, small: Tensor) -> Tensor:
    larger = F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)
    return (x + larger).contiguous(memory_format=torch.channels_last)


def test_planes_of_heavy_points_are_smaller() -> None:
    """Thirty-two points a thread would take 172 registers, and an SM would hold one program of 8 warps."""
    plan = planned(blended, torch.empty(4, 128, 76, 106).half(), torch.empty(4, 128, 37, 53).half())
    [tiling] = [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in plan.kernels]
    blocks = tiling.blocks
    assert tiling.y
    assert blocks.x * blocks.y <= 8 * 32 * blocks.warps


def added(table: Tensor, at: Tensor, x: Tensor) -> Tensor:
    return table.index_add(0, at, x.float())


def added_along(table: Tensor, at: Tensor, x: Tensor) -> Tensor:
    return table.scatter_add(1, at, x)


@pytest.mark.parametrize(
    ("columns", "dtype", "arch", "points"),
    [(64, torch.bfloat16, 90, 4), (64, torch.float32, 90, 4), (63, torch.bfloat16, 90, 1), (64, torch.bfloat16, 80, 1)],
    ids=["narrow", "wide", "between", "ampere"],
)
def test_threads_have_as_many_neighbours_as_an_update_takes(columns: int, dtype: torch.dtype, arch: int, points: int) -> None:
    """Threads would exchange what eight neighbours of 16 bits add to float32."""
    x, at = torch.empty(1 << 16, columns, dtype=dtype), torch.empty(1 << 16, dtype=torch.int64)
    plan = planned(added, torch.empty(1 << 18, columns), at, x)
    [tiling] = [choose_tiles(k, plan.graph, Sizes({}), Gpu(arch=arch)) for k in plan.kernels if scatters(k)]
    assert tiling.blocks.x == points * 32 * tiling.blocks.warps


def scatters(kernel: object) -> bool:
    return isinstance(kernel, Kernel) and any(s.kind == "scatter" for s in kernel.statements)


@pytest.mark.parametrize(("columns", "points"), [(4096, 1), (4095, 4)], ids=["vectors", "numbers"])
def test_elements_at_computed_places_are_updated_side_by_side(columns: int, points: int) -> None:
    """A thread of neighbours that are loaded as a vector would exchange them. Of a length of no vectors there are none."""
    x, at = torch.empty(513, columns), torch.empty(513, columns, dtype=torch.int64)
    plan = planned(added_along, torch.empty(513, 1 << 12), at, x)
    [tiling] = [choose_tiles(k, plan.graph, Sizes({}), Gpu()) for k in plan.kernels if scatters(k)]
    assert tiling.blocks.x == points * 32 * tiling.blocks.warps


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_read_in_part_may_have_eight_bits(dtype: torch.dtype) -> None:
    """Triton makes no 8-bit float of the integer 0, in its interpreter as little as in its compiler."""

    def padded(x: Tensor) -> Tensor:
        return F.pad(x.float() * 2, (1, 2)).relu()

    x = torch.arange(-5, 6).float().to(dtype)
    torch.testing.assert_close(compiled(padded, x), padded(x))
