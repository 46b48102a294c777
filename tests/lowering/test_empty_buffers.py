"""Exported programs with sizes that may be 0: where a loop would read an element that is not there, they refuse such a size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import kgen
from kgen.errors import WrongArguments

pytestmark = pytest.mark.cpu
SIZES = ({0: Dim("batch", max=64), 1: Dim("length", max=512)},)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def loaded(function: Callable[[Tensor], Tensor], folder: Path) -> kgen.host.exported.LoadedProgram:
    kgen.export(Calls(function), (torch.randn(3, 6, 16),), folder=folder, dynamic_shapes=SIZES)
    return kgen.load(folder)


# torch says of the first of them that its result has one element along the axis, whatever the length is.
NEED_ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first element": lambda x: x[:, :1] * 2,
    "view of an input": lambda x: x[:, :1],
    "view of a result": lambda x: (x * 2)[:, :1],
    "behind all": lambda x: torch.cat([x, x[:, :1]], 1),
    "selected": lambda x: x[:, -1] * 2,
    "listed": lambda x: x[:, torch.tensor([0, 0])] * 2,
    "repeated ends": lambda x: F.pad(x.transpose(1, 2), (2, 1), mode="replicate"),
    "resized": lambda x: F.interpolate(x.transpose(1, 2), size=7, mode="linear", align_corners=True),
    "one fewer": lambda x: x[:, 1:] - x[:, :-1],
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
}


@pytest.mark.parametrize("name", NEED_ELEMENTS)
def test_sizes_that_cannot_be_zero(name: str, tmp_path: Path) -> None:
    """The process ended, or the result had elements that nobody wrote."""
    function = NEED_ELEMENTS[name]
    program = loaded(function, tmp_path / "program")
    for size in ((2, 7), (1, 1), (0, 3)):
        x = torch.randn(*size, 16)
        torch.testing.assert_close(program(x), function(x))
    with pytest.raises(WrongArguments, match="1 <= "):
        program(torch.randn(2, 0, 16))


TAKE_NONE: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, :4] * 2,
    "last ones": lambda x: torch.cat([x[:, -2:] + 1, x], 1),
    "rolled": lambda x: x.roll(1, 1) + x.flip(1),
    "padded": lambda x: F.pad(x, (0, 0, 1, 2)) * 2,
    "shifted": lambda x: x[:, (torch.arange(x.shape[1]) - 1).clamp(min=0)],
    "sum": lambda x: x.sum(1),
    "scaled": lambda x: x.softmax(1) * x[:, :, :1],
}


@pytest.mark.parametrize("name", TAKE_NONE)
def test_sizes_that_may_be_zero(name: str, tmp_path: Path) -> None:
    function = TAKE_NONE[name]
    program = loaded(function, tmp_path / "program")
    for size in ((2, 7), (1, 1), (0, 3), (2, 0), (0, 0)):
        x = torch.randn(*size, 16)
        torch.testing.assert_close(program(x), function(x))
