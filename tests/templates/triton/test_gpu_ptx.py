"""The kernels of `gpu_graphs` compiled for GPUs that are not here: within registers and shared memory, nothing spilled."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen import gradients, options_for, plan_of, rendered
from gpu_graphs import GRAPHS, Maker, kinds_of, short_rows, tilings, wide_indices
from launch_kernels import waits_first
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from kgen.build import triton
from kgen.capture.decompositions import TABLE
from kgen.errors import TritonNotFound
from kgen.ir.plan import Call, Schedule
from kgen.rendered.gpu_kernel import TritonKernel

pytestmark = pytest.mark.ptx

SHARED = {80: 166_912, 90: 232_448}  # bytes that a block may have
ARCHES = (80, 90)


def kernels_of(name: str) -> tuple[list[TritonKernel], set[str]]:
    """The distinct kernels of a graph (and of its backward), and the templates that they use."""
    graph = GRAPHS[name]
    plans: list[Schedule] = []
    options = options_for(gpu=True)

    def keep(gm: Any, _: Any) -> Any:
        with _disable_current_modes():  # reading constants needs real tensors
            plans.append(plan_of(gm, options))
        return gm

    compiled = aot_function(graph.fn, keep, decompositions=TABLE, keep_inference_input_mutations=True)
    args = list(graph.inputs(Maker()))
    if graph.backward:
        gradients(compiled)(*args)
    else:
        with torch.no_grad():
            compiled(*args)
    made = [rendered(step, plan, "kernel", options).launch for plan in plans for step, _ in tilings(plan)]
    kinds = {kind for plan in plans for kind in kinds_of(plan)}
    return list({k.identity: k for k in made if k is not None}.values()), kinds


def assert_fits(kernels: list[TritonKernel], arch: int) -> None:
    assert kernels
    for kernel, made in zip(kernels, triton.compile_kernels(kernels, arch), strict=True):
        assert made.stack == 0, f"{made.stack} bytes of stack\n{kernel.source}"
        assert made.early == (arch >= 90)
        assert waits_first(made.cubin) == made.early, kernel.source
        assert made.registers <= 255
        assert made.shared <= SHARED[arch]


def within(name: str) -> AbstractContextManager[None]:
    return short_rows() if GRAPHS[name].short else nullcontext()


# One graph of each template for `make test`; the others belong to `make test-full`.
TELLING = (
    "chain",
    "transposed",
    "scatters",
    "statistics",
    "arg_reductions",
    "long_layer_norm",
    "long_arg_reductions",
    "long_scans",
    "split_columns",
)


def _marked() -> Iterator[Any]:
    for name in GRAPHS:
        yield pytest.param(name, marks=() if name in TELLING else pytest.mark.slow)


@pytest.mark.every(3)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", _marked())
def test_graphs_compile(name: str, arch: int) -> None:
    if arch < 89 and name == "mixed_dtypes":
        pytest.skip("Triton has float8_e4m3fn from sm_89 on")
    with within(name):
        kernels, kinds = kernels_of(name)
    assert GRAPHS[name].kinds <= kinds
    assert_fits(kernels, arch)


@pytest.mark.parametrize("name", ["chain", "transposed", "long_softmax"])
def test_wide_indices_compile(name: str) -> None:
    with within(name), wide_indices():
        kernels, _ = kernels_of(name)
    assert all("int64" in kernel.source for kernel in kernels)
    assert_fits(kernels, 90)


# ---- tensors of a GPU that is not here: traced, lowered, scheduled and compiled for their own device --------------------


def on_cuda(mode: FakeTensorMode, t: torch.Tensor) -> torch.Tensor:
    return FakeTensor(mode, t.to("meta"), torch.device("cuda:0"))


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x @ w) @ v + x, (x.shape[-1],)).log_softmax(-1)


def masked_attention(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, (q @ k.transpose(-1, -2)) * 0.125, float("-inf")).softmax(-1) @ k


def image(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2).mean((2, 3))


def numbers_of_the_cpu(x: torch.Tensor, n: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A number in a CPU tensor, an index from there, and a result that goes there."""
    return x * n, torch.ops.aten.index(x, [i]).exp(), (x.sum(0) + 1).cpu() * 2


r = torch.empty
MODELS: dict[str, tuple[Any, list[torch.Tensor], set[str]]] = {
    "mlp": (mlp, [r(8, 64), r(64, 128), r(128, 64)], {"aten.mm.default"}),
    "mlp_bf16": (mlp, [t.bfloat16() for t in (r(8, 64), r(64, 128), r(128, 64))], {"aten.mm.default"}),
    "attention": (masked_attention, [r(2, 32, 64), r(2, 32, 64), r(32, 32) > 0], {"aten.bmm.default"}),
    "image": (image, [r(2, 3, 16, 16), r(8, 3, 3, 3)], {"aten.convolution.default"}),
    "numbers_of_the_cpu": (numbers_of_the_cpu, [r(8, 64), r(()), r(3).long()], {"aten._to_copy.default"}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("templates", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_on_a_gpu_that_is_not_here(name: str, templates: bool) -> None:
    fn, shapes, calls = MODELS[name]
    mode = FakeTensorMode()
    stays = 1 if name == "numbers_of_the_cpu" else len(shapes)
    args = [on_cuda(mode, t) if k < stays else mode.from_tensor(t) for k, t in enumerate(shapes)]
    with mode:
        gm = make_fx(fn, decomposition_table=TABLE)(*args)
    options = replace(options_for(), templates=templates)
    plan = plan_of(gm, options)
    found = {str(step.node.target) for step in plan.steps if isinstance(step, Call)}
    assert found <= calls if templates else found == calls
    kernels = [(step, rendered(step, plan, "kernel", options).launch) for step, _ in tilings(plan)]
    devices = {str(plan.graph.buffers[o].device) for step, _ in kernels for s in step.statements for o in s.outs}
    assert devices == {"cuda:0"}
    assert_fits([k for _, k in kernels if k is not None], 90)


# ---- without Triton -------------------------------------------------------------------------------------------------


def test_without_triton_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, fresh_cache: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name.startswith("triton") else find(name, *a))
    triton._package.cache_clear()
    triton._version.cache_clear()
    try:
        kernels, _ = kernels_of("chain")
        with pytest.raises(TritonNotFound, match=r"pip install 'torch-kgen\[gpu\]'"):
            triton.compile_kernels(kernels, 90)
        x = torch.randn(5, 7)
        with pytest.raises(Exception, match=r"pip install 'torch-kgen\[gpu\]'"):
            torch.compile(lambda x: x + 1, backend="kgen", options={"gpu_interpreter": True, "cache": False})(x)
    finally:
        monkeypatch.undo()
        triton._package.cache_clear()
        triton._version.cache_clear()


WITHOUT_TRITON = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch
x = torch.randn(5, 7)
got = torch.compile(lambda x: (x.exp() + 1).softmax(-1), backend="kgen")(x)
torch.testing.assert_close(got, (x.exp() + 1).softmax(-1))
assert not any(name.split(".")[0] == "triton" for name in sys.modules)
"""


@pytest.mark.cpu
def test_tensors_of_the_cpu_need_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
