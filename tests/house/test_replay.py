"""The replay: renders kernels without compilers, the same in every process, and shows what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import replay

ROOT = Path(__file__).resolve().parents[2]
CASES = ("memory/softmax-train", "matmul/9kn", "frozen/gelu_1-float32", "ops/argmax")


@pytest.fixture(autouse=True)
def _threads():
    """The replay plans for a number of threads of its own."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def written(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_two_processes_render_the_same_without_compilers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.replay", "render", "--out", str(tmp_path / "apart"), "--only", *CASES]
    apart = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PATH": ""}, stderr=subprocess.DEVNULL)
    options = replay.parse(["render", "--out", str(tmp_path / "here"), "--only", *CASES])
    assert replay.render(options.out, replay.chosen(options)[::-1]) == {}
    assert apart.wait() == 0
    here = files(tmp_path / "here")
    assert here == files(tmp_path / "apart")
    kernels = {name.rpartition("/")[0] for name in here if name.endswith((".cpp", ".py"))}
    roles = ("0_forward", "1_backward")
    assert {f"{device}/memory/softmax-train/{role}" for device in ("cpu", "gpu") for role in roles} <= kernels
    assert any(name.startswith("gpu/matmul/9kn") for name in kernels)
    assert "sections" in here["cpu/memory/softmax-train/0_forward/steps.txt"]


def test_an_error_is_part_of_what_is_compared(tmp_path: Path) -> None:
    from tools.replay_corpus import Case

    def refuse() -> None:
        raise ValueError("no such pattern")

    errors = replay.render(tmp_path, [(Case("bad", refuse), "cpu")])
    assert errors["cpu/bad"].startswith("ValueError: no such pattern")
    assert (tmp_path / "cpu" / "bad" / "error.txt").exists()


BEFORE = {
    "cpu/a/0_inference/k_a.cpp": "one\ntwo\n",
    "gpu/a/0_inference/k_a.py": "from kgen.templates.triton import library as lib\nx = 1\n",
    "cpu/a/0_inference/verdicts.txt": "fused\n",
}


def compared(tmp_path: Path, after: dict[str, str], *flags: str) -> tuple[int, list[str]]:
    roots = [written(tmp_path / name, texts) for name, texts in (("before", BEFORE), ("after", after))]
    options = replay.parse(["diff", *map(str, roots), *flags])
    return replay.compare(*roots, options), [title for title, _ in replay.differences(*roots, options)]


def test_equal_folders_do_not_differ(tmp_path: Path) -> None:
    assert compared(tmp_path, BEFORE) == (0, [])


def test_what_differs_is_listed_by_graph_and_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = {**BEFORE, "cpu/a/0_inference/k_a.cpp": "one\nthree\n", "cpu/b/0_inference/k_b.cpp": "new\n"}
    status, titles = compared(tmp_path, after)
    assert status == 1
    assert titles == ["cpu/a/0_inference/k_a.cpp: differs", "cpu/b/0_inference/k_b.cpp: only after"]
    shown = capsys.readouterr().out
    assert "-two" in shown
    assert "+three" in shown
    assert "2 files of 2 graphs differ" in shown


def test_verdicts_and_imports_can_be_left_out(tmp_path: Path) -> None:
    moved = BEFORE["gpu/a/0_inference/k_a.py"].replace(
        "kgen.templates.triton import library", "kgen.templates.gpu import device"
    )
    after = {**BEFORE, "gpu/a/0_inference/k_a.py": moved, "cpu/a/0_inference/verdicts.txt": "refused\n"}
    assert compared(tmp_path, after)[0] == 1
    assert compared(tmp_path, after, "--ignore-verdicts", "--ignore-imports") == (0, [])
    assert compared(tmp_path, after, "--kernels-only", "--ignore-imports") == (0, [])
    assert compared(tmp_path, after, "--kernels-only")[1] == ["gpu/a/0_inference/k_a.py: differs"]


def test_kgen_is_imported_from_the_tree_of_its_commit(tmp_path: Path) -> None:
    """Folders go where its pyproject.toml says, whatever they are called."""
    tree = written(
        tmp_path / "tree",
        {
            "pyproject.toml": '[tool.setuptools.package-dir]\nkgen = "kgen"\n"kgen.scheduler" = "planner"\n',
            "kgen/__init__.py": "",
            "planner/__init__.py": "NAME = 'planner'\n",
            "tools/replay_adapter.py": "OWN = True\n",
        },
    )
    side = tmp_path / "side"
    replay.importable(tree, side)
    code = """
import importlib.util, kgen.scheduler, tools.replay_adapter
print(kgen.scheduler.NAME, tools.replay_adapter.OWN, importlib.util.find_spec("kgen.lowering"))
"""
    isolated = replay.ISOLATED.partition("runpy.run_module")[0] + code
    done = subprocess.run([sys.executable, "-c", isolated], cwd=side, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["planner", "True", "None"]
