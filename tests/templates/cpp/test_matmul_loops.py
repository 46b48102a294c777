"""Loops of matmuls: compiled once for a pair of types, linked by every unit that multiplies these."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kgen import cache
from kgen.build import cpp, toolchain
from kgen.counters import counters
from kgen.errors import KernelBuildFailed
from kgen.templates.cpp.codegen.engine import declaration, objects

pytestmark = pytest.mark.cpu

# C = scale * A B for 5 by 7 and 7 by 3 elements.
UNIT = """#include <kgen/kernel.h>
using namespace kgen;
KGEN_MATMUL({a}, {b})
extern "C" int matmul(void** ptrs) {{
  const Strided<{a}> left{{static_cast<{a}*>(ptrs[0]), 7, 1}};
  const Strided<{b}> right{{static_cast<{b}*>(ptrs[1]), 1, 3}};
  float* const out = static_cast<float*>(ptrs[2]);
  const auto finish = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const auto* tile, int64_t ld) {{
    for (int64_t r = 0; r < rows; ++r) {{
      for (int64_t j = 0; j < columns; ++j) out[(m0 + r) * 3 + n0 + j] = {scale} * float(tile[r * ld + j]);
    }}
  }};
  matmul(1, 5, 7, Blocking{{.few_rows = {few}}}, left, columns(3, finish, right));
  return 0;
}}
"""
TYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "int8_t": torch.int8, "double": torch.float64}


@pytest.fixture
def empty(fresh_cache: Path) -> None:
    counters.reset()
    cpp._headers.clear()


def unit(scale: int = 1, a: str = "float", b: str = "float", few: int = 0) -> cpp.Unit:
    return cpp.Unit(f"matmul{scale}", UNIT.format(a=a, b=b, scale=scale, few=few), objects=objects(a, b))


def matmul_of(path: Path, a: str = "float", b: str = "float") -> tuple[Tensor, Tensor]:
    """What the library computes of small integers, and what it should."""
    x = torch.randint(-3, 4, (5, 7)).to(TYPES[a])
    w = torch.randint(-3, 4, (7, 3)).to(TYPES[b])
    out = torch.full((5, 3), torch.nan)
    pointers = (ctypes.c_void_p * 3)(x.data_ptr(), w.data_ptr(), out.data_ptr())
    assert cpp.load_library(path).matmul(pointers) == 0
    return out, x.float() @ w.float()


@pytest.mark.usefixtures("empty")
def test_units_share_them() -> None:
    first, second = cpp.build_units([unit(1), unit(2)])
    assert (counters["cpp.compiles"], counters["cpp.loops"]) == (2, 3)  # the matmul's, and two of its one type of operands
    for scale, path in ((1, first), (2, second)):
        got, want = matmul_of(path)
        assert torch.equal(got, scale * want)
    cpp.build_units([unit(3)])
    cpp.build_units([unit(1, "float", "int8_t")])  # other loops: words of float, made of two types
    assert (counters["cpp.compiles"], counters["cpp.loops"]) == (4, 8)


@pytest.mark.every(3)
@pytest.mark.parametrize(("a", "b"), [("float", "float"), ("bfloat16", "bfloat16"), ("float", "int8_t"), ("int8_t", "int8_t")])
def test_units_have_none_of_their_own(a: str, b: str, tmp_path: Path) -> None:
    """What takes long to compile is called, and in the unit itself only with KGEN_OWN_LOOPS."""
    long = re.compile(
        r"\b(multiply|multiply_panel|pack_rows|pack_row_panels|pack_panels|dot_block|dot_columns|add_all_multiples)<"
    )
    source = tmp_path / "unit.cpp"
    source.write_text(unit(1, a, b, 16).source)

    def compiled(*more: str) -> tuple[set[str], set[str]]:
        made = tmp_path / "unit.o"
        flags = [*toolchain.kernel_flags(), f"-I{cpp.kernel_include_dir()}", *more]
        subprocess.run([*toolchain.compiler().command, "-c", *flags, str(source), "-o", str(made)], check=True)
        lines = subprocess.run(["nm", "-C", str(made)], capture_output=True, text=True, check=True).stdout.splitlines()
        found = [(line[17:18], name[1]) for line in lines if (name := long.search(line))]
        return {name for kind, name in found if kind != "U"}, {name for kind, name in found if kind == "U"}

    assert compiled() == (set(), {"multiply", "pack_rows", "pack_row_panels", "pack_panels", "dot_block"})
    own, called = compiled("-DKGEN_OWN_LOOPS")
    assert not called
    assert {"multiply", "pack_panels", "dot_columns"} <= own


@pytest.mark.every(3)
@pytest.mark.parametrize(("a", "b"), [("float", "float"), ("bfloat16", "bfloat16"), ("float", "int8_t"), ("int8_t", "double")])
@pytest.mark.parametrize("few", [0, 16])
def test_values(few: int, a: str, b: str) -> None:
    got, want = matmul_of(cpp.build_units([unit(1, a, b, few)])[0], a, b)
    assert torch.equal(got, want)


@pytest.mark.usefixtures("empty")
def test_damaged_ones_do_not_matter() -> None:
    cpp.build_units([unit(1)])
    entries = cache.list_entries("loops")
    assert len(entries) == 3
    for entry in entries:  # truncated: seen by its checksum, made again
        entry.path.write_bytes(entry.path.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match="damaged"):
        got, want = matmul_of(cpp.build_units([unit(2)])[0])
    assert torch.equal(got, 2 * want)
    assert counters["cpp.loops"] == 6
    for entry in entries:  # as it was written, but no object
        cache.put("loops", entry.path.name, b"no object")
    got, want = matmul_of(cpp.build_units([unit(3)])[0])
    assert torch.equal(got, 3 * want)
    assert not cache.list_entries("loops")


@pytest.mark.usefixtures("empty")
def test_a_damaged_header_does_not_matter() -> None:
    cpp.build_units([unit(1)])
    (header,) = cache.list_entries("header")
    compiled = next(p for p in header.path.iterdir() if p.suffix in (".gch", ".pch"))
    compiled.write_bytes(bytes(compiled.stat().st_size))
    got, want = matmul_of(cpp.build_units([unit(1, "float", "int8_t")])[0], "float", "int8_t")
    assert torch.equal(got, want)


@pytest.mark.usefixtures("empty")
def test_what_cannot_be_compiled_is_reported_with_the_kernel() -> None:
    source = unit(1).source.replace("return 0;", "return nonsense;")
    with pytest.raises(KernelBuildFailed, match="nonsense") as caught:
        cpp.build_units([replace(unit(1), name="broken", source=source)])
    done = subprocess.run(caught.value.details["command"].split(), capture_output=True, text=True, check=False)
    assert "nonsense" in done.stderr
    # types that have no matmul: the unit is compiled as if it had its own, and is right, since it multiplies others
    text = unit(4).source.replace(declaration("float", "float"), declaration("float", "nothing"))
    got, want = matmul_of(cpp.build_units([cpp.Unit("other", text, objects=objects("float", "nothing"))])[0])
    assert torch.equal(got, 4 * want)
