"""Which graphs are recorded as CUDA graphs, and why others are not; on a GPU, that replays give what calls would."""

from __future__ import annotations

from dataclasses import replace

import launch_kernels as tk
import pytest
import torch
from program_builder import Builder

import kgen
from kgen.host import cudagraph
from kgen.host.compiled import Blueprint, HostGraph
from kgen.host.cudagraph import Recording, decide
from kgen.host.program import Alias, Alloc, ArgTensor, BindSize, Extern, Launch, Pick, Program, PythonCall
from kgen.verdict import Outcome, Reason

GPU = "cuda:0"
EVERY = frozenset(range(10))


def sum_program(b: Builder, mutated: bool = False, more=(), launches: int = cudagraph.FEWEST) -> Program:
    """x + y, or x += y, that many times."""
    x, y, out = b.slot((1000,)), b.slot((1000,)), b.slot((1000,))
    grid = b.regs((4, 1, 1))
    code = [Alias(out, x) if mutated else Alloc(out), *[Launch(0, (x, y, out), (b.reg(1000),), grid)] * launches, *more]
    return b.program([b.input(x, mutated=mutated), b.input(y)], code, [] if mutated else [b.out(out)])


@pytest.fixture
def b() -> Builder:
    return Builder(GPU, ("add",))


def test_a_graph_on_one_gpu_is_recorded(b):
    recording, verdict = decide(sum_program(b), frozenset({1}), "forward")
    assert recording == Recording(0, "forward", static=(1,))
    assert (verdict.outcome, verdict.reason) == (Outcome.RECORDED, Reason.ONE_REPLAY)
    assert str(verdict).startswith("forward graph: recorded as a CUDA graph, because")


def test_static_inputs_may_be_written(b):
    program = sum_program(b, mutated=True)
    assert decide(program, frozenset({0}), "inference")[0] == Recording(0, "inference", (0,), (0,))
    recording, verdict = decide(program, frozenset({1}), "inference")
    assert (recording, verdict.reason) == (Recording(0, "inference", replays=False), Reason.MUTATED_INPUT)
    assert "parameter" in verdict.change


def test_few_launches_are_not_recorded(b):
    program = sum_program(b, launches=cudagraph.FEWEST - 1)
    recording, verdict = decide(program, EVERY, "inference")
    assert (recording, verdict.reason) == (Recording(0, "inference", replays=False), Reason.FEW_LAUNCHES)
    picking = replace(program, code=[*program.code[:1], Pick(0, (), program.code[1:] * 2)])
    assert decide(picking, EVERY, "inference")[1].reason is Reason.FEW_LAUNCHES  # of all these, one runs
    # what a forward saves is in the recorder's memory, or copied at each replay of its backward
    assert [decide(program, EVERY, role)[1].reason for role in ("forward", "backward")] == [Reason.ONE_REPLAY] * 2
    assert decide(sum_program(b, mutated=True, launches=1), frozenset(), "forward")[1].reason is Reason.MUTATED_INPUT


def test_what_needs_the_host_is_not_recorded(b):
    data = b.slot((1000,))
    for step in (
        PythonCall(0, (ArgTensor(0),), (), (data,)),
        BindSize(b.reg(), 0, 0),
        Extern("aten::item", "", (ArgTensor(0),), (), (None,), ((0, b.reg()),)),
    ):
        made = Builder(GPU, ("add",))
        made.registers, made.slots = b.registers, b.slots[:1]
        program = sum_program(b, more=(step,))
        assert decide(program, EVERY, "forward")[1].reason is Reason.HOST_DECIDES


def test_other_devices_and_empty_graphs_are_not_recorded(b):
    program = sum_program(b)
    for device in ("cpu", "cuda:1"):
        b.slot((1,), device=device)
        mixed = sum_program(b)
        assert decide(mixed, EVERY, "forward")[1].reason is Reason.NOT_ONE_GPU
        b.slots.pop()
    assert decide(program, EVERY, "forward")[0] is not None
    cpu = Builder()
    assert decide(sum_program(cpu), EVERY, "forward")[0] is None
    x = (nothing := Builder(GPU)).slot((8,))
    program = nothing.program([nothing.input(x)], [], [nothing.out(x)])
    assert decide(program, EVERY, "forward")[1].reason is Reason.NOTHING_RUNS


@pytest.mark.cpu
def test_the_mode_says_so_and_changes_nothing_on_the_cpu():
    with kgen.config.override(mode="reduce-overhead"):
        found = kgen.explain(lambda x: x + 1, torch.ones(4), print_report=False)
    [verdict] = [v for v in found.verdicts if v.outcome is Outcome.NOT_RECORDED]
    assert str(verdict) == "inference graph: not recorded as a CUDA graph, because it does not run on one GPU alone"


@pytest.mark.gpu
def test_replays_give_what_calls_would(b):
    graph = HostGraph(Blueprint([], sum_program(b), launches=[tk.add()], recording=Recording(0, "inference", (1,))))
    fixed = torch.randn(1000, device=GPU)
    for _ in range(6):
        x = torch.randn(1000, device=GPU)
        torch.compiler.cudagraph_mark_step_begin()
        [result] = graph([x, fixed])
        assert torch.equal(result, x + fixed)
    fixed.fill_(3)  # read in place
    torch.compiler.cudagraph_mark_step_begin()
    x = torch.randn(1000, device=GPU)
    assert torch.equal(graph([x, fixed])[0], x + 3)


@pytest.mark.gpu
def test_a_recorded_graph_writes_its_static_inputs(b):
    recording = Recording(0, "inference", (0,), (0,))
    graph = HostGraph(Blueprint([], sum_program(b, mutated=True, launches=1), launches=[tk.add()], recording=recording))
    total, expected = torch.zeros(1000, device=GPU), torch.zeros(1000, device=GPU)
    for _ in range(6):
        step = torch.randn(1000, device=GPU)
        expected += step
        torch.compiler.cudagraph_mark_step_begin()
        graph([total, step])
        assert torch.equal(total, expected)


@pytest.mark.gpu
def test_forward_and_backward_take_turns(b):
    forward = HostGraph(Blueprint([], sum_program(b), launches=[tk.add()], recording=Recording(0, "forward")))
    second = Builder(GPU, ("add",))
    for replays in (True, False):
        recording = Recording(0, "backward", replays=replays)
        backward = HostGraph(Blueprint([], sum_program(second), launches=[tk.add()], recording=recording))
        for _ in range(5):
            x, y = torch.randn(1000, device=GPU), torch.randn(1000, device=GPU)
            torch.compiler.cudagraph_mark_step_begin()
            [saved] = forward([x, y])
            [result] = backward([saved, y])
            assert torch.equal(result, x + y + y)
        second = Builder(GPU, ("add",))
