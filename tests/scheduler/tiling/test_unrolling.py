"""Short loops of elementwise kernels on a GPU that are written point by point, so that a thread computes what their points
share for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Tiling
from kgen.scheduler import choose_tiles
from kgen.scheduler.tiling import unrolling
from kgen.scheduler.tiling.tiles import _stores_adjacent
from kgen.templates.render import canonical_text
from kgen.templates.triton.kernels import loops
from tests.matmuls import compiled
from tests.rendering import gpu_call
from tests.scheduler.selection.test_safe_choices import planned

MANY = 300_000


def stacked(s: Tensor, t: Tensor) -> Tensor:
    """Two results of one price."""
    call = s * torch.erf(s / t) - torch.exp(-t)
    return torch.stack((call, call - s), -1)


def outer(n: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of nine numbers with eight, of which each is stored too."""
    radial = torch.sin(n[:, None] * torch.arange(1, 9, device=n.device)) / n[:, None]
    return radial, a[:, :, None] * radial[:, None, :]


def channels(x: Tensor, mean: Tensor) -> Tensor:
    return (x.permute(0, 3, 1, 2) / 255 - mean[:, None, None]).flip(3).contiguous()


def nibbles(packed: Tensor, scale: Tensor) -> Tensor:
    """Two numbers of each byte."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return (both.float() - 8) * scale[:, None]


def looked_up(packed: Tensor, table: Tensor, exponent: Tensor) -> Tensor:
    """Two numbers of each byte, from a table, times a power of two for 16 bytes."""
    both = torch.stack((table[(packed & 15).int()], table[(packed >> 4).int()]), -1).view(len(packed), -1, 32)
    return torch.ldexp(both, exponent[..., None]).flatten(1)


def sixths(packed: Tensor, scale: Tensor) -> Tensor:
    """Four numbers of three bytes."""
    a, b, c = packed.int().unbind(-1)
    six = torch.stack([a >> 2, ((a & 3) << 4) | (b >> 4), ((b & 15) << 2) | (c >> 6), c & 63], -1)
    return six.flatten(1).float() * scale[:, None]


def halves(x: Tensor, scale: Tensor) -> Tensor:
    """What is read is a run, and would be none of every other element."""
    return x * torch.erf(scale).repeat_interleave(2, 1)


def indexed(x: Tensor, table: Tensor) -> Tensor:
    """The rows come of what another statement makes."""
    at = (torch.sigmoid(x) * 30).long()
    return table[at] * x[:, None]


def bands(x: Tensor) -> Tensor:
    """Sums and differences of neighbouring rows, all sums first."""
    a, b = x.unflatten(1, (-1, 2)).unbind(2)
    return torch.cat([a + b, a - b], 0) * 0.5


def unlike(x: Tensor) -> Tensor:
    """Each part reads elements of its own."""
    return torch.cat([x[:2] + 1, x[2:] * 2], 0)


def added(x: Tensor) -> Tensor:
    """Nothing is the same at all channels."""
    return x + 1


def wide(s: Tensor) -> Tensor:
    """Twelve results of a point: neighbours would store further apart than a sector."""
    t = torch.erf(s)
    return t[:, None] * torch.arange(12, device=s.device)


def updated(x: Tensor, s: Tensor) -> Tensor:
    return x.mul_(torch.erf(s)[:, None])


def tiled(fn: Callable[..., object], *args: Tensor) -> Tiling:
    plan = planned(fn, *args)
    return choose_tiles(plan.kernels[-1], plan.graph, Sizes({}), Gpu())


def extents(tiling: Tiling) -> list[int | None]:
    return [v.extent.as_int() for v in (*tiling.y, *tiling.x)]


def test_what_points_share_is_computed_once() -> None:
    tiling = tiled(stacked, torch.rand(MANY), torch.rand(MANY))
    assert extents(tiling) == [MANY]
    assert len(tiling.kernel.statements) == 2


def rounds(s: Tensor, t: Tensor) -> Tensor:
    """Four results of much arithmetic that all of them share."""
    for _ in range(8):
        s, t = torch.sin(s) - t, torch.erf(t) * s
    return torch.stack((s, t, s - t, s + t), -1)


def test_fewer_threads_are_enough_for_much_arithmetic() -> None:
    few = (torch.ones(100_000), torch.ones(100_000))
    assert extents(tiled(rounds, *few)) == [100_000]
    assert extents(tiled(stacked, *few)) == [100_000, 2]
    assert extents(tiled(rounds, torch.ones(30_000), torch.ones(30_000))) == [30_000, 4]  # SMs wait


def rotated(q: Tensor, v: Tensor) -> Tensor:
    """By quaternions: each element of a cross product reads others of its row."""
    q, v = F.normalize(q.float(), dim=-1), v.float()
    w, u = q[:, :1], q[:, 1:]
    t = 2 * torch.linalg.cross(u, v)
    return v + w * t + torch.linalg.cross(u, t)


def test_what_points_read_of_one_row_counts_for_them_together() -> None:
    q, v = (torch.ones(10 * MANY, n, dtype=torch.bfloat16) for n in (4, 3))
    assert extents(tiled(rotated, q, v)) == [10 * MANY]


def test_a_loop_in_the_middle() -> None:
    """The eight numbers are stored at one of the nine points alone: they lose their mask."""
    tiling = tiled(outer, torch.rand(MANY), torch.rand(MANY, 9))
    assert extents(tiling) == [MANY, 8]
    assert len(tiling.kernel.statements) == 10
    assert all(s.mask is None for s in tiling.kernel.statements)


def test_points_that_take_turns() -> None:
    tiling = tiled(nibbles, torch.zeros(2048, 1024, dtype=torch.uint8), torch.rand(2048))
    assert math.prod(filter(None, extents(tiling))) == 2048 * 1024
    assert len(tiling.kernel.statements) == 2


def test_points_that_look_up_take_turns() -> None:
    """Data say where a table is read: nobody reads less of a run of it."""
    args = torch.zeros(2048, 1024, dtype=torch.uint8), torch.rand(16), torch.zeros(2048, 64, dtype=torch.int32)
    tiling = tiled(looked_up, *args)
    assert math.prod(filter(None, extents(tiling))) == 2048 * 1024
    assert len(tiling.kernel.statements) == 2


def test_parts_of_a_concatenation_read_what_they_share_at_a_time() -> None:
    tiling = tiled(bands, torch.empty(4, 2048, 1000))
    assert math.prod(filter(None, extents(tiling))) == 4 * 1024 * 1000
    assert len(tiling.kernel.statements) == 2


@pytest.mark.interpret
@pytest.mark.parametrize("number", [2, 4])
def test_adjacent_results_are_stored_together(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "THREADS_PER_SM", 1)

    def several(s: Tensor) -> Tensor:
        t = torch.erf(s)
        return torch.stack([t, t + 1, t * 2, -t][:number], -1).half()

    texts: list[str] = []
    monkeypatch.setattr(loops, "canonical_text", lambda text, names: texts.append(text) or canonical_text(text, names))
    s = torch.rand(1003)
    torch.testing.assert_close(compiled(several, s), several(s))
    assert any(f"lib.side_by_side_{number}" in text for text in texts)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("number", "width", "dtype"),
    [(3, 0, torch.float32), (5, 8, torch.float32), (9, 16, torch.float32), (7, 8, torch.float16), (8, 0, torch.float32)],
)
def test_many_adjacent_results_are_exchanged(
    number: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to four stores of a point stay, such as two vectors of four."""

    def several(s: Tensor) -> Tensor:
        t = s.to(dtype)
        made = [t, t + 1, t * 2, -t, t.exp(), t.sin(), t.sqrt(), t.cos(), t.abs()]
        return torch.stack(made[:number], -1)

    texts: list[str] = []
    monkeypatch.setattr(loops, "canonical_text", lambda text, names: texts.append(text) or canonical_text(text, names))
    s = torch.rand(1003)
    torch.testing.assert_close(compiled(several, s), several(s))
    assert any(f"tl.arange(0, {width}) < {number}" in text for text in texts) == (width > 0)


