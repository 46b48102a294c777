"""The Jinja file of a template may be text: in a notebook there is no file beside the class, which is in none either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from template_author import JINJA

import kgen
from kgen import errors
from kgen.templates import registry

pytestmark = pytest.mark.interpret
# Run from standard input, as a cell is: inspect finds no file of the class.
CELL = """
import kgen, torch
from kgen import knob, operand, result

def cell(factor):
    @kgen.template(
        implements=kgen.contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda",
        source=TEXT.replace("FACTOR", factor), name="noted",
    )
    class Noted(kgen.KernelTemplate):
        A, B, C = operand("b", "m", "k"), operand("b", "k", "n"), result("b", "m", "n")
        BLOCK_M, BLOCK_N, BLOCK_K = knob(32), knob(32), knob(32)

        def seconds(self, problem, config):
            return 0.0

x, y = torch.randn(2, 40, 30), torch.randn(2, 30, 50)
options = {"gpu_interpreter": True, "cache": False}
for factor in ("1.0", "2.0"):  # the cell is changed and run again
    cell(factor)
    torch._dynamo.reset()
    with kgen.require_fused("aten.bmm", "aten.relu"):
        found = torch.compile(lambda x, y: torch.relu(x @ y), backend="kgen", options=options)(x, y)
    torch.testing.assert_close(found, float(factor) * torch.relu(x @ y), rtol=1e-4, atol=1e-4)
print("right")
"""


@pytest.mark.slow
def test_a_template_in_a_notebook(tmp_path: Path) -> None:
    text = JINJA.replace('{{ C.store("acc"', 'acc *= FACTOR\n    {{ C.store("acc"')
    cell = f"TEXT = {text!r}\n{CELL}"
    done = subprocess.run([sys.executable, "-"], input=cell, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr


def declared(text: str) -> None:
    @kgen.template(implements=kgen.contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source=text, name="given_as_text")
    class Given(kgen.KernelTemplate):
        A, B, C = kgen.operand("b", "m", "k"), kgen.operand("b", "k", "n"), kgen.result("b", "m", "n")
        BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(32), kgen.knob(32), kgen.knob(32)


def test_the_text_is_the_templates_file() -> None:
    try:
        declared(JINJA)
        found = registry.find("given_as_text")
        assert found.source.read_text() == JINJA
        first = found.version
        declared(JINJA + "\n")
        assert registry.find("given_as_text").version != first
    finally:
        registry.remove("given_as_text")


def test_a_mistake_in_the_text_names_its_line() -> None:
    lines = JINJA.splitlines()
    number = next(k for k, line in enumerate(lines, 1) if "A.tile(" in line)
    lines.insert(number - 1, "        x = {{ NOWHERE }}")
    with pytest.raises(errors.BadTemplate, match=rf"given\.py\.jinja, line {number}"):
        declared("\n".join(lines))


def test_a_class_without_a_file_needs_the_text() -> None:
    members = {"A": kgen.operand("m", "k"), "B": kgen.operand("k", "n"), "C": kgen.result("m", "n"), "__module__": "nowhere"}
    declare = kgen.template(
        implements=kgen.contraction("m,k", "k,n -> m,n"), device="cuda", source="there.py.jinja", name="in_no_file"
    )
    with pytest.raises(errors.BadTemplate, match="give the text of the Jinja file"):
        declare(type("InNoFile", (kgen.KernelTemplate,), members))
