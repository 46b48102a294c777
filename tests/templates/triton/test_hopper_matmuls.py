"""Matmuls whose operands come by TMA: layouts, batches, what falls back to pointers, parts of tiles."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton as triton_package
from matmuls import compiled, error, forced
from slow import slow_but
from torch import Tensor

from kgen.build import triton
from kgen.device import Device
from kgen.host.launch import _format
from kgen.only import only
from kgen.rendered.tensor_map import MapFormat, is_rounded
from kgen.templates.contract import Config

h, bf = torch.float16, torch.bfloat16
TEMPLATES = ("triton_matmul_persistent", "triton_matmul_tiles")


def r(*shape: int, dtype: torch.dtype = h) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def heads(x: Tensor, y: Tensor) -> Tensor:
    """A batch of two dimensions, neither of which is contiguous with the other."""
    return x.transpose(1, 2) @ y.transpose(1, 2)


# What is computed, from what, and how much of it comes by TMA.
CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor], int]] = {
    "rows_by_rows": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        [r(200, 96, dtype=bf), r(264, 96, dtype=bf), r(264, dtype=bf)],
        2,
    ),
    "rows_by_columns": (lambda x, w, y: x @ w + y, [r(200, 96), r(96, 264), r(200, 264)], 3),
    "columns_by_columns": (lambda x, w: torch.relu(x.t() @ w) ** 2, [r(96, 200), r(96, 264)], 2),
    "columns_by_rows": (lambda x, w: x.t() @ w.t(), [r(96, 200), r(264, 96)], 2),
    "batch": (lambda x, w: torch.bmm(x, w) * 2, [r(3, 72, 40), r(3, 40, 136)], 2),
    "batch_of_one_operand": (lambda x, w: torch.bmm(x, w.expand(3, 40, 136)), [r(3, 72, 40), r(40, 136)], 2),
    "heads": (heads, [r(2, 72, 3, 40), r(2, 40, 3, 136)], 2),
    "transposed_result": (lambda x, w: (x @ w).t().contiguous(), [r(72, 40), r(40, 136)], 2),
    "part_of_a_tensor": (lambda x, w: x[8:, 16:] @ w[:, 8:80], [r(72, 56), r(40, 136)], 2),
    "misaligned_part": (lambda x, w: x[:, 3:] @ w, [r(72, 43), r(40, 136)], 1),
    "odd_rows": (lambda x, w: x @ w.t(), [r(72, 40), r(133, 40)], 2),
    "odd_columns": (lambda x, w: x @ w, [r(72, 40), r(40, 133)], 1),
    "one_row": (lambda x, w: x @ w, [r(1, 40), r(40, 136)], 2),
    "cast": (lambda x, w: x.to(h) @ w, [r(72, 40, dtype=torch.float32), r(40, 136)], 1),
    "gathered": (lambda x, i, w: x[i] @ w, [r(72, 40), torch.arange(71, -1, -1), r(40, 136)], 1),
    "fp32": (lambda x, w: x @ w, [r(72, 40, dtype=torch.float32), r(40, 136, dtype=torch.float32)], 2),
    # TMA stores whole units of 16 bytes: a slice that ends inside of one would lose what its neighbour wrote
    "slices": (lambda x, w, v: torch.cat([x @ w.t(), x @ v.t()], 1), [r(72, 40), r(64, 40), r(88, 40)], 4),
    "slices_that_end_inside_a_unit": (
        lambda x, w, v: torch.cat([x @ w.t(), x @ v.t()], 1),
        [r(72, 40), r(61, 40), r(91, 40)],
        4,
    ),
}

CASES["gate_and_up"] = (lambda x, w, v: F.silu(x @ w) * (x @ v), [r(72, 40), r(40, 136), r(40, 136)], 3)
CASES["row_sums"] = (lambda x, w: (x @ w).float().exp().sum(-1), [r(72, 40) * 0.1, r(40, 136)], 2)
CASES["column_sums"] = (lambda x, w: (x @ w).float().square().sum(0), [r(72, 40), r(40, 136)], 2)
f8, i8 = torch.float8_e4m3fn, torch.int8


def scaled(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch.relu(torch._scaled_mm(x, w.t(), s, t, out_dtype=bf, use_fast_accum=True))


CASES["scaled"] = (scaled, [r(64, 96, dtype=f8), r(80, 96, dtype=f8), torch.tensor(0.5), torch.tensor(0.25)], 2)
CASES["scaled_rows"] = (scaled, [r(64, 96, dtype=f8), r(80, 96, dtype=f8), r(64, 1).abs().float(), r(1, 80).abs().float()], 2)
CASES["integers"] = (lambda x, w: torch._int_mm(x, w) * 3, [r(64, 96).mul(30).to(i8), r(96, 80).mul(30).to(i8)], 2)
CASES["residual_of_a_batch"] = (lambda x, w, y: torch.bmm(x, w) + y, [r(3, 72, 40), r(3, 40, 136), r(3, 72, 136)], 3)
CASES["residual_by_columns"] = (lambda x, w, y: x @ w + y.t(), [r(72, 40), r(40, 136), r(136, 72)], 3)
CASES["masked"] = (lambda x, w, m: (x @ w).masked_fill(m, 2), [r(72, 40), r(40, 144), r(72, 144) > 0], 3)
CASES["masked_batch"] = (lambda x, w, m: torch.bmm(x, w).masked_fill(m, 2), [r(3, 72, 40), r(3, 40, 144), r(72, 144) > 0], 3)
CASES["bytes"] = (lambda x, w, y: x @ w + y, [r(72, 40), r(40, 144), r(72, 144).mul(30).to(i8)], 3)
CASES["misaligned_mask"] = (lambda x, w, m: (x @ w).masked_fill(m, 2), [r(72, 40), r(40, 136), r(72, 136) > 0], 2)
CASES["misaligned_residual"] = (lambda x, w, y: x @ w + y[:, 3:], [r(72, 40), r(40, 136), r(72, 139)], 2)
# Results that are stored by pointers: rows that do not begin at multiples of 16 bytes, integers, and parts of sums.
BY_POINTERS = ("odd_rows", "odd_columns", "slices_that_end_inside_a_unit", "integers", "row_sums", "column_sums")
TELLING = (
    "gate_and_up",
    "residual_of_a_batch",
    "residual_by_columns",
    "transposed_result",
    "row_sums",
    "column_sums",
    "rows_by_rows",
    "columns_by_columns",
    "heads",
    "misaligned_part",
)


def smallest(configs: Sequence[Config]) -> Sequence[Config]:
    """With several tiles even of small matmuls, stored in parts where there is such a configuration."""
    return sorted(configs, key=lambda c: (c.BLOCK_M * c.BLOCK_N, -c.EPILOGUE_SUBTILES))[:1]


@pytest.mark.every(3)
@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("name", "template"), [*((name, TEMPLATES[1]) for name in CASES), *((name, TEMPLATES[0]) for name in TELLING)]
)
def test_agrees_with_eager(name: str, template: str) -> None:
    fn, args, boxed = CASES[name]
    with forced(template, smallest) as made:
        got = compiled(fn, *args)
    assert error(got, fn(*args)) < (4e-3 if got.dtype is bf else 1e-3)
    assert len(made.matmuls) == 1
    assert made.matmuls[0].source.count(".load([") == boxed
    assert (".store([" in made.matmuls[0].source) == (name not in BY_POINTERS)


def rows_of_both(x: Tensor, i: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """One operand's rows and the epilogue's by indices from data."""
    return x[i] @ w + y[i]


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_index_out_of_range_raises(template: str) -> None:
    args = (r(72, 40), torch.arange(71, 0, -1), r(40, 136), r(72, 136))
    with forced(template, smallest):
        assert error(compiled(rows_of_both, *args), rows_of_both(*args)) < 1e-3
    args[1][70] = 72
    with forced(template, smallest), pytest.raises(Exception, match=r"IndexError.*out of range"):
        compiled(rows_of_both, *args)


@pytest.mark.ptx
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_check_does_not_keep_matmuls_from_overlapping(template: str) -> None:
    """An assertion calls a function, and the compiler then waits for each multiplication before the next one."""
    args = (r(512, 512), torch.zeros(512, dtype=torch.int64), r(512, 1024), r(700, 1024))
    with forced(template, lambda configs: [c for c in configs if c.BLOCK_M == c.BLOCK_N == 128][:1], runs=False) as made:
        compiled(lambda x, i, w, y: x @ w + y[i], *args)
    (found,) = triton.compile_kernels(made.matmuls, 90)
    assert found.shared > 0.9 * made.needs[0].shared  # all stages are there
    code = disassembled(found.cubin)
    matmuls = re.findall("HGMMA.*", code)
    assert sum("gsb" in line for line in matmuls) < len(matmuls)  # what is waited for
    assert "TRAP" in code


IN_REGISTERS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "scaled": (lambda x, s, w: (x * s + 1) @ w, [r(512, 520, dtype=bf), r(512, 1, dtype=bf), r(520, 512, dtype=bf)]),
    "cast": (lambda x, w: x.to(bf) @ w, [r(512, 520, dtype=torch.float32), r(520, 512, dtype=bf)]),
    "gathered": (lambda x, i, w: x[i] @ w, [r(512, 520), torch.zeros(512, dtype=torch.int64), r(520, 512)]),
    "integers": (lambda x, s, w: (x * s).to(bf) @ w, [r(512, 520).to(torch.int8), r(520), r(520, 512, dtype=bf)]),
    "turned": (lambda x, w: x.t() @ w, [r(520, 512), r(520, 512)]),
    "misaligned": (lambda x, w: x[:, 1:] @ w, [r(512, 521), r(520, 512)]),
    "tf32": (lambda x, w: x.square() @ w, [r(512, 520, dtype=torch.float32), r(520, 512, dtype=torch.float32)]),
}


@pytest.mark.every(3)
@pytest.mark.ptx
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("template", ["triton_matmul", *TEMPLATES, "triton_matmul_b_resident"])
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("scaled", "tf32"), IN_REGISTERS))
def test_registers_are_kept_until_they_are_multiplied(name: str, template: str) -> None:
    """A multiplication reads its left operand out of registers while the program goes on, and no compiler keeps these."""
    fn, args = IN_REGISTERS[name]
    with forced(template, lambda configs: [c for c in configs if c.BLOCK_M >= 64][:1], runs=False) as made:
        compiled(fn, *args)
    if not made.matmuls:
        return
    (found,) = triton.compile_kernels(made.matmuls, 90)
    code = disassembled(found.cubin)
    assert "HGMMA" in code
    if re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", code):
        assert set(re.findall(r"DEPBAR.LE gsb0, (\w+)", code)) == {"0x0"}


def disassembled(cubin: bytes) -> str:
    tool = Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_configuration(template: str) -> None:
    fn, args, _ = CASES["rows_by_columns"]
    sizes: list[int] = []
    with forced(template, lambda configs: sizes.append(len(configs)) or configs[:1]) as made:
        compiled(fn, *args)
    for k in range(sizes[0]):
        with forced(template, lambda configs, k=k: configs[k : k + 1]) as made:
            assert error(compiled(fn, *args), fn(*args)) < 1e-3, made.configs


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("template", TEMPLATES)
def test_sizes_of_the_call(template: str) -> None:
    """The length of the operands' rows is known, their number is not."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w)

    with forced(template, smallest) as made:
        step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
        for rows in (72, 200, 17):
            x, w = r(rows, 40), r(40, 136)
            torch._dynamo.mark_dynamic(x, 0)
            assert error(step(x, w), fn(x, w)) < 1e-3
    assert {k.source.count(".load([") for k in made.matmuls} == {2}


