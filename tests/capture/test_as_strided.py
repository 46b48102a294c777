"""Views by strides of views, in graphs whose sizes may vary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kgen.capture.as_strided import name_owners

pytestmark = pytest.mark.cpu
aten = torch.ops.aten


def windows(x: Tensor) -> Tensor:
    """Overlapping windows of padded images, of columns that are taken first."""
    columns = aten.as_strided.default(F.pad(x * 2, (2, 2, 2, 2)), [2, 3, 2, 20, 12], [1200, 400, 160, 1, 20])
    return aten.as_strided.default(columns, [2, 3, 2, 2, 12, 12], [1200, 400, 160, 8, 20, 1]).clone()


def of_rows(x: Tensor) -> Tensor:
    """Of a view that begins inside the storage."""
    return aten.as_strided.default((x * 2)[:, 1:], [2, 2, 5], [768, 256, 3]) + 1


def further(x: Tensor) -> Tensor:
    """With an offset of its own, in the storage."""
    return aten.as_strided.default((x * 2).transpose(1, 2)[1], [4, 4], [16, 3], 100) + 1


CASES: dict[str, Callable[[Tensor], Tensor]] = {"windows": windows, "rows": of_rows, "offset": further}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_views_of_views(name: str, dynamic: bool) -> None:
    x = torch.randn(2, 3, 16, 16)
    run = torch.compile(CASES[name], backend="kgen", fullgraph=True, dynamic=dynamic, options={"verify": True, "strict": True})
    torch.testing.assert_close(run(x), CASES[name](x))


@pytest.mark.parametrize("name", CASES)
def test_they_are_of_the_tensor_that_owns_the_storage(name: str) -> None:
    x = torch.randn(2, 3, 16, 16)
    gm = name_owners(make_fx(CASES[name], tracing_mode="fake")(x))
    gm.recompile()
    found = gm.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert found
    assert not any(getattr(node.args[0].target, "is_view", False) for node in found)
    torch.testing.assert_close(gm(x), CASES[name](x))


@pytest.mark.parametrize(("size", "stride", "offset"), [((3, 4), (8, 2), 0), ((3, 2), (8, 4), 2)], ids=["all", "some"])
def test_of_a_copy_with_gaps_between_its_elements(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
    """The copy reads an input, whose storage is another one."""

    def copied(x: Tensor) -> Tensor:
        spread = torch.empty_strided((3, 4), (8, 2))
        spread.copy_(x[:3, :4])
        return spread.as_strided(size, stride, offset) * 2

    x = torch.randn(5, 5)
    run = torch.compile(copied, backend="kgen", fullgraph=True, options={"verify": True, "strict": True})
    torch.testing.assert_close(run(x), copied(x), rtol=0, atol=0)
