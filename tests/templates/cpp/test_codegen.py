"""The op tables through the C++ back end: built in batches, one test a batch, each failure named by its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import Row, doubled, elementwise_rows, indexing_rows, laid_out, near, plain_agreement, possible, report, run_rows

from kgen.build import toolchain

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::UserWarning")]

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
# Every operator in every dtype, on the sample with special numbers. In these two, on one of several vectors and a rest as well:
# loads, stores and rests of vectors of the other dtypes are in test_cpp_vector.py, the samples left in `test_every_sample`.
BOTH_SAMPLES = (torch.float32, torch.int64)
# Indexing moves elements, so these stand for the others. The rest is slow.
MOVED = (torch.float32, torch.bool)
# All operators in the first of these, and a batch in each other one. Each operation in each type is in test_cpp_vector.py.
COMPUTED = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def _elementwise(dtypes: Sequence[torch.dtype]) -> list[Row]:
    return [row for d in dtypes for row in elementwise_rows([d], last_sample=d not in BOTH_SAMPLES)]


TABLES: dict[str, Callable[..., list[Row]]] = {"elementwise": elementwise_rows, "indexing": indexing_rows}
FEWER = TABLES | {"elementwise": _elementwise}
# Batches a table and dtype: enough that two workers finish together, few enough that units are well filled.
SHARDS = {("elementwise", d): 3 if d.is_floating_point else 2 for d in DTYPES} | {("elementwise", torch.float32): 6}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(rows: Sequence[Row], part: int = 0, parts: int = 1) -> None:
    chosen = list(rows)[part::parts]
    failures = run_rows(chosen)
    assert not failures, f"{len(failures)} of {len(chosen)} rows fail\n{report(failures)}"


def _marks(name: str, dtype: torch.dtype, part: int) -> tuple[pytest.MarkDecorator, ...]:
    told = MOVED if name == "indexing" else COMPUTED
    return () if dtype is told[0] or (dtype in told and part == 0) else (pytest.mark.slow,)


def batches(names: Sequence[str] = tuple(TABLES), dtypes: Sequence[torch.dtype] = DTYPES) -> list[Any]:
    return [
        pytest.param(
            name,
            dtype,
            part,
            SHARDS.get((name, dtype), 1),
            id=f"{name}-{_short(dtype)}-{part}",
            marks=_marks(name, dtype, part),
        )
        for dtype in dtypes
        for name in names
        for part in range(SHARDS.get((name, dtype), 1))
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize(("table", "dtype", "part", "parts"), batches())
def test_agrees_with_eager(table: str, dtype: torch.dtype, part: int, parts: int) -> None:
    check(FEWER[table]([dtype]), part, parts)


# ---- what the tables' small inputs do not reach: several threads, blocks, split and stored rows -------------------------


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _ints(top: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(7))


def _scatter_rows(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, i, v)


def _row_writes(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for k in range(5):
        x[k * 7] = v[k]
    return x[3:9] * 2


LARGE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "chain": (lambda x: ((x * 2 + 1).tanh() * x, x.exp()), (_rand(300, 700),)),
    "chain_odd": (lambda x, y: (x * y).relu() - y, (_rand(257, 1031), _rand(1031))),
    "bool_mask": (lambda x, m: x.masked_fill(m, 0).abs(), (_rand(301, 517), _rand(301, 517) > 0)),
    "transposed_add": (lambda x, y: x + y.t(), (_rand(300, 500), _rand(500, 300))),
    "transposed_bfloat16": (lambda x, y: x + y.t(), (_rand(300, 500, dtype=torch.bfloat16), _rand(500, 300))),
    "sum_all": (lambda x: (x.sum(), x.amax(), x.mean()), (_rand(1000, 1001),)),
    "sum_all_bfloat16": (lambda x: x.sum(), (_rand(1000, 1001, dtype=torch.bfloat16),)),
    "sum_all_integers": (lambda x: (x.sum(), x.argmax()), (_ints(1 << 40, 700_001),)),
    "sum_of_bool": (lambda x: ((x > 0).sum(), (x > 9).any(), (x < 9).all()), (_rand(400_003),)),
    "sum_columns": (lambda x: x.sum(0), (_rand(5000, 37),)),
    "sum_columns_wide": (lambda x: (x.sum(0), x.amax(0)), (_rand(300, 3001),)),
    "sum_middle": (lambda x: x.sum(1), (_rand(30, 200, 33),)),
    "sum_ends": (lambda x: x.sum((0, 2)), (_rand(30, 64, 333),)),
    "var_long": (lambda x: torch.var_mean(x, -1), (_rand(3, 70_000) + 10,)),
    "var_columns": (lambda x: torch.var_mean(x, 0), (_rand(3000, 65) + 10,)),
    "arg_long": (lambda x: (x.argmax(), x.argmin(-1), *x.max(0)), (_rand(3, 50_021),)),
    "softmax": (lambda x: x.softmax(-1), (_rand(200, 1003),)),
    "softmax_long": (lambda x: x.softmax(-1), (_rand(2, 60_001),)),
    "softmax_columns": (lambda x: x.softmax(0), (_rand(1003, 77),)),
    "log_softmax_bfloat16": (lambda x: x.log_softmax(-1), (_rand(64, 2051, dtype=torch.bfloat16),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1001,), w, b), (_rand(333, 1001), _rand(1001), _rand(1001))),
    "layer_norm_gelu": (lambda x, w: F.layer_norm(F.gelu(x), (40_000,), w), (_rand(3, 40_000), _rand(40_000))),
    "group_norm": (lambda x: F.group_norm(x, 4), (_rand(8, 8, 31, 33),)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (_rand(16, 24, 17, 19),)),
    "cross_entropy": (F.cross_entropy, (_rand(333, 1009), _ints(1009, 333))),
    "cumsum": (lambda x: x.cumsum(-1), (_rand(70, 3001),)),
    "cumsum_columns": (lambda x: x.cumsum(0), (_rand(3001, 70),)),
    "cummax": (lambda x: tuple(x.cummax(-1)), (_rand(70, 3001),)),
    "gather_rows": (lambda x, i: x[i] * 2, (_rand(1000, 65), _ints(1000, 3000))),
    "gather_columns": (lambda x, i: x.gather(1, i), (_rand(400, 300), _ints(300, 400, 500))),
    "scatter_rows": (_scatter_rows, (_rand(100, 65), _ints(100, 5000), _rand(5000, 65))),
    "embedding_mean": (lambda w, i: F.embedding(i, w).mean(1), (_rand(1000, 129), _ints(1000, 64, 50))),
    "row_writes": (_row_writes, (_rand(200, 1000), _rand(5, 1000))),
    "concat": (lambda x, y: torch.cat([x.relu(), y * 2, x], 1), (_rand(300, 401), _rand(300, 77))),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (_rand(4, 8, 63, 65),)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), (_rand(4, 8, 64, 66),)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (_rand(2, 8, 33, 31),)),
    "flip_roll": (lambda x: x.flip(1).roll(5, 0) + x, (_rand(300, 513),)),
    "through_matmul": (lambda x, w: (x.relu() @ w).softmax(-1) + 1, (_rand(130, 60), _rand(60, 250))),
}


@pytest.mark.parametrize("part", range(2))
def test_large(part: int) -> None:
    calls = frozenset({"mm"})
    check([Row(name, fn, [args], near(fn), calls) for name, (fn, args) in LARGE.items()], part, 2)


# ---- every sample, symbolic sizes, layouts, other instruction sets: too long for `make test` ----------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int8, torch.int16], ids=_short)
def test_every_sample(dtype: torch.dtype, part: int) -> None:
    check(elementwise_rows([dtype], every_sample=True), part, 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("how", ["stepped", "offset", "turned", "misaligned"])
def test_layouts(how: str, part: int) -> None:
    """The tables on views: every second element, an odd offset, dimensions in reverse, an address of no alignment. What asks
    for a layout of its own means something else there."""
    rows = [*elementwise_rows([torch.float32, torch.bfloat16]), *indexing_rows([torch.float32, torch.bool])]
    rows = [row for row in rows if not row.name.startswith("as_strided")]
    check([moved for row in rows if possible(moved := laid_out(row, how))], part, 6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_symbolic_sizes(part: int) -> None:
    """One graph for two sizes. The rows' own constants may fix a size: then the second size is refused, never wrong."""
    check([doubled(row) for row in elementwise_rows([torch.float32, torch.int64])], part, 6)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "generic"])