@pytest.mark.interpret
@pytest.mark.cpu
def test_rows_of_unknown_length_come_by_pointers() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    with forced("triton_matmul_tiles", smallest) as made:
        for inner in (40, 41):
            x, w = r(72, inner), r(inner, 136)
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(w, 0)
            assert error(compiled(fn, x, w), fn(x, w)) < 1e-3
    assert {k.source.count(".load([") for k in made.matmuls} == {1}  # rows of w have a known length


@pytest.mark.interpret
@pytest.mark.cpu
def test_scaled_matmuls_that_stay_the_librarys() -> None:
    """Sums as exact as float32's, 8-bit results, and scales of blocks."""
    x, w, s = r(64, 96, dtype=f8), r(80, 96, dtype=f8), torch.tensor(0.5)

    def exact(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), s, s, out_dtype=bf)

    def narrow(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), s, s, out_dtype=f8, use_fast_accum=True).float()

    for fn in (exact, narrow):
        with forced("triton_matmul") as made:
            assert error(compiled(fn, x, w, s), fn(x, w, s)) == 0
        assert not made.matmuls


# ---- few rows ------------------------------------------------------------------------------------------------------------

FEW: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "row": (lambda x, w, b: F.silu(F.linear(x, w, b)), [r(1, 136), r(72, 136), r(72)]),
    "row_by_columns": (lambda x, w, b: F.silu(x @ w + b), [r(1, 136), r(136, 72), r(72)]),
    "row_of_each": (torch.bmm, [r(3, 1, 136), r(3, 136, 72)]),
    "row_of_fp32": (lambda x, w: x @ w, [r(1, 136, dtype=torch.float32), r(136, 72, dtype=torch.float32)]),
    "row_by_gate_and_up": (lambda x, w, v: F.silu(x @ w) * (x @ v), [r(1, 136), r(136, 72), r(136, 72)]),
    "dequantised": (
        lambda x, w, s: F.linear(x, w.to(h) * s.unsqueeze(1)),
        [r(8, 136), r(72, 136).mul(30).to(torch.int8), r(72).abs() / 30],
    ),
}


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("name", FEW)
def test_few_rows(name: str) -> None:
    fn, args = FEW[name]
    with forced("triton_matmul" if name == "dequantised" else "triton_matvec") as made:
        got = compiled(fn, *args)
    assert error(got, fn(*args)) < 1e-3
    assert len(made.matmuls) == 1


