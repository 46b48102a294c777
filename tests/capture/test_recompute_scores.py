"""Joint graphs of attention: what forward saves for backward, gradients against float64, and what is left as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import kgen
from kgen.capture import torch_adapter

B, H, M, N, D = 2, 2, 24, 40, 4
MATRIX = M * N  # of scores; no other tensor has as many elements
pytestmark = pytest.mark.cpu
Function = Callable[..., Tensor]


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(M)[:, None], torch.arange(N)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = places()
    s = scores(q, k)
    return torch.where(columns <= rows + 3, s, torch.finfo(s.dtype).min).softmax(-1) @ v


def bert(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (scores(q, k) + (1.0 - keep.to(q.dtype)) * -10000.0).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = places()
    slopes = 2.0 ** -torch.arange(1, H + 1).to(q.dtype)[:, None, None]
    return (scores(q, k) + slopes * (columns - rows)).masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The bias has a gradient."""
    rows, columns = places()
    bias = F.embedding((columns - rows).clamp(-5, 5) + 5, table).permute(2, 0, 1)
    return (q @ k.mT + bias).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(scores(q, k) / 5)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = places()
    return scores(q, k).masked_fill((columns - rows).abs() >= 9, -math.inf).softmax(-1) @ v


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :1].repeat_interleave(H, 1), v[:, :1].repeat_interleave(H, 1))


def expanded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :1].expand(-1, H, -1, -1), v[:, :1].expand(-1, H, -1, -1))


def one_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q[0, 0], k[0, 0], v[0, 0])


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]


def by_math_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0]


def projected(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
    """Cross attention of a layer."""
    q, k, v = (one @ w for one, w in zip((x, y, y), weights[:3], strict=True))
    return (plain(q, k, v).transpose(1, 2).flatten(2) @ weights[3]).relu()


def float32_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype) @ v


QKV = [r(B, H, M, D), r(B, H, N, D, seed=1), r(B, H, N, D, seed=2)]
SPELLINGS: dict[str, tuple[Function, list[Tensor]]] = {
    "plain": (plain, []),
    "gpt2": (gpt2, []),
    "bert": (bert, [torch.arange(N) < torch.tensor([[30], [N]])[:, :, None, None]]),
    "alibi": (alibi, []),
    "t5": (t5, [r(11, H)]),
    "softcap": (softcap, []),
    "window": (window, []),
    "shared heads": (shared_heads, []),
    "expanded heads": (expanded_heads, []),
    "one matrix": (one_matrix, []),
    "decomposed": (by_math, []),
    "float32 softmax": (float32_softmax, []),
}


class Split:
    """What the partitioner has made of joint graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward: list[GraphModule] = []
        self.results: list[int] = []
        split = torch_adapter.min_cut_rematerialization_partition

        def noted(joint: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
            made = split(joint, inputs, **settings)
            self.forward.append(made[0])
            self.results.append(settings["num_fwd_outputs"])
            return made

        monkeypatch.setattr(torch_adapter, "min_cut_rematerialization_partition", noted)

    def saved(self) -> dict[str, int]:
        """Elements of each tensor that forward makes for backward."""
        [results] = self.forward[-1].graph.output_node().args
        saved = [node for node in results[self.results[-1] :] if node.op != "placeholder"]
        return {node.name: node.meta["val"].numel() for node in saved if isinstance(node.meta["val"], Tensor)}


@pytest.fixture
def split(monkeypatch):
    return Split(monkeypatch)


def gradients(f: Function, args: list[Tensor], switch: str | None = "on") -> list[Tensor]:
    """Of everything that has any; in eager without a switch."""
    args = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    if switch is None:
        made = f(*args)
    else:
        torch._dynamo.reset()
        with kgen.config.override(cache=False, recompute_scores=switch):
            made = torch.compile(f, backend="kgen")(*args)
    weights = r(*made.shape, seed=7).to(made.dtype)
    return list(torch.autograd.grad((made * weights).sum(), [a for a in args if a.requires_grad]))


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(got, want, strict=True):
        scale = max(1.0, float(theirs.nan_to_num().abs().max()))
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def wide(args: list[Tensor]) -> list[Tensor]:
    return [a.double() if a.is_floating_point() else a for a in args]


@pytest.mark.parametrize("name", SPELLINGS)
def test_no_matrix_of_scores_is_saved(name, split):
    f, more = SPELLINGS[name]
    got = gradients(f, [*QKV, *more])
    assert split.saved()
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(f, wide([*QKV, *more]), None), 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "alibi", "softcap", "decomposed", "float32 softmax"])
def test_in_bfloat16(name, split):
    f, more = SPELLINGS[name]
    args = [a.bfloat16() for a in QKV]
    got = gradients(f, [*args, *more])
    assert max(split.saved().values()) < MATRIX, split.saved()
    assert_close(got, gradients(f, wide([*args, *more]), None), 4e-2)
