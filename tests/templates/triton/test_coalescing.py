"""Tiles whose runs in memory have odd lengths, or steps: Triton sees no neighbours there, and kernels say along which axis they
are nearest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kgen.ir import index as ix
from kgen.ir.index import Expr, Sizes, Var
from kgen.templates.triton.codegen.coalescing import hinted, nearest_axis
from tests.matmuls import compiled, error, forced

ROWS, COLUMNS = ix.var("m", 64), ix.var("n", 64)
IMAGES, PIXELS = ix.var("i", 4), ix.var("p", 27)
SIZES = Sizes({})
Loops = dict[str, tuple[Var, ...]]
SPLIT: Loops = {"m": (ROWS,), "n": (IMAGES, PIXELS)}
WHOLE: Loops = {"m": (ROWS,), "n": (COLUMNS,)}


def at(*terms: tuple[Var, int]) -> Expr:
    return sum((v.expr() * step for v, step in terms), ix.ZERO)


def divided(by: int) -> Expr:
    """Rows of a matrix whose elements went into rows of another length."""
    place = at((ROWS, 64), (COLUMNS, 1))
    return ix.floordiv(place, ix.constant(by)) * 1000 + ix.mod(place, ix.constant(by))


EVEN: Loops = {"m": (ROWS,), "n": (IMAGES, ix.var("q", 28))}
CASES: dict[str, tuple[Expr, Loops, str | None]] = {
    "runs of odd length": (at((ROWS, 27), (IMAGES, 2000), (PIXELS, 1)), SPLIT, "n"),
    "runs of even length": (at((ROWS, 28), (IMAGES, 2000), (EVEN["n"][1], 1)), EVEN, None),
    "all of an axis": (at((ROWS, 64), (COLUMNS, 1)), WHOLE, None),
    "every other number": (at((ROWS, 402), (COLUMNS, 2)), WHOLE, "n"),
    "the first axis": (at((ROWS, 3), (COLUMNS, 402)), WHOLE, "m"),
    "nothing near": (at((ROWS, 400), (COLUMNS, 64)), WHOLE, None),
    "rows of another odd length": (divided(65), WHOLE, "n"),
    "rows of another even length": (divided(32), WHOLE, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_nearest_axis(name: str) -> None:
    offset, axes, expected = CASES[name]
    assert nearest_axis(offset, axes, 4, SIZES) == expected


def test_data_say_nothing() -> None:
    """What is looked up is nowhere in particular: the other axis is seen, or hinted, by itself."""
    found = ix.indirect(_Value(COLUMNS), ix.constant(900)).expr()
    assert nearest_axis(at((ROWS, 3)) + found * 5, WHOLE, 4, SIZES) == "m"


class _Value:
    """A value that differs along a loop."""

    def __init__(self, loop: Var) -> None:
        self.loop = loop

    def free_atoms(self) -> frozenset[Any]:
        return frozenset([self.loop])


def test_hints() -> None:
    assert hinted("x", {"m": False, "n": True}) == "tl.max_contiguous(tl.multiple_of(x, [1, 1]), [1, 2])"


def r(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 4).to(dtype)


def channels_first(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """A matmul of pixels whose result goes to images of odd lengths, channel by channel."""
    return x + (y @ w).permute(0, 3, 1, 2)


def pairs(x: Tensor, w: Tensor) -> Tensor:
    """Squares of complex numbers."""
    parts = x.unflatten(1, (-1, 2))
    return (parts[..., 0] * parts[..., 0] + parts[..., 1] * parts[..., 1]) @ w


GRAPHS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "channels first": (channels_first, (r(4, 48, 9, 9), r(4, 9, 9, 64), r(64, 48))),
    "pairs": (pairs, (r(96, 66), r(33, 40))),
}


@pytest.mark.interpret
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_have_hints(name: str) -> None:
    f, args = GRAPHS[name]
    with forced("triton_matmul") as made:
        got = compiled(f, *args)
    assert error(got, f(*args)) < 0.01
    [kernel] = made.matmuls
    assert "tl.max_contiguous" in kernel.source


KERNEL = """
import triton
import triton.language as tl
@triton.jit
def kernel(p, q):
    m = tl.arange(0, 64)[:, None]
    n = tl.program_id(0) * 64 + tl.arange(0, 64)[None, :]
    tl.store(q + ({out}), tl.load(p + ({offset})))
"""


@pytest.mark.ptx
@pytest.mark.parametrize("offset", ["m * 402 + n * 2", "m * 128 + n % 27", "m * 8 + (n % 27) * 256", "n * 64 + m * 2"])
@pytest.mark.parametrize("along", [(False, True), (True, False)])
def test_no_load_is_wider_than_an_element(offset: str, along: tuple[bool, bool], tmp_path: Path) -> None:
    """A hint that is false for some pairs may only order threads: what is loaded or stored at a time stays one element."""
    text = hinted(offset, dict(zip("mn", along, strict=True)))
    ptx, layouts = _compiled(KERNEL.format(offset=text, out=text), tmp_path)
    assert set(re.findall(r"(?:ld|st)\.global\S*", ptx)) <= {"ld.global.b32", "st.global.b32"}
    assert all(("order = [1, 0]" in one) == along[1] for one in layouts)


def _compiled(text: str, folder: Path) -> tuple[str, list[str]]:
    """The PTX of a kernel, and how its threads hold tiles."""
    path = folder / f"kernel{next(_NUMBERS)}.py"
    path.write_text(text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    code = ASTSource(
        names["kernel"], {"p": "*fp32", "q": "*fp32"}, constexprs={}, attrs={(k,): [["tt.divisibility", 16]] for k in (0, 1)}
    )  # fmt: skip
    made = triton.compile(code, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm
    return made["ptx"], [line for line in made["ttgir"].splitlines() if line.startswith("#blocked")]


_NUMBERS = itertools.count()
