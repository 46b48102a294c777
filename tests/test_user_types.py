"""What a type checker says of users' code: nothing of right code, and one error in each wrong snippet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.none, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[1]
# Of this environment, which need not be the one of the shell.
PYRIGHT = shutil.which("pyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

RIGHT = """
from collections.abc import Iterable, Mapping

import torch
import kgen
from kgen import knob, operand, result


@kgen.template(implements=kgen.contraction("m,k", "k,n -> m,n"), device="cuda", source="matmul.py.jinja")
class Matmul(kgen.KernelTemplate):
    A, B, C = operand("m", "k", access="tma"), operand("k", "n"), result("m", "n")
    BLOCK_M, BLOCK_N = knob(64, 128), knob(64)

    def refuse(self, problem: kgen.Problem) -> str | None:
        return "not for float64" if problem.main_dtype is torch.float64 else None

    def configs(self, problem: kgen.Problem) -> Iterable[Mapping[str, int]]:
        yield {"BLOCK_M": 64}

    def resources(self, problem: kgen.Problem, config: kgen.KernelConfig) -> kgen.Resources:
        return kgen.Resources(shared=config.BLOCK_M * 2)


model = kgen.compile(torch.nn.Linear(2, 3), mode="max-autotune", options={"numerics": "stable", "fusion": False})
with kgen.config.override(numerics="eager", fallback=["aten.mm"]), kgen.require_fused("aten.mm", "aten.relu"):
    report = kgen.explain(model, torch.ones(1, 2))
moved: int = report.bytes_moved


@kgen.compile(mode="default")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@kgen.control_flow
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


wide: int = kgen.compile(torch.nn.Linear(2, 3)).out_features
result_of_call: torch.Tensor = halved(doubled(torch.ones(2)))
names: list[str] = [one.name for one in kgen.list_options()]
"""
# A line of wrong code, and a word of the error, or its code.
WRONG = {
    'kgen.compile(f, mode="fastest")': "call-overload",
    "kgen.compile(f)(3)": "arg-type",
    'kgen.compile(f, options={"fuse": True})': "call-overload",
    'kgen.compile(f, options={"numerics": "exact"})': "call-overload",
    'options: kgen.config.Options = {"fuse": True}': 'for TypedDict "Options"',
    "kgen.config.override(fusoin=False)": "call-arg",
    'kgen.config.override(fusion="no")': "arg-type",
    "kgen.config.fusion = False": "attr-defined",
    'kgen.require_fused("aten.mm")': "call-arg",
    'kgen.operand("m", access="tmma")': "arg-type",
    'kgen.knob("64")': "arg-type",
    "kgen.explian(f)": "attr-defined",
    'kgen.template(implements="mm", device="cuda", source="a")': "arg-type",
    'kgen.template(implements=kgen.contraction("m,k", "k,n -> m,n"), device="gpu", source="a")': "arg-type",
    "class T(kgen.KernelTemplate):\n    def refuse(self, problem: kgen.Problem) -> bool: return True": "override",
    "class U(kgen.KernelTemplate):\n    def resources(self, problem: kgen.Problem) -> kgen.Resources: ...": "override",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages as they are imported: mypy does not see through an editable install."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "kgen").mkdir()
    for path in [*(ROOT / "kgen").iterdir(), *(ROOT / name for name in ("lowering", "scheduler", "templates"))]:
        (folder / "kgen" / path.name).symlink_to(path)
    return folder


def checked(code: str, tree: Path, folder: Path) -> list[str]:
    (folder / "user.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--follow-imports", "silent"]
    command += ["--cache-dir", str(tree / "cache"), "--strict", str(folder / "user.py")]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_right_code_has_no_errors(tree: Path, tmp_path: Path) -> None:
    assert checked(RIGHT, tree, tmp_path) == []


def test_each_wrong_snippet_is_an_error(tree: Path, tmp_path: Path) -> None:
    head = "import torch\nimport kgen\n\n\ndef f(x: torch.Tensor) -> torch.Tensor:\n    return x\n\n\n"
    lines = [head.count("\n") + 1]
    for snippet in WRONG:
        lines.append(lines[-1] + snippet.count("\n") + 1)
    errors = checked(head + "\n".join(WRONG) + "\n", tree, tmp_path)
    for (snippet, word), first, end in zip(WRONG.items(), lines[:-1], lines[1:], strict=True):
        found = [line for line in errors if first <= int(line.split(":")[1]) < end]
        assert any(word in line for line in found), (snippet, found)


@pytest.mark.skipif(PYRIGHT is None, reason="needs pyright")
def test_pyright_says_the_same(tree: Path, tmp_path: Path) -> None:
    """No error in right code, and one in each wrong snippet."""
    (tmp_path / "right.py").write_text(RIGHT)
    head = "import torch\nimport kgen\n\ndef f(x: torch.Tensor) -> torch.Tensor:\n    return x\n\n"
    for number, snippet in enumerate(WRONG):
        (tmp_path / f"wrong_{number}.py").write_text(f"{head}{snippet}\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(tree)]}))
    command = [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):  # its package for Python fetches it when it first runs
        pytest.skip(f"pyright does not run: {done.stderr[-200:]}")
    found = {Path(one["file"]).name for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"}
    assert found == {f"wrong_{number}.py" for number in range(len(WRONG))}
