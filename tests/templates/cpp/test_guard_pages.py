"""Masked loads and stores next to a page that nobody may touch: lanes that are masked out must not reach memory.

The accesses run in a process of their own, for what fails dies. It prints each case before it runs it.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LANES = (4, 8, 16, 32, 64)  # a Vec has no fewer
# Two registers of the widest kind: with this and with the fewest lanes, each type fills a part of a register and several ones.
BYTES = 128
KINDS = (
    "load",
    "store",
    "load_back",
    "store_back",
    "load_two",
    "store_two",
    "whole_two",
    "whole_four",
    "whole_three",
    "store_three",
)
UNMASKED = ("store_back", "whole_two", "whole_four", "whole_three", "store_three")


def stored() -> dict[str, int]:
    """Storage types of kernels, and their bytes."""
    from kgen.templates.cpp.codegen.table import CPP_TYPES

    return {row.storage: dtype.itemsize for dtype, row in CPP_TYPES.items()}


# The mask inverts bools in memory, of which the compiler knows nothing: that sets the bits beyond the lanes as well.
TEXT = """
extern "C" void {name}({type}* p, {type}* other, const bool* outside, int64_t n) {{
  vector_loop<{lanes}>(0, {reach}, [&](int64_t i, auto w) {{
    constexpr int L = {lanes};
    const auto inside = not_(load<L>(outside + i, Full<L>{{}}));
    {access};
  }});
}}
"""
ACCESS = {
    "load": "store(other + i, load_masked<L>(p + i, inside, w), w)",
    "store": "store_masked(p + i, load<L>(other + i, w), inside, w)",
    "load_back": "store(other + i, load_strided_masked<L>(p + n - 1 - i, -1, inside, w), w)",
    "store_back": "store_strided(p + n - 1 - i, -1, load<L>(other + i, w), w)",
    "load_two": "store(other + i, load_every_masked<2, L>(p + 2 * i, inside, w), w)",
    "whole_two": "store(other + i, load_every<2, L>(p + 2 * i, w), w)",
    "whole_four": "store(other + i, load_every<4, L>(p + 4 * i, w), w)",
    "whole_three": "store(other + i, load_every<3, L>(p + 3 * i, w), w)",
    "store_three": "store_every<3>(p + 3 * i, load<L>(other + i, w), w)",
    "store_two": "store_every_masked<2>(p + 2 * i, load<L>(other + i, w), inside, w)",
}


def cases(every: bool) -> Iterator[tuple[str, str, str, int]]:
    """(name, kind, type, lanes), for every number of lanes or for two a type."""
    for kind in KINDS:
        for number, (kept, size) in enumerate(stored().items()):
            for lanes in LANES if every else (LANES[0], min(LANES[-1], BYTES // size)):
                yield f"{kind}_{number}_{lanes}", kind, kept, lanes


def source(kind: str, every: bool) -> str:
    text = '#include "kgen/kernel.h"\nusing namespace kgen;\n'
    for name, which, kept, lanes in cases(every):
        if which == kind:
            # rounded up, so that whole vectors have lanes beyond the end; accesses without a mask stop there
            reach = "n" if kind in UNMASKED else f"(n + {lanes} - 1) / {lanes} * {lanes}"
            text += TEXT.format(name=name, type=kept, lanes=lanes, reach=reach, access=ACCESS[kind])
    return text


@pytest.mark.cpu
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_masked_lanes_touch_no_memory(every: bool) -> None:
    from kgen.build import cpp

    cpp.math_library()
    paths = cpp.build_units([cpp.Unit(f"guard_{kind}", source(kind, every)) for kind in KINDS])
    command = [sys.executable, __file__, str(int(every)), *map(str, paths)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"ended with {done.returncode} in {last}\n{done.stderr[-2000:]}"
    assert last == f"{len(list(cases(every)))} cases"


# ---- the other process ----------------------------------------------------------------------------------------------


class Guarded:
    """One page of memory between two that must not be touched."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self.memory = mmap.mmap(-1, 3 * page)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + page
        self.end = self.first + page
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (self.first - page, self.end):
            assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0

    def array(self, size: int, at_end: bool) -> int:
        return self.end - size if at_end else self.first

    def fill(self, byte: int) -> None:
        ctypes.memset(self.first, byte, self.end - self.first)

    def bytes_at(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


def run(every: bool, paths: list[str]) -> None:
    libraries = [ctypes.CDLL(path) for path in paths]
    functions = {name: next(getattr(lib, name) for lib in libraries if hasattr(lib, name)) for name, *_ in cases(every)}
    guarded, other, sizes = Guarded(), ctypes.create_string_buffer(4096), stored()
    for name, kind, kept, lanes in cases(every):
        print(name, flush=True)
        for count in (lanes, 2 * lanes, lanes + 3, lanes - 1, 1):
            check(functions[name], guarded, other, (kind, sizes[kept], count))
    print(f"{len(list(cases(every)))} cases")


def check(function: ctypes._FuncPtr, guarded: Guarded, other: ctypes.Array[ctypes.c_char], case: tuple[str, int, int]) -> None:
    """A zero page and an array of ones that ends, and one that begins, at a guard: neither may change beyond its elements."""
    kind, size, count = case
    every = {"two": 2, "three": 3, "four": 4}.get(kind.rpartition("_")[2], 1)
    extent = (every * (count - 1) + 1) * size
    for at_end in (True, False):
        guarded.fill(0)
        ctypes.memset(other, 1, len(other))
        start = guarded.array(extent, at_end)
        outside = (ctypes.c_bool * 256)(*(k >= count for k in range(256)))
        function(ctypes.c_void_p(start), ctypes.byref(other), ctypes.byref(outside), ctypes.c_int64(count))
        page = guarded.bytes_at(guarded.first, guarded.end - guarded.first)
        if kind.startswith("store"):
            at = start - guarded.first
            assert not any(page[:at]), "a store before the array"
            assert not any(page[at + extent :]), "a store behind the array"
            assert all(any(page[at + every * k * size :][:size]) for k in range(count)), "an element is missing"
        else:
            assert not any(page), "a load changed memory"
            assert not any(other.raw[: count * size]), "loaded what is not there"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    run(sys.argv[1] == "1", sys.argv[2:])