@pytest.mark.interpret
@pytest.mark.cpu
def test_matvec_leaves_other_matmuls_alone() -> None:
    with forced("triton_matvec") as made:
        compiled(lambda x, w: x @ w, r(2, 136), r(136, 72))
    assert not made.matmuls


# ---- compiled for a GPU that is not here ---------------------------------------------------------------------------------

e = torch.empty
SHAPES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "activation": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        [e(4096, 4096, dtype=bf), e(4096, 4096, dtype=bf), e(4096, dtype=bf)],
    ),
    "residual": (lambda x, w, y: x @ w + y, [e(4096, 4096, dtype=bf) for _ in range(3)]),
    "wide": (lambda x, w: F.linear(x, w).float(), [e(4096, 768, dtype=bf), e(5025, 768, dtype=bf)]),
    "computed": (lambda x, w: torch.cat([x, x * 0.5], -1) @ w, [e(4096, 2048), e(4096, 4096)]),
    "turned": (lambda x, w: x @ w, [e(4096, 2048), e(2048, 4096)]),
    "computed_to_float32": (lambda x, w: (x.sigmoid() @ w).float(), [e(4096, 2048, dtype=bf), e(2048, 4096, dtype=bf)]),
    "gradient": (lambda x, w: x.t() @ w, [e(4096, 4096, dtype=bf) for _ in range(2)]),
}


