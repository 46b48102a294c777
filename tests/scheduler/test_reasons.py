"""Every reason that a verdict can have is produced by some test; here are those that no other test is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from kgen.scheduler.fusion import fuse
from kgen.verdict import Reason
from tools import replay_adapter as adapter
from tools.replay_corpus import Case
from tools.replay_graphs import call

TESTS = Path(__file__).resolve().parents[1]
bf16 = torch.bfloat16
# No graph gives these: what kernels of two devices read of each other, a copy between devices has made.
UNREACHED = {"DEVICE"}


@dataclass(frozen=True)
class Example:
    """A function of tensors of these shapes, or of what `args` gives. `weights` are shapes of frozen parameters, which the
    function gets first."""

    fn: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]] = ()
    gpu: bool = False
    dtype: torch.dtype = torch.float32
    dynamic: bool = False
    weights: Sequence[tuple[int, ...]] = ()
    more: Callable[[], Sequence[Tensor]] = field(default=lambda: ())

    def build(self) -> tuple[Callable[..., Any], Sequence[Tensor]]:
        args = [*(torch.empty(shape, dtype=self.dtype) for shape in self.shapes), *self.more()]
        return (_Frozen(self.fn, self.weights) if self.weights else self.fn), args


class _Frozen(nn.Module):
    def __init__(self, fn: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.fn = fn
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape), requires_grad=False) for shape in shapes)

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*self.weights, *args)


def verdicts(example: Example) -> str:
    """What was decided, as text."""
    found: list[str] = []

    options = {"freezing": True} if example.weights else {}
    case = Case("example", example.build, dynamic=example.dynamic, options=options)
    torch._dynamo.reset()
    rendering = partial(adapter.rendering, lambda texts: found.append(texts.verdicts))
    with suppress(adapter.Stopped, DataDependentOutputException):
        call(case, "gpu" if example.gpu else "cpu", adapter.door(options), rendering)
    return "".join(found)


def gives(reason: Reason, text: str) -> bool:
    return f"because {reason.value}" in text


# ---- functions ---------------------------------------------------------------------------------------------------------


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y * 2


def other_elements(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y[0].sin()


def overwritten(x: Tensor) -> Tensor:
    y = x + x.flip(0)
    x.mul_(2)
    return y


def joined(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, -1).softmax(-1) * tensors[0][:, :1]


def added_to(x: Tensor, source: Tensor) -> Tensor:
    return x.index_add(0, torch.arange(8), source)[:8].exp()


def row_norm(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), weight), matrix)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x.to(memory_format=torch.channels_last), 32, weight, bias)


def with_a_loop_of_its_own(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return ((x @ w)[:, :, None] * c).sum(-1)


def operand_kept(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y @ w


def as_many_as_data_says(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    length = count.item()
    torch._check(length >= 0)
    torch._check(length <= 1000)
    y = x.exp()
    return y * 2, y[:, None] + torch.arange(length)


def around_another(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y * y.sort(-1).values


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


MATRICES = ((512, 512), (512, 512))
EXAMPLES = {
    Reason.SHARED_DATA: Example(kept, [(64, 64)]),
    Reason.EPILOGUE: Example(lambda x, w: F.relu(x @ w), MATRICES, gpu=True, dtype=bf16),
    Reason.TEMPLATE: Example(lambda x, w: F.relu(x @ w), MATRICES, gpu=True, dtype=bf16),
    Reason.BROADCAST_BACK: Example(softmax, [(64, 1000)]),
    Reason.ROW_IN_CACHE: Example(softmax, [(64, 1000)]),
    Reason.EXPENSIVE: Example(softmax, [(64, 400_000)]),
    Reason.HORIZONTAL: Example(lambda x: (x.sum(-1), x.amax(-1)), [(64, 1000)]),
    Reason.INDEX_MISMATCH: Example(other_elements, [(64, 64)]),
    Reason.SPACE_MISMATCH: Example(row_norm, [(4096, 4096), (4096,), (4096, 4096)], gpu=True, dtype=bf16),
    Reason.MUTATION: Example(overwritten, [(64, 64)]),
    Reason.PART: Example(joined, [(64, 64)] * 6),
    Reason.SCATTER_RESULT: Example(added_to, [(64, 64), (8, 64)]),
    Reason.LAYOUT_CONFLICT: Example(group_norm, [(32, 256, 112, 112), (256,), (256,)], gpu=True, dtype=bf16),
    Reason.NOT_EPILOGUE: Example(with_a_loop_of_its_own, [(64, 64), (64, 64), (64,)]),
    Reason.NOT_PROLOGUE: Example(operand_kept, [(8, 4096), (4096, 1)]),
    Reason.UNKNOWN_SIZES: Example(
        lambda x, w, r: F.layer_norm(x @ w + r, (1024,)), [(8192, 1024), (1024, 1024), (8192, 1024)],
        gpu=True, dtype=bf16, dynamic=True,
    ),
    Reason.EMPTY_LOOP: Example(
        as_many_as_data_says, [(64,)], gpu=True, more=lambda: [torch.ones((), dtype=torch.int64)],
    ),
    Reason.LARGER: Example(lambda a, b, x: x + a[:, None] * b, [(512, 512)], weights=[(512,), (512,)]),
    Reason.RETURNED: Example(lambda w, x: (x + w.exp(), w.exp()), [(512, 512)], weights=[(512, 512)]),
    Reason.FROZEN_OPERAND: Example(lambda w, x: F.relu(F.linear(x, w)), [(8, 1024)], weights=[(1024, 1024)]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings() -> Any:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("reason", EXAMPLES, ids=lambda reason: reason.name)
def test_an_example_gives_its_reason(reason: Reason) -> None:
    text = verdicts(EXAMPLES[reason])
    assert gives(reason, text), text


def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example(around_another, [(64, 64)])
    assert gives(Reason.CYCLE, verdicts(example))
    monkeypatch.setattr(fuse, "SEARCH_LIMIT", 0)
    text = verdicts(example)
    assert gives(Reason.SEARCH_LIMIT, text), text


def test_a_test_names_every_reason() -> None:
    texts = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    named = set(re.findall(r"\bReason\.([A-Z_]+)\b", texts))
    assert [reason.name for reason in Reason if reason.name not in named | UNREACHED] == []
