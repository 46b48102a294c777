"""The operator suite itself: its tasks, its workers, and its list of known failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest")  # torch's test database wants it

from kgen import backend
from tests.opinfo import evaluated
from tests.opinfo.known_failures import KNOWN, reason
from tests.opinfo.tasks import DTYPES, KINDS, Checker, Outcome, Task, tasks

pytestmark = pytest.mark.none


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    """Tasks in the evaluator."""
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)

    def compiled(gm: Any, inputs: Any, **options: Any) -> Any:
        return backend.kgen_backend(gm, inputs, options={"cache": False, "strict": True}, **options)

    return Checker("cpu", compiled, samples=2)


def test_tasks_cover_dtypes_and_kinds() -> None:
    found = tasks("cpu", DTYPES, KINDS)
    assert len(found) > 9000
    assert {(t.dtype, t.kind) for t in found} == {(d, k) for d in DTYPES for k in KINDS} - {
        (d, "gradient") for d in ("int64", "int32", "uint8", "bool")
    }


SAMPLED = [
    Task("softmax", "float32", "gradient"), Task("addmm", "float16", "forward"), Task("cumsum", "int32", "out"),
    Task("add", "uint8", "inplace"), Task("mul", "complex64", "forward"), Task("any", "bool", "forward"),
]  # fmt: skip


@pytest.mark.parametrize("task", SAMPLED, ids=str)
def test_a_task(task: Task, checker: Checker) -> None:
    assert astuple(checker.check(task)) == ("ok", "")


def test_a_wrong_rule_is_found(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gm: Any, inputs: Any, **options: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
        return backend.kgen_backend(gm, inputs, options={"cache": False}, **options)

    task = Task("sin", "float32", "forward")
    assert checker.check(task) == Outcome("ok")
    found = Checker("cpu", wrong, samples=1).check(task)
    assert (found.status, found.bad) == ("values", True)


def test_what_torch_gets_wrong_is_not_counted(checker: Checker) -> None:
    """Its functionalisation refuses the operator."""
    found = checker.check(Task("polygamma.polygamma_n_0", "float32", "inplace"))
    assert (found.status, found.bad) == ("torch", False)


def test_known_failures_have_reasons_and_tasks() -> None:
    """An entry for an operator, dtype or kind that the database does not have could never go away."""
    all_tasks = tasks("cpu", DTYPES, KINDS)
    names = {str(t) for t in all_tasks} | {f"{t.op} {t.kind}" for t in all_tasks}
    assert not KNOWN.keys() - names
    assert all(len(text.split()) > 4 for text in KNOWN.values())


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_failure_still_fails(name: str, checker: Checker) -> None:
    """One that has begun to pass leaves the list."""
    [*_, first] = [t for t in tasks("cpu", DTYPES, KINDS) if reason(t) == KNOWN[name] and name in (str(t), f"{t.op} {t.kind}")]
    assert Checker("cpu", checker.backend, samples=3).check(first).bad
