"""Why a template has a kernel, or has not: `kgen templates why`, and the answers that it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import options_for, plan_of
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from kgen.capture.decompositions import TABLE
from kgen.cli import main
from kgen.listeners import Listeners
from kgen.scheduler.selection.template_decisions import DECISIONS, verdict_on
from kgen.templates import registry

SCRIPT = """
import torch

@torch.compile(backend="kgen")
def f(x, w):
    return torch.softmax(torch.relu(x @ w), -1)

with torch.no_grad():
    f(torch.randn(4, 512), torch.randn(512, 512))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch._dynamo.reset()
    return tmp_path


def t(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def verdicts_of(name: str, fn: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """What the template makes of each decision about a GPU's kernels."""
    with DECISIONS.listening() as decisions:

        def plan(gm: Any, _: Any) -> Any:
            with _disable_current_modes():
                plan_of(gm, options_for(gpu=True))
            return gm

        compiled = aot_function(fn, plan, decompositions=TABLE)
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            compiled(*args)
    return [verdict_on(registry.find(name), one) for one in {one.out: one for one in decisions}.values()]


@pytest.mark.cpu
def test_the_command_answers_for_each_contraction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "why", "cpp_matmul", "script.py"]) == 0
    out = capsys.readouterr().out
    assert "mm of graph" in out
    assert "script.py:6 return torch.softmax(torch.relu(x @ w), -1)" in out
    assert "  cpp_matmul takes it: cpp_matmul ROWS=" in out


@pytest.mark.cpu
def test_the_command_answers_for_loops(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "why", "cpp_reduction", "script.py"]) == 0
    assert "  cpp_reduction takes it" in capsys.readouterr().out
    torch._dynamo.reset()
    assert main(["templates", "why", "triton_reduction", "script.py"]) == 1
    assert "no graph of the script has loops of its kind" in capsys.readouterr().err


@pytest.mark.cpu
def test_wrong_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "why", "cpp_matmul", "missing.py"]) == 2
    (folder / "nothing.py").write_text("x = 1\n")
    assert main(["templates", "why", "no_such_template", "nothing.py"]) == 1
    assert "no template is called no_such_template" in capsys.readouterr().err
    assert main(["templates", "why", "cpp_matmul", "nothing.py"]) == 1
    assert "no template was asked" in capsys.readouterr().err


@pytest.mark.none
def test_a_refusal_is_the_templates_own() -> None:
    [one] = verdicts_of("triton_matmul_full_row", F.linear, t(64, 8192), t(8192, 8192))
    assert one.startswith("refuses it: ")
    assert len(one) > len("refuses it: ")


@pytest.mark.none
def test_another_device() -> None:
    [one] = verdicts_of("cpp_matmul", F.linear, t(64, 512), t(512, 512))
    assert one == "is for cpu, and the kernel runs on cuda"


@pytest.mark.none
def test_what_is_slower_has_its_estimate() -> None:
    """Each GPU template of a plain matmul takes it, refuses it, or says what it was compared with."""

    def gelu_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w))

    found = {
        one.name: verdicts_of(one.name, gelu_linear, t(4096, 4096), t(4096, 4096))[-1] for one in registry.contractions("cuda")
    }
    taking = [text for text in found.values() if text.startswith("takes it: ")]
    slower = [text for text in found.values() if text.startswith("could compute it in ")]
    assert len(taking) == 1
    assert slower
    assert all(" us by the estimate, with " in text and " is faster (" in text for text in slower)


@pytest.mark.none
def test_notes_are_made_for_listeners_only() -> None:
    listeners: Listeners[int] = Listeners()

    def never() -> int:
        raise AssertionError

    listeners.note(never)
    with listeners.listening() as outer, listeners.listening() as inner:
        listeners.note(lambda: 3)
    listeners.note(never)
    assert (outer, inner) == ([3], [3])
