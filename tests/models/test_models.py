"""Whole models, tiny, on the CPU: inference and a training step against eager in float64, and graph breaks counted.

A few are compiled to C++ in every run. Most are lowered and scheduled, and the evaluator runs what comes out: that finds
wrong rules and wrong fusion, and needs no compiler. The slow tests compile all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kgen
from kgen import backend
from tests.models.catalogue import MODELS
from tests.models.check import Subject, breaks_without_kgen, graph_breaks, worst
from tests.opinfo import evaluated
from tests.slow import slow_but

OPTIONS = {"cache": False}
# The evaluator is slow where a loop has many points.
QUICK = ("bert", "gnn", "mixtral")
COMPILED = ("dlrm",)


def subject(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Subject:
    model = MODELS[name]
    if model.package != "torch":
        pytest.importorskip(model.package)
    return Subject(model, "tiny", dtype, **settings)


@pytest.fixture(autouse=True)
def _recurrent_modules() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.fixture
def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)


@pytest.fixture(autouse=True)
def _fresh_counts() -> Iterator[None]:
    kgen.coverage_reset()
    yield
    kgen.coverage_reset()


def check(name: str, train: bool, dtype: torch.dtype = torch.float32, batch: int = 0, **settings: Any) -> None:
    """Right twice, with the graphs and breaks that Dynamo has for any back end, and nothing replaced."""
    made = subject(name, dtype, **settings)
    expected = breaks_without_kgen(made, train)
    compiled = torch.compile(made.ours, backend="kgen", options=OPTIONS)
    for _ in range(2):
        found = made.check(compiled, train, batch)
        assert found
        assert not worst(found)
    assert expected == (graph_breaks(), torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert not kgen.coverage()["replaced"]


@pytest.mark.none
@pytest.mark.parametrize("name", slow_but(lambda name: name != "mixtral", QUICK))
def test_training_in_the_evaluator(name: str, without_compilers: None) -> None:
    check(name, train=True)


@pytest.mark.cpu
@pytest.mark.parametrize("name", COMPILED)
def test_training_compiled(name: str) -> None:
    check(name, train=True)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_all(name: str, train: bool) -> None:
    check(name, train)


NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
AMP = pytest.mark.parametrize("amp", [False, True], ids=["weights", "amp"])


@pytest.mark.every(3)
@pytest.mark.none
@NARROW
@AMP
def test_16_bits_in_the_evaluator(dtype: torch.dtype, amp: bool, without_compilers: None) -> None:
    """Five graphs: of two, parameters that differ by 2^-9 have gradients that differ by a third, in float64 as well."""
    check("gnn", train=True, dtype=dtype, batch=5, amp=amp)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@NARROW
@AMP
@pytest.mark.parametrize("name", MODELS)
def test_16_bits(name: str, amp: bool, dtype: torch.dtype, train: bool) -> None:
    check(name, train, dtype, amp=amp)


@pytest.mark.none
def test_a_wrong_result_is_found(without_compilers: None) -> None:
    """The comparison itself: a gradient that is off by a thousandth."""
    made = subject("dlrm")
    compiled = torch.compile(made.ours, backend="kgen", options=OPTIONS)
    assert not worst(made.check(compiled, train=True))
    with torch.no_grad():
        next(made.ours.parameters()).mul_(1.001)
    assert "gradient of" in worst(made.check(compiled, train=True))
