"""Triton kernels to machine code: no GPU is needed. What the cache holds costs no Triton; what fails names its kernel."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch_kernels as tk
import pytest

from kgen import config
from kgen.build import triton
from kgen.counters import counters
from kgen.errors import TritonBuildFailed, TritonNotFound

pytestmark = pytest.mark.ptx


@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code_and_what_a_launch_needs(arch):
    kernel = tk.add("i32", options=(("enable_fp_fusion", False),))
    [made] = triton.compile_kernels([kernel], arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert (made.name, made.function, made.warps, made.signature) == ("add", "add", 4, kernel.signature)
    assert made.scratch == (0, 0)
    assert (made.registers, made.stack) == triton.resource_usage(made.cubin)
    assert made.registers > 0
    assert made.stack == 0


WAITS = """def waits(x, out):
    lib.wait_for_previous()
    tl.store(out, tl.load(x) + 1)
"""


def test_kernels_that_wait_by_themselves():
    """Where the GPU can, and the kernel does."""
    options = (("launch_pdl", True),)
    [waits] = triton.compile_kernels([tk.kernel(WAITS, ("*fp32", "*fp32"), options=options)], 90)
    assert waits.early
    assert tk.waits_first(waits.cubin)
    [forgets] = triton.compile_kernels([tk.add(options=options)], 90)
    [asked_for_nothing] = triton.compile_kernels([tk.kernel(WAITS, ("*fp32", "*fp32"))], 90)
    [older] = triton.compile_kernels([tk.kernel(WAITS, ("*fp32", "*fp32"), options=options)], 80)
    others = forgets, asked_for_nothing, older
    assert not any(made.early or tk.waits_first(made.cubin) for made in others)


def test_shared_memory_is_reported():
    source = "def total(x, out):\n    tl.store(out, tl.sum(tl.load(x + tl.arange(0, 1024)), 0))\n"
    [made] = triton.compile_kernels([tk.kernel(source, ("*fp32", "*fp32"))], 90)
    assert made.shared > 0


def test_scratch_memory_and_large_tiles():
    copy = tk.kernel(tk.COPY_BY_DESCRIPTOR, ("*fp32", "*fp32", "i32"))
    sizes = tk.kernel(tk.MATMUL, tk.MATMUL_SIGNATURE, divisible=(True,) * 4, num_stages=4, num_warps=8)
    first, second = triton.compile_kernels([copy, sizes], 90)
    assert first.scratch[0] > 0
    assert second.scratch == (0, 0)
    assert second.shared > 48 * 1024
    assert second.warps == 8


def test_divisible_pointers_are_loaded_as_vectors():
    registers = [triton.compile_kernels([tk.add(divisible=flags)], 90)[0] for flags in ((True,) * 3 + (False,), (False,) * 4)]
    assert registers[0].cubin != registers[1].cubin


def test_compiled_once_per_content(fresh_cache):
    before = counters["triton.compiles"]
    kernel = tk.add()
    renamed = dataclasses.replace(kernel, source=f"# layer 2\n{kernel.source}")  # of the same key
    first, second = triton.compile_kernels([kernel, renamed], 80)
    assert first == second
    assert triton.compile_kernels([renamed], 80) == [first]
    assert counters["triton.compiles"] == before + 1
    triton.compile_kernels([dataclasses.replace(kernel, num_warps=8)], 80)
    triton.compile_kernels([dataclasses.replace(kernel, options=(("enable_fp_fusion", False),))], 80)
    assert counters["triton.compiles"] == before + 3


@pytest.mark.parametrize(
    "change",
    [
        {"key": "x"}, {"signature": ("*fp32",) * 3 + ("i32",)}, {"divisible": (False,) * 4}, {"num_warps": 8},
        {"num_stages": 2}, {"options": (("maxnreg", 32),)},
    ],
)  # fmt: skip
def test_the_key_covers_whatever_changes_code(change):
    kernel = tk.add()
    assert triton._key(kernel, 80) != triton._key(dataclasses.replace(kernel, **change), 80)


def test_the_key_covers_the_machine_and_the_compiler(monkeypatch):
    kernel = tk.add()
    first = triton._key(kernel, 80)
    assert triton._key(kernel, 90) != first
    for name in ("_version", "_library", "_settings"):
        with monkeypatch.context() as patch:
            patch.setattr(triton, name, lambda: "another")
            assert triton._key(kernel, 80) != first


def test_the_library_counts_with_all_that_it_imports(tmp_path):
    (tmp_path / "library.py").write_text("from kgen.templates.triton.device.one import f\n")
    (tmp_path / "one.py").write_text("from kgen.templates.triton.device import two\nimport triton.language as tl\n")
    (tmp_path / "two.py").write_text("import kgen.templates.triton.device.library\n")
    (tmp_path / "three.py").write_text("")
    assert sorted(triton._with_imports(tmp_path, "library")) == ["library", "one", "two"]


def test_a_mistake_is_reported_with_its_source_kept(fresh_cache):
    with pytest.raises(TritonBuildFailed, match=r"kernel broken for sm_80 \(exit 1\)(.|\n)*nothing_there") as caught:
        triton.compile_kernels([tk.kernel("def broken(x):\n    tl.store(x, nothing_there)\n", ("*fp32",)), tk.add()], 80)
    assert "nothing_there" in Path(caught.value.details["source"]).read_text()
    assert "Traceback" in Path(caught.value.details["log"]).read_text()
    before = counters["triton.compiles"]
    triton.compile_kernels([tk.add()], 80)
    assert counters["triton.compiles"] == before, "the good kernel beside it was compiled and kept"


def test_what_the_verifier_says_is_reported(fresh_cache):
    """It stands at the top of the log, before the whole program."""
    source = """def packed(x):
    at = x + tl.arange(0, 1)
    tl.store(at, tl.inline_asm_elementwise("", "=r,=r,0,1", [tl.load(at)], tl.float32, True, 2))
