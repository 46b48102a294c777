"""Models at sizes that change from call to call: right at each, and no more graphs than Dynamo has for any back end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kgen import backend
from tests.models.catalogue import MODELS
from tests.models.check import Run, Subject, run, worst
from tests.opinfo import evaluated

SIZES = [(2, 16), (3, 9), (5, 12), (4, 16), (3, 16)]
MORE_SIZES = [(b, n) for b in (2, 3, 5, 8) for n in (8, 9, 12, 16, 24)]
stats = torch._dynamo.utils.counters


def graphs_of(backend_name: str, subject: Subject, sizes: list[tuple[int, int]], dynamic: bool | None) -> tuple[int, Run]:
    """How many graphs a sweep compiles, in inference."""
    torch._dynamo.reset()
    stats.clear()
    options: Any = {"options": {"cache": False}} if backend_name == "kgen" else {}
    compiled = torch.compile(subject.ours, backend=backend_name, dynamic=dynamic, **options)
    for batch, length in sizes:
        run(compiled, subject.ours, subject.arguments(batch, length), train=False)
    return stats["stats"]["unique_graphs"], compiled


def check(name: str, sizes: list[tuple[int, int]], dynamic: bool | None, train: bool) -> None:
    model = MODELS[name]
    if model.package != "torch":
        pytest.importorskip(model.package)
    if not model.sequence:
        sizes = list(dict.fromkeys((batch, 0) for batch, _ in sizes))
    subject = Subject(model, "tiny")
    wanted, _ = graphs_of("aot_eager", Subject(model, "tiny"), sizes, dynamic)
    graphs, compiled = graphs_of("kgen", subject, sizes, dynamic)
    assert graphs <= wanted
    for batch, length in sizes:
        assert not worst(subject.check(compiled, train, batch, length))
    if not train:
        assert stats["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.none
@pytest.mark.parametrize("name", ["vit"])
def test_sizes_in_the_evaluator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)
    check(name, SIZES[:3], dynamic=True, train=False)


@pytest.mark.cpu
def test_sizes_compiled() -> None:
    check("gnn", SIZES, dynamic=True, train=False)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mamba_scan", "mamba")])
def test_all_at_twenty_sizes(name: str, dynamic: bool | None) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        check(name, MORE_SIZES, dynamic, train=False)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "resnet50", "unet", "efficientnet", "dit", "dlrm", "gnn"])
def test_training_at_twenty_sizes(name: str) -> None:
    check(name, MORE_SIZES, dynamic=True, train=True)


@pytest.mark.none
def test_marked_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A marked dimension stays dynamic: a size that a model specialises would be an error."""
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)
    subject = Subject(MODELS["dlrm"], "tiny")
    compiled = torch.compile(subject.ours, backend="kgen", options={"cache": False})
    stats.clear()
    for batch in (4, 7, 9):
        arguments = subject.arguments(batch)
        for tensor in arguments.values():
            torch._dynamo.mark_dynamic(tensor, 0)
        got = run(compiled, subject.ours, arguments, train=False)
        torch.testing.assert_close(got, run(subject.eager, subject.eager, arguments, train=False))
    assert stats["stats"]["unique_graphs"] == 1
