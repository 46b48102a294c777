"""Templates as somebody else would write them: a module and a Jinja file in a folder, imported from there."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from kgen.commands.templates_command import JINJA as SKELETON

MODULE = '''
import kgen


@kgen.template(implements=kgen.contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matmul.py.jinja", name="{name}")
class Matmul(kgen.KernelTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n]."""

    A, B, C = kgen.operand("b", "m", "k"), kgen.operand("b", "k", "n"), kgen.result("b", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(32, 16), kgen.knob(32, 16), kgen.knob(16)
{methods}
'''

JINJA = f"\n{SKELETON}"

METHODS = {
    "nothing more": "",
    "refuse float64": """
    def refuse(self, problem):
        import torch

        return "it is for short floats" if problem.main_dtype is torch.float64 else None
""",
    "costs nothing": """
    def seconds(self, problem, config):
        return 0.0
""",
    "half of the programs": """
    def grid(self, problem, config):
        return problem.tiles("m", config.BLOCK_M)
""",
    "needs too much": """
    def resources(self, problem, config):
        return kgen.templates.contract.Resources(shared=1 << 30)
""",
}

_numbers = itertools.count()


def write(folder: Path, name: str, jinja: str = JINJA, module: str = MODULE, methods: str = "") -> Path:
    """The module's path; the Jinja file is beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matmul.py.jinja").write_text(jinja)
    path = folder / "matmul.py"
    path.write_text(module.format(name=name, methods=methods))
    return path


def load(path: Path) -> ModuleType:
    """Imports the module under a name that no other has."""
    spec = importlib.util.spec_from_file_location(f"author_{next(_numbers)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
