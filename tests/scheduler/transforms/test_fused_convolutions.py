"""The library's calls for a convolution and what follows: what they are seen in, what runs, and weights packed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

import kgen
from kgen.capture.decompositions import TABLE
from kgen.cost import cpu_convolutions, model
from kgen.cost.tuning_query import FUSED
from kgen.ir.plan import Call, Schedule
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.report.record import Record, recording
from kgen.scheduler import Options, schedule
from kgen.verdict import Outcome, Reason
from tests.scheduler.transforms.test_fused_calls import Knows

bf16, last = torch.bfloat16, torch.channels_last
ALONE, SUM = "mkldnn._convolution_pointwise.default", "mkldnn._convolution_pointwise.binary"
CONVOLUTION = "aten.convolution.default"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def steps(plan: Schedule) -> list[str]:
    return [str(step.node.target) if isinstance(step, Call) else step.name for step in plan.steps]  # type: ignore[union-attr]


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def compiled(fn: Callable[..., Any], *args: Tensor, tolerance: float = 1e-5, **options: Any) -> list[str]:
    """The steps of a graph that computes what eager does."""
    with torch.no_grad(), recording() as seen:
        made = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False, **options})(*args)
        wanted = fn(*args)
    for one, other in zip(torch.utils._pytree.tree_leaves(made), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * float(other.abs().amax()) if other.numel() else 0.0
        )
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    return steps(graph.plan)


def given(form: torch.memory_format = last, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, r = (torch.randn(2, 8, 8, 8, dtype=dtype).to(memory_format=form) for _ in range(2))
    return x, torch.randn(8, 8, 3, 3, dtype=dtype), r


def apart(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = conv(x, w)
    return F.silu(y), y + 1


def late(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """What is added is computed behind the convolution."""
    y = conv(x, w)
    return y + r.cumsum(1)


CASES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "relu": (lambda x, w, r: F.relu(conv(x, w)), None),
    "sigmoid": (lambda x, w, r: conv(x, w).sigmoid(), ALONE),
    "silu": (lambda x, w, r: F.silu(conv(x, w)), ALONE),
    "hardswish": (lambda x, w, r: F.hardswish(conv(x, w)), ALONE),
    "hardsigmoid": (lambda x, w, r: F.hardsigmoid(conv(x, w)), None),
    "relu6": (lambda x, w, r: F.relu6(conv(x, w)), None),
    "hardtanh": (lambda x, w, r: F.hardtanh(conv(x, w)), None),
    "sum": (lambda x, w, r: r + conv(x, w), SUM),
    "sum and relu": (lambda x, w, r: F.relu(conv(x, w) + r), None),
    "sum of two": (lambda x, w, r: conv(x, w) + conv(r.sin(), w), SUM),
    "difference": (lambda x, w, r: conv(x, w) - r, None),
    "sum with a row": (lambda x, w, r: conv(x, w) + r[:1], None),
    "twice": (lambda x, w, r: conv(x, w) * 2 + r, None),
    "two readers": (apart, None),
    "transposed": (lambda x, w, r: F.conv_transpose2d(x, w, padding=1) + r, None),
    "late": (late, None),
}


@pytest.mark.every(5)
@pytest.mark.cpu
@pytest.mark.parametrize("form", [torch.contiguous_format, last])
@pytest.mark.parametrize("name", CASES)
def test_one_call_computes_both(name: str, form: torch.memory_format) -> None:
    fn, call = CASES[name]
    calls = [one for one in compiled(fn, *given(form), layouts="off") if "convolution_pointwise" in one]
    assert calls == ([] if call is None else [call])


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["silu", "sum"])
@pytest.mark.parametrize("axes", [1, 3])
def test_images_of_other_ranks(axes: int, name: str) -> None:
    """torch's call for a sum raises an error for images along one axis."""
    convolve = {1: F.conv1d, 3: F.conv3d}[axes]
    x, r, w = torch.randn(2, 8, *[9] * axes), torch.randn(2, 8, *[9] * axes), torch.randn(8, 8, *[3] * axes)
    fn = (
        (lambda x, w, r: F.silu(convolve(x, w, padding=1)))
        if name == "silu"
        else (lambda x, w, r: r + convolve(x, w, padding=1))
    )
    calls = [one for one in compiled(fn, x, w, r, layouts="off") if "convolution_pointwise" in one]
    assert calls == ([] if (axes, name) == (1, "sum") else [ALONE if name == "silu" else SUM])


