"""The C++ matmul with an epilogue written by hand, against eager: ``python -m bench.cpp_matmul``.

gelu(x w + b), as generated code would state it, against ``F.gelu(F.linear(x, w, b))``, and the bare matmul against
``torch.mm``. Contenders take turns; ``same`` is eager against itself, what the machine's noise makes of 1.0. Weights take
turns, too, so that they come from memory where they would in a model. Rates are of reading the weights, beside that of
summing a large tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import Timing, geomean, interleave, machine_facts, thread_count
from kgen.build import cpp, toolchain
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.kernels.blocking import Blocking, choose_blocking

# m, k, n
SHAPES = [(1024, 1024, 1024), (512, 1024, 4096), (64, 4096, 4096), (16, 4096, 4096), (8, 4096, 4096), (1, 4096, 11008)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SOURCE = """
#include "kgen/kernel.h"
#include "kgen/matmul.h"
using namespace kgen;
using T = {type};

template <class F>
void matmul(void** ptrs, const int64_t* z, int threads, const F& finish) {{
  const int64_t N = z[1];
  T* const out = static_cast<T*>(ptrs[2]);
  const Strided<T> x{{static_cast<const T*>(ptrs[0]), z[3], z[4]}}, w{{static_cast<const T*>(ptrs[1]), z[5], z[6]}};
  const auto finished = [&](int64_t m0, int64_t n0, int64_t rows, int64_t columns, const float* tile, int64_t ld) {{
    for (int64_t r = 0; r < rows; ++r) {{
      vector_loop<16>(0, columns, [&](int64_t j, auto w) KGEN_INLINE {{
        store(out + (m0 + r) * N + n0 + j, finish(load<16>(tile + r * ld + j, w), n0 + j, w), w);
      }});
    }}
  }};
  matmul(threads, z[0], z[2], {blocking}, x, columns(N, finished, w));
}}
extern "C" void linear_gelu(void** ptrs, const int64_t* z, int threads) {{
  const T* const bias = static_cast<const T*>(ptrs[3]);
  matmul(ptrs, z, threads, [&](auto sum, int64_t n, auto w) KGEN_INLINE {{
    const auto x = round_to<T>(add_(sum, load<16>(bias + n, w)));
    return mul_(mul_(x, 0.5f), add_(1.0f, erf_(mul_(x, 0.70710678f))));
  }});
}}
extern "C" void mm(void** ptrs, const int64_t* z, int threads) {{
  matmul(ptrs, z, threads, [](auto sum, int64_t, auto) KGEN_INLINE {{ return sum; }});
}}
"""
ROUND = """
template <class T, class X>
KGEN_FN X round_to(X x) {
  if constexpr (is_narrow_float<T>) return round_to_<T>(x);
  else return x;
}
"""


def function(name: str, dtype: torch.dtype, blocking: Blocking, threads: int) -> Callable[..., Tensor]:
    """(out, x, w, bias) -> out, for x of m by k and w of k by n in any layout."""
    text = SOURCE.format(type=CPP_TYPES[dtype].storage, blocking=blocking.cpp())
    text = text.replace("using T =", ROUND + "using T =", 1)
    native = getattr(cpp.load_library(cpp.build_unit("bench_matmul", text)), name)

    def call(out: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        pointers = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in (x, w, out, bias)))
        sizes = (ctypes.c_int64 * 7)(*x.shape[:1], w.shape[1], x.shape[1], *x.stride(), w.stride(1), w.stride(0))
        native(pointers, sizes, ctypes.c_int(threads))
        return out

    return call


def in_turn(items: Sequence[Tensor]) -> Callable[[], Tensor]:
    endless = itertools.cycle(items)
    return lambda: next(endless)


def contenders(shape: tuple[int, int, int], dtype: torch.dtype, columns: bool, threads: int) -> dict[str, Callable[[], Any]]:
    """`columns`: w is stored as [k, n], not as nn.Linear keeps it."""
    m, k, n = shape
    x, bias, out = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype), torch.empty(m, n, dtype=dtype)
    made = [(torch.randn(n, k) / k**0.5).to(dtype).t() for _ in range(1 if m > 64 else 3)]
    weight = in_turn([w.contiguous() for w in made] if columns else made)
    blocking = choose_blocking((m, n, k), dtype, toolchain.isa().name, threads)
    gelu, mm = (function(name, dtype, blocking, threads) for name in ("linear_gelu", "mm"))
    for ours, theirs in ((gelu, F.gelu(F.linear(x, made[0].t(), bias))), (mm, torch.mm(x, made[0]))):
        torch.testing.assert_close(ours(out, x, made[0], bias).float(), theirs.float(), rtol=2e-2, atol=2e-2)
    total = torch.ones(2**26)
    return {
        "eager": lambda: F.gelu(F.linear(x, weight().t(), bias)),
        "same": lambda: F.gelu(F.linear(x, weight().t(), bias)),
        "kgen": lambda: gelu(out, x, weight(), bias),
        "torch.mm": lambda: torch.mm(x, weight()),
        "kgen mm": lambda: mm(out, x, weight(), bias),
    } | ({"sum": total.sum} if m <= 64 else {})


def line(shape: tuple[int, int, int], dtype: torch.dtype, timings: dict[str, Timing]) -> tuple[str, float]:
    """What is printed, and how many times faster than eager."""
    m, k, n = shape
    eager = timings["eager"].median
    faster = {name: eager / timings[name].median for name in ("same", "kgen")}
    ours = timings["kgen mm"].median
    bare, rate = timings["torch.mm"].median / ours, 2e-9 * m * k * n / ours
    text = f"{eager * 1e3:8.2f} {faster['same']:6.2f} {faster['kgen']:6.2f} {bare:6.2f}  {rate:7.0f}"
    if "sum" in timings:
        rate, best = k * n * dtype.itemsize / ours, 2**28 / timings["sum"].median
        text += f" {rate / 1e9:7.1f} {100 * rate / best:5.0f}%"
    return text, faster["kgen"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape and layout")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    args = parser.parse_args()
    torch.manual_seed(0)
    facts = machine_facts()
    print(
        f"{facts['cpu']}, {args.threads} threads, torch {facts['torch']}, load {facts['load']:.1f}, {toolchain.isa().flags[-1]}"
    )
    print(f"{'m, k, n':24} {'w':4} {'eager ms':>8} {'same':>6} {'kgen':>6} {'mm':>6}  {'GF/s':>7} {'GB/s':>7} {'of sum':>6}")
    ratios = []
    with thread_count(args.threads):
        for name in args.dtype or DTYPES:
            for shape, columns in itertools.product(SHAPES, (False, True)):
                calls = contenders(shape, DTYPES[name], columns, args.threads)
                text, ratio = line(shape, DTYPES[name], interleave(calls, seconds=args.seconds))
                ratios.append(ratio)
                print(f"{name:8} {shape!s:15} {'k n' if columns else 'n k':4} {text}", flush=True)
    print(f"geomean of eager / kgen {geomean(ratios):.2f}")


if __name__ == "__main__":
    main()
