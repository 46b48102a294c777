"""The Gluon tutorial: its two files make a template whose kernels compile for Hopper, and are right on numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import template_author
import torch
from codegen import rendered
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.ir.plan import members
from kgen.only import Only
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Options
from kgen.templates import registry
from tests.kernels import plans
from tests.warp_numbers import on_numbers

ROOT = Path(__file__).resolve().parents[3]
NAME = "gluon_matmul"
bf = torch.bfloat16
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "alone": lambda x, w, b, r: x @ w,
    "with what surrounds it": lambda x, w, b, r: torch.relu(x @ w + b) * r,
}


@pytest.fixture(autouse=True)
def written(tmp_path: Path) -> Iterator[None]:
    text = (ROOT / "docs" / "templates" / "gluon_tutorial.md").read_text()
    files = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert files.keys() == {"gluon_matmul.py", "gluon_matmul.py.jinja"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    template_author.load(tmp_path / "gluon_matmul.py")
    yield
    registry.remove(NAME)


def options() -> Options:
    return Options(gpu_everywhere=True, only=Only(NAME, lambda configs: configs[0]))


@pytest.mark.ptx
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_compiles_for_hopper(name: str) -> None:
    given = (
        torch.ones(256, 128, dtype=bf),
        torch.ones(128, 256, dtype=bf),
        torch.ones(256, dtype=bf),
        torch.ones(256, 256, dtype=bf),
    )
    plan = plans(FUNCTIONS[name], *given, options=options()).forward
    [step] = [one for one in plan.kernels if members(one)[0].choice is not None]
    call = rendered(step, plan, "kernel", options())
    assert isinstance(call, KernelCall)
    assert call.launch is not None
    assert "warp_specialize" in call.launch.source
    [built] = triton.compile_kernels([call.launch], 90)
    assert built.stack == 0


@pytest.mark.cpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_right_on_numbers(name: str) -> None:
    """More steps than stages, more tiles than one, and edges within tiles. All sums are whole and small."""
    torch.manual_seed(0)
    x, w, b, r = (torch.randint(-2, 3, shape).to(bf) for shape in ((200, 328), (328, 136), (136,), (200, 136)))
    with on_numbers(options()) as ran:
        got = kgen.compile(FUNCTIONS[name], options={"gpu_interpreter": True, "cache": False})(x, w, b, r)
    assert len(ran) == 1
    want = FUNCTIONS[name](*(one.double() for one in (x, w, b, r))).to(bf)
    assert torch.equal(got, want)
    assert NAME not in sys.modules
