"""A second process finds everything on disk: no tracing by AOTAutograd, no lowering, no compiler, not even their imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kgen import cache

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]

GPT = """
    from examples.gpt import GPT, TINY, random_batch
    for dynamic, sizes in RUNS:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = GPT(TINY)
        run = torch.compile(model, backend="kgen", dynamic=dynamic)
        for batch, sequence in sizes:
            ids, targets = random_batch(TINY, "cpu", batch, sequence)
            results = []
            for call in (model, run):
                model.zero_grad()
                loss = call(ids, targets)
                loss.backward()
                results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
"""
REPORT = """
    import json, sys
    from kgen.counters import counters
    # AOTAutograd's key asks for Inductor's back ends, which take a second to import and which no graph of kgen goes through.
    sources = ("torch._inductor.codegen.cpp", "kgen.pipeline", "kgen.lowering", "kgen.scheduler")
    sources += ("kgen.templates.cpp.codegen.emit",)
    names = ("aot_trace", "aot_cache_hit", "lowered", "cpp.compiles", "cpp.headers", "cpp.runtimes", "kernels")
    loaded = [m for m in sources if m in sys.modules]
    print(json.dumps({**{name: counters[name] for name in names}, "loaded": loaded}))
"""


def process(body: str, folder: Path, **values: Any) -> dict[str, Any]:
    """Counters of a fresh process that runs `body` with caches in `folder`."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    script = "import torch\n" + given + textwrap.dedent(body) + textwrap.dedent(REPORT)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **caches}, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def assert_warm(report: dict[str, Any], kernels: int, graphs: int = 1) -> None:
    assert report.pop("aot_cache_hit") >= graphs
    assert report.pop("kernels") == kernels  # the coverage of a loaded graph is that of the graph that was made
    assert report.pop("loaded") == []
    assert not any(report.values()), report


def test_second_process_only_loads(tmp_path: Path) -> None:
    """Graphs of fixed and of dynamic sizes, in the same two processes: most of their time is torch's start."""
    first = process(GPT, tmp_path, RUNS=[(False, [(2, 32)]), (True, [(3, 17)])])
    assert first["aot_trace"] == 2
    assert first["lowered"] == 4
    assert_warm(process(GPT, tmp_path, RUNS=[(False, [(2, 32)]), (True, [(5, 32), (2, 24)])]), first["kernels"], graphs=2)


@pytest.mark.slow
def test_an_emptied_cache_is_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd's entries lie in a folder of torch's; without ours they must not be used."""
    body = """
        x = torch.randn(7, 5)
        torch.testing.assert_close(torch.compile(torch.softmax, backend="kgen")(x, 1), torch.softmax(x, 1))
    """
    built = cache.cache_dir()
    reports = []
    for folder in ("one", "one", "two"):
        place = tmp_path / folder / built.name
        place.mkdir(parents=True, exist_ok=True)
        for kind in ("runtime", "header", "loops"):  # what is built once per machine takes minutes and has no part in this
            (built / kind).mkdir(exist_ok=True)
            if not (place / kind).exists():
                (place / kind).symlink_to(built / kind)
        monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / folder))
        reports.append(process(body, tmp_path))
    assert [r["lowered"] for r in reports] == [1, 0, 1]
    assert [r["aot_trace"] for r in reports] == [1, 0, 1]
