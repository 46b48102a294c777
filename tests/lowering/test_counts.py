"""Sums of bools: counted in 32 bits where these hold the number of terms, with the type that torch gives them."""

import pytest
import torch

from tests.rendering import texts_of_a_gpu


def count(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).sum(-1)


def test_what_holds_is_counted_in_32_bits() -> None:
    made = texts_of_a_gpu(count, torch.empty(64, 4096))
    assert "cast" in made.steps
    assert "to i32" in made.steps
    assert "to i64" in made.steps  # the result alone


def test_more_terms_than_32_bits_count_are_not() -> None:
    made = texts_of_a_gpu(count, torch.empty(1).expand(2, 1 << 31))
    assert "to i32" not in made.steps


@pytest.mark.parametrize("options", [{}, {"gpu_interpreter": True}], ids=["cpu", "gpu"])
def test_counts_are_those_of_eager(options: dict[str, bool]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        holds = x > 0
        return (
            holds.sum(),
            holds.sum(0),
            holds.sum(-1, keepdim=True),
            holds.sum(dtype=torch.int64),
            (holds.sum(1) * x[:, 0]).sum(),
        )

    x = torch.randn(5, 70)
    result = torch.compile(function, backend="kgen", options={"strict": True, **options})(x)
    for given, expected in zip(result, function(x), strict=True):
        assert given.dtype is expected.dtype
        torch.testing.assert_close(given, expected)