# Which configurations: those that keep an accumulator whole and in parts where it leaves as it is.
PICKED = {"activation": (0, 5, 10), "computed": (0, 9), "turned": (0, 3, 10), "computed_to_float32": (0, 10)}


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize("template", TEMPLATES)
def test_exact_matmuls_of_what_repeats_fit(template: str) -> None:
    """Operands that repeat are read as whole tiles, by pointers, and written to shared memory again."""
    x, w = r(1, 72, dtype=torch.float32).expand(35, 72), r(72, 1, dtype=torch.float32).expand(72, 40)
    for flattened in (True, False):
        with forced(template, lambda c, f=flattened: [x for x in c if x.get("FLATTEN") in (f, None)][-1:], runs=False) as made:
            compiled(torch.mm, x, w)
        (found,) = triton.compile_kernels(made.matmuls, 90)
        assert found.shared <= made.needs[0].shared, made.configs


@pytest.mark.every(3)
@pytest.mark.ptx
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SHAPES)
def test_fits(name: str, template: str) -> None:
    """The compiler needs no more shared memory than was foreseen, and keeps everything in registers."""
    fn, args = SHAPES[name]
    for k in PICKED.get(name, (0,)):
        with forced(template, lambda configs, k=k: configs[k : k + 1], runs=False) as made:
            compiled(fn, *args)
        (found,) = triton.compile_kernels(made.matmuls, 90)
        assert found.shared <= made.needs[0].shared, made.configs
        assert found.stack == 0


