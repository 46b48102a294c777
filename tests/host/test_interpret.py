"""GPU kernels in Triton's interpreter, on the CPU's memory: what lets a machine without a GPU test them."""

from __future__ import annotations

import dataclasses
import importlib.util

import launch_kernels as tk
import pytest
import torch

from kgen.host.interpret import Interpreted

pytestmark = pytest.mark.interpret

SOFTMAX = """def softmax(x, out, n):
    i = tl.arange(0, 64)
    row = tl.program_id(0) * n
    v = tl.load(x + row + i, mask=i < n, other=float("-inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row + i, e / tl.sum(e, 0), mask=i < n)
"""


def test_add_over_a_grid_of_programs():
    x, y, out = torch.randn(600), torch.randn(600), torch.zeros(600)
    assert Interpreted(tk.add())(x, y, out, 600, 3, 1, 1) == ()
    assert torch.equal(out, x + y)


def test_an_empty_grid_runs_nothing():
    Interpreted(tk.kernel("def broken(x):\n    nothing_there\n", ("*fp32",)))(torch.zeros(1), 0, 1, 1)


@pytest.mark.skipif(
    importlib.util.find_spec("kgen.templates.triton.codegen.interpret") is None, reason="needs Triton's own functions"
)
def test_reductions_and_other_dtypes():
    x, out = torch.randn(5, 40).bfloat16(), torch.zeros(5, 40)
    Interpreted(tk.kernel(SOFTMAX, ("*bf16", "*fp32", "i32")))(x, out, 40, 5, 1, 1)
    torch.testing.assert_close(out, torch.softmax(x.float(), 1))


def test_pointers_start_at_the_first_element_whatever_the_geometry():
    memory = torch.randn(64)
    x = memory[8:].as_strided((2, 3), (1, 20))
    out = torch.zeros(24)
    Interpreted(tk.add())(x, x, out[2:].as_strided((2, 2), (7, 3)), 22, 1, 1, 1)
    assert torch.equal(out[2:], 2 * memory[8:30])
    assert torch.equal(out[:2], torch.zeros(2))


def test_an_atomic_sum_under_a_mask_that_is_broadcast():
    source = """def added(x, out):
    i = tl.arange(0, 128)[None, :]
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    tl.atomic_add(out + i + 0 * row, tl.load(x + 128 * row + i), row < 3)
"""
    x, out = torch.randn(3, 128), torch.zeros(128)
    Interpreted(tk.kernel(source, ("*fp32", "*fp32")))(x, out, 4, 1, 1)
    torch.testing.assert_close(out, x.sum(0))


def test_booleans_and_reinterpreted_pointers():
    source = "def flip(x, y):\n    i = tl.arange(0, 4)\n    tl.store(x + i, tl.load(x + i) == 0)\n    tl.store(y + i, i)\n"
    flags, words = torch.tensor([True, False, True, False]), torch.zeros(4)
    Interpreted(tk.kernel(source, ("*i1", "*i32")))(flags, words, 1, 1, 1)
    assert flags.tolist() == [False, True, False, True]
    assert words.view(torch.int32).tolist() == [0, 1, 2, 3]


def test_compiled_functions_stay_compiled_ones():
    """The interpreter's switch is back where it was, and helper functions of other users of Triton are untouched."""
    import triton

    before = triton.knobs.runtime.interpret
    Interpreted(tk.add())(torch.ones(2), torch.ones(2), torch.ones(2), 2, 1, 1, 1)
    assert triton.knobs.runtime.interpret == before
    again = dataclasses.replace(tk.add(), source=tk.add().source.replace("+ tl.load(y", "- tl.load(y"))
    out = torch.ones(2)
    Interpreted(again)(torch.ones(2), torch.ones(2), out, 2, 1, 1, 1)
    assert torch.equal(out, torch.zeros(2))


def test_truth_of_a_scalar_and_of_a_tile():
    """A comparison of scalars, spread over a tile: as `atan2` has it of a norm and a matrix."""

    def f(x, y):
        return torch.atan2(torch.linalg.vector_norm(x), y)

    x, y = torch.randn(30), torch.randn(6, 8)
    found = torch.compile(f, backend="kgen", options={"gpu_interpreter": True, "cache": False})(x, y)
    torch.testing.assert_close(found, f(x, y))
