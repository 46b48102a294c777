"""Values that are read beside the points where they are made: which ones kernels recompute, and that results stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_case import capture
from rendering import texts_of_a_gpu
from slow import slow_but
from torch import Tensor

import kgen.lowering.graph
from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower, reinplace, stencils
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options, schedule

GPU = Options(gpu_everywhere=True)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stencils, "LARGE", 100)


def graph_of(f: Callable[..., Any], args: list[Tensor], **context: Any) -> ir.Graph:
    return lower(reinplace(capture(f, tuple(args), "fake")), LoweringContext(gpu_everywhere=True, **context))


def without(f: Callable[..., Any], args: list[Tensor]) -> ir.Graph:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kgen.lowering.graph, "recompute_in_stencils", lambda *_: None)
        return graph_of(f, args)


def swept(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        z = F.pad(x, (1, 1))
        x = y - 0.5 * z[:, :-2] - 0.25 * z[:, 2:]
    return x


@pytest.mark.parametrize(("gpu", "nodes"), [(True, 2), (False, 4)], ids=["launches", "caches"])
def test_a_sweep_is_one_launch_though_its_elements_are_few(gpu: bool, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of ten sweeps stored its padded vectors first, in a launch of its own. A launch has two of them."""
    monkeypatch.setattr(stencils, "LARGE", 1 << 20)
    x = torch.empty(200, 5001)
    found = lower(reinplace(capture(swept, (x, x), "fake")), LoweringContext(gpu_everywhere=gpu))
    assert len(found.nodes) == nodes