"""
    with pytest.raises(TritonBuildFailed, match="must be a multiple of the op's packed_element attribute, 2"):
        triton.compile_kernels([tk.kernel(source, ("*fp32",))], 80)


def test_what_has_begun_is_not_compiled_again(fresh_cache):
    before = counters["triton.compiles"]
    for _ in range(2):
        triton.begin(tk.add(), 80)
    [made] = triton.compile_kernels([tk.add()], 80)
    assert made.name == "add"
    assert counters["triton.compiles"] == before + 1
    triton.begin(tk.add(), 80)
    assert not triton._begun
    assert counters["triton.compiles"] == before + 1


def test_a_failure_of_what_has_begun_waits_for_who_asks(fresh_cache):
    wrong = dataclasses.replace(tk.add(), key="wrong", source="no Python\n")
    triton.begin(wrong, 80)
    concurrent.futures.wait(triton._begun.values())
    before = counters["triton.compiles"]
    with pytest.raises(TritonBuildFailed, match="SyntaxError"):
        triton.compile_kernels([wrong, tk.add()], 80)
    assert counters["triton.compiles"] == before + 1, "of the good one"
    with pytest.raises(TritonBuildFailed):
        triton.compile_kernels([wrong], 80)
    assert counters["triton.compiles"] == before + 2


def test_a_fork_compiles_for_itself(fresh_cache):
    """It has none of the threads that wait for what its parent has begun."""
    slow = dataclasses.replace(tk.add(), source=f"import time\ntime.sleep(3)\n{tk.add().source}")
    triton.begin(slow, 80)
    process = os.fork()
    if process == 0:
        os._exit(0 if not triton._begun and triton.compile_kernels([tk.add("i32")], 80) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    triton.compile_kernels([slow], 80)


def test_what_the_launcher_cannot_do_is_refused():
    with pytest.raises(TritonBuildFailed, match="does not support num_ctas"):
        triton.compile_kernels([tk.add(options=(("num_ctas", 2),))], 90)


def test_a_crash_and_a_hang_fail_one_kernel(fresh_cache):
    crash = tk.kernel("def crash(x):\n    tl.store(x, 1)\n", ("*fp32",))
    crash = dataclasses.replace(crash, source=f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})\n{crash.source}")
    with pytest.raises(TritonBuildFailed, match="killed by SIGSEGV"):
        triton.compile_kernels([crash], 80)
    hang = dataclasses.replace(crash, key="hang", source="import time\ntime.sleep(60)\n")
    start = time.monotonic()
    with config.override(compile_seconds=1), pytest.raises(TritonBuildFailed, match="not done after 1 s"):
        triton.compile_kernels([hang], 80)
    assert time.monotonic() - start < 20
    assert triton.compile_kernels([tk.add()], 80)


def test_a_new_server_follows_a_dead_one(fresh_cache):
    triton.compile_kernels([tk.add()], 80)
    server = triton._server()
    slow = dataclasses.replace(tk.add(), key="slow", source="import time\ntime.sleep(60)\n")
    os.kill(server.process.pid, signal.SIGSTOP)  # so that it dies with the job still waiting
    try:
        job = fresh_cache / "job"
        job.mkdir()
        triton._write_job(job, slow, 80)
        pending = server.submit(job)
    finally:
        os.kill(server.process.pid, signal.SIGKILL)
    assert triton._how(pending.result(20)) == "the compile server died"
    assert triton.compile_kernels([dataclasses.replace(tk.add(), num_warps=1)], 80)
    assert triton._server() is not server


def _alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip


def test_a_warm_start_imports_no_triton_and_starts_no_server():
    triton.compile_kernels([tk.add()], 80)
    done = _alone(
        "import sys, launch_kernels as tk\n"
        "from kgen.build import triton\n"
        "[made] = triton.compile_kernels([tk.add()], 80)\n"
        "assert made.cubin and not triton._running and 'triton' not in sys.modules\n",
    )
    assert done.returncode == 0, done.stderr


def test_the_worker_needs_no_torch():
    done = _alone(
        "import sys, kgen.build.triton_worker as w\nassert w._import_triton() == ''\nassert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_server_ends_with_its_parent():
    done = _alone(
        "import os\n"
        "from kgen.build import triton\n"
        "triton.prestart()\n"
        "print(triton._server().process.pid, flush=True)\n"
        "os._exit(1)\n",
    )
    server = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{server}/cmdline").exists() and Path(f"/proc/{server}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_interpreter_setting_does_not_reach_the_compiler(fresh_cache):
    done = _alone(
        "import launch_kernels as tk\nfrom kgen.build import triton\ntriton.compile_kernels([tk.add()], 80)\n",
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(triton, "_package", lambda: None)
    triton._version.cache_clear()
    try:
        with pytest.raises(TritonNotFound, match="pip install 'torch-kgen"):
            triton.compile_kernels([tk.add()], 80)
        triton.prestart()
    finally:
        monkeypatch.undo()
        triton._version.cache_clear()
