"""Faults planted in the middle of a model are found: the operators, their lines, the stage and the kernel."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import kgen.backend
import kgen.pipeline
from kgen.bisection import speed
from kgen.bisection.calls import difference_of_calls
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.isolated import cpu_seconds, hangs
from kgen.bisection.part import Part
from kgen.bisection.shrink import Shrinker
from kgen.bisection.timing import Timing
from kgen.bisection.trial import Trial
from kgen.cli import main
from kgen.config import Config
from kgen.lowering.families import RULES
from kgen.rendered.kernel_call import Rendered
from kgen.templates.cpp.codegen.table import CPP_OPS
from kgen.verdict import Verdict

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
    code = main(["bisect", "--in-process", *arguments])
    return code, capsys.readouterr().out


def test_what_is_right_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bisected(capsys, "small.py")
    text = "right: 1 calls of 1 graphs agree with their operators in eager, and 1 calls of Dynamo's graphs with eager"
    assert code == 0
    assert out.startswith(text)


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

    def wrong(step, symbol, decisions):  # type: ignore[no-untyped-def]
        made = render_step(step, symbol, decisions)
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


@pytest.mark.none
def test_a_process_without_a_core_does_not_hang() -> None:
    """On a busy machine what only compiles was said to hang."""
    assert not hangs(14.0, 14.0, 15.0)
    assert hangs(15.1, 9.0, 15.0)  # an endless loop
    assert not hangs(40.0, 2.0, 15.0)  # others have the cores
    assert hangs(60.1, 2.0, 15.0)  # it waits for what never comes
    assert hangs(361.0, 0.0, 300.0)
    used = cpu_seconds(os.getpid())
    sum(range(3_000_000))
    assert cpu_seconds(os.getpid()) > used > 0


TINY = """
import torch

@torch.compile(backend="kgen")
def f(x):
    y = torch.sigmoid(x)
    y = torch.tanh(y)
    return torch.exp(y)

f(torch.linspace(-2, 2, 160))
"""
DEADLY = """
import dataclasses
import kgen.pipeline
from kgen.rendered.kernel_call import Rendered

render_step = kgen.pipeline.render_step

def deadly(step, symbol, decisions):
    made = render_step(step, symbol, decisions)
    names = {name for origin in step.origins for name in origin.operators}
    if isinstance(made, Rendered) and "aten.tanh.default" in names:
        return dataclasses.replace(made, text=made.text.replace("{\\n", "{\\n  *(volatile int*)8 = 1;\\n", 1), general=None)
    return made

kgen.pipeline.render_step = deadly
"""
ENDLESS = """
from kgen.lowering.families import RULES

def endless(*_):
    while True:
        pass

RULES["aten.tanh"] = endless
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "more", "how", "stage"),
    [
        (DEADLY, (), "the process dies of SIGSEGV in a call of graph0_inference", "stage: call: no option"),
        (ENDLESS, ("--seconds", "15"), "the process never ends compiling graph0_inference", "stage: build: no option"),
    ],
    ids=["dies", "hangs"],
)
def test_what_ends_the_process_is_found(folder: Path, module: str, more: tuple[str, ...], how: str, stage: str) -> None:
    """In processes of their own: neither the command nor the search ends with them. The graph is small, for each trial that
    hangs takes its seconds."""
    (folder / "planted.py").write_text(module)
    (folder / "tiny.py").write_text(TINY)
    command = [sys.executable, "-m", "kgen", "bisect", "tiny.py", "--module", "planted", "--trials", "30", *more]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500).stdout
    assert how in out
    assert "smallest part: 1 of" in out
    assert "aten.tanh.default  tiny.py:7 y = torch.tanh(y)" in out
    assert stage in out
    assert "options={'fallback': ('aten.tanh.default',)}" in out or "options={'fallback': 'aten.tanh.default'}" in out
    assert (folder / "kgen_bisect" / "repro.py").is_file()


def test_a_wrong_pass_in_front_of_the_aten_graphs_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aten graphs agree with themselves: only Dynamo's graph, in eager, shows the fault."""
    batched = kgen.backend._batched

    def wrong(gm: torch.fx.GraphModule, config: Config) -> list[Verdict]:
        for node in gm.graph.nodes if config.loop_batching else ():
            if node.target is torch.tanh:
                node.target = torch.sin
        gm.recompile()
        return batched(gm, config)

    monkeypatch.setattr(kgen.backend, "_batched", wrong)
    code, out = bisected(capsys, "small.py")
    assert code == 1
    assert "a graph of Dynamo's is wrong, and the aten graphs that it becomes are right: result 0 differs" in out
    assert "smallest part: 1 of" in out
    assert "torch.tanh  small.py:8 y = torch.tanh(y)" in out
    assert "stage: rewrite: the call is right where unrolled loops are not made batches" in out
    assert "options={'loop_batching': False}" in out
    assert "repro.py does not repeat it" in out  # that process has no such pass


@pytest.mark.none
def test_wrong_gradients_are_seen() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.sin()

        @staticmethod
        def backward(ctx, given):  # type: ignore[no-untyped-def]
            return given * 2

    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    given = [torch.linspace(0, 1, 5).requires_grad_()]
    state = RandomState.now()
    assert difference_of_calls(gm, torch.sin, given, state) == ""
    assert (difference_of_calls(gm, Doubled.apply, given, state) or "").startswith("gradient of argument 0 differs by up to")
    assert (
        difference_of_calls(gm, lambda x: x.detach().sin(), given, state)
        == "1 results and 0 gradients, not 1 results and 1 gradients"
    )
    with torch.no_grad():
        assert difference_of_calls(gm, Doubled.apply, given, state) == ""


@pytest.mark.none
def test_calls_with_random_numbers_are_not_compared() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + torch.rand_like(x))
    assert difference_of_calls(gm, gm, [torch.ones(3)], RandomState.now()) is None


@pytest.mark.slow
def test_a_slow_kernel_is_found(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up times: what computes tanh is slow, unless eager does."""

    def time_part(part: Part, trial: Trial) -> Timing:
        slow = any("tanh" in str(node.target) for node in part.calls) and not trial.config.fallback
        return Timing(4e-3 if slow else 1e-4, 1e-3)

    monkeypatch.setattr(speed, "timed", lambda *_: Timing(5e-3, 1e-3))
    monkeypatch.setattr(speed, "time_part", time_part)
    code, out = bisected(capsys, "script.py", "--speed")
    assert code == 1
    assert "graph 0: 5 ms compiled, 1 ms in eager (5.00x the time), forward and backward" in out
    assert "(loops): 4 ms compiled" in out.partition("kernels of the slowest graph")[2].splitlines()[1]
    assert "aten.tanh.default  script.py:14 h = torch.tanh(h * 2)" in out
    assert "options={'fallback': ('aten.tanh.default',)}: 100 us" in out
    assert "script: kgen_bisect/repro.py (" in out


def test_misuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "missing.py"]) == 2
    for wrong in (["--trials", "0"], ["--seconds", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(["bisect", "small.py", *wrong])
        assert ended.value.code == 2
    (folder / "nothing.py").write_text("x = 1\n")
    assert main(["bisect", "--in-process", "nothing.py"]) == 1
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