@pytest.mark.interpret
def test_numbers_of_three_bytes_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours read a run of bytes, and store a run of results: also in rows that share a scale."""
    assert extents(tiled(sixths, torch.zeros(6144, 1024, 3, dtype=torch.uint8), torch.rand(6144))) == [6144, 1024]
    monkeypatch.setattr(unrolling, "THREADS_PER_SM", 1)
    texts: list[str] = []
    monkeypatch.setattr(loops, "canonical_text", lambda text, names: texts.append(text) or canonical_text(text, names))
    args = torch.randint(0, 256, (61, 1003, 3), dtype=torch.uint8), torch.rand(61)
    torch.testing.assert_close(compiled(sixths, *args), sixths(*args))
    assert "[:, :, None] + tl.arange(0, 4)[None, None, :]), lib.side_by_side_4(" in texts[0]


def five(s: Tensor, scale: Tensor) -> Tensor:
    """Five numbers of a point, of two loops that are not one: what is read is transposed."""
    t = torch.erf(s.t())
    return torch.stack([t, t + scale[:, None], t * 2, -t, t.exp()], -1)


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (sixths, (torch.zeros(6144, 1024, 3, dtype=torch.uint8), torch.empty(6144))),
        (five, (torch.empty(3000, 4000), torch.empty(4000))),
    ],
)
def test_rows_of_adjacent_results_compile(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    plan = planned(fn, *args)
    launch = gpu_call(choose_tiles(plan.kernels[-1], plan.graph, Sizes({}), Gpu()), plan.graph).launch
    assert "[None, None, :]" in launch.source
    triton.compile_kernels([launch], 90)


def test_indices_are_work_too() -> None:
    image = torch.zeros(64, 225, 225, 3, dtype=torch.uint8)
    assert extents(tiled(channels, image, torch.rand(3))) == [64, 225, 225]


@pytest.mark.parametrize(
    ("fn", "sizes", "loops"),
    [
        (added, [(MANY, 3)], [3 * MANY]),
        (wide, [(MANY,)], [MANY, 12]),
        (stacked, [(1000,), (1000,)], [1000, 2]),
        (halves, [(4096, 1024), (4096, 512)], [4096, 1024]),
        (bands, [(4, 64, 1000)], [8, 32, 1000]),
        (unlike, [(4, 2048, 1000)], [4, 2048000]),
    ],
    ids=["nothing shared", "far apart", "few threads", "runs", "parts in a cache", "unlike parts"],
)
def test_others_stay_loops(fn: Callable[..., object], sizes: list[tuple[int, ...]], loops: list[int]) -> None:
    assert extents(tiled(fn, *(torch.rand(s) for s in sizes))) == loops


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (stacked, lambda: (torch.rand(1003) + 0.5, torch.rand(1003) + 0.5)),
        (bands, lambda: (torch.rand(3, 14, 7),)),
        (outer, lambda: (torch.rand(130) + 0.5, torch.rand(130, 9))),
        (channels, lambda: (torch.randint(0, 255, (3, 17, 13, 3), dtype=torch.uint8), torch.rand(3))),
        (nibbles, lambda: (torch.randint(0, 255, (33, 20), dtype=torch.uint8), torch.rand(33))),
        (
            looked_up,
            lambda: (
                torch.randint(0, 255, (33, 32), dtype=torch.uint8),
                torch.rand(16),
                torch.randint(-9, 9, (33, 2), dtype=torch.int32),
            ),
        ),
        (indexed, lambda: (torch.randn(500), torch.randn(30, 3))),
        (updated, lambda: (torch.rand(300, 3), torch.rand(300))),
    ],
    ids=["stacked", "bands", "outer", "channels", "nibbles", "looked up", "indexed", "updated"],
)
def test_values(fn: Callable[..., object], args: Callable[[], tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "THREADS_PER_SM", 1)
    monkeypatch.setattr(unrolling, "CACHED", 1)
    given = args()
    want = fn(*(x.clone() for x in given))
    torch.testing.assert_close(compiled(fn, *given), want)


@pytest.mark.parametrize(
    ("fn", "args", "adjacent"),
    [
        (stacked, (torch.empty(MANY), torch.empty(MANY)), False),
        (channels, (torch.empty(64, 225, 225, 3, dtype=torch.uint8), torch.empty(3)), True),
    ],
)
def test_planes_take_only_what_is_stored_side_by_side(
    fn: Callable[..., Tensor], args: tuple[Tensor, ...], adjacent: bool
) -> None:
    """Pairs that were written out are two apart; channels are planes of their own."""
    assert _stores_adjacent(tiled(fn, *args).kernel, Sizes({})) == adjacent


def warped(x: Tensor, steps: int) -> Tensor:
    """Images of a batch, all read at the same positions, which take many operations to find."""
    u = torch.linspace(-1, 1, x.shape[1], device=x.device)[:, None] * torch.ones(x.shape[2], device=x.device)
    for _ in range(steps):
        u = (u - 0.1 * u * u) / (1 + 0.1 * u)
    at = ((u + 1) * (x.shape[1] - 1) / 2).long().clamp(0, x.shape[1] - 1)
    return x[:, at, torch.arange(x.shape[2], device=x.device)] * u


@pytest.mark.parametrize(("steps", "loops_left"), [(8, 1), (0, 2)])
def test_images_of_a_batch_share_much_arithmetic(steps: int, loops_left: int) -> None:
    """Of little arithmetic programs of each image run side by side."""
    tiling = tiled(lambda x: warped(x, steps), torch.ones(12, 1080, 1920))
    assert extents(tiling)[-2:] == ([1080, 1920] if loops_left == 1 else extents(tiling)[-2:])
    assert (12 in extents(tiling) or 12 * 1080 in extents(tiling)) == (loops_left > 1)


@pytest.mark.interpret
def test_images_of_a_batch_are_right() -> None:
    x = torch.randn(5, 40, 30)
    torch.testing.assert_close(compiled(lambda x: warped(x, 4), x), warped(x, 4))


def turned_runs(x: Tensor) -> Tensor:
    """Runs of 12 numbers in another order."""
    return x.reshape(32, 32, 32, 32, 12).permute(0, 3, 2, 1, 4).contiguous()


def test_a_run_is_read_by_neighbouring_threads() -> None:
    """Twelve loads of a thread would each take one element of a sector. 149 us for 75 MB (H200)."""
    tiling = tiled(turned_runs, torch.empty(32, 32, 32, 384, dtype=torch.bfloat16))
    assert math.prod(extents(tiling)) == 32**4 * 12
