"""Memory layouts for a whole graph: few copies, eager's strides for who sees a result, and graphs that say what they are."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

import kgen
from kgen import config
from kgen.capture import layouts, torch_adapter
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.layouts import choose_layouts
from kgen.capture.min_cut import INFINITE, SINK, SOURCE, min_cut
from kgen.capture.notes import notes
from kgen.capture.torch_adapter import GraphInfo
from kgen.cost import layouts as costs
from kgen.verdict import CHANGES, Outcome, Reason, Verdict

last = torch.channels_last
pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


# ---- minimal cuts --------------------------------------------------------------------------------------------------------


def cut_by(edges: Sequence[tuple[int, int, int]], side: frozenset[int]) -> int:
    return sum(capacity for start, end, capacity in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_is_as_small_as_any(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 8)
    edges = [(draw.randrange(count), draw.randrange(count), draw.randint(0, 9)) for _ in range(draw.randint(0, 24))]
    side = min_cut(count, edges)
    assert SOURCE in side
    assert SINK not in side
    others = range(2, count)
    subsets = itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(count - 1))
    assert cut_by(edges, side) == min(cut_by(edges, frozenset([SOURCE, *some])) for some in subsets)


def test_a_long_chain_is_cut_at_its_thinnest_edge() -> None:
    count = 5000
    inner = ((k, k + 1, 5 if k != 3000 else 4) for k in range(2, count - 1))
    edges = [(SOURCE, 2, INFINITE), *inner, (count - 1, SINK, INFINITE)]
    assert min_cut(count, edges) == frozenset([SOURCE, *range(2, 3001)])


# ---- graphs that run in eager after the pass -------------------------------------------------------------------------------


class Checked(Interpreter):
    """Runs a graph and compares each tensor's strides with those that its node is said to have."""

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        promised = torch.utils._pytree.tree_leaves(n.meta.get("val"))
        for one, what in zip(torch.utils._pytree.tree_leaves(made), promised, strict=False):
            if isinstance(one, Tensor) and isinstance(what, Tensor) and one.numel():
                pairs = zip(one.shape, one.stride(), what.stride(), strict=True)
                assert all(size == 1 or mine == other for size, mine, other in pairs), (n.format_node(), one.stride())
        return made


@dataclass
class Laid:
    """Compiles by the pass alone, and runs what it makes in eager."""

    graphs: list[GraphModule] = field(default_factory=list)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_adapter.capture(gm, inputs, self.graph, lambda both: choose_layouts(both, costs), None)

    def graph(self, gm: GraphModule, info: GraphInfo) -> EagerGraph:
        gm = choose_layouts(gm, costs) if info.role == "inference" else gm
        self.graphs.append(gm)
        run = Checked(gm).run
        made = EagerGraph(gm, torch_adapter.output_strides(gm))
        made.__class__ = type("Run", (EagerGraph,), {"__call__": lambda _, args: list(run(*args))})
        return made

    @property
    def verdicts(self) -> list[Verdict]:
        return [one for gm in self.graphs for one in notes(gm)]

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome is outcome for one in self.verdicts)

    def layouts(self, target: Any) -> Counter[bool]:
        """Of the images that calls of an operator read: whether channels are last."""
        calls = (n for gm in self.graphs for n in gm.graph.nodes if n.target is target)
        return Counter(n.args[0].meta["val"].is_contiguous(memory_format=last) for n in calls)


def same(a: Any, b: Any) -> None:
    for one, other in zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True):
        assert one.stride() == other.stride(), (one.stride(), other.stride())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def laid_out(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> Laid:
    """What the pass makes of an inference graph, whose results are eager's."""
    made = Laid()
    with torch.no_grad():
        same(torch.compile(fn, backend=made, fullgraph=True, dynamic=dynamic)(*args), fn(*args))
    return made


def conv(i: int, o: int, k: int = 3, **how: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, **how)


class Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = conv(c, c, bias=False), conv(c, c, bias=False)
        self.n, self.m = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + x)