def variances(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A batch normalisation's first pass over a 1 x 1 convolution."""
    y = x @ w
    return y, *torch.var_mean(y.float(), 0, correction=0)


@pytest.mark.ptx
@pytest.mark.parametrize("template", TEMPLATES)
def test_folds_of_columns_fit(template: str) -> None:
    """Warps join what they have of a column while stages and stores keep their places."""
    args = r(1568, 512, dtype=bf), r(512, 2048, dtype=bf)
    with forced(template, lambda configs: [c for c in configs if c.WARPS == 4 and c.STAGES > 3][:1], runs=False) as made:
        compiled(variances, *args)
    (found,) = triton.compile_kernels(made.matmuls, 90)
    assert found.shared <= made.needs[0].shared, made.configs


@pytest.mark.parametrize("count", [3, 4])
def test_epilogues_of_many_tiles_get_parts(count: int) -> None:
    """With whole accumulators of 128 a thread there are no registers for five tiles, the stored one included."""
    x, w = r(6272, 256, dtype=bf), r(256, 1024, dtype=bf)

    def scaled(x: Tensor, w: Tensor, *tiles: Tensor) -> Tensor:
        return functools.reduce(torch.mul, tiles, x @ w)

    with forced("triton_matmul_persistent", list, runs=False) as made:
        compiled(scaled, x, w, *[r(6272, 1024 + k, dtype=bf)[:, :1024] for k in range(count)])
    rows = zip(made.configs, made.needs, strict=True)
    whole = {needs.registers > Device("cuda").registers for c, needs in rows if c.WARPS == 4 and c.EPILOGUE_SUBTILES == 1}
    assert whole == {count == 4}


@pytest.mark.ptx
@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_wide_tiles_beside_a_resident_operand_fit(kind: torch.dtype) -> None:
    """What an epilogue reads, as wide as the accumulator or turned over, finds room, or a smaller tile is on offer."""
    x, w, y = r(256, 256), r(256, 256), r(256, 256).to(kind).mT
    with forced("triton_matmul_b_resident", list, runs=False) as made:
        compiled(lambda x, w, y: x @ w + y, x, w, y)
    for config, needs in zip(made.configs, made.needs, strict=True):
        if needs.shared <= 232448:
            with forced("triton_matmul_b_resident", lambda _, config=config: [config], runs=False) as one:
                compiled(lambda x, w, y: x @ w + y, x, w, y)
            (found,) = triton.compile_kernels(one.matmuls, 90)
            assert found.shared <= needs.shared, config


@pytest.mark.ptx
@pytest.mark.parametrize("kind", [f8, i8])
def test_short_sums_of_bytes_compile(kind: torch.dtype) -> None:
    """The matrix units multiply 32 bytes along k in one step, also where there are 16."""
    x, w = r(64, 16).mul(4).to(kind), r(128, 16).mul(4).to(kind)
    fn, more = (torch._int_mm, ()) if kind is i8 else (scaled, (torch.tensor(0.5), torch.tensor(0.25)))
    with forced("triton_matmul_b_resident", list, runs=False) as made:
        compiled(fn, x, w.t() if kind is i8 else w, *more)
    assert made.configs
    assert {config.BLOCK_K for config in made.configs} == {32}
    triton.compile_kernels(made.matmuls, 90)


def halves_of_columns(x: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """The second operand has a number for each column, made of two in one step."""
    return x @ (s * y).expand(x.shape[1], len(s))


# One row, with what is computed of several elements at a time: one program may have a single one.
ONE_ROW: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "rounded": (
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v),
        [r(1, 200, dtype=bf), r(48, 200, dtype=bf), r(48, 200, dtype=bf)],
    ),
    "bytes": (lambda x, w, m: F.linear(x, w) * m, [r(1, 200), r(48, 200), r(1, 48).to(torch.int8)]),
    "halves": (halves_of_columns, [r(1, 200, dtype=bf), r(48, dtype=bf), r(48, dtype=bf)]),
}


