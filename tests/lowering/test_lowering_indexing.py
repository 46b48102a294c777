"""Views, indexing, scatter, concatenation and pooling: every case of the table against eager, through the evaluator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_case import Case, capture, check, tensor
from op_table_indexing import CASES

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.verify import verify
from kgen.lowering import LoweringContext, lower
from kgen.reference.evaluate import evaluate_graph

# Indexing moves elements: the first types of each operator stand for the others.
MOVED = 2
ROWS = [
    pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}", marks=() if number < MOVED else pytest.mark.slow)
    for cases in CASES.values()
    for case in cases
    for number, dtype in enumerate(case.dtypes)
]
SYMBOLIC = [pytest.param(case, id=case.name) for cases in CASES.values() for case in cases if case.symbolic]


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_static(case: Case, dtype: torch.dtype) -> None:
    check(case.fn, case.make_inputs(dtype), "fake", case.externs)


@pytest.mark.parametrize("case", SYMBOLIC)
def test_symbolic(case: Case) -> None:
    check(case.fn, case.make_inputs(case.dtypes[0]), "symbolic", case.externs)


CONVOLUTIONS = [
    pytest.param((2, 4, 9), (6, 4, 3), {"padding": 1}, id="1d"),
    pytest.param((2, 4, 7, 8), (6, 4, 3, 2), {"stride": 2, "padding": (1, 0)}, id="2d"),
    pytest.param((2, 4, 7, 8), (6, 2, 3, 3), {"groups": 2, "dilation": 2, "padding": 2}, id="groups"),
    pytest.param((2, 4, 7, 8), (4, 1, 3, 3), {"groups": 4, "padding": 1}, id="depthwise"),
    pytest.param((1, 2, 5, 4, 6), (3, 2, 2, 2, 2), {}, id="3d"),
]


@pytest.mark.parametrize(("shape", "weight", "options"), CONVOLUTIONS)
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_convolution_is_a_contraction(
    shape: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any], tracing: str
) -> None:
    call = [F.conv1d, F.conv2d, F.conv3d][len(shape) - 3]
    inputs = [tensor(torch.float64, *shape), tensor(torch.float64, *weight)]
    graph = check(lambda x, w: call(x.relu(), w, **options), inputs, tracing)
    assert [type(n) for n in graph.nodes if isinstance(n, ir.Contraction | ir.Extern)] == [ir.Contraction]


def test_a_result_whose_strides_tracing_gets_wrong_has_all_its_elements() -> None:
    """Torch 2.11 says that what a slice was written into has the strides of the expanded tensor that it was made of."""

    def fn(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return x.expand(4, 3).slice_scatter(part, 0, 2, 3)

    inputs = tensor(torch.float32, 1, 3), tensor(torch.float32, 1, 3) + 1
    gm = capture(fn, inputs)
    (made,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice_scatter.default)
    with made.meta["val"].fake_mode:
        made.meta["val"] = torch.empty_strided((4, 3), (0, 1))
    (got,) = evaluate_graph(verify(lower(gm, LoweringContext()), "lower"), inputs)
    torch.testing.assert_close(got, fn(*inputs), rtol=0, atol=0)


def test_resampling_by_a_whole_factor_is_affine() -> None:
    graph = check(lambda x: F.interpolate(x, scale_factor=2), [tensor(torch.float32, 1, 2, 5, 6)])
    atoms = {a for n in graph.nodes for root in ir.roots(n) for a in root.free_atoms()}
    assert not any(isinstance(a, ix.Indirect) for a in atoms)


@pytest.mark.parametrize("columns", [[2, 1, 0], [0, 3], [1, 1, 1], [-4, -2], [0, 2, 3], [3, -4, 1, 0, 0, 0, 2, 1]], ids=str)
def test_lists_of_a_few_evenly_spaced_runs_are_arithmetic(columns: list[int]) -> None:
    """As where colours change their order, or corners are taken apart: no data say what is read."""
    graph = check(lambda x: x[:, columns] * 2, [tensor(torch.float32, 3, 4)])
    assert not graph.constants
    assert [type(n) for n in graph.nodes] == [ir.Pointwise]


def test_other_lists_are_data() -> None:
    assert check(lambda x: x[:, [0, 2, 3, 1, 1, 3, 0, 2, 1, 0]] * 2, [tensor(torch.float32, 3, 4)]).constants


def test_elements_at_a_list_are_read_without_it() -> None:
    """What picks elements and reduces them reads the elements where they are."""
    graph = check(lambda x: x[..., [1, 2, 5, 6]].amin(-1) - x[..., [0, 3, 4, 7]].amin(-1), [tensor(torch.float32, 3, 8)])
    positions = {e for n in graph.nodes for root in ir.roots(n) for load in vs.loads([root]) for e in load.attr[1]}
    assert not any(ix.indirects(e) for e in positions)


def test_cat_of_few_is_one_value() -> None:
    graph = check(lambda x, y: torch.cat([x, y, x]).relu() * 2, [tensor(torch.float32, 3, 4), tensor(torch.float32, 2, 4)])
    assert [type(n) for n in graph.nodes] == [ir.Pointwise]
