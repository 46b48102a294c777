"""Operands of which an element in memory holds several neighbours: each is read once, in both languages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kgen.build import triton
from kgen.templates.contract import Config
from tests.matmuls import compiled, error, forced

pytestmark = [pytest.mark.interpret, pytest.mark.cpu]

h = torch.float16


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(h)


def packed(*shape: int, dtype: torch.dtype = torch.uint8, bits: int = 8) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def numbers(w: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers of so many bits in the elements of `w`, next to each other along `dim`."""
    count = w.dtype.itemsize * 8 // bits
    parts = [((w >> (bits * n)) & (2**bits - 1)) - 2 ** (bits - 1) for n in range(count)]
    return torch.stack([part.to(h) for part in parts], dim + 1).flatten(dim, dim + 1) * 0.1


def by_shifts(w: Tensor, shifts: Tensor, mask: int = 15) -> Tensor:
    """Several numbers in each integer, along the rows, unpacked by broadcasting."""
    return ((w.unsqueeze(1) >> shifts.view(1, -1, 1)) & mask).to(h).sub(8).mul(0.1).flatten(0, 1)


def groups(w: Tensor, less: float | Tensor, scale: Tensor) -> Tensor:
    """Rows of two numbers in each byte, less a number or one for each group, times a scale for each."""
    values = torch.stack((w & 15, w >> 4), -1).flatten(1).unflatten(1, (scale.shape[1], -1))
    return ((values.to(h) - less) * scale[..., None]).flatten(1)


def columns_of_words(w: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """Eight neighbours along the rows in an integer, with zeros that are integers of eight as well, and scales of columns."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values, less = (((one[..., None] >> shifts) & 15).flatten(1) for one in (w, zero))
    return ((values - less.repeat_interleave(16, 0)) * scale.repeat_interleave(16, 0)).to(h)


Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "halves along the sum": (lambda x, w: x @ numbers(w, 4, 0), (r(24, 176), packed(88, 72))),
    "halves, rows by rows": (lambda x, w: x @ numbers(w, 4, 1).t(), (r(24, 176), packed(72, 88))),
    "quarters": (
        lambda x, w: x @ by_shifts(w, torch.arange(0, 8, 2, dtype=torch.uint8), 3),
        (r(24, 176), packed(44, 72)),
    ),
    "eighths of integers": (
        lambda x, w, s: x @ by_shifts(w, s),
        (r(24, 176), packed(22, 72, dtype=torch.int32, bits=31), torch.arange(0, 32, 4, dtype=torch.uint8)),
    ),
    "scales of groups": (
        lambda x, w, s: x @ (numbers(w, 4, 0).unflatten(0, (11, 16)) * s.unsqueeze(1)).flatten(0, 1),
        (r(24, 176), packed(88, 72), r(11, 72)),
    ),
    "less a number": (lambda x, w, s: x @ groups(w, 8, s).t(), (r(24, 176), packed(72, 88), r(72, 11))),
    "less a part": (lambda x, w, s: x @ groups(w, 7.5, s).t(), (r(24, 176), packed(72, 88), r(72, 11))),
    "less much": (lambda x, w, s: x @ groups(w, 1000, s).t(), (r(24, 176), packed(72, 88), r(72, 11) * 1e-2)),
    "zeros of groups": (
        lambda x, w, s, z: x @ groups(w, z[..., None], s).t(),
        (r(24, 176), packed(72, 88), r(72, 11), r(72, 11)),
    ),
    "along the columns": (
        lambda x, w, z, s: x @ columns_of_words(w, z, s),
        (r(24, 176), packed(176, 9, dtype=torch.int32, bits=31), packed(11, 9, dtype=torch.int32, bits=31), r(11, 72)),
    ),
    "of the left operand": (lambda x, w: numbers(x, 4, 1) @ w, (packed(24, 88), r(176, 72))),
    "a batch": (lambda x, w: torch.bmm(x, numbers(w, 4, 1)), (r(3, 24, 80), packed(3, 40, 72))),
    "one row": (lambda x, w: x @ numbers(w, 4, 0), (r(1, 176), packed(88, 72))),
    "one row, by groups": (lambda x, w, s: x @ groups(w, 8, s).t(), (r(1, 176), packed(72, 88), r(72, 11))),
}
TEMPLATES = ("triton_matmul", "triton_matmul_tiles", "triton_matvec")
TAKES = [(name, template) for name in CASES for template in TEMPLATES if (template == "triton_matvec") <= ("one row" in name)]


def smallest(configs: Sequence[Config]) -> Sequence[Config]:
    return sorted(configs, key=lambda c: c.get("BLOCK_M") * c.get("BLOCK_N") * c.get("BLOCK_K"))[:1]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "template"), TAKES)
def test_neighbours_come_from_one_load(name: str, template: str) -> None:
    """The blocks along the sum are shorter than it and do not divide it."""
    fn, args = CASES[name]
    with forced(template, smallest) as made:
        got = compiled(fn, *args)
    assert error(got, fn(*args)) < 2e-3
    [kernel] = made.matmuls
    [stored, *_] = (arg.dtype for arg in args if not arg.dtype.is_floating_point)
    pointers = re.search(r"def \w+\((.*?)\):", kernel.source)
    assert pointers is not None
    kinds = dict(zip(pointers[1].split(", "), kernel.signature, strict=True))
    [pointer, *_] = (name for name, kind in kinds.items() if kind == {torch.uint8: "*u8", torch.int32: "*i32"}[stored])
    assert "tl.join(" in kernel.source
    assert len(re.findall(rf"tl\.load\({pointer}\b", kernel.source)) == 1


@pytest.mark.ptx
@pytest.mark.parametrize(("template", "arch"), [*((name, 90) for name in TEMPLATES), (TEMPLATES[0], 80), (TEMPLATES[2], 80)])
def test_they_compile(template: str, arch: int) -> None:
    name = "one row" if template == "triton_matvec" else "scales of groups"
    fn, args = CASES[name]
    with forced(template, smallest, runs=False) as made:
        compiled(fn, *args)
    assert triton.compile_kernels(made.matmuls, arch)


@pytest.mark.interpret
def test_a_tile_of_one_column_has_no_run_of_neighbours() -> None:
    """The gradient of a dilated convolution in steps, as matmuls of one row: 4 columns each are made of the same elements."""

    def f(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten.convolution_backward(g, x, w, None, [2], [0], [3], False, [0], 2, [True, False, False])[0]
        return made

    torch._dynamo.reset()
    args = [torch.randn(3, 2, 1).bfloat16(), torch.randn(3, 2, 8).bfloat16(), torch.randn(2, 1, 3).bfloat16()]
    run = torch.compile(f, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "strict": True, "cache": False})
    torch.testing.assert_close(run(*args).double(), f(*(a.double() for a in args)), rtol=1e-2, atol=1e-2)
