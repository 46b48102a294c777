"""require_fused and forbid_fused of single calls: what they say of the graphs, and of names that are none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

import kgen
from kgen import errors
from kgen.verdict import DEMANDS, OperatorCall

pytestmark = pytest.mark.cpu


def two_adds(x: Tensor) -> Tensor:
    return ((x + 1).sum(0) + 2).sum()


def compiled_kernels(*demands: object) -> list[tuple[str, ...]]:
    report = kgen.explain(two_adds, torch.randn(8, 16), print_report=False)
    return [kernel.calls for kernel in report.kernels]


def test_one_call_is_kept_apart_and_the_other_is_not() -> None:
    together = compiled_kernels()
    assert any("aten.add#0" in " ".join(calls) and "aten.sum#0" in " ".join(calls) for calls in together)
    with pytest.raises(Exception, match=r"must not be fused|inlined") as raised, kgen.forbid_fused("aten.add#0", "aten.sum#0"):
        compiled_kernels()
    assert isinstance(raised.value.__cause__ or raised.value, Exception)
    with kgen.require_fused("aten.add#1", "aten.sum#1"):
        compiled_kernels()


def test_a_demand_on_one_call_fails_with_its_name() -> None:
    with (
        pytest.raises(Exception, match=r"aten\.sum#0 and aten\.sum#1 must be fused"),
        kgen.require_fused("aten.sum#0", "aten.sum#1"),
    ):
        kgen.explain(lambda x: x.sum(0).sum(), torch.randn(600, 700), print_report=False)


def test_a_name_of_nothing_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(errors.NothingNamed) as raised, kgen.forbid_fused("aten.add#2", "aten.sum"):
        compiled_kernels()
    assert "forbid_fused names 'aten.add#2'" in str(raised.value)
    assert "aten.add#0" in str(raised.value)
    with pytest.raises(errors.NothingNamed, match=r"layers\.9"), kgen.require_fused("aten.add@layers.9", "aten.sum"):
        compiled_kernels()


def test_to_forbid_an_operator_that_no_graph_has_asks_for_nothing() -> None:
    with kgen.forbid_fused("aten.tan", "aten.sum"):
        compiled_kernels()


@pytest.mark.parametrize("name", ["", "@", "aten.mm@", "aten.mm#", "aten.mm#x", "aten.mm#1@layers", "#1"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(errors.BadCallName), kgen.require_fused(name, "aten.mm"):
        raise AssertionError("entered")
    assert DEMANDS.get() == ()


def test_an_unknown_operator_of_a_call() -> None:
    with pytest.raises(Exception, match=r"aten\.sumn"), kgen.require_fused("aten.sumn#0", "aten.add"):
        compiled_kernels()


def test_a_graph_from_a_cache_does_not_hide_a_demand() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sum(0).sum()

    x = torch.randn(600, 700)
    torch.compile(f, backend="kgen")(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="must be fused"), kgen.require_fused("aten.sum#0", "aten.sum#1"):
        torch.compile(f, backend="kgen")(x)


@pytest.mark.parametrize("door", [kgen.require_fused, kgen.forbid_fused])
def test_a_demand_on_what_was_compiled_before_warns(door: Callable[[str, str], AbstractContextManager[None]]) -> None:
    """It looked at nothing, and would pass for one that holds."""
    compiled = torch.compile(two_adds, backend="kgen")
    compiled(torch.randn(8, 16))
    with pytest.warns(errors.NothingCompiledWarning, match=rf"{door.__name__} .*_dynamo\.reset"), door("aten.add", "aten.sum"):
        compiled(torch.randn(8, 16))


def test_texts_of_calls() -> None:
    assert str(OperatorCall("aten.mm.default", "a.b", "f.py:3 x @ y", 2)) == "aten.mm#2 in a.b"
    assert str(OperatorCall("aten.mm.default", "", "f.py:3 x @ y", 0)) == "aten.mm#0 in f.py:3"
    assert str(OperatorCall("copy")) == "copy#0"
