"""The project as users get it: import names, entry points, files in the wheel, and what kgen may import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tools import check_install

ROOT = Path(__file__).resolve().parents[2]
KGEN = ("kgen", "lowering", "scheduler", "templates")
# The two exceptions: CUDA-graph trees, and the base class that AOTAutograd's cache demands.
MAY_IMPORT_INDUCTOR = {"kgen/capture/aot_cache.py", "kgen/host/cudagraph.py"}


def import_name(path: Path) -> str:
    """`lowering/views.py` -> `kgen.lowering.views`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "kgen" else ("kgen", *parts))
    return name.removesuffix(".__init__")


def kgen_files(suffixes: set[str]) -> list[Path]:
    return sorted(path for folder in KGEN for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_is_packaged():
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    found = {import_name(path.parent / "__init__.py") for path in kgen_files({".py"})}
    assert found == listed


@pytest.mark.parametrize("name", ["kgen", "kgen.lowering", "kgen.scheduler", "kgen.templates"])
def test_import_names_resolve(name):
    module = importlib.import_module(name)
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


def test_import_has_no_heavy_side_effect():
    """Importing the package must not import torch: `torch.compile` lists back ends by importing nothing."""
    code = "import kgen, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_backend_is_an_entry_point():
    found = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "kgen"]
    assert [point.value for point in found] == ["kgen.entry:kgen_backend"]


def test_kgen_does_not_import_inductor():
    offenders = []
    for path in kgen_files({".py"}):
        if str(path.relative_to(ROOT)) in MAY_IMPORT_INDUCTOR:
            continue
        offenders += [f"{path.relative_to(ROOT)}:{line}" for line in inductor_imports(ast.parse(path.read_text()))]
    assert not offenders


def inductor_imports(tree: ast.AST) -> list[int]:
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [f"torch.{node.attr}"] if isinstance(node.value, ast.Name) and node.value.id == "torch" else []
        else:
            continue
        if any(name.startswith("torch._inductor") for name in names):
            lines.append(node.lineno)
    return lines


def test_no_path_of_one_machine_in_the_tree():
    """The repository names no home folder and no package host."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    needles = ("/" + "root/", "/" + "home/", "pypi" + ".org", "download.pytorch" + ".org")
    offenders = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and any(needle in path.read_text(errors="replace") for needle in needles):
            offenders.append(name)
    assert not offenders


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist and a wheel, built in a copy: setuptools writes build files beside pyproject.toml."""
    return check_install.build(tmp_path_factory.mktemp("built"))


def test_sdist_and_wheel_hold_everything(built):
    sdist, wheel = built
    assert check_install.missing_files(sdist, wheel) == []
    inside = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("kernels/matmul.py.jinja", "include/kgen/ops.h", "tuning/shipped/"):
        assert any(kind in name for name in inside), kind
    assert {top for name in inside for top in [name.split("/")[0]] if not top.endswith(".dist-info")} == {"kgen"}
    [metadata] = [zipfile.ZipFile(wheel).read(name).decode() for name in inside if name.endswith("/METADATA")]
    assert "Name: torch-kgen\n" in metadata
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata, re.MULTILINE)
    assert sorted(required) == ["jinja2", "numpy", "sympy", "torch", "tqdm"]


def test_a_missing_file_is_seen(built, monkeypatch):
    sdist, wheel = built
    monkeypatch.setattr(check_install, "package_files", lambda: {"kgen/forgotten.h"})
    assert check_install.missing_files(sdist, wheel) == ["sdist: kgen/forgotten.h", "wheel: kgen/forgotten.h"]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment():
    subprocess.run([sys.executable, "-m", "tools.check_install"], cwd=ROOT, check=True)


def fresh(code: str, where: Path = ROOT.parent) -> subprocess.CompletedProcess[str]:
    """A new process that runs some Python."""
    return subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)


@pytest.mark.every(2)
@pytest.mark.parametrize("inside", [False, True])
def test_import_in_and_beside_a_clone(tmp_path, inside):
    clone = tmp_path / "kgen"
    clone.symlink_to(ROOT)
    done = fresh("import kgen, kgen.lowering, kgen.templates.cpp; kgen.KernelTemplate", clone if inside else tmp_path)
    assert done.returncode == 0, done.stderr


def test_no_package_is_inside_of_itself():
    """torch's logging walks through all packages below kgen."""
    code = "import kgen, pkgutil; print(*(one.name for one in pkgutil.iter_modules(kgen.__path__)))"
    found = fresh(code).stdout.split()
    assert "backend" in found
    assert "kgen" not in found


def test_another_platform_gets_one_sentence():
    code = """
import sys, torch, torch._dynamo
sys.platform, sys.modules["fcntl"] = "win32", None
sys.argv = ["kgen", "cache", "stats"]
from kgen.cli import main
sys.exit(main())
"""
    done = fresh(code)
    assert done.returncode == 1
    assert done.stderr.startswith("kgen: kgen runs on Linux, and this is win32")
    assert "Traceback" not in done.stderr


def test_a_library_for_terminals_is_imported_where_a_bar_is_shown():
    code = """
import sys, torch
sys.modules["tqdm"] = sys.modules["rich"] = sys.modules["rich.console"] = None
import kgen.pipeline, kgen.cli, kgen.commands.explain
from kgen.tuning.progress import progress
with progress("a matmul", 2) as (step, line):
    step("next")
"""
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "kgen: measuring a matmul, 2 candidates\n"
