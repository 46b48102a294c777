"""Faults planted in the middle of a model are found: the operators, their lines, the stage and the kernel."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import kgen.pipeline
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.shrink import Shrinker
from kgen.cli import main
from kgen.lowering.families import RULES
from kgen.rendered.kernel_call import Rendered
from kgen.templates.cpp.codegen.table import CPP_OPS

pytestmark = pytest.mark.cpu

# Dropout and a counter: a repeated call has to begin with the same random numbers and the same buffer.
SCRIPT = """
import torch
import torch.nn.functional as F

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        h = F.dropout(F.gelu(self.up(x)), 0.25)
        h = torch.tanh(h * 2)
        return h[:, :16] + x

torch.manual_seed(0)
model = torch.nn.Sequential(Block(), Block())
step = torch.compile(model, backend="kgen")
step(torch.randn(8, 16)).square().mean().backward()
"""
SMALL = """
import torch

@torch.compile(backend="kgen")
def f(x, state):
    y = torch.sigmoid(x) * 3
    state.copy_(torch.relu(state) + 1)
    y = torch.tanh(y)
    return torch.exp(y - 0.5).sum(-1) * y.cos().mean(-1)

f(torch.linspace(-2, 2, 4 * 40).reshape(4, 40), torch.zeros(3))
"""
DEFECT = """
from kgen.lowering.families import RULES

RULES["aten.tanh"] = RULES["aten.sin"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "planted_defect.py").write_text(DEFECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planted_defect", raising=False)
    torch._dynamo.reset()
    return tmp_path


def bisected(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["bisect", *arguments])
    return code, capsys.readouterr().out


def test_what_is_right_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bisected(capsys, "small.py")
    assert (code, out.splitlines()[0]) == (0, "right: 1 calls of 1 graphs agree with their operators in eager.")


@pytest.mark.slow
def test_a_wrong_rule_is_found(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator of a training step; the script that is written repeats the fault, and ends well without it."""
    monkeypatch.setitem(RULES, "aten.tanh", RULES["aten.tanh"])  # put back after the test
    code, out = bisected(capsys, "script.py", "--module", "planted_defect", "--out", "found")
    assert code == 1
    assert "_forward is wrong: result" in out
    assert "smallest part: 1 of" in out
    assert "aten.tanh.default  0  script.py:14 h = torch.tanh(h * 2)" in out
    assert "stage: lower: the loop IR is wrong before it is scheduled" in out
    assert "  tanh (loops): aten.tanh.default" in out
    assert "options={'fallback': 'aten.tanh.default'}" in out
    assert "script: found/repro.py repeats it (WRONG: result 0 differs by up to" in out
    script = folder / "found" / "repro.py"
    script.write_text(script.read_text().replace("import planted_defect\n", ""))
    mended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (mended.returncode, mended.stdout) == (0, "right: the compiled part agrees with eager\n"), mended.stderr


def test_a_wrong_kernel_is_found(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPP_OPS, "tanh", CPP_OPS["sin"])
    code, out = bisected(capsys, "small.py")
    assert code == 1
    assert "smallest part: 1 of" in out
    assert "aten.tanh.default  small.py:8 y = torch.tanh(y)" in out
    assert "stage: render: the loop IR is right, and no option that leaves out a decision makes the result right" in out
    assert "repro.py does not repeat it" in out  # that process has no such text


@pytest.mark.slow
def test_a_fault_of_fused_kernels_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two operators is right alone."""
    render_step = kgen.pipeline.render_step

    def wrong(step, symbol, context):  # type: ignore[no-untyped-def]
        made = render_step(step, symbol, context)
        names = {name for origin in step.origins for name in origin.operators}
        if isinstance(made, Rendered) and {"aten.exp.default", "aten.sum.dim_IntList"} <= names:
            return dataclasses.replace(made, text=made.text.replace("exp_(", "exp2_("), general=None)
        return made

    monkeypatch.setattr(kgen.pipeline, "render_step", wrong)
    code, out = bisected(capsys, "small.py")
    assert code == 1
    assert "smallest part: 2 of" in out
    assert "aten.exp.default  small.py:9" in out
    assert "aten.sum.dim_IntList  small.py:9" in out
    assert "stage: schedule: the loop IR is right, and so is the result with a kernel for each operator" in out
    assert "  exp_sum (loops): aten.exp.default, aten.sum.dim_IntList" in out
    assert "options={'fusion': False, 'inlining': False}" in out


def test_an_error_is_found(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that does not compile, where kgen would fall back to eager."""

    def raising(*_: object) -> None:
        raise ValueError("no such function")

    monkeypatch.setitem(RULES, "aten.tanh", raising)
    code, out = bisected(capsys, "small.py")
    assert code == 1
    assert "is wrong: LoweringFailed: lowering aten.tanh.default failed" in out
    assert "smallest part: 1 of" in out
    assert "stage: lower: it raises the error" in out


def test_misuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "missing.py"]) == 2
    assert main(["bisect", "small.py", "--trials", "0"]) == 2
    (folder / "nothing.py").write_text("x = 1\n")
    assert main(["bisect", "nothing.py"]) == 1
    assert "nothing was compiled by kgen" in capsys.readouterr().err


@pytest.mark.none
@pytest.mark.parametrize("needed", [{3}, {0, 9}, {2, 5, 6}, {9}, set(range(10))])
def test_the_smallest_part_is_found(needed: set[int]) -> None:
    def shows(part: Sequence[int]) -> bool:
        return needed <= set(part)

    shrinker = Shrinker(shows, 1000)
    assert set(shrinker.smallest(range(10))) == needed
    assert shrinker.count < 100


@pytest.mark.none
def test_more_may_hide_a_fault() -> None:
    """With 4 the fault of 2 does not show, unless 8 is there: the answer still shows it."""

    def shows(part: Sequence[int]) -> bool:
        return 2 in part and (4 not in part or 8 in part)

    assert shows(Shrinker(shows, 1000).smallest(range(10)))


@pytest.mark.none
def test_trials_are_limited() -> None:
    asked: list[int] = []

    def shows(part: Sequence[int]) -> bool:
        asked.append(len(part))
        return {1, 70} <= set(part)

    assert {1, 70} <= set(Shrinker(shows, 5).smallest(range(100)))
    assert len(asked) == 5


@pytest.mark.none
def test_copies_share_memory_as_the_originals_do() -> None:
    base = torch.arange(12.0)
    whole, part, number = copied([base.view(3, 4), base[2:6:2], 7])
    whole.zero_()
    assert number == 7
    assert part.stride() == (2,)
    assert part.sum() == 0
    assert base.sum() == 66


@pytest.mark.none
def test_random_numbers_are_repeated() -> None:
    state = RandomState.now()
    first = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)
