"""Installs kgen as a stranger would: sdist and wheel into empty environments, then a model compiled from another folder.

    python -m tools.check_install                # minutes, and 1.5 GB of disk while it runs
    python -m tools.check_install --contents      # only compares what sdist and wheel hold with the tree

Packages come from where pip is configured to find them, in the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kgen", "lowering", "scheduler", "templates")
DATA = {".py", ".jinja", ".h", ".cpp", ".json", ".typed"}
BUILD = "import sys; sys.path.insert(0, 'tools'); import build_backend; build_backend.build_sdist(sys.argv[1])"
# Run in a folder with nothing of kgen in it.
SMOKE = """
import importlib.util, pathlib, sys
import torch, kgen
assert pathlib.Path(kgen.__file__).is_relative_to(sys.prefix), kgen.__file__
model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5))
x = torch.randn(7, 24)
wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
compiled = torch.compile(model, backend="kgen")
found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
for one, other in zip(wanted, found):
    torch.testing.assert_close(one, other)
assert kgen.coverage()["kernels"] > 0
assert importlib.util.find_spec("triton") is None, "a CPU's user needs no Triton"
print("compiled and trained:", kgen.__version__)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contents", action="store_true", help="install nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kgen-install-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        missing = missing_files(sdist, wheel)
        if missing:
            print("left out:", *missing, sep="\n  ")
            return 1
        print(f"sdist and wheel hold all {len(package_files())} files of the packages")
        if not options.contents:
            check_environment(folder, wheel, sdist)
    return 0


# ---- building -----------------------------------------------------------------------------------------------------------


def build(folder: Path) -> tuple[Path, Path]:
    """An sdist of a copy of the tree, and a wheel that is built from the sdist."""
    source = copied(folder / "clones")
    run([sys.executable, "-c", BUILD, str(folder)], source)
    sdist = one_file(folder, "*.tar.gz")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, sdist], folder)
    return sdist, one_file(folder, "*.whl")


def copied(into: Path) -> Path:
    """The tree as a clone called kgen, without what git ignores: setuptools writes beside pyproject.toml."""
    clone = into / "kgen"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "out", "dist", "tests", "bench")
    shutil.copytree(ROOT, clone, ignore=ignore)
    shutil.rmtree(clone / "build", ignore_errors=True)
    return clone


def one_file(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def package_files() -> set[str]:
    """What the packages hold, by its place below `kgen`."""
    found = {path.relative_to(ROOT) for one in PACKAGES for path in (ROOT / one).rglob("*") if path.suffix in DATA}
    return {path.as_posix() if path.parts[0] == "kgen" else f"kgen/{path.as_posix()}" for path in found}


def missing_files(sdist: Path, wheel: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    placed = {name if name.startswith("kgen/") else f"kgen/{name}" for name in inside}
    lost = [f"sdist: {name}" for name in sorted(package_files() - placed)]
    with zipfile.ZipFile(wheel) as archive:
        return lost + [f"wheel: {name}" for name in sorted(package_files() - set(archive.namelist()))]


# ---- installing ---------------------------------------------------------------------------------------------------------


def check_environment(folder: Path, wheel: Path, sdist: Path) -> None:
    """Installs the wheel, with what it requires, into an empty environment and uses it; then the sdist, which pip builds."""
    python = new_environment(folder / "environment")
    run([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel], folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    run([python, "-c", SMOKE], elsewhere)
    run([python.with_name("kgen"), "doctor"], elsewhere)
    run([python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", sdist], folder)
    shutil.rmtree(elsewhere / "cache")
    run([python, "-c", SMOKE], elsewhere)
    check_beside_clone(folder, python)


def check_beside_clone(folder: Path, python: Path) -> None:
    """`import kgen` in a folder that holds a clone, and in the clone: installed, and with an editable install."""
    code = "import kgen, kgen.lowering, kgen.templates.cpp; kgen.explain"
    for place in (folder / "clones", folder / "clones" / "kgen"):
        run([python, "-c", code], place)
    run([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "setuptools", "wheel"], folder)
    editable = ["--quiet", "--no-deps", "--no-build-isolation", "-e", folder / "clones" / "kgen"]
    run([python, "-m", "pip", "install", *editable], folder)
    for place in (folder / "clones", folder / "clones" / "kgen", folder):
        run([python, "-c", code], place)


def new_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(command: list[object], where: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KGEN_", "VIRTUAL_ENV"))}
    # a cache of its own: what an earlier version has compiled would hide what this one lacks
    clean["KGEN_CACHE_DIR"] = str(where / "cache")
    print("$", *map(str, command[:1]), *(str(part) for part in command[1:] if "\n" not in str(part)), flush=True)
    subprocess.run(list(map(str, command)), cwd=where, env=clean, check=True)


if __name__ == "__main__":
    sys.exit(main())
