"""The order of strides of tensors that nobody outside sees, those among them that a forward graph saves for its backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from kgen import backend
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.ir import nodes as ir
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned

# The package's attribute of this name is its function.
SCHEDULE = importlib.import_module("kgen.scheduler.schedule")


def residuals(x: Tensor, filters: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """A stream of residuals that begins as a permuted image: norms and matmuls want its rows."""
    tokens = functional.conv2d(x, filters, stride=4).flatten(2).transpose(1, 2)
    for _ in range(2):
        tokens = tokens + functional.layer_norm(tokens * scale, (24,)) @ w
    return tokens.tanh()


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Strides of the three-dimensional tensors that backward graphs get."""
    found: list[tuple[int, ...]] = []
    real = backend.lower

    def lower(gm: GraphModule, info: GraphInfo, config: Config) -> Any:
        values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")] if info.role == "backward" else []
        found.extend(v.stride() for v in values if isinstance(v, Tensor) and v.dim() == 3)
        return real(gm, info, config)

    monkeypatch.setattr(backend, "STAGES", tuple(lower if one is real else one for one in backend.STAGES))
    return found


def test_saved_tensors_have_the_order_that_suits_their_readers(saved: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    args = [torch.randn(size, requires_grad=True) for size in ((2, 3, 16, 16), (24, 3, 4, 4), (24, 24), (24,))]
    torch._dynamo.reset()
    made = torch.compile(residuals, backend="kgen", options={"cache": False})(*args)
    want = residuals(*args)
    assert made.stride() == want.stride()
    torch.testing.assert_close(made, want)
    weights = torch.randn(2, 16, 24)
    for one, other in zip(*(torch.autograd.grad((y * weights).sum(), args) for y in (made, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert saved
    inner = [stride for stride in saved if sorted(stride)[1] > 1]
    assert any(stride[-1] == 1 for stride in inner), saved


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
    """Scores with a bias that is looked up by positions, heads innermost."""
    bias = table[buckets].permute(2, 0, 1)[None].exp().cos().sigmoid().log()  # dear enough to be stored
    for _ in range(2):
        q = torch.softmax(q @ k.mT + bias, -1) @ v
    return q


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs after their orders are chosen."""
    found: list[Any] = []
    real = SCHEDULE.choose_orders

    def choose(graph: Any, on_gpu: Callable[[Any], bool]) -> None:
        real(graph, on_gpu)
        found.append({name: buffer.hint for name, buffer in graph.buffers.items() if len(buffer.sizes) == 4})

    monkeypatch.setattr(SCHEDULE, "choose_orders", choose)
    return found


def test_a_bias_of_scores_is_no_image(lowered: list[Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 8) for _ in range(3))
    args = (q, k, v, torch.randn(7, 3), torch.randint(0, 7, (16, 16)))
    torch._dynamo.reset()
    got = torch.compile(biased, backend="kgen", options={"cache": False})(*args)
    torch.testing.assert_close(got, biased(*args))
    (hints,) = lowered
    assert hints
    assert (0, 2, 3, 1) not in hints.values()


def parts(x: Tensor) -> Tensor:
    """Functionalization writes parts of a permuted tensor as views by strides."""
    first, second = x.split([16, 8], -1)
    return first.sum(-1) * second.sigmoid().sum(-1)


def by_strides(x: Tensor) -> Tensor:
    """Numbers that lie together in eager's memory."""
    return x.as_strided((2, 16, 7), (384, 3, 5), 11).sin().sum(-1)


@pytest.mark.parametrize("read", [parts, by_strides])
def test_views_by_strides_are_of_the_memory_that_was_traced(
    read: Callable[[Tensor], Tensor], saved: list[tuple[int, ...]]
) -> None:
    """Backward computes again from a saved tensor with other strides than those which tracing saw."""
    torch.manual_seed(0)
    sizes = ((2, 3, 16, 16), (24, 3, 4, 4), (24, 24), (24,))
    args = [torch.randn(size) for size in sizes]

    def fn(x: Tensor, filters: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        tokens = functional.conv2d(x, filters, stride=4).flatten(2).transpose(1, 2)
        for _ in range(2):
            tokens = tokens + functional.layer_norm(tokens * scale, (24,)) @ w
        return read(functional.silu(tokens))

    def gradients(fn: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [one.to(dtype).requires_grad_() for one in args]
        return torch.autograd.grad(fn(*leaves).sum(), leaves)

    torch._dynamo.reset()
    found = gradients(torch.compile(fn, backend="kgen", options={"cache": False}), torch.float32)
    assert any(stride[-1] == 1 for stride in saved if sorted(stride)[1] > 1), saved
    for one, other in zip(found, gradients(fn, torch.float64), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)


def turned(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The gradient of a transposed matrix, read beside tensors that have its rows."""
    return torch.sigmoid(w) + w * torch.bmm(a.transpose(1, 2), b).transpose(1, 2)


def read_by_a_matmul(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """A matmul reads the result, too."""
    made = torch.bmm(a.transpose(1, 2), b)
    return (made @ made.transpose(1, 2)).sum() + made.transpose(1, 2) * w


def read_both_ways(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Another kernel has the rows that the matmul writes."""
    made = torch.bmm(a.transpose(1, 2), b)
    return torch.sigmoid(w) + w * made.transpose(1, 2), torch.tanh(made)


ARGUMENTS = ((2, 48, 40), (2, 48, 56), (2, 56, 40))


@pytest.mark.parametrize(
    ("fn", "step"),
    [(turned, (40 * 56, 1, 40)), (read_by_a_matmul, (40 * 56, 56, 1)), (read_both_ways, (40 * 56, 56, 1))],
)
def test_results_of_matmuls_have_the_order_of_their_readers(fn: Callable[..., Tensor], step: tuple[int, ...]) -> None:
    plan = planned(fn, *(torch.empty(size, dtype=torch.bfloat16) for size in ARGUMENTS))
    assert tuple(s.as_int() for s in plan.graph.buffers["bmm"].strides or ()) == step


def test_a_result_that_the_user_sees_has_eagers_order() -> None:
    plan = planned(lambda *args: (turned(*args), torch.bmm(args[0].transpose(1, 2), args[1])), *map(torch.empty, ARGUMENTS))
    assert [s.as_int() for s in plan.graph.buffers["bmm"].strides or ()] == [40 * 56, 56, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [True, False])
def test_the_library_writes_either_order(dtype: torch.dtype, batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = SCHEDULE.choose_orders

    def everywhere(graph: Any, _: Any) -> None:
        real(graph, lambda _: True)
        seen.extend(buffer.strides for buffer in graph.buffers.values() if buffer.hint is not None)

    monkeypatch.setattr(SCHEDULE, "choose_orders", everywhere)
    torch.manual_seed(0)
    a, b, w = (torch.randn(size).to(dtype) for size in ARGUMENTS)
    fn = turned if batched else lambda a, b, w: torch.sigmoid(w[0]) + w[0] * (a[0].t() @ b[0]).t()
    made = torch.compile(fn, backend="kgen", options={"cache": False, "templates": False})(a, b, w)
    torch.testing.assert_close(made, fn(a, b, w), rtol=2e-2, atol=2e-2)
    assert seen


@pytest.mark.interpret
def test_values_of_turned_results() -> None:
    torch.manual_seed(0)
    a, b, w = (torch.randn(size) for size in ARGUMENTS)
    torch.testing.assert_close(compiled(turned, a, b, w), turned(a, b, w), rtol=1e-4, atol=1e-4)


def resampled(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What a bilinear upsampling's gradient is made of: additions to two tables, at positions that the loops give."""
    b, c, h, w = gradient.shape
    rows, columns = torch.arange(h, device=gradient.device) // 2, torch.arange(w, device=gradient.device) // 2
    tables = [torch.zeros(b, c, h // 2, w // 2, device=gradient.device) for _ in range(2)]
    add = torch.ops.aten.index_put.default
    first = add(tables[0], [None, None, rows[:, None], columns], gradient * 0.25, True)
    second = add(tables[1], [None, None, (rows[:, None] + 1).clamp(max=h // 2 - 1), columns], gradient, True)
    return (first + second).tanh(), first.sum()


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("images", [True, False])
def test_tables_have_the_order_of_what_is_added_to_them(images: bool, gpu: bool) -> None:
    """Threads of a warp that add to channels side by side share sectors."""
    form = torch.channels_last if images else torch.contiguous_format
    plan = planned(resampled, torch.empty(4, 64, 32, 48).to(memory_format=form), gpu=gpu)
    names = [node.target for node in plan.graph.nodes if isinstance(node, ir.Scatter)]
    fastest = {[s.as_int() for s in plan.graph.buffers[name].strides or ()].index(1) for name in names}
    assert len(names) == 2
    assert fastest == ({1} if images and gpu else {3})


@pytest.mark.interpret
def test_additions_to_tables_of_another_order() -> None:
    x = torch.randn(2, 3, 8, 10).to(memory_format=torch.channels_last)
    for got, want in zip(compiled(resampled, x), resampled(x), strict=True):
        torch.testing.assert_close(got, want)
