"""Inputs that share a storage: what the graph was compiled for is checked at each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.capture.shared_storages import StorageView, shared_views
from kgen.errors import FallbackWarning

pytestmark = pytest.mark.cpu
Views = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def of_base(length: int, offset: int) -> Views:
    base = torch.arange(float(length))
    return base[offset : offset + 12].view(3, 4), base[2:12:2], base


def of_storage(length: int, offset: int) -> Views:
    """Views that do not know each other."""
    base = torch.arange(float(length))
    whole = torch.empty(0).set_(base.untyped_storage(), offset, (3, 4), (4, 1))  # type: ignore[call-overload]
    return whole, torch.empty(0).set_(base.untyped_storage(), 2, (5,), (2,)), base  # type: ignore[call-overload]


def written(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return y * 2, x.sum()


def read(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y * 2, x.sum()


def calls(make: Callable[[int, int], Views], fn: Callable[..., Any], **options: Any) -> Iterator[bool]:
    """Whether eager ran, for several offsets of the inputs."""
    compiled = torch.compile(fn, backend="kgen", **options)
    for length, offset in ((20, 0), (20, 3), (40, 8), (20, 0)):
        wanted, given = make(length, offset), make(length, offset)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", FallbackWarning)
            made = compiled(*given[:2])
        for one, other in zip((*made, *given), (*fn(*wanted[:2]), *wanted), strict=True):
            assert torch.equal(one, other)
        yield any(one.category is FallbackWarning for one in warned)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_views_of_one_tensor_at_other_offsets(dynamic: bool | None) -> None:
    assert [*calls(of_base, written, dynamic=dynamic)] == [False, True, False, False]  # warned once


def test_views_of_one_storage_at_other_offsets() -> None:
    assert [*calls(of_storage, written)] == [False, True, False, False]


def test_a_graph_that_only_reads_takes_inputs_anywhere() -> None:
    assert not any(calls(of_base, read))


def test_the_cache_knows_of_the_storage() -> None:
    for length in (12, 20):
        torch._dynamo.reset()
        x, y, base = of_base(length, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            torch.compile(written, backend="kgen")(x, y)
        assert torch.equal(base[:12], torch.arange(12.0) + 1)


@pytest.mark.parametrize("options", [{"cache": False}, {"cache": False, "gpu_interpreter": True}], ids=["cpp", "triton"])
def test_a_storage_that_goes_on_behind_the_views(options: dict[str, Any]) -> None:
    """The storage that AOTAutograd traces with ends where the last detached view does."""

    def detached() -> tuple[Tensor, Tensor, Tensor]:
        base = torch.arange(144.0).reshape(12, 12)
        return base[:6].detach(), base[1:7].detach(), base

    wanted, given = detached(), detached()
    made = torch.compile(written, backend="kgen", options=options)(*given[:2])
    for one, other in zip((*made, *given), (*written(*wanted[:2]), *wanted), strict=True):
        assert torch.equal(one, other)


def test_only_tensors_that_share_a_storage_have_views() -> None:
    base = torch.zeros(6)
    assert shared_views([base, 3, torch.zeros(2), torch.eye(3).to_sparse()]) == ()
    assert shared_views([base, torch.zeros(2), base[2:]]) == (StorageView(0, 0, 24), StorageView(2, 2, 24))
