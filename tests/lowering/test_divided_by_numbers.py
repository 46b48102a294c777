"""Division by a number of the program, on a GPU: eager multiplies by the inverse there, and whole numbers show the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.rendering import texts_of_a_gpu

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "codes": lambda x: (x / 0.05).round().to(torch.int8),
    "bins": lambda x: (x / 0.1).long(),
    "whole steps": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "negative": lambda x: (x / -7).ceil(),
    "of whole numbers": lambda x: ((x * 100).int() / 15).round(),
    "plain": lambda x: x / 15,
}


def of_a_gpu(function: Function, dtype: torch.dtype) -> str:
    return "".join(texts_of_a_gpu(function, torch.empty(4, 700, dtype=dtype)).kernels.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gpu_multiplies(name: str, dtype: torch.dtype) -> None:
    source = of_a_gpu(FUNCTIONS[name], dtype)
    assert "lib.divided" not in source
    assert "trunc_div" not in source
    assert " * " in source


def test_inverses_are_rounded_to_the_type_that_eager_multiplies_in() -> None:
    for number in (0.1, 3, 0.7, 1e-3, 441.0):
        in_double = torch.tensor(1.0 / number, dtype=torch.float32).item()
        in_single = (torch.tensor(1.0) / torch.tensor(number)).item()
        assert f"{in_double!r}" in of_a_gpu(lambda x, by=number: (x / by).round(), torch.bfloat16)
        assert f"{in_single!r}" in of_a_gpu(lambda x, by=number: torch.div(x, by, rounding_mode="trunc"), torch.float32)


def test_floors_and_tensors_are_divided() -> None:
    assert "lib.divided" in of_a_gpu(lambda x: (x / x[:, :1]).round(), torch.float32)
    assert "lib.floordiv" in of_a_gpu(lambda x: torch.div(x, 0.3, rounding_mode="floor"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whole_numbers_are_eagers(name: str, dtype: torch.dtype) -> None:
    x = (torch.arange(-200000, 200000, device="cuda") * 0.025).to(dtype).view(400, -1)
    assert torch.equal(torch.compile(FUNCTIONS[name], backend="kgen")(x), FUNCTIONS[name](x))
