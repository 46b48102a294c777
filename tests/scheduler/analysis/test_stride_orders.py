"""The order of strides of tensors that nobody outside sees, those among them that a forward graph saves for its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from kgen import backend
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config


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
