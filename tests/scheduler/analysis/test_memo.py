"""What is known about one object is not taken for what is known about another one, or about something else of it."""

from __future__ import annotations

import pytest
import torch

from kgen.device import Device, Gpu
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel
from kgen.scheduler import Options
from kgen.scheduler.analysis.memo import memoised_for, memoising
from kgen.scheduler.kernels.steps import distinct_names
from kgen.scheduler.protocol import Candidate, Decisions, Draft
from kgen.scheduler.transforms.operand_padding import OPERAND_LAYOUT
from kgen.scheduler.transforms.template_kernels import Offer, Prologues
from tests.op_case import lowered

pytestmark = pytest.mark.none

OPTIONS = Options(cpu=Device("cpu", isa="avx512"))


def test_an_object_has_one_memo_for_each_question() -> None:
    one, other = [1], [1]
    with memoising():
        assert memoised_for(one, ("named", "a"), lambda: "a") == "a"
        assert memoised_for(one, ("named", "b"), lambda: "b") == "b"
        assert memoised_for(one, ("named", "a"), lambda: "never") == "a"
        assert memoised_for(other, ("named", "a"), lambda: "of the other") == "of the other"
        assert memoised_for(one, ("named", "a"), lambda: "beside", other) == "beside"
    assert memoised_for(one, ("named", "a"), lambda: "outside") == "outside"


def test_kernels_keep_their_numbers_and_are_the_same_objects() -> None:
    kernels = [Kernel(name, (), (), 1, ()) for name in ("a", "a_2", "a", "b", "a", "a_2")]
    with memoising():
        first, second = distinct_names([*kernels]), distinct_names([*kernels])
        assert [one.name for one in first if isinstance(one, Kernel)] == ["a", "a_2", "a_3", "b", "a_4", "a_2_2"]
        assert all(one is two for one, two in zip(first, second, strict=True))
        [alone] = distinct_names(kernels[2:3])
        assert alone is kernels[2]


def offered(graph: ir.Graph, decisions: Decisions) -> ir.Contraction:
    draft = Draft(graph, graph, graph.nodes, OPTIONS, decisions, {})
    Offer().apply(draft)
    Prologues().apply(draft)
    [found] = [node for node in draft.nodes if ir.is_contraction(node)]
    return found


def test_contractions_are_one_object_for_each_way_to_read_operands() -> None:
    graph = lowered(lambda x, w: torch.relu(x + 1) @ w, [torch.randn(64, 64), torch.randn(64, 64)])
    [matmul] = [node for node in graph.nodes if ir.is_contraction(node)]
    refused = Decisions(settings={Candidate(OPERAND_LAYOUT, matmul.out): "left"})
    with memoising():
        computed, again = (offered(graph, Decisions()) for _ in range(2))
        read = offered(graph, refused)
        assert computed is again
        assert read is not computed
        assert read is offered(graph, refused)
    assert computed == offered(graph, Decisions())
    assert read == offered(graph, refused)


def test_devices_are_known_by_options() -> None:
    graph = lowered(lambda x: x + 1, [torch.randn(8)])
    [name] = ir.outs(graph.nodes[0])
    assert OPTIONS.device(graph, name) is OPTIONS.device(graph, name) is OPTIONS.cpu
    assert Options(gpu=Gpu(), gpu_everywhere=True).device(graph, name).kind == "cuda"
    assert Options(cpu=Device("cpu", isa="avx512")) == OPTIONS
