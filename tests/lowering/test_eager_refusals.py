"""What eager refuses and tracing lets pass: the same class of error, never a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen import backend
from tests.opinfo import evaluated

pytestmark = pytest.mark.none
Function = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def _without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)


def compiled(f: Function, dynamic: bool = False) -> Function:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", fullgraph=True, dynamic=dynamic, options={"cache": False})


def refused_as_in_eager(f: Function, x: Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        f(x)
    with pytest.raises(eager.type):
        compiled(f)(x)


EXTREMES: dict[str, Function] = {
    "max": lambda x: x.max(), "min": lambda x: x.min(), "max_along": lambda x: x.max(0), "min_along": lambda x: x.min(0)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_of_nothing(name: str) -> None:
    refused_as_in_eager(EXTREMES[name], torch.zeros(0, 3))


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_of_what_data_select(name: str) -> None:
    """Nothing may be left, which only run time shows."""
    x = torch.tensor([1.0, 3.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(lambda x: EXTREMES[name](x[x > 1]))
        torch.testing.assert_close(f(x), EXTREMES[name](x[x > 1]))
        with pytest.raises(IndexError, match="at least one element"):
            f(x - 9)


def test_extremes_along_what_is_not_empty() -> None:
    def f(x: Tensor) -> Any:
        return x.max(1)[0], x.amin(1), x.argmax(1)

    torch.testing.assert_close(compiled(f)(torch.zeros(0, 3)), f(torch.zeros(0, 3)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("limits", [(-5, 300), (None, 300), (-5, 100), (3, 100)])
def test_limits_that_a_type_does_not_have(limits: tuple[int | None, int], dtype: torch.dtype) -> None:
    """Eager takes a negative limit of unsigned numbers: it wraps."""
    x = torch.tensor([0, 4, 100, 127], dtype=dtype)
    if limits[1] == 300:
        refused_as_in_eager(lambda x: x.clamp(*limits), x)
    else:
        torch.testing.assert_close(compiled(lambda x: x.clamp(*limits))(x), x.clamp(*limits))


@pytest.mark.parametrize("number", [1, 1.5])
def test_a_number_less_a_bool(number: float) -> None:
    refused_as_in_eager(lambda x: number - x, torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_a_least_common_multiple_that_overflows(dtype: torch.dtype) -> None:
    """Eager multiplies narrow integers in 32 bits: the magnitude wraps, and may be negative."""
    info = torch.iinfo(dtype)
    x = torch.tensor([info.max, info.max - 1, 0, 1, 6, 100, 7, 90, info.min // 2 + 1], dtype=dtype)
    torch.testing.assert_close(compiled(lambda x: torch.lcm(x[:, None], x))(x), torch.lcm(x[:, None], x))