class ConvNext(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.norm = conv(c, c, 7, groups=c), nn.LayerNorm(c)
        self.wide, self.narrow = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


def residuals() -> nn.Module:
    return nn.Sequential(Residual(8), Residual(8)).eval()


def image(c: int = 8, n: int = 2, size: int = 16, **how: Any) -> Tensor:
    return torch.randn(n, c, size, size, **how)


@pytest.mark.parametrize("form", [torch.contiguous_format, last])
def test_a_residual_net_is_copied_at_its_ends_at_most(form: torch.memory_format) -> None:
    made = laid_out(residuals(), image().to(memory_format=form))
    assert made.layouts(torch.ops.aten.convolution.default) == {True: 4}
    inputs = {n.name for gm in made.graphs for n in gm.graph.nodes if n.op == "placeholder" and n.meta["val"].shape[-1] == 16}
    copied = [one.producer for one in made.verdicts if one.outcome is Outcome.COPIED]
    entry = [name for name in copied if name in inputs]
    assert len(entry) == (form is not last), copied
    weights = 4
    assert len(copied) == (weights + 2 if form is not last else 0) or form is last


@pytest.mark.parametrize("form", [torch.contiguous_format, last])
def test_gradients_have_eagers_strides(form: torch.memory_format) -> None:
    module = residuals().train()
    x = image().to(memory_format=form)
    made = Laid()
    compiled = torch.compile(module, backend=made, fullgraph=True)

    def gradients(fn: Callable[..., Any]) -> Any:
        given = x.detach().requires_grad_()
        y = fn(given)
        return y.detach(), torch.autograd.grad(y.square().sum(), [given, *module.parameters()])

    same(gradients(compiled), gradients(module))
    assert made.layouts(torch.ops.aten.convolution_backward.default) == {True: 4}
    names = [one.producer for one in made.verdicts if one.outcome is Outcome.COPIED]
    assert len(names) == len(set(names)), "a weight is copied once for both directions"


def upsampled(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, padding=1)
    return F.conv2d(torch.cat([F.interpolate(F.max_pool2d(y, 2), scale_factor=2), y], 1)[:, 4:12], w, padding=1)


def chunks(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    a, b = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1).chunk(2, 1)
    return F.conv2d(torch.cat([a, F.silu(b)], 1), w, padding=1)


def with_view(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(F.conv2d(F.conv2d(x, w, padding=1), v, padding=1), w, padding=1)
    z = F.relu(y)
    return y, y.reshape(2, -1), z.permute(0, 2, 3, 1), z.flatten(1), z[:, 2:]


def part(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, padding=1)
    return y[:, 2:], F.conv2d(F.relu(F.conv2d(y, w, padding=1)), v)[1:], F.conv2d(y, w).permute(0, 2, 3, 1)


def normed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.group_norm(F.conv2d(F.conv2d(x, w, padding=1), v, padding=1), 2)
    return F.conv2d(F.avg_pool2d(F.pad(y, (1, 1, 1, 1)), 2), w, padding=1).mean((2, 3))


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
    gate = F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), w[:, :, :1, :1])), v[:, :, :1, :1])
    return F.conv2d(y * gate.sigmoid(), w, padding=1) + y.sum(1, keepdim=True)


