"""The project as users get it: import names, entry points, files in the wheel, and what kgen may import."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KGEN = ("kgen", "lowering", "scheduler", "templates")
DATA_SUFFIXES = {".jinja", ".h", ".cpp", ".json"}
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
    assert [point.value for point in found] == ["kgen.backend:kgen_backend"]


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
def wheel(tmp_path_factory) -> Path:
    """A wheel of the tree, built in a copy: setuptools writes build files beside pyproject.toml."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*KGEN, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_carries_data_files(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for path in kgen_files(DATA_SUFFIXES):
        relative = path.relative_to(ROOT)
        expected.add(str(relative if relative.parts[0] == "kgen" else Path("kgen") / relative))
    assert expected <= inside
    tops = {name.split("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kgen"}


@pytest.mark.slow
def test_wheel_works_from_another_folder(wheel, tmp_path):
    """Installed for real, away from the tree: at the root, ./kgen would hide what the wheel lacks."""
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    # The environment sees this one's packages, so that nothing is downloaded, but finds the wheel's kgen first.
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    here = [path for path in sys.path if "site-packages" in path]
    code = (
        "import kgen.lowering, kgen.scheduler, kgen.templates.cpp, torch, pathlib; "
        f"assert pathlib.Path(kgen.__file__).is_relative_to({str(installed)!r}), kgen.__file__; "
        f"assert pathlib.Path(kgen.lowering.__file__).is_relative_to({str(installed)!r}); "
        "f = torch.compile(lambda x: (x + 1).relu(), backend='kgen'); "
        "x = torch.randn(31); torch.testing.assert_close(f(x), (x + 1).relu())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *here])}
    subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, check=True)