@pytest.mark.ptx
@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_by_one_column_compiles(name: str) -> None:
    fn, args = ONE_ROW[name]
    with forced("triton_matvec", lambda configs: [c for c in configs if c.BLOCK_N == 1][-1:], runs=False) as made:
        compiled(fn, *args)
    [found] = triton.compile_kernels(made.matmuls, 90)
    assert found.stack == 0


TALL = (r(512, 520, dtype=torch.float32), r(520, 512, dtype=torch.float32))


def first(configs: Sequence[Config]) -> Sequence[Config]:
    return configs[:1]


@pytest.mark.cpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("template", "registers", "engine"), [("triton_matmul", 2, 0), *((name, 0, 2) for name in TEMPLATES)])
def test_operands_become_tf32(template: str, registers: int, engine: int) -> None:
    """The matrix units cut digits off, and results would be too small by 7e-4. TMA rounds what it brings."""
    with forced(template, first, runs=False) as made:
        compiled(lambda x, w: x @ w, *TALL)
    (kernel,) = made.matmuls
    assert kernel.source.count("lib.rounded_to_tf32(tl.load(") == registers
    assert sum(map(is_rounded, kernel.signature)) == engine


@pytest.mark.cpu
@pytest.mark.usefixtures("tf32")
def test_a_computed_operand_becomes_tf32() -> None:
    with forced(TEMPLATES[1], first, runs=False) as made:
        compiled(lambda x, w: x.square() @ w, *TALL)
    (kernel,) = made.matmuls
    assert (kernel.source.count("lib.rounded_to_tf32("), sum(map(is_rounded, kernel.signature))) == (1, 1)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, bf])
def test_others_stay_as_they_are(dtype: torch.dtype) -> None:
    """float32 is multiplied exactly without torch's permission, and other types are what the units take."""
    with forced("triton_matmul", first, runs=False) as made:
        compiled(lambda x, w: x @ w, *(one.to(dtype) for one in TALL))
    (kernel,) = made.matmuls
    assert "rounded_to_tf32" not in kernel.source
    assert not any(map(is_rounded, kernel.signature))


def test_the_launcher_asks_for_tf32() -> None:
    found = MapFormat(element=7, element_bytes=4, swizzle=3, box=(64, 32))
    assert _format(found, "tensordesc<fp32[64, 32], tf32>")[1] == 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
    assert _format(found, "tensordesc<fp32[64, 32]>")[1] == 7


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("template", ["triton_matmul", *TEMPLATES, "triton_matmul_warp_specialized"])
def test_sums_of_tf32_are_not_too_small(template: str) -> None:
    """Of positive numbers, for errors add up. cuBLAS is off by 2e-5 at most."""
    x, w = (torch.rand(1024, 1024, device="cuda") for _ in range(2))
    torch._dynamo.reset()
    with only(template, lambda configs: configs[0]):
        got = torch.compile(lambda x, w: x @ w.t(), backend="kgen", options={"cache": False})(x, w)
    exact = x.double() @ w.double().t()
    assert abs(float((got.double() - exact).mean() / exact.mean())) < 1e-4
