"""What torch's own tools show of kgen: TORCH_LOGS, the structured trace, the profiler, TORCH_COMPILE_DEBUG."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kgen
from kgen.backend import kgen_backend

pytestmark = pytest.mark.cpu
SCRIPT = """
import torch

@torch.compile(backend="kgen", options={"cache": False})
def f(x):
    return torch.softmax(x * 2, -1)

f(torch.randn(4, 8))
"""


def run(folder: Path, script: str = SCRIPT, **variables: str) -> str:
    """The script in a process of its own; what it writes to standard error."""
    (folder / "script.py").write_text(script)
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_logs_and_trace_of_one_process(tmp_path: Path) -> None:
    """Both are set up when torch is imported: one process for the two."""
    text = run(tmp_path, TORCH_LOGS="+kgen", TORCH_TRACE=str(tmp_path / "trace"), TORCH_COMPILE_DEBUG="1")
    for stage in ("lower", "schedule", "render", "build"):
        assert re.search(rf"{stage} of \w+: [\d.]+ ms", text), stage
    assert "1 kernels, 0 library calls" in text
    assert "fused, because" in text
    assert 'extern "C" int' in text
    check_trace(tmp_path / "trace")
    [folder] = tmp_path.glob("torch_compile_debug/run_*/kgen/graph_000_inference")
    assert {"fx.txt", "ir_lowered.txt", "verdicts.txt", "output_code.py"} <= {path.name for path in folder.iterdir()}


TLPARSE = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.skipif(TLPARSE is None, reason="needs tlparse")
def test_tlparse_shows_what_kgen_made(tmp_path: Path) -> None:
    run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    [log] = (tmp_path / "trace").glob("*.log")
    command = [str(TLPARSE), str(log), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True)
    pages = {path.name.partition("_inference")[0]: path for path in (tmp_path / "out").rglob("kgen_*")}
    assert pages.keys() == {"kgen_graph", "kgen_ir", "kgen_kernels", "kgen_verdicts", "kgen_output_code"}
    assert 'extern "C" int' in pages["kgen_output_code"].read_text()
    assert "kgen_output_code" in (tmp_path / "out" / "index.html").read_text()


def check_trace(folder: Path) -> None:
    [log] = folder.glob("*.log")
    found = {}
    parts = re.split(r"^V\d{4} .*?\] ", log.read_text(), flags=re.MULTILINE)
    for part in parts:
        head, _, payload = part.partition("\n")
        about = json.loads(head) if head.startswith("{") else {}
        name = about.get("artifact", {}).get("name", "")
        if name.startswith("kgen_"):
            found[name.split("_inference")[0]] = payload
    assert found.keys() == {"kgen_graph", "kgen_ir", "kgen_kernels", "kgen_verdicts", "kgen_output_code"}
    assert "torch.ops.aten.mul" in found["kgen_graph"]
    assert "pointwise" in found["kgen_ir"]
    assert "kernel" in found["kgen_kernels"]
    assert json.loads(found["kgen_verdicts"])[0]["outcome"] == "fused"
    assert 'extern "C" int' in found["kgen_output_code"]


@pytest.mark.slow
def test_what_a_cache_has_is_shown_too(tmp_path: Path) -> None:
    """A second process would find its graphs in the cache, and say nothing of them."""
    cached = SCRIPT.replace('options={"cache": False}', "options={}")
    own = {"KGEN_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "aot")}
    run(tmp_path, cached, **own)
    text = run(tmp_path, cached, TORCH_LOGS="+kgen", TORCH_TRACE=str(tmp_path / "trace"), **own)
    assert 'extern "C" int' in text
    check_trace(tmp_path / "trace")
    assert "kernels" in run(tmp_path, cached, TORCH_LOGS="kgen", **own)


def test_a_program_that_logs_all_uses_the_cache(tmp_path: Path) -> None:
    """A root logger at INFO has not asked for graphs."""
    script = "import logging\nlogging.basicConfig(level=logging.INFO)\n" + SCRIPT.replace('{"cache": False}', "{}")
    script += "import kgen\nlogging.info('traced: %d', kgen.coverage()['aot_traces'])\n"
    own = {"KGEN_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "aot")}
    assert run(tmp_path, script, **own).endswith("traced: 1\n")
    assert run(tmp_path, script, **own).endswith("traced: 0\n")


def test_nothing_is_written_otherwise(tmp_path: Path) -> None:
    assert run(tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def profiled(**options: object) -> list[str]:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.softmax(x * 2, -1) @ x, 0).exp()

    compiled = torch.compile(f, backend=kgen_backend, options={"cache": False, **options})
    x = torch.randn(8, 8)
    compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(x)
    return [event.name for event in found.events()]


def test_graphs_are_regions_of_the_profilers_timeline() -> None:
    names = profiled()
    assert len([name for name in names if name.startswith("kgen inference")]) == 1
    assert [name for name in names if re.match(r"k\d+_", name)] == []


def test_kernels_are_regions_by_option() -> None:
    names = profiled(profile_kernels=True)
    kernels = [name for name in names if re.match(r"k\d+_\w+", name)]
    assert len(kernels) >= 2
    assert any("softmax" in name or "exp" in name for name in kernels)


def test_a_kernels_region_says_what_it_is_of() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x))

    model = Model()
    compiled = torch.compile(model, backend=kgen_backend, options={"cache": False, "profile_kernels": True})
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(torch.randn(8, 8))
    names = [event.name for event in found.events() if re.match(r"k\d+_", event.name)]
    assert [bool(re.match(r"k0_addmm\w* in up at test_trace\.py:\d+ return torch\.relu", name)) for name in names] == [True], (
        names
    )


def test_forward_and_backward_are_told_apart() -> None:
    compiled = torch.compile(lambda x: x.sin().sum(), backend=kgen_backend, options={"cache": False})
    x = torch.randn(8, requires_grad=True)
    compiled(x).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(x).backward()
    roles = {event.name.split()[1] for event in found.events() if event.name.startswith("kgen ")}
    assert roles == {"forward", "backward"}


class Told(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_logger_of_tuning_says_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, told = logging.getLogger("kgen.tuning"), Told()
    monkeypatch.setattr(logger, "handlers", [told])
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()
    f = kgen.compile(
        lambda x, y: torch.relu(x @ y), mode="max-autotune-no-cudagraphs",
        options={"cache": False, "tuning_file": tmp_path / "tuning.json", "tuning_seconds": 10},
    )  # fmt: skip
    f(torch.randn(64, 64), torch.randn(64, 64))
    text = "\n".join(told.lines)
    assert re.search(r"is the fastest of \d+, [\d.]+ us", text)


FROZEN = """
import torch

