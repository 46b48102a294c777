"""Templates of installed packages are there without an import; and `kgen templates`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import template_author

from kgen.cli import main
from kgen.templates import registry

pytestmark = pytest.mark.interpret
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "tiny-templates"
version = "1.0"

[project.entry-points."kgen.templates"]
tiny = "tiny_templates.matmul"

[tool.setuptools]
packages = ["tiny_templates"]

[tool.setuptools.package-data]
"*" = ["*.jinja"]
"""
USER = """
import sys
import torch

assert not [name for name in sys.modules if name.startswith("tiny")]
options = {"gpu_interpreter": True, "cache": False, "template_packages": sys.argv[1] == "on"}
compiled = torch.compile(lambda x, y: torch.relu(x @ y), backend="kgen", options=options)
x, y = torch.randn(2, 32, 16), torch.randn(2, 16, 32)
import kgen
with kgen.require_fused("aten.bmm", "aten.relu"):
    torch.testing.assert_close(compiled(x, y), torch.relu(x @ y), rtol=1e-4, atol=1e-4)
print("tiny_templates.matmul" in sys.modules)
"""


@pytest.mark.slow
def test_an_installed_package_takes_part_without_an_import(tmp_path: Path) -> None:
    package = tmp_path / "source" / "tiny_templates"
    template_author.write(package, "tiny_matmul", methods=template_author.METHODS["costs nothing"])
    (package / "__init__.py").write_text("")
    (package.parent / "pyproject.toml").write_text(PROJECT)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(tmp_path / "installed"), str(package.parent)], check=True, cwd=tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for switch, imported in (("on", "True"), ("off", "False")):
        command = [sys.executable, "-c", USER, switch]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout == f"{imported}\n", done.stderr
    command = [sys.executable, "-m", "kgen", "templates", "list"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert any("tiny_matmul" in line and "tiny_templates.matmul" in line for line in done.stdout.splitlines())


def test_a_package_that_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module.at_all", registry.PACKAGES)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [point])
    registry.load_packages.cache_clear()
    with pytest.warns(RuntimeWarning, match="the templates of no_such_module.at_all are left out: ModuleNotFoundError"):
        registry.load_packages()
    registry.load_packages.cache_clear()


def test_templates_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in registry.names())
    name = registry.every("cuda")[0].name
    assert main(["templates", "show", name]) == 0
    out = capsys.readouterr().out
    assert "knob BLOCK_M: " in out
    assert "{{ kernel() }}" in out or "{{ A.tile(" in out
    assert main(["templates", "show", "nothing"]) == 1
    assert "no template is called nothing" in capsys.readouterr().err


def test_a_new_template_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["templates", "new", "my_matmul"]) == 0
    assert main(["templates", "new", "my_matmul"]) == 2
    assert "exists already" in capsys.readouterr().err
    try:
        assert main(["templates", "show", "my_matmul", "--module", "my_matmul"]) == 0
        assert "b,m,k, b,k,n -> b,m,n" in capsys.readouterr().out
    finally:
        registry.remove("my_matmul")
        sys.modules.pop("my_matmul", None)


@pytest.mark.slow
def test_a_new_template_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["templates", "new", "my_checked"]) == 0
    try:
        assert main(["templates", "check", "my_checked", "--module", "my_checked", "--configs", "1"]) == 0
    finally:
        registry.remove("my_checked")
        sys.modules.pop("my_checked", None)