def written(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
    x.copy_(F.relu(y))
    return F.conv2d(y, w, padding=1) + x


def branched(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Branches are modules of the graph, which have no value."""
    y = F.conv2d(F.conv2d(x, w, padding=1), v, padding=1)
    return F.conv2d(torch.cond(w.sum() > 0, torch.sin, torch.cos, (y,)), w, padding=1)


@pytest.mark.every(3)
@pytest.mark.parametrize("fn", [upsampled, chunks, with_view, part, normed, gated, written, branched])
@pytest.mark.parametrize("form", [torch.contiguous_format, last])
def test_what_stands_between_convolutions_hands_layouts_on(fn: Callable[..., Any], form: torch.memory_format) -> None:
    w, v = torch.randn(8, 8, 3, 3) / 8, torch.randn(8, 8, 3, 3) / 8
    x = image().to(memory_format=form)
    made = laid_out(lambda x, w, v: fn(x.clone(), w, v), x, w, v)
    assert made.layouts(torch.ops.aten.convolution.default)[True] >= 2


def test_a_permuted_block_needs_no_copy_inside() -> None:
    made = laid_out(nn.Sequential(conv(3, 16), ConvNext(16), ConvNext(16)), image(3, size=32))
    assert made.layouts(torch.ops.aten.convolution.default) == {True: 3}
    ends = [one for one in made.verdicts if one.outcome is Outcome.COPIED and "arg" not in one.producer]
    assert len(ends) == 1, [str(one) for one in made.verdicts]


def test_three_dimensions() -> None:
    w = torch.randn(8, 8, 3, 3, 3)
    made = laid_out(lambda x, w: F.conv3d(F.relu(F.conv3d(x, w, padding=1)), w, padding=1), torch.randn(1, 8, 8, 8, 8), w)
    calls = [n for n in made.graphs[0].graph.nodes if n.target is torch.ops.aten.convolution.default]
    assert all(n.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last_3d) for n in calls)


# ---- along one dimension ------------------------------------------------------------------------------------------------


class Wave(nn.Module):
    """A residual stack of dilated convolutions, with one that is transposed and one for each channel at its ends."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(c, c, 4, 2, 1)
        self.layers = nn.ModuleList(nn.Conv1d(c, c, 3, padding=2**k, dilation=2**k) for k in range(3))
        self.each = nn.Conv1d(c, c, 7, padding=3, groups=c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(F.pad(x, (1, 0))))[..., 1:]
        return self.each(x)


@pytest.fixture
def _rows_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one row on a CPU as well, which runs them too."""
    monkeypatch.setattr(layouts, "_may_have_rows", lambda _: True)


@pytest.mark.usefixtures("_rows_anywhere")
@pytest.mark.parametrize("turned", [False, True])
def test_convolutions_along_one_dimension_are_of_images_of_one_row(turned: bool) -> None:
    x = torch.randn(2, 40, 8).transpose(1, 2) if turned else torch.randn(2, 8, 40)
    made = laid_out(Wave(8).eval(), x)
    assert made.layouts(torch.ops.aten.convolution.default) == {True: 5}
    entries = [one for one in made.verdicts if one.outcome is Outcome.COPIED and "arg" in one.producer]
    assert len(entries) == 4 + (not turned), "four weights (one is in both layouts) and the image"


@pytest.mark.usefixtures("_rows_anywhere")
def test_numbers_whose_layout_the_library_does_not_mind_have_no_row() -> None:
    made = laid_out(Wave(8).double().eval(), torch.randn(2, 40, 8, dtype=torch.float64).transpose(1, 2))
    assert made.layouts(torch.ops.aten.convolution.default) == {False: 5}


@pytest.mark.usefixtures("_rows_anywhere")
@pytest.mark.parametrize("turned", [False, True])
def test_their_gradients_have_eagers_strides(turned: bool) -> None:
    module, made = Wave(8), Laid()
    compiled = torch.compile(module, backend=made, fullgraph=True)
    x = torch.randn(2, 40, 8).transpose(1, 2) if turned else torch.randn(2, 8, 40)

    def gradients(fn: Callable[..., Any]) -> Any:
        given = x.detach().requires_grad_()
        y = fn(given)
        return y.detach(), torch.autograd.grad(y.square().sum(), [given, *module.parameters()])

    same(gradients(compiled), gradients(module))
    assert made.layouts(torch.ops.aten.convolution_backward.default)[True] == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: (residuals().double(), image().double()),  # the library has no preference
        lambda: (nn.Sequential(nn.Linear(16, 16), nn.ReLU()), image()),
        lambda: (conv(8, 8, 1), image()),  # copies before and behind are as dear
        lambda: (nn.Sequential(nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3)), torch.randn(2, 8, 16)),
        lambda: (nn.Sequential(conv(8, 8, 1), conv(8, 8, 1)), image(size=1)),  # one point is both
        lambda: (residuals().to(memory_format=last), image().to(memory_format=last)),
    ],
    ids=["float64", "no convolution", "alone", "rows", "a point", "channels last"],
)  # fmt: skip
def test_a_graph_without_a_better_layout_stays(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    module, x = make()
    made = laid_out(module, x)
    assert made.count(Outcome.COPIED) == 0
    assert not [n for gm in made.graphs for n in gm.graph.nodes if n.target is torch.ops.aten.clone.default]


def test_memory_that_is_seen_keeps_its_order() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(F.conv2d(x, w, padding=1), w, padding=1)
        return torch.as_strided(y, (4,), (1,), 3)

    made = laid_out(fn, image(), torch.randn(8, 8, 3, 3))
    assert made.layouts(torch.ops.aten.convolution.default) == {False: 2}


def norm_of_copy(x: Tensor, w: Tensor) -> Tensor:
    """As `F.group_norm` is on a GPU, whose kernel takes contiguous images."""
    return F.conv2d(F.silu(F.group_norm(x.contiguous(), 2)), w, padding=1) + x


def test_a_contiguous_copy_between_images_follows_them() -> None:
    made = laid_out(norm_of_copy, image().to(memory_format=last), torch.randn(8, 8, 3, 3).to(memory_format=last))
    assert made.layouts(torch.ops.aten.convolution.default) == {True: 1}
    assert made.layouts(torch.ops.aten.native_group_norm.default) == {True: 1}
    assert made.count(Outcome.COPIED) == 0


@pytest.mark.parametrize("seen", ["returned", "viewed"])
def test_a_contiguous_copy_that_the_program_sees_stays(seen: str) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.contiguous()
        y = F.conv2d(copy.sin(), w, padding=1)
        return y, copy if seen == "returned" else copy.view(2, -1)[:, ::3]

    laid_out(fn, image().to(memory_format=last), torch.randn(8, 8, 3, 3).to(memory_format=last))


# ---- verdicts ---------------------------------------------------------------------------------------------------------------


def reasons(made: Laid) -> set[tuple[Outcome, Reason]]:
    return {(one.outcome, one.reason) for one in made.verdicts}


def test_copies_and_kept_layouts_are_verdicts() -> None:
    found = reasons(laid_out(residuals(), image()))
    assert (Outcome.CHANNELS_LAST, Reason.LIBRARY_PREFERS) in found
    assert (Outcome.COPIED, Reason.LIBRARY_PREFERS) in found
    assert (Outcome.COPIED, Reason.EAGER_STRIDES) in found
    torch._dynamo.reset()
    assert reasons(laid_out(conv(8, 8, 1), image())) == {(Outcome.LAYOUT_KEPT, Reason.COPIES_DEAR)}
    torch._dynamo.reset()
    assert reasons(laid_out(conv(8, 8), image(), dynamic=True)) == {(Outcome.LAYOUT_KEPT, Reason.SYMBOLIC)}
    assert {Reason.COPIES_DEAR, Reason.EAGER_STRIDES} <= CHANGES.keys()


# ---- compiled ---------------------------------------------------------------------------------------------------------------


def test_explain_shows_copies_and_the_option_switches_them_off() -> None:
    module, x = residuals(), image()
    shown = {}
    for how in ("auto", "off"):
        with torch.no_grad(), config.override(layouts=how):
            shown[how] = str(kgen.explain(module, x, print_report=False))
    assert Outcome.COPIED.value in shown["auto"]
    assert Outcome.COPIED.value not in shown["off"]


@pytest.mark.parametrize("freezing", [False, True])
def test_compiled_results_have_eagers_strides(freezing: bool) -> None:
    module, x = nn.Sequential(conv(3, 8), Residual(8), ConvNext(8)).eval(), image(3)
    with torch.no_grad():
        options = {"cache": False, "freezing": freezing}
        same(torch.compile(module, backend="kgen", fullgraph=True, options=options)(x), module(x))


def test_weights_are_copied_once_where_they_are_frozen() -> None:
    with torch.no_grad(), kgen.report.record.recording() as seen:
        torch.compile(residuals(), backend="kgen", options={"cache": False, "freezing": True})(image())
    found = seen.graphs[0].plan.verdicts
    assert sum(one.producer == "aten.clone.default" and one.outcome is Outcome.FROZEN for one in found) == 4


def test_a_training_step_is_compiled_in_one_layout() -> None:
    module = nn.Sequential(conv(3, 8), Residual(8))
    x = image(3)
    plain = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    made = torch.compile(module, backend="kgen", fullgraph=True, options={"cache": False})
    same(torch.autograd.grad(made(x).square().sum(), list(module.parameters())), plain)


def test_filters_of_one_tap_or_one_channel_hold_no_image_back() -> None:
    """Their gradients lie the same way in both layouts, so no reader of these asks for one."""
    torch.manual_seed(0)
    module = nn.Sequential(conv(8, 16, bias=False), nn.SiLU(), conv(16, 16, groups=16), nn.SiLU(), conv(16, 8, 1), conv(8, 8))
    made, x = Laid(), image()
    compiled = torch.compile(module, backend=made, fullgraph=True)

    def gradients(fn: Callable[..., Any]) -> Any:
        given = x.detach().requires_grad_()
        return torch.autograd.grad(fn(given).square().sum(), [given, *module.parameters()])

    plain = gradients(module)
    torch.testing.assert_close(gradients(compiled), plain)
    assert made.layouts(torch.ops.aten.convolution_backward.default) == {True: 4}
    same(gradients(torch.compile(module, backend="kgen", fullgraph=True, options={"cache": False})), plain)


@pytest.mark.parametrize(("taps", "least"), [(1, 1), (3, 3), (5, 10)])
def test_a_gpus_depthwise_convolutions_pay_for_each_tap(taps: int, least: float) -> None:
    """Of images whose channels are not the innermost dimension: times that the library moves them, at least."""
    with FakeTensorMode():
        image = torch.empty(32, 128, 56, 56, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(128, 1, taps, taps, dtype=torch.bfloat16, device="cuda")
    assert costs.channels_first([image], weight, 128) >= (least if taps > 1 else 0.5) * 2 * image.numel()


@pytest.mark.parametrize(("channels", "dtype"), [(65, torch.float16), (3, torch.float32)])
def test_a_gpus_depthwise_convolutions_of_odd_channels_stay_as_they_are(channels: int, dtype: torch.dtype) -> None:
    """cuDNN's kernels for channels side by side take longer there than torch's own for the others."""
    with FakeTensorMode():
        image = torch.empty(16, channels, 130, 130, dtype=dtype, device="cuda")
        weight = torch.empty(channels, 1, 4, 4, dtype=dtype, device="cuda")
    assert costs.channels_first([image], weight, channels) == 0


def layouts_of(call: Callable[[Tensor], Tensor], image: Tensor) -> list[bool]:
    """Whether each convolution has channels last."""
    made = Laid()
    torch.compile(call, backend=made, fullgraph=True)(image)
    return [is_last for is_last, count in made.layouts(torch.ops.aten.convolution.default).items() for _ in range(count)]


@pytest.mark.parametrize(
    ("channels", "stride", "dilation", "is_last"), [(32, 1, 1, False), (24, 2, 2, False), (24, 2, 1, True), (24, 1, 1, True)]
)
def test_transposed_groups_have_channels_last_where_the_library_is_faster(
    channels: int, stride: int, dilation: int, is_last: bool
) -> None:
    """oneDNN has kernels for groups of 4, 8 or more channels where these are first, and multiplies matrices where there are
    both gaps and steps: with channels last either takes longer (`grown maps` of bench.untuned)."""
    groups = 8
    weight = torch.randn(channels, channels // groups, 3, 3) * 0.1
    turn = lambda x: F.conv_transpose2d(x, weight, stride=stride, dilation=dilation, groups=groups)  # noqa: E731
    image = torch.randn(2, channels, 14, 15)
    with torch.no_grad():
        assert layouts_of(turn, image) == [is_last]
        same(torch.compile(turn, backend="kgen", options={"cache": False})(image), turn(image))


@pytest.mark.parametrize(("width", "pays"), [(129, True), (128, False)])
def test_a_gpus_matmuls_along_odd_numbers_of_positions_pay(width: int, pays: bool) -> None:
    """For more than a copy of the image takes, where its channels are whole loads."""
    with FakeTensorMode():
        image, odd = (torch.empty(8, n, 65, width, dtype=torch.bfloat16, device="cuda") for n in (512, 509))
        weight, least = (torch.empty(256, n, 1, 1, dtype=torch.bfloat16, device="cuda") for n in (512, 509))
    assert (costs.channels_first([image], weight, 1) > costs.copy(image)) == pays
    assert costs.channels_first([odd], least, 1) == 0


def test_a_gpus_filters_of_small_images_count() -> None:
    """A library that reorders images reorders filters as well, and their gradient."""
    with FakeTensorMode():
        image = torch.empty(8, 1536, 4, 4, dtype=torch.bfloat16, device="cuda")
        made = torch.empty(8, 768, 4, 4, dtype=torch.bfloat16, device="cuda")
        weight, single = (torch.empty(768, 1536, n, n, dtype=torch.bfloat16, device="cuda") for n in (3, 1))
    assert costs.channels_first([image], weight, 1) >= costs.copy(weight)
    assert costs.channels_first([made, image], weight, 1) >= 2 * costs.copy(weight)
    assert costs.channels_first([image], single, 1) < costs.copy(single)