def fluxes(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Two quantities and what flows between points, around both ends."""
    f, g = h * u, h * u * u + h * h / 2
    return h - f.roll(1, 0) + f.roll(-1, 0), u - g.roll(1, 1) + g.roll(-1, 1)


def clamped(x: Tensor, y: Tensor) -> Tensor:
    d = x * y.abs() - y
    return F.pad(d[None], (1, 0, 1, 0), mode="replicate")[0, :-1, :-1] - d + x + y


def differences(x: Tensor) -> Tensor:
    """The gradient of differences: each is read at two places, with a mask at the ends."""
    d = torch.sign(x[1:] - x[:-1]) * 0.5 + (x[1:] + x[:-1]) * 0.25
    return F.pad(d, (0, 0, 1, 0)) - F.pad(d, (0, 0, 0, 1)) + x


def sums(x: Tensor, y: Tensor) -> Tensor:
    d = x * y + y * y - x
    return (d[1:] * d[:-1] + x[1:] * y[1:]).sum(1)


def steps(x: Tensor, y: Tensor) -> Tensor:
    """Each step reads the one before beside its points."""
    for _ in range(3):
        f = x * y + y * y * x
        x = x - f.roll(1, 1) + f.roll(-1, 1)
    return x


def butterflies(x: Tensor) -> Tensor:
    """Sums and differences of elements 1, 2, 4 and 8 apart: a thread that has both loads their elements for both."""
    for width in (1, 2, 4, 8):
        a, b = x.view(30, -1, 2, width).unbind(2)
        x = torch.stack([a + b, a - b], 2)
    return x.view(30, -1)


def other_inputs(x: Tensor, y: Tensor, *more: Tensor) -> Tensor:
    """Its readers read none of what it is made of, which is more than it is. But then nobody else reads that."""
    f = x * y * more[0] * more[1]
    return f.roll(1, 1) - f.roll(-1, 1)


def inside(x: Tensor, y: Tensor) -> Tensor:
    """Neighbours around both ends of a part that does not begin where its tensor does."""
    u, v = x[:, 1:], y[:, 1:]
    f = u.roll(1, 1) * v - u * v.roll(1, 1)
    return f.roll(1, 1) - f.roll(-1, 1) + u + v


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "fluxes": (fluxes, 2, 1),
    "clamped": (clamped, 2, 1),
    "differences": (differences, 1, 1),
    "sums": (sums, 2, 1),
    "steps": (steps, 2, 3),
    "butterflies": (butterflies, 1, 1),
    "inside": (inside, 2, 1),
    "other inputs": (other_inputs, 4, 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_kernels(name: str, dtype: torch.dtype) -> None:
    fn, count, kernels = CASES[name]
    args = [torch.randn(30, 48, dtype=dtype) for _ in range(count)]
    graph = graph_of(fn, args)
    if dtype is not torch.bfloat16:  # of which half the bytes are saved
        assert len(schedule(graph, GPU).kernels) == kernels
    got = evaluate_graph(graph, args)
    torch.testing.assert_close(got, evaluate_graph(without(fn, args), args), rtol=0, atol=0)
    expected = fn(*args)
    if dtype is not torch.bfloat16:
        torch.testing.assert_close(tuple(got), expected if isinstance(expected, tuple) else (expected,))


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["fluxes", "differences", "steps"])
def test_a_cpu_recomputes_them_too(name: str) -> None:
    fn, count, kernels = CASES[name]
    args = [torch.randn(30, 40) for _ in range(count)]
    graph = lower(reinplace(capture(fn, tuple(args), "fake")), LoweringContext())
    assert len(schedule(graph, Options()).kernels) <= kernels
    torch.testing.assert_close(torch.compile(fn, backend="kgen")(*args), fn(*args))


def crossed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Each element of a cross is made of both others of its row, and a norm reads all of them."""
    n = torch.linalg.cross(a, b)
    m = torch.linalg.cross(n, c)
    k = torch.linalg.cross(m, n)
    return k / (k.norm(dim=-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_chain_of_cross_products(dtype: torch.dtype) -> None:
    """Four kernels stored each cross. What a row is read at one by one is read beside the points of what makes it, too."""
    args = [torch.randn(500, 3, dtype=dtype) for _ in range(3)]
    graph = graph_of(crossed, args)
    assert len(schedule(graph, GPU).kernels) == 1
    got = evaluate_graph(graph, args)
    torch.testing.assert_close(got, evaluate_graph(without(crossed, args), args), rtol=0, atol=0)
    if dtype is not torch.bfloat16:
        torch.testing.assert_close(got[0], crossed(*args))


def test_a_thread_has_a_row_of_three() -> None:
    """Each element would compute the whole chain again: one thread computes it, and reads each number of its row."""
    args = [torch.empty(1_000_000, 3) for _ in range(3)]
    [text] = texts_of_a_gpu(crossed, *args).kernels.values()
    assert text.count("tl.load") == 9
    assert text.count("tl.store") == 3


def stages(x: Tensor) -> Tensor:
    """All stages of a butterfly of rows."""
    length = x.shape[1]
    for k in range(length.bit_length() - 1):
        a, b = x.view(len(x), -1, 2, 1 << k).unbind(2)
        x = torch.stack([a + b, a - b], 2)
    return x.view(-1, length)


def test_stages_of_few_rows_share_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven stages of 32,768 numbers were nine launches, each as long as a launch takes."""
    monkeypatch.setattr(stencils, "LARGE", 1 << 20)
    args = [torch.randn(16, 2048, dtype=torch.float64)]
    graph = graph_of(stages, args)
    assert len(schedule(graph, GPU).kernels) <= 3
    torch.testing.assert_close(evaluate_graph(graph, args)[0], stages(*args))


def test_a_dear_value_of_few_elements_is_stored() -> None:
    """Seven logarithms and inverses take longer than a launch."""
    args = [torch.randn(30, 40), torch.randn(30, 40)]
    graph = graph_of(dear, args)
    assert len(graph.nodes) == len(without(dear, args).nodes)


def short_axes(seed: int) -> Callable[..., Tensor]:
    """A random program over vectors of a few components: crosses, dots, norms, rolls, stacks and parts."""
    choose = random.Random(seed)

    def other(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.cross(a, b) if a.shape[-1] == 3 else a.roll(1, -1) * b - a * b.roll(1, -1)

    mixes: list[Callable[[Tensor, Tensor], Tensor]] = [
        other,
        lambda a, b: a * (a * b).sum(-1, keepdim=True) - b,
        lambda a, b: a / (b.norm(dim=-1, keepdim=True) + 1),
        lambda a, b: torch.stack([a[:, -1] * b[:, 0] + a[:, 0], *(a[:, 1:] - b[:, :-1]).unbind(1)], 1),
        lambda a, b: torch.cat([b[:, 1:] * a[:, :-1], a[:, :1] + b[:, 1:2]], 1),
        lambda a, b: a.softmax(-1) * b + b.prod(-1, keepdim=True).tanh(),
        lambda a, b: torch.where(a > b, a.flip(-1) * b, b.abs() + a[:, :1]),
    ]
    steps = [(choose.choice(mixes), choose.random(), choose.random()) for _ in range(choose.randint(3, 7))]

    def fn(*given: Tensor) -> Tensor:
        values = list(given)
        for mix, left, right in steps:
            pair = (values[int(part * len(values))] for part in (left, right))
            values.append(torch.tanh(mix(*pair)))
        return values[-1] + values[-2].roll(1, 0)

    return fn


@pytest.mark.parametrize("seed", slow_but(lambda n: n < 20, range(200)))
def test_random_programs_of_short_axes(seed: int) -> None:
    args = [torch.randn(15, 2 + seed % 4, dtype=torch.float64) for _ in range(2)]
    fn = short_axes(seed)
    torch.testing.assert_close(evaluate_graph(graph_of(fn, args), args)[0], fn(*args))


def result_too(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    f = x * y + y * y
    return f, x * y - f.roll(1, 1)


def dear(x: Tensor, y: Tensor) -> Tensor:
    f = torch.lgamma(x.abs() + 1) * torch.erfinv(y.tanh()) + torch.digamma(x.abs() + y.abs() + 1)
    return sum((f.roll(k, 1) for k in range(-3, 4)), x + y)


def turned(x: Tensor, y: Tensor) -> Tensor:
    f = x.t() * y.t() + x.t()
    return f.roll(1, 1) - f.roll(-1, 1) + x.t() + y.t()


def written_later(x: Tensor, y: Tensor) -> Tensor:
    """The value was made of what memory held before."""
    f = x * y + y * y
    x.mul_(2)
    return f.roll(1, 1) - f.roll(-1, 1) + x * y


def by_data(x: Tensor, y: Tensor) -> Tensor:
    f = x * y + y * y - x
    return f.gather(1, x.argsort(1)) - f.roll(1, 1) + x + y


@pytest.mark.parametrize("fn", [result_too, dear, turned, written_later, by_data])
def test_others_are_stored(fn: Callable[..., Any]) -> None:
    args = [torch.randn(30, 40) for _ in range(2)]
    graph = graph_of(fn, args)
    assert [ir.outs(node) for node in graph.nodes] == [ir.outs(node) for node in without(fn, args).nodes]
    got, found = evaluate_graph(graph, [a.clone() for a in args]), fn(*(a.clone() for a in args))
    torch.testing.assert_close(got[-1], found[-1] if isinstance(found, tuple) else found)


def test_a_mask_is_zero_outside() -> None:
    """What nobody wraps in a condition reads zeros beyond the end, as from memory."""
    args = [torch.randn(30, 40, dtype=torch.float64)]
    graph = graph_of(lambda x: F.pad((x + 1) * (x + 2) + x, (0, 0, 2, 0))[:-2] - x, args)
    [got] = evaluate_graph(graph, args)
    x = args[0]
    torch.testing.assert_close(got, F.pad((x + 1) * (x + 2) + x, (0, 0, 2, 0))[:-2] - x)


def test_an_operator_for_itself_is_stored() -> None:
    args = [torch.randn(30, 40), torch.randn(30, 40)]
    assert len(graph_of(fluxes, args, inlining=False).nodes) > len(graph_of(fluxes, args).nodes)


def drawn(seed: int) -> Callable[..., Tensor]:
    """A random program of elementwise operators, and of views that shift, pad, turn and cut."""
    choose = random.Random(seed)
    shifts: list[Callable[[Tensor], Tensor]] = [
        lambda v: v.roll(1, 1),
        lambda v: v.roll((-2, 3), (0, 1)),
        lambda v: v.flip(0),
        lambda v: F.pad(v[1:, :-2], (1, 1, 0, 1)),
        lambda v: F.pad(v[None, 2:], (0, 0, 1, 1), mode="replicate")[0],
        lambda v: F.pad(v[None, :, 1:-1], (1, 1), mode="reflect")[0],
        lambda v: v,
    ]
    mixes: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, b: a * b + b * 0.5 - a,
        lambda a, b: torch.where(a > b, a * a - b, b.abs() + a),
        lambda a, b: (a - b).sign() * a + b * b * 0.25,
        lambda a, b: torch.maximum(a, b) * 0.5 + torch.minimum(a, b).neg() * a,
    ]
    steps = [(choose.choice(mixes), choose.choice(shifts), choose.choice(shifts), choose.random()) for _ in range(6)]

    def fn(*given: Tensor) -> Tensor:
        values = list(given)
        for mix, left, right, part in steps:
            values.append(mix(left(values[int(part * len(values))]), right(values[-1])))
        return values[-1] + values[-2].roll(1, 0)

    return fn


@pytest.mark.parametrize("seed", slow_but(lambda n: n < 20, range(80)))
def test_random_programs(seed: int) -> None:
    args = [torch.randn(12, 14, dtype=torch.float64) for _ in range(2)]
    fn = drawn(seed)
    got = evaluate_graph(graph_of(fn, args), args)
    torch.testing.assert_close(got, evaluate_graph(without(fn, args), args), rtol=0, atol=0)


def test_a_long_chain() -> None:
    """Values of one kernel that a stencil's value is made of."""

    def fn(x: Tensor) -> Tensor:
        kept = [x]
        for _ in range(400):
            kept.append(torch.sin(kept[-1]) * 0.5 + torch.cos(kept[-1]) + kept[-1] * kept[0])
        return kept[-1].roll(1, 1) - kept[-1].roll(-1, 1) + x

    graph = graph_of(fn, [torch.randn(30, 40)])
    assert len(graph.nodes) > 1


def test_a_roll_of_inputs_is_a_view() -> None:
    """Several operators read each element where it is."""

    def of_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        d = (x * x * 0.5 + x - 1).roll(1, 1)
        return d * 2, (d * y).sum(1)

    args = [torch.randn(30, 40, dtype=torch.float64), torch.randn(30, 40, dtype=torch.float64)]
    graph = graph_of(of_inputs, args)
    assert len(graph.nodes) == 2
    torch.testing.assert_close(tuple(evaluate_graph(graph, args)), of_inputs(*args))
