"""GPU kernels in the host program of a schedule: launches with computed grids, what they demand of memory, the interpreter."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import launch_kernels as tk
import pytest
import torch
from codegen import plan_of
from op_case import capture
from stub_driver import compiled

from kgen.capture import torch_adapter
from kgen.capture.aot_cache import NotSerializable
from kgen.errors import KernelTooLarge, MixedCapabilities
from kgen.host import launch, native
from kgen.host import program as hp
from kgen.host.assemble import Assembled, assemble
from kgen.host.compiled import Blueprint, HostGraph, _load_launches
from kgen.ir import index as ix
from kgen.ir.plan import Schedule
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Options

pytestmark = pytest.mark.cpu


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def plan(fn: Any, *args: Any, dynamic: bool = False) -> Schedule:
    return plan_of(capture(fn, args, "symbolic" if dynamic else "fake"))


def calls(made: Schedule, kernel: Any = None) -> dict[str, KernelCall]:
    """Each kernel of the schedule is the addition of two inputs, for blocks of 256."""
    found = {}
    inputs = tuple(item.buffer for item in made.graph.inputs if item.buffer is not None)
    for step in made.kernels:
        [out] = {name for s in step.statements for name in s.outs}
        [size] = made.graph.buffers[inputs[0]].sizes
        symbols = tuple(a.name for a in ix.free_atoms(size))
        grid = (ix.floordiv(size + 255, 256), ix.ONE, ix.ONE)
        found[step.name] = KernelCall("", (*inputs[:2], out), symbols, grid, kernel or tk.add())
    return found


def launches(made: Assembled) -> list[hp.Launch]:
    return [item for item in made.program.code if isinstance(item, hp.Launch)]


def test_the_grid_follows_the_sizes(stub):
    made_plan = plan(add, torch.randn(7), torch.randn(7), dynamic=True)
    made = assemble(made_plan, calls(made_plan))
    assert made.launches == [tk.add()]
    assert made.program.launches == ("add",)
    kernel = launch.load_kernel(compiled("add", tk.add().signature, divisible=tk.add().divisible), [])
    run = native.load(pickle.loads(pickle.dumps(made.program)), launches=[kernel])
    for count, programs in ((7, 1), (256, 1), (257, 2), (0, 0)):
        x, y = torch.randn(count), torch.randn(count)
        before = stub["launches"]
        assert torch.equal(run([x, y])[0], x + y)
        assert stub["launches"] - before == min(programs, 1)
        if programs:
            assert stub.list("config", 3) == [programs, 1, 1]
    odd = torch.randn(9)[1:]
    assert torch.equal(run([odd, odd])[0], 2 * odd)


def test_equal_kernels_are_launched_as_one():
    def separate(*xs):
        return [x + 1 for x in xs]

    traced = capture(separate, tuple(torch.randn(8 + k) for k in range(4)), "fake")
    made_plan = plan_of(traced, options=Options(fusion=False))  # or they would be one batch
    named = {}
    for k, (step, item) in enumerate(zip(made_plan.kernels, made_plan.graph.inputs, strict=True)):
        [out] = {name for s in step.statements for name in s.outs}
        kernel = replace(tk.add("i32"), source=f"# layer {k}\n{tk.add().source}", num_warps=4 if k < 2 else 8)
        named[step.name] = KernelCall("", (item.buffer, item.buffer, out), (), (ix.ONE,) * 3, kernel)
    made = assemble(made_plan, named)
    assert [kernel.num_warps for kernel in made.launches] == [4, 8]
    assert [item.index for item in launches(made)] == [0, 0, 1, 1]


def test_what_kernels_demand_of_inputs():
    made_plan = plan(add_in_place, torch.randn(8), torch.randn(8))
    [step] = made_plan.kernels
    buffers = ("x_1", "y_1", "x_1_v1")

    def flags(*divisible: bool) -> list[tuple[bool, bool]]:
        kernel = tk.add(divisible=(*divisible, False))
        made = assemble(made_plan, {step.name: KernelCall("", buffers, (), (ix.ONE,) * 3, kernel)})
        return [(item.aligned, item.mutated) for item in made.program.inputs]

    assert flags(True, True, True) == [(True, True), (True, False)]
    assert flags(False, False, True) == [(True, True), (False, False)]
    assert flags(False, True, False) == [(False, True), (True, False)]


def test_constants_and_results_of_calls_lie_where_kernels_need_them():
    def f(x):
        return torch.sort(x)[0] + torch.tensor([float(k * k % 7) for k in range(24)])

    made_plan = plan(f, torch.randn(24))
    [step] = made_plan.kernels
    [constant] = made_plan.graph.constants
    table = made_plan.graph.constants[constant] = torch.randn(25)[1:]
    [call] = made_plan.calls
    buffers = (call.node.outs[0], constant, next(o for s in step.statements for o in s.outs))
    made = assemble(made_plan, {step.name: KernelCall("", buffers, (), (ix.ONE,) * 3, tk.add())})
    [given] = made.constants
    assert given.data_ptr() % 16 == 0
    assert torch.equal(given, table)
    extern = next(item for item in made.program.code if isinstance(item, hp.Extern))
    assert extern.aligned == (extern.outs[0],)


def test_inputs_die_after_the_last_launch_that_reads_them():
    made_plan = plan(add, torch.randn(8), torch.randn(8))
    program = assemble(made_plan, calls(made_plan)).program
    kinds = [type(item) for item in native.with_frees(program)]
    assert kinds == [hp.Alloc, hp.Launch, hp.Free, hp.Free]


@pytest.mark.interpret
def test_interpreted_kernels_give_the_same_results():
    made_plan = plan(add, torch.randn(7), torch.randn(7), dynamic=True)
    made = assemble(made_plan, calls(made_plan), interpret=True)
    assert made.launches == []
    graph = HostGraph(Blueprint([], made.program, made.constants), (), made.callables)
    for count in (7, 300, 0):
        x, y = torch.randn(count), torch.randn(count)
        assert torch.equal(graph([x, y])[0], x + y)
    with pytest.raises(NotSerializable):
        graph.serialize()


def test_kernels_are_compiled_for_the_device_and_loaded_there(stub, monkeypatch):
    b = hp.SlotSpec(torch.float32, (), (), 0, "cuda:1")
    x = hp.InputTensor(0, torch.float32, (), ())
    program = hp.Program((x,), (0, 1), (b,), (hp.Launch(0, (0, 0, 0), (1,), (1, 1, 1)),), (), launches=("add",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (8, 0), 1: (9, 0)}[device])
    asked = []

    def compile_kernels(kernels, arch):
        asked.append((list(kernels), arch))
        return [compiled("add", kernel.signature) for kernel in kernels]

    monkeypatch.setattr("kgen.build.triton.compile_kernels", compile_kernels)
    monkeypatch.setattr(torch_adapter, "gpu_facts", lambda device: {"shared": 232_448})
    blueprint = Blueprint([], program, launches=[tk.add()])
    [kernel] = _load_launches(pickle.loads(pickle.dumps(blueprint)))
    assert asked == [([tk.add()], 90)]
    assert (kernel.pointers, kernel.integers, stub["loads"]) == (3, 1, 1)
    on_both = replace(program, slots=(b, replace(b, device="cuda:0")), code=(*program.code, hp.Launch(0, (1,), (), (1, 1, 1))))
    with pytest.raises(MixedCapabilities, match=r"cuda:0 is 8.0, cuda:1 is 9.0"):
        _load_launches(Blueprint([], on_both, launches=[tk.add()]))
    monkeypatch.setattr(torch_adapter, "gpu_facts", lambda device: {"shared": -1})
    with pytest.raises(KernelTooLarge, match="-1 on cuda:1"):
        _load_launches(blueprint)
