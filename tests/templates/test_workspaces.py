"""What a template may ask for besides its operands: memory of its own, and numbers that the host works out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import template_author
import torch
from torch import Tensor

import kgen
from kgen import errors
from kgen.only import only
from kgen.templates import registry
from kgen.templates.contract import Config

SPLIT = '''
import torch

import kgen
from kgen.ir import index as ix

SPLIT = 3


def tiles(problem, config):
    return problem.tiles("m", config.BLOCK_M) * problem.tiles("n", config.BLOCK_N)


@kgen.template(implements=kgen.contraction("m,k", "k,n -> m,n"), device="cuda", source="matmul.py.jinja", name="{name}")
class Split(kgen.KernelTemplate):
    """Sums cut into parts in one launch: the last program of a tile adds them up, in their order."""

    A, B, C = kgen.operand("m", "k"), kgen.operand("k", "n"), kgen.result("m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(16, 32), kgen.knob(16), kgen.knob(16)
    SUMS = kgen.workspace(torch.float32, lambda p, c: tiles(p, c) * (SPLIT * c.BLOCK_M * c.BLOCK_N))
    DONE = kgen.workspace(torch.int32, tiles, zeroed=True)
    SHARE = kgen.host_value(lambda p, c: ix.ceildiv(ix.ceildiv(p.extent("k"), c.BLOCK_K), SPLIT) * c.BLOCK_K)

    def grid(self, problem, config):
        return tiles(problem, config) * SPLIT
{methods}
'''

SPLIT_JINJA = """
{{ kernel() }}
    tile, part = tl.program_id(0) // 3, tl.program_id(0) % 3
    tiles_n = tl.cdiv(N, BLOCK_N)
    rm = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
    for start in range(part * {{ SHARE }}, tl.minimum(K, (part + 1) * {{ SHARE }}), BLOCK_K):
        rk = start + tl.arange(0, BLOCK_K)
        {{ A.tile("left", "rm", "rk") }}
        {{ B.tile("right", "rk", "rn") }}
        acc = lib.dot(left, right, acc, PRECISION)
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = {{ SUMS }} + tile * 3 * BLOCK_M * BLOCK_N + own
    tl.store(sums + part * BLOCK_M * BLOCK_N, acc)
    tl.debug_barrier()
    if tl.atomic_add({{ DONE }} + tile, 1) == 2:
        total = tl.load(sums) + tl.load(sums + BLOCK_M * BLOCK_N)
        total += tl.load(sums + 2 * BLOCK_M * BLOCK_N)
        {{ C.store("total", "rm", "rn") }}
"""

CPU = '''
import torch

import kgen
from kgen.templates.cpp.kernels.matmul import Matmul


@kgen.template(implements=kgen.contraction("b,m,k", "b,k,n -> b,m,n"), device="cpu", source="matmul.py.jinja", name="{name}")
class Marked(Matmul):
    """A matmul that fails where its memory is not zero, and leaves it so."""

    MARKS = kgen.workspace(torch.int32, lambda p, c: p.extent("m") + 5, zeroed=True)
    LAST = kgen.host_value(lambda p, c: p.extent("m") + 4)
{methods}
'''


def cpu_jinja() -> str:
    text = (Path(registry.__file__).parent / "cpp" / "kernels" / "matmul.cpp.jinja").read_text()
    marks = "  for (int64_t i = 0; i <= {{ LAST }}; ++i) {\n    if ({{ MARKS }}[i]) return 1;\n    {{ MARKS }}[i] = 7;\n  }\n"
    return text.replace("  share_batches(", marks + "  share_batches(", 1)


@pytest.fixture
def author(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("split_at_once", "marked"):
        registry.remove(name)


def first(configs: Sequence[Config]) -> Config:
    return configs[0]


def shifted_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b) + 1


SHAPES = ((33, 100, 20), (40, 257, 50), (16, 5, 7), (33, 100, 20))


def check(template: str, dynamic: bool, **options: bool) -> None:
    """Each shape twice: what a call leaves in its memory must be nothing to the next one."""
    torch._dynamo.reset()
    compiled = torch.compile(shifted_relu, backend="kgen", dynamic=dynamic, options={"cache": False, **options})
    with only(template, first):
        for m, k, n in SHAPES:
            a, b = torch.randn(m, k), torch.randn(k, n)
            for _ in range(2):
                torch.testing.assert_close(compiled(a, b), shifted_relu(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_in_parts_in_one_launch(author: Path, dynamic: bool) -> None:
    template_author.load(template_author.write(author, "split_at_once", SPLIT_JINJA, SPLIT))
    check("split_at_once", dynamic, gpu_interpreter=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_in_parts_natively(author: Path, dynamic: bool) -> None:
    template_author.load(template_author.write(author, "split_at_once", SPLIT_JINJA, SPLIT))
    torch._dynamo.reset()
    compiled = torch.compile(shifted_relu, backend="kgen", dynamic=dynamic, options={"cache": False})
    with only("split_at_once", first):
        for m, k, n in ((33, 100, 20), (1000, 2571, 500), (16, 5, 7)):
            a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
            results = [compiled(a, b) for _ in range(20)]
            want = shifted_relu(a.double(), b.double()).float()
            torch.testing.assert_close(results[0], want, rtol=1e-4, atol=1e-3)
            assert all(torch.equal(results[0], other) for other in results)  # whoever comes last adds in one order


@pytest.mark.interpret
def test_what_the_kernels_get(author: Path) -> None:
    template_author.load(template_author.write(author, "split_at_once", SPLIT_JINJA, SPLIT))
    torch._dynamo.reset()
    with kgen.config.override(gpu_interpreter=True, cache=False), only("split_at_once", first):
        [graph] = kgen.explain(shifted_relu, torch.randn(33, 100), torch.randn(100, 20)).graphs
    fill, matmul = graph.kernels
    assert "zeros" in fill.name
    assert "range(part * 48, " in matmul.source  # a third of the 7 blocks of 16
    assert "_sums" in matmul.source
    assert "_done" in matmul.source


@pytest.mark.cpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_of_a_cpu_kernel(author: Path, dynamic: bool) -> None:
    template_author.load(template_author.write(author, "marked", cpu_jinja(), CPU))
    check("marked", dynamic)


@pytest.mark.cpu
@pytest.mark.parametrize(("unused", "text"), [("DONE", "{{ DONE }}"), ("SHARE", "{{ SHARE }}")])
def test_what_is_asked_for_is_used(tmp_path: Path, unused: str, text: str) -> None:
    with pytest.raises(errors.BadTemplate, match=f"never uses {unused}"):
        template_author.load(template_author.write(tmp_path, "never", SPLIT_JINJA.replace(text, "0"), SPLIT))
