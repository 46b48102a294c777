"""Exported programs that launch GPU kernels: with a driver that runs kernels on the CPU, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_builder import Builder
from stub_driver import compiled
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import kgen
from kgen import errors
from kgen.build import cpp
from kgen.host.exported import Contents, write_folder
from kgen.host.program import Alloc, Free, Launch
from kgen.rendered.exported_call import Argument, ExportedCall, Result
from kgen.rendered.gpu_kernel import CompiledLaunches

ROOT = Path(__file__).parents[2]


def launching(folder: Path, launches: CompiledLaunches) -> None:
    """A program that adds two vectors and doubles the sum, by two launches."""
    b = Builder()
    x, y, out = b.slot((600,)), b.slot((600,)), b.slot((600,))
    code = [
        Alloc(out), Launch(0, (x, y, out), (b.reg(600),), b.regs((3, 1, 1))), Free(x),
        Launch(1, (out,), (b.reg(600),), b.regs((3, 1, 1))),
    ]  # fmt: skip
    program = b.program([b.input(x), b.input(y)], code, [b.out(out)])
    _, takes = pytree.tree_flatten(((0, 0), {}))
    _, gives = pytree.tree_flatten(0)
    inputs = tuple(Argument(k, name, torch.float32, "cpu", (600,), (None,), (0,), False) for k, name in enumerate("xy"))
    call = ExportedCall(pytree.treespec_dumps(takes), pytree.treespec_dumps(gives), inputs, (), (Result(0),), (), ())
    write_folder(folder, Contents(program, (), call, 0, launches), (), {})


def kernels() -> tuple[Any, ...]:
    add = compiled("add", ("*fp32", "*fp32", "*fp32", "i64"), divisible=(True, True, True, False))
    return add, compiled("double_it", ("*fp32", "i32"), divisible=(True, False), scratch=(256 * 4,))


@pytest.mark.cpu
def test_a_program_launches_with_what_its_folder_has(stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launching(tmp_path / "program", CompiledLaunches(kernels()))
    assert (tmp_path / "program" / "launch.so").exists()

    def none() -> None:
        raise AssertionError("a loaded program needs no launcher of the cache")

    monkeypatch.setattr(cpp, "launcher_library", none)
    program = kgen.load(tmp_path / "program")
    x, y = torch.randn(600), torch.randn(600)
    torch.testing.assert_close(program(x, y), 2 * (x + y))
    assert stub["launches"] == 2


@pytest.mark.cpu
def test_a_program_for_another_gpu_is_refused(stub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    launching(folder, CompiledLaunches(kernels(), (7,), 90))
    assert json.loads((folder / "manifest.json").read_text())["machine"]["arch"] == 90
    with pytest.raises(errors.ExportedElsewhere, match=r"the GPU cuda:7 was one of compute capability 9\.0, and here is none"):
        kgen.load(folder)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm, attention, a feed-forward part, and a count of its calls."""

    calls: Tensor

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


ALONE = """
import sys, torch, kgen
program = kgen.load(sys.argv[1])
x, want = torch.load(sys.argv[2])
torch.testing.assert_close(program(x), want, rtol=2e-2, atol=2e-2)
assert "triton" not in sys.modules
print("right, calls", int(program.weights["calls"]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_on_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    module = Block().to("cuda", dtype).eval()
    x = torch.randn(2, 64, 128, device="cuda", dtype=dtype)
    sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=512)},)
    kgen.export(module, (x,), folder=tmp_path / "program", dynamic_shapes=sizes)
    program = kgen.load(tmp_path / "program")
    for given in (x, torch.randn(3, 17, 128, device="cuda", dtype=dtype), torch.randn(5, 256, 128, device="cuda", dtype=dtype)):
        with torch.no_grad():
            torch.testing.assert_close(program(given), module(given), rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    program(x)
    with torch.cuda.graph(graph):
        made = program(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(made, module(x), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_another_process_needs_neither_triton_nor_a_cache(tmp_path: Path) -> None:
    module = Block().to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    kgen.export(module, (x,), folder=tmp_path / "program")
    with torch.no_grad():
        torch.save((x, module(x)), tmp_path / "call.pt")
    environment = {**os.environ, "KGEN_CACHE_DIR": str(tmp_path / "empty"), "CXX": "/nowhere", "PATH": "/nowhere"}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "program"), str(tmp_path / "call.pt")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right, calls ")