@pytest.mark.parametrize(("table", "dtype", "part", "parts"), batches(dtypes=(torch.float32, torch.bfloat16, torch.int64)))
def test_other_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, isa: str, table: str, dtype: torch.dtype, part: int, parts: int
) -> None:
    monkeypatch.setenv("KGEN_ISA", isa)
    if toolchain.isa().name != isa:
        pytest.skip(f"this machine has no {isa}")
    check(TABLES[table]([dtype]), part, parts)


# ---- the harness itself ---------------------------------------------------------------------------------------------


def test_a_failure_is_that_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row does not compile, one computes something else, one raises while tracing; the fourth is well."""
    from kgen.templates.cpp.codegen import table

    monkeypatch.setitem(table.CPP_OPS, "erfc", "no_such_function_({0})")
    x = _rand(10)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no graph")

    def disagrees(args: Sequence[Any], got: Any, want: Any) -> None:
        raise AssertionError("differs")

    rows = [
        Row("compile", torch.erfc, [(x,)], plain_agreement(torch.erfc)),
        Row("trace", broken, [(x,)], plain_agreement(broken)),
        Row("result", torch.exp, [(x,)], disagrees),
        Row("call", torch.sort, [(_rand(24),)], plain_agreement(torch.sort)),
        Row("well", torch.sin, [(x,)], plain_agreement(torch.sin)),
    ]
    failures = run_rows(rows)
    assert set(failures) == {"compile", "trace", "result", "call"}
    assert "no_such_function_" in failures["compile"]
    assert "no graph" in failures["trace"]
    assert "aten.sort" in failures["call"]
