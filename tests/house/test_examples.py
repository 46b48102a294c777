"""The examples and the bench commands run, on small sizes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.cpu
def test_demo_trains_right(tmp_path):
    """No graph break, loss, gradients and parameters as in eager, one recompilation for nine shapes."""
    out = tmp_path / "out.json"
    done = run(
        "examples.transformer", "--quick", "--size", "tiny", "--rounds", "1", "--backends", "eager", "kgen", "--json", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [row["ok"] for row in report["dtypes"][0]["checks"]] == [True, True]
    assert report["dynamic"]["recompilations"] == 1


@pytest.mark.cpu
@pytest.mark.slow
def test_demo_in_bfloat16_and_fresh_processes(tmp_path):
    out = tmp_path / "out.json"
    done = run(
        "examples.transformer",
        "--size",
        "tiny",
        "--dtype",
        "bfloat16",
        "--rounds",
        "1",
        "--backends",
        "eager",
        "kgen",
        "--json",
        str(out),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(out.read_text())["dtypes"][0]
    assert measured["warm"]["kgen"]["peak_bytes"] > 0


@pytest.mark.cpu
@pytest.mark.slow
def test_patterns_are_right():
    done = run("bench.compare", "--check", "--contenders", "kgen", "--megabytes", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_demo_reports_a_failing_backend():
    from examples.transformer import guarded

    def fail():
        raise RuntimeError("no")

    row = guarded(fail, backend="kgen", dtype="float32")
    assert row == {"backend": "kgen", "dtype": "float32", "ok": False, "error": "RuntimeError: no"}


@pytest.mark.parametrize(("device", "able", "dtypes"), [("cpu", False, 1), ("cpu", True, 2), ("cuda", False, 2)])
def test_demo_leaves_bfloat16_out_where_eager_takes_minutes(device, able, dtypes, monkeypatch):
    from examples import transformer

    monkeypatch.setattr(transformer, "has_bfloat16_matmuls", lambda: able)
    printed = io.StringIO()
    assert transformer.default_dtypes("full", device, Console(file=printed)) == ["float32", "bfloat16"][:dtypes]
    assert ("--dtype" in printed.getvalue()) == (dtypes == 1)


def test_the_short_demo_is_of_one_type(monkeypatch):
    from examples import transformer

    monkeypatch.setattr(transformer, "has_bfloat16_matmuls", lambda: True)
    assert transformer.default_dtypes("small", "cpu", Console()) == ["float32"]


def test_every_pattern_gives_the_bytes_it_moves():
    from bench.contenders import jobs

    for job in jobs([], "both"):
        assert job.fewest_bytes(1) > 2**16, job.name


@pytest.mark.cpu
def test_the_compilers_report_is_read() -> None:
    from bench.compile_profile import PHASES, inside_compiler
    from kgen.build import toolchain

    if toolchain.compiler().family != "gcc":
        pytest.skip("the report is g++'s")
    found = inside_compiler('#include <kgen/kernel.h>\nextern "C" int nothing() { return 0; }\n')
    assert set(PHASES.values()) < set(found)
    assert 0 < found["assemble, link, start"] < 60


def test_scaling_graphs_have_as_many_nodes_as_asked():
    from bench.scheduler_scaling import aten, build_graph

    gm = build_graph(40)
    sums = sum(node.target is aten.sum.dim_IntList for node in gm.graph.nodes)
    outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    assert sums + len(outputs) >= 40
    gm.graph.lint()


def test_timings_take_turns():
    from bench.measure import geomean, growth_exponent, interleave

    order = []
    interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0, sample=0, rounds=4)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert growth_exponent([10, 100, 1000], [1e-2, 1e-1, 1.0]) == pytest.approx(1.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_counts_what_a_call_frees():
    from bench.memory import peak_of

    peak = peak_of(lambda: torch.ones(2**24).sum())
    assert 0.9 * 2**26 < peak.above_rest < 2**27  # the kernel counts whole pages, and late


@pytest.mark.interpret
def test_a_template_for_an_own_operator(tmp_path):
    """One kernel with a prologue and an epilogue, in under 60 lines of Python and Jinja."""
    files = [ROOT / "examples" / name for name in ("new_template.py", "l1_distance.py.jinja")]
    assert sum(len(f.read_text().splitlines()) for f in files) < 60
    done = run("examples.new_template")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 graph, 1 kernel, 0 library calls" in done.stdout


@pytest.mark.cpu
def test_a_template_in_cpp_for_an_own_operator():
    done = run("examples.new_template_cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 graph, 1 kernel, 0 library calls" in done.stdout


@pytest.mark.cpu
def test_an_attention_of_its_own_is_one_kernel():
    done = run("examples.attention_variant")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels: 1" in done.stdout
