"""Names in the user's modules: of inputs and of operators, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import ParamAOTInput, PlainAOTInput, SubclassGetAttrAOTInput

from kgen.capture.operators import Paths, call_of, name_calls, origin_of, paths_in, paths_of
from kgen.verdict import FusionDemand


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Mlp(), nn.Linear(8, 4)) for _ in range(2))
        self.register_buffer("scale", torch.ones(4))
        self.extra = [torch.ones(4), torch.zeros(4)]

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + more["bias"] + self.extra[1]


def graphs(fn: Any, *args: Any) -> dict[str, tuple[dict[str, str], Any]]:
    """By role: the paths by names of nodes, and the aten graph."""
    found = {}

    def backend(gm: Any, example: Any) -> Any:
        paths = paths_of(gm)

        def keep(role: str) -> Any:
            def compiled(aten: Any, _: Any) -> Any:
                found[role] = paths_in(aten, paths), aten
                return aten

            return compiled

        return aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))(gm, example)

    result = torch.compile(fn, backend=backend, fullgraph=True)(*args)
    if result.requires_grad:
        result.sum().backward()
    return found


@pytest.fixture(scope="module")
def net() -> dict[str, tuple[dict[str, str], Any]]:
    return graphs(Net(), torch.randn(2, 4), {"bias": torch.ones(4)})


def inputs(paths: dict[str, str], gm: Any) -> set[str]:
    return {paths.get(node.name, "") for node in gm.graph.find_nodes(op="placeholder")}


def test_inputs_are_called_as_in_the_module(net: Any) -> None:
    named = inputs(*net["forward"])
    parameters = {f"layers.{k}.{one}" for k in range(2) for one in ("0.up.weight", "0.up.bias", "1.weight", "1.bias")}
    assert parameters | {"scale", "extra.1", "x", "more.bias"} == named


def test_operators_have_the_innermost_module(net: Any) -> None:
    paths, gm = net["forward"]
    found = [paths[n.name] for n in gm.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert found == ["layers.0.0.up", "layers.0.1", "layers.1.0.up", "layers.1.1"]
    assert [paths[n.name] for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default] == ["layers.0.0", "layers.1.0"]


def test_backward_has_the_modules_of_what_it_is_the_gradient_of(net: Any) -> None:
    paths, gm = net["backward"]
    found = [paths[n.name] for n in gm.graph.nodes if n.target is torch.ops.aten.gelu_backward.default]
    assert found == ["layers.1.0", "layers.0.0"]
    assert {"scale", "x"} <= inputs(paths, gm)


def test_two_models_in_one_graph_are_told_apart() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    paths, gm = graphs(lambda x: one(other(x)), torch.randn(2, 4))["forward"]
    assert {"one.weight", "one.bias", "other.weight", "other.bias", "x"} == inputs(paths, gm)


def test_a_function_of_tensors_has_names_of_arguments_alone() -> None:
    paths, gm = graphs(lambda x, y: x + y, torch.randn(2), torch.randn(2))["forward"]
    assert inputs(paths, gm) == {"x", "y"}
    assert set(paths.values()) == {"x", "y"}


def test_tensors_that_the_graph_holds_and_parts_of_subclasses() -> None:
    gm = torch.fx.symbolic_trace(lambda a, b, c: (a, b, c))
    a, b, c = gm.graph.find_nodes(op="placeholder")
    a.meta["desc"] = ParamAOTInput("head.weight")
    b.meta["desc"] = SubclassGetAttrAOTInput(PlainAOTInput(0), "values")
    c.meta["desc"] = PlainAOTInput(7)  # of no graph that Dynamo made
    assert paths_in(gm, Paths(("x",))) == {"a": "head.weight", "b": "x"}


def test_a_size_has_no_path() -> None:
    source = SimpleNamespace(base=None, name="s0")
    gm = torch.fx.symbolic_trace(lambda a: a)
    gm.graph.find_nodes(op="placeholder")[0].meta["grapharg"] = SimpleNamespace(source=source)
    assert paths_of(gm) == Paths(("",))


def test_calls_are_counted_by_operator(net: Any) -> None:
    paths, gm = net["forward"]
    name_calls(gm, paths)
    calls = [call_of(n) for n in gm.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert [str(call) for call in calls] == [
        "aten.addmm#0 in layers.0.0.up",
        "aten.addmm#1 in layers.0.1",
        "aten.addmm#2 in layers.1.0.up",
        "aten.addmm#3 in layers.1.1",
    ]
    assert origin_of(next(n for n in gm.graph.nodes if n.op == "call_function")).modules


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("aten.addmm", 4), ("aten.addmm.default", 4), ("aten.addmm#3", 1), ("aten.addmm@layers.0", 2),
        ("aten.addmm@layers.0.0.up", 1), ("aten.addmm@layers.0.0.u", 0), ("aten.addmm#4", 0), ("@layers.0.0.up", 2),
        ("aten.addmm@test_paths.py:0", 0),
    ],
)  # fmt: skip
def test_what_a_name_names(net: Any, name: str, count: int) -> None:
    paths, gm = net["forward"]
    name_calls(gm, paths)
    demand = FusionDemand(name, "aten.gelu", wanted=True)
    calls = [call_of(n) for n in gm.graph.nodes if n.op == "call_function"]
    assert sum(demand.first.names(call) for call in calls if call.packet == "aten.addmm" or name[0] == "@") >= count
    assert demand.first.among(calls) == (count > 0)


def test_a_line_names_the_calls_on_it(net: Any) -> None:
    paths, gm = net["forward"]
    name_calls(gm, paths)
    gelu = next(call_of(n) for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default)
    place = gelu.line.partition(" ")[0]
    assert place.startswith("test_paths.py:")
    assert FusionDemand(f"aten.gelu@{place}", "aten.mm", wanted=True).first.names(gelu)
    assert not FusionDemand(f"aten.gelu@{place}0", "aten.mm", wanted=True).first.names(gelu)