@pytest.mark.every(3)
@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("late", "two readers")])
def test_nans_stay(name: str, dtype: torch.dtype) -> None:
    """oneDNN's relu makes zeros of them."""
    x, w, r = given(dtype=dtype)
    x[0, 3, 4, 4] = torch.nan
    with torch.no_grad():
        made = torch.compile(CASES[name][0], backend="kgen", options={"cache": False})(x, w, r)
        assert torch.equal(made.isnan(), CASES[name][0](x, w, r).isnan())


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["sigmoid", "silu", "hardswish", "sum"])
def test_16_bits(name: str) -> None:
    """Decompositions compute some functions in float32, between two conversions."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no instructions for bfloat16")
    found = compiled(CASES[name][0], *given(dtype=bf16), tolerance=3e-2)
    assert (ALONE in found) == (name != "sum")
    assert SUM not in found, "torch adds in float32 alone where oneDNN declines"


@pytest.mark.cpu
def test_not_where_each_operation_is_rounded() -> None:
    """The one call does not round in between."""
    found = compiled(CASES["silu"][0], *given(dtype=bf16), tolerance=3e-2, numerics="eager")
    assert ALONE not in found


@pytest.mark.cpu
def test_a_batch_of_none() -> None:
    x, w, _ = given()
    assert compiled(lambda x, w: F.silu(conv(x, w)), x[:0], w) != [ALONE]


@pytest.mark.cpu
def test_no_call_reads_what_is_made_after_it() -> None:
    """Of two convolutions that are added, either could add the other one, but the first one runs before there is another."""
    fn, _ = CASES["sum of two"]
    assert compiled(fn, *given(), layouts="off", verify=True).count(SUM) == 1


@pytest.mark.cpu
def test_it_can_be_forbidden() -> None:
    with kgen.forbid_fused("aten.convolution", "aten.sigmoid"):
        assert ALONE not in compiled(CASES["sigmoid"][0], *given())


# ---- a GPU that need not be here -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "sum and relu"])
def test_a_gpu_has_no_such_call(name: str) -> None:
    """It is not known that cuDNN's relus keep NaNs."""
    mode = FakeTensorMode()
    fakes = [FakeTensor(mode, a.to(bf16).to("meta"), torch.device("cuda:0")) for a in given()]
    with mode:
        gm = make_fx(CASES[name][0], decomposition_table=TABLE)(*fakes)
    with _disable_current_modes():
        graph = lower(reinplace(gm), LoweringContext())
    assert steps(schedule(graph, Options(oracle=Knows(FUSED))))[0] == CONVOLUTION


# ---- packed weights --------------------------------------------------------------------------------------------------


