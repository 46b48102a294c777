"""What the table of models says of the cost model."""

from __future__ import annotations

import torch

from tests.models.estimates import Estimate, estimates, missed


def test_each_function_of_a_graph_has_an_estimate() -> None:
    torch._dynamo.reset()
    with estimates() as found:
        torch.compile(lambda x: torch.softmax(x, -1).relu(), backend="kgen", options={"cache": False})(torch.randn(8, 32))
    assert found
    assert all(0 < f <= e for one in found.values() for e, f in zip(one.estimate, one.floor, strict=True))


def test_those_that_lose_most_come_first() -> None:
    found = {
        "k0_a": Estimate([10.0, 20.0], [5.0, 10.0]),
        "k1_b": Estimate([10.0], [1.0], "matmul"),
        "k2_c": Estimate([1.0], [1.0]),
    }
    rows = missed(found, {"k1_b": (50.0, 1.0), "k0_a": (90.0, 4.0), "library": (9.0, 1.0)})
    assert rows == [(50.0, 10.0, 1.0, 1.0, "k1_b", "matmul"), (90.0, 60.0, 30.0, 4.0, "k0_a", "")]
