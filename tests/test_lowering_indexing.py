"""Views, indexing, scatter, concatenation and pooling: every case of the table against eager, through the evaluator."""

from __future__ import annotations

import pytest
import torch
from op_case import Case, check
from op_table_indexing import CASES

ROWS = [pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}") for cases in CASES.values() for case in cases for dtype in case.dtypes]
SYMBOLIC = [pytest.param(case, id=case.name) for cases in CASES.values() for case in cases if case.symbolic]


@pytest.mark.parametrize("case,dtype", ROWS)
def test_static(case: Case, dtype: torch.dtype) -> None:
    check(case.fn, case.make_inputs(dtype), "fake", case.externs)


@pytest.mark.parametrize("case", SYMBOLIC)
def test_symbolic(case: Case) -> None:
    check(case.fn, case.make_inputs(case.dtypes[0]), "symbolic", case.externs)