layers = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
with torch.no_grad():
    torch.compile(layers, backend="kgen", options={"cache": False, "freezing": True, "strict": True})(torch.randn(2, 8, 16, 16))
"""


def test_a_trace_shows_weights_in_a_form_of_the_librarys(tmp_path: Path) -> None:
    """They have no strides, and so no bytes that could be counted: with a trace, the compilation failed."""
    run(tmp_path, FROZEN, TORCH_TRACE=str(tmp_path / "trace"))
    [log] = (tmp_path / "trace").glob("*.log")
    assert "in a form of the library's" in log.read_text()


MINIFIED = """
import torch

compiled = torch.compile(lambda x: torch.relu(torch.sin(x) + 1), backend="kgen")
compiled(torch.randn(3, 4))
"""


PLANTED = """
from kgen.lowering.families import RULES

def raising(*_):
    raise ValueError("nobody knows sines")

RULES["aten.sin"] = raising
"""


@pytest.mark.slow
def test_torchs_minifier_works_with_variables(tmp_path: Path) -> None:
    """Its scripts know the back end and no options, and kgen raises where it is strict."""
    (tmp_path / "script.py").write_text(MINIFIED)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PLANTED)
    environment = os.environ | {
        "KGEN_STRICT": "1", "PYTHONPATH": str(tmp_path / "planted"),
        "TORCHDYNAMO_REPRO_AFTER": "dynamo", "TORCHDYNAMO_REPRO_LEVEL": "2",
    }  # fmt: skip

    def run(script: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "Minifier script written to" in run(tmp_path / "script.py").stderr
    [launcher] = tmp_path.rglob("minifier_launcher.py")
    run(launcher)
    made = (tmp_path / "repro.py").read_text()
    assert "torch.sin(" in made
    assert "torch.relu(" not in made
    assert "nobody knows sines" in run(tmp_path / "repro.py").stderr
