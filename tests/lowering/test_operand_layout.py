"""Operands of library calls have the strides that they have in eager: operators may demand them, results follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import kgen

pytestmark = pytest.mark.cpu

SEEN: list[tuple[int, ...]] = []


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Two operators that note the strides of their arguments: a functional one, and one that writes its first argument."""
    library = torch.library.Library("kgen_layout", "FRAGMENT")
    library.define("noted(Tensor x, Tensor[] more) -> Tensor")
    library.define("add_into(Tensor(a!) out, Tensor x) -> ()")

    def noted(x: Tensor, more: list[Tensor]) -> Tensor:
        SEEN.extend(t.stride() for t in (x, *more))
        return x.contiguous().sum(-1)

    def add_into(out: Tensor, x: Tensor) -> None:
        SEEN.append(x.stride())
        out.add_(x)

    library.impl("noted", noted, "CPU")
    library.impl("add_into", add_into, "CPU")
    library.impl("noted", lambda x, more: x.new_empty(x.shape[:-1]), "Meta")
    library.impl("add_into", lambda out, x: None, "Meta")
    yield
    library._destroy()


def noted(x: Tensor, *more: Tensor) -> Tensor:
    return torch.ops.kgen_layout.noted(x, list(more))  # type: ignore[no-any-return]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def written(x: Tensor) -> Tensor:
    out = x + 1
    torch.ops.kgen_layout.add_into(out, F.pad(x.exp(), (0, 3))[:, :9])
    return out


def heads_first(x: Tensor) -> Tensor:
    """Traced with sizes that vary, strides are numbers of all elements over the rest of a view's shape."""
    bias = (x.reshape(-1, 6) @ torch.eye(6)).view(3, 5, 4, 6).permute(0, 3, 1, 2)
    return noted(bias.clone(memory_format=torch.contiguous_format).expand(3, 6, 5, 4))


CASES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    # fused attention of CUDA pads its bias so, that rows begin at multiples of 16 bytes
    "padded rows of a computed tensor": (lambda x: noted(F.pad(x * 2, (0, 7))[..., :9]), rand(2, 5, 9)),
    "padded rows of an input": (lambda x: noted(F.pad(x, (0, 7))[..., :9]), rand(2, 5, 9)),
    "padded rows, repeated": (lambda x: noted(F.pad(x.exp(), (0, 7))[:, None, :, :9].expand(2, 4, 5, 9)), rand(2, 5, 9)),
    "a transposed tensor made contiguous": (lambda x: noted(x.t().contiguous()), rand(5, 9)),
    "a transposed computed tensor": (lambda x: noted(x.exp().t()), rand(5, 9)),
    "several, in a list": (lambda x: noted(x.exp(), x.t().clone(memory_format=torch.contiguous_format), x[:, ::2]), rand(9, 9)),
    "every second row": (lambda x: noted((x * 2)[::2], (x * 2)[1::2]), rand(8, 9)),
    "heads first": (heads_first, rand(3, 5, 4, 6)),
    "channels last": (lambda x: noted(x.relu().to(memory_format=torch.channels_last)), rand(2, 3, 4, 5)),
    "beside a written argument": (written, rand(5, 9)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_strides_are_those_of_eager(name: str, dynamic: bool) -> None:
    f, x = CASES[name]
    run = torch.compile(f, backend="kgen", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        SEEN.clear()
        want = f(x)
        expected = SEEN.copy()
        SEEN.clear()
        torch.testing.assert_close(run(x), want)
    assert expected
    assert expected == SEEN


def test_an_operand_of_two_calls_is_stored_once() -> None:
    from codegen import plan_of
    from op_case import capture

    plan = plan_of(capture(lambda x: noted(x.t().contiguous()) + noted(x.t().contiguous()), (rand(5, 9),)))
    assert sum(b.name.endswith("_arg") for b in plan.graph.buffers.values()) == 1


class Heads(nn.Module):
    """An operator of attention's operands, as a linear layer leaves them."""

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (x.repeat(1, 1, 2) * 2).chunk(2, -1))
        return noted(queries, keys)


def test_sizes_that_may_be_zero(tmp_path: Path) -> None:
    """A stride of so many rows was taken for the smallest: operators got batches side by side."""
    sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=512)},)
    x = rand(3, 5, 8)
    with torch.no_grad():
        kgen.export(Heads(), (x,), folder=tmp_path / "program", dynamic_shapes=sizes)
        SEEN.clear()
        torch.testing.assert_close(kgen.load(tmp_path / "program")(x), Heads()(x))
    assert SEEN[:2] == SEEN[2:] == [(80, 4, 16, 1)] * 2


def test_matmuls_take_any_strides() -> None:
    """Their results do not depend on the layout: a copy would be for nothing."""
    from codegen import plan_of
    from op_case import capture

    from kgen.scheduler import Options

    plan = plan_of(capture(lambda x, y: x @ y.t().contiguous(), (rand(5, 9), rand(7, 9))), Options(templates=False))
    assert not plan.kernels


def test_a_gpus_group_norm_takes_and_gives_the_order_of_the_dimensions() -> None:
    """Its library call refuses channels that are last, as the choice of layouts may have made them."""
    from tests.rendering import texts_of_a_gpu

    def normed(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.group_norm(x, 4), w).relu()

    images = torch.empty(2, 64, 32, 32, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    options = {"fallback": ("aten.native_group_norm.default",)}
    made = texts_of_a_gpu(normed, images, torch.empty(64, 64, 1, 1, dtype=torch.bfloat16), options=options)
    [step] = [line for line in made.steps.splitlines() if "extern aten::native_group_norm" in line]
    assert "strides [65536, 1024, 32, 1]" in step
