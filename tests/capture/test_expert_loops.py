"""A loop over experts, as mixtures of experts are written: how many rows an expert has is known at the call alone."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import kgen

EXPERTS, CHOSEN, WIDTH, INNER = 3, 2, 32, 48
pytestmark = pytest.mark.cpu


class Experts(nn.Module):
    """A gate chooses some experts for each row; each expert adds what it makes of its rows to these."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        with torch.no_grad():
            self.gate.bias[1] = -1e4  # nobody chooses this one
        self.w1, self.w3, self.w2 = (
            nn.ModuleList(nn.Linear(*size, bias=False) for _ in range(EXPERTS))
            for size in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=1), CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        made = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for k in range(EXPERTS):
            which, row = torch.where(mask[k])
            own = x[row]
            y = self.w2[k](F.silu(self.w1[k](own)) * self.w3[k](own)) * weights[row, which, None]
            made.index_add_(0, row, y)
        return made


@pytest.mark.parametrize("captured", [False, True])
def test_a_loop_over_experts_is_right(captured: bool) -> None:
    """Dynamo traces it as a whole where it may give sizes of data names; else eager runs what it leaves out."""
    torch.manual_seed(0)
    module, x = Experts(), torch.randn(24, WIDTH)
    torch._dynamo.reset()
    with dynamo.patch(capture_dynamic_output_shape_ops=captured):
        compiled = torch.compile(module, backend="kgen", options={"cache": False}, fullgraph=captured)
        got = compiled(x)
        exact = module.double()(x.double())
        module.float()
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


def test_an_expert_is_four_steps() -> None:
    """The rows' numbers by the library; gate and up in one kernel, with the rows gathered there; down; the weighted sum."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Experts().requires_grad_(False)
    with dynamo.patch(capture_dynamic_output_shape_ops=True), kgen.config.override(cache=False):
        report = kgen.explain(module, torch.randn(24, WIDTH), print_report=False)
    [graph] = report.graphs
    calls = {call.operator: call.calls for call in report.externs}
    assert calls["aten.nonzero.default"] == EXPERTS
    assert sum("mm" in kernel.name for kernel in graph.kernels) <= 1 + 2 * EXPERTS
    assert len(graph.kernels) <= 5 + 3 * EXPERTS