class Owner(nn.Module):
    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = F.silu(F.conv2d(x, w, padding=w.shape[-1] // 2))
        return x


def frozen(owner: nn.Module, x: Tensor, **options: Any) -> tuple[Record, Any]:
    options = {"cache": False, "freezing": True, **options}
    with torch.no_grad(), recording() as seen:
        run = torch.compile(owner, backend="kgen", fullgraph=True, options=options)
        torch.testing.assert_close(run(x), owner(x), rtol=1e-4, atol=1e-4)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    return graph, run


@pytest.mark.cpu
def test_frozen_weights_are_packed_once() -> None:
    owner = Owner(*(torch.randn(8, 8, k, k) / 8 for k in (3, 5)))
    x = given(last)[0]
    graph, run = frozen(owner, x)
    packed = [v for v in graph.plan.verdicts if v.outcome is Outcome.PACKED]
    assert [v.reason for v in packed] == [Reason.FROZEN_OPERAND] * 2
    assert steps(graph.plan) == [ALONE] * 2
    with torch.no_grad():
        owner.weights[0].mul_(-1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.testing.assert_close(run(x), owner(x), rtol=1e-4, atol=1e-4)
    assert any("has changed" in str(one.message) for one in warned)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_packed_weights_make_the_library_cheaper(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights of small images: the library would take half its time to bring them into order."""
    prices: list[float] = []

    def noted(*args: Any) -> float:
        prices.append(cpu_convolutions.convolution_on_cpu(*args))
        return prices[-1]

    monkeypatch.setattr(model, "convolution_on_cpu", noted)
    owner = Owner(torch.randn(256, 256, 3, 3) / 48).to(dtype)
    found = []
    for freezing in (False, True):
        torch._dynamo.reset()
        prices.clear()
        with torch.no_grad():
            options = {"cache": False, "freezing": freezing}
            torch.compile(owner, backend="kgen", options=options)(torch.randn(1, 256, 4, 4, dtype=dtype).to(memory_format=last))
        found.append(min(prices, default=0.0))
    assert found[1] < 0.7 * found[0] or not found[0], "a CPU without instructions for bfloat16 has another price"


@pytest.mark.cpu
def test_a_weight_of_two_sizes_of_images_is_packed_for_each() -> None:
    w = torch.randn(8, 8, 3, 3) / 8
    owner = Owner(w)
    owner.weights.append(owner.weights[0])
    graph, _ = frozen(owner, given(last)[0])
    assert len(graph.plan.library_packings) == 1


@pytest.mark.cpu
def test_images_with_channels_first_have_plain_weights() -> None:
    graph, _ = frozen(Owner(torch.randn(8, 8, 3, 3) / 8), given(torch.contiguous_format)[0], layouts="off")
    assert not graph.plan.library_packings


class Normed(nn.Module):
    """A norm of channels, whose results are rows that the convolution takes for an image; `cut` leaves out a column of it."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.cut = nn.LayerNorm(8).requires_grad_(False), nn.Conv2d(8, 8, 3, padding=1, groups=8), cut
        self.conv.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.norm(x)
        image = rows.permute(0, 3, 1, 2)
        return self.conv(image[..., 1:] if self.cut else image), rows


@pytest.mark.cpu
@pytest.mark.parametrize("cut", [False, True])
def test_an_image_that_is_a_view_with_channels_last_has_packed_weights(cut: bool) -> None:
    """The norm's rows are a result in their own order, so the image is a view of them, and one with gaps where it is cut."""
    graph, _ = frozen(Normed(cut), torch.randn(1, 9, 9, 8), layouts="off", templates=False)
    assert len(graph.plan.library_packings) == (0 if cut else 1)


@pytest.mark.cpu
@pytest.mark.parametrize("activation", [torch.sigmoid, F.silu])
def test_a_bias_with_steps_between_its_numbers_is_no_argument_of_the_one_call(activation: Callable[[Tensor], Tensor]) -> None:
    """oneDNN reads a bias as if its numbers lay one after another."""
    bias = torch.randn(8, 2)
    found = compiled(lambda x, w, b: activation(F.conv2d(x, w, b[:, 0], padding=1)), *given(last)[:2], bias)
    assert ALONE not in found


@pytest.mark.cpu
def test_a_bias_with_steps_between_its_numbers_keeps_weights_as_they_are() -> None:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) / 8, requires_grad=False)
            self.bias = nn.Parameter(torch.randn(8, 2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight, self.bias[:, 0], padding=1)

    graph, _ = frozen(Stepped(), given(last)[0])
    assert not any(v.outcome is Outcome.PACKED for v in graph.plan.verdicts)


def depthwise_rows(x: Tensor, taps: Tensor) -> Tensor:
    return F.conv1d(x.view(1, 8, -1), taps[:, None], groups=8)


def shared_taps(x: Tensor, taps: Tensor) -> Tensor:
    k = taps[None, None].expand(3, 1, -1)
    return F.conv2d(F.conv2d(x, k.unsqueeze(2), groups=3), k.unsqueeze(3), groups=3)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.cpu), pytest.param({"gpu_interpreter": True}, marks=pytest.mark.interpret)]
)
@pytest.mark.parametrize(
    ("fn", "shapes"), [(depthwise_rows, [(240,), (8, 5)]), (shared_taps, [(2, 3, 9, 11), (3,)])], ids=["image", "filters"]
)
def test_the_library_is_priced_for_views_of_other_dimensions(
    fn: Callable[..., Tensor], shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """Prices read the dimensions of what the call gets, not of the buffer behind it, which may have fewer."""
    compiled(fn, *map(torch.randn, shapes), strict=True, **options)
