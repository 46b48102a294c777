"""The call profile counts the files whose functions run, in all threads, and not what runs while modules are imported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools.call_profile import CallProfile, packages

ROOT = Path(__file__).resolve().parents[2]
# Files of kgen that one relu executes: it may only fall.
MOST_FILES = 40


def test_functions_count_and_imports_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    used = tmp_path / "profiled_used.py"
    (tmp_path / "profiled_imported.py").write_text("def at_import():\n    return 1\nVALUE = at_import()\n")
    used.write_text("def run():\n    import profiled_imported\n    return profiled_imported.VALUE\n")
    other = tmp_path / "profiled_thread.py"
    other.write_text("def run():\n    pass\n")
    modules = [importlib.import_module(path.stem) for path in (used, other)]
    with CallProfile([tmp_path]) as profile:
        modules[0].run()
        thread = threading.Thread(target=modules[1].run)
        thread.start()
        thread.join()
    assert dict(profile.calls) == {str(used): 1, str(other): 1}


def test_files_are_counted_by_folder() -> None:
    assert packages({"kgen/a.py": 2, "kgen/b.py": 1, "kgen/build/c.py": 9}) == {"kgen": 2, "kgen/build": 1}  # type: ignore[arg-type]


@pytest.mark.cpu
@pytest.mark.slow
def test_a_relu_executes_few_files(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    command = [sys.executable, "-m", "tools.call_profile", "--json", str(out), "--at-most", str(MOST_FILES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = json.loads(out.read_text())["calls"].keys()
    assert {"kgen/backend.py", "lowering/graph.py"} <= files
    assert not [name for name in files if name.startswith(("scheduler/transforms/", "kgen/tuning/", "kgen/report/"))]
