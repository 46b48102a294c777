"""The benches of matmuls: each runs on small matmuls and a CPU, and their reports say what was measured."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import ablation, autotune_compile, cpu_convolutions, gpu_matmuls, report
from bench.cublas import TYPES, Cublas, through_cupy
from bench.gpu_timing import Entry, prepare, take_turns
from bench.matmuls import MATMULS, MORE, Given, Matmul
from bench.measurements import read
from bench.results import Results, floor, load, merged

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--shrink", "64")


def result(seconds: float, **more: Any) -> dict[str, Any]:
    plain = {"seconds": seconds, "low": seconds, "high": seconds, "rounds": 7, "compile_s": 1.0, "error": None}
    return {**plain, "peak_bytes": None, "recorded": True, "chosen": [], **more}


def row(number: str, failed: dict[str, str] | None = None, **times: float) -> dict[str, Any]:
    results = {name.replace("_", "-"): result(taken) for name, taken in times.items()}
    rates = {"bfloat16": 1e12, "copy": 1e12}
    return {
        "number": number, "title": f"matmul {number}", "sets": 2, "flops": 2e6, "bytes": 1e6, "rate": "bfloat16",
        "rates": rates, "failed": failed or {}, "results": results,
    }  # fmt: skip


ROWS = [
    row("1", kgen=2e-6, eager=4e-6, eager_again=5e-6, max_autotune=3e-6, kgen_autotune=1e-6, cublas=1.9e-6),
    row("2", kgen=2e-6, eager=1e-6, eager_again=1e-6, failed={"max-autotune": "RuntimeError: no tile fits"}),
    row("10", kgen=1e-6, eager=8e-6, eager_again=8e-6, max_autotune=3e-6),
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"machine": {"gpu": "a GPU"}, "rows": ROWS}))
    return path


# ---- results and reports --------------------------------------------------------------------------------------------


def test_ratios_are_over_the_matmuls_that_both_ran(stored: Path) -> None:
    results = load([stored])
    eager, best = results.compared("kgen", "eager"), results.compared("kgen", "max-autotune")
    assert eager is not None
    assert best is not None
    assert (eager.geomean, eager.lowest) == (pytest.approx((2 * 0.5 * 8) ** (1 / 3)), ("2", 0.5))
    assert best.ratios == {"1": pytest.approx(1.5), "10": pytest.approx(3.0)}
    assert best.geomean == pytest.approx(4.5**0.5)
    assert results.compared("kgen", "inductor") is None
    assert results.spread() == (pytest.approx(0.8), pytest.approx(1.0))
    assert floor(results.rows[0]) == pytest.approx(2e-6)


def test_a_compiler_that_failed_once_wins_nothing_in_total_time() -> None:
    assert Results(ROWS).first_calls() == {"max-autotune": 1.0, "kgen": 1.0, "kgen-autotune": 1.0}


def test_the_table_has_a_row_for_who_failed(stored: Path) -> None:
    text = report.markdown(load([stored]))
    second = next(line for line in text.splitlines() if line.startswith("| 2 matmul 2"))
    assert "failed" in second
    assert "max-autotune on 2 matmul 2: RuntimeError: no tile fits" in text
    assert "max-autotune / kgen: geomean 2.121, lowest 1.500 (matmul 1), of 2" in text
    assert "kgen-autotune / kgen: geomean 0.500" in text  # the speed of the default mode is half of the other's
    assert "eager against itself: 0.800 to 1.000" in text


def test_regret_is_against_the_best_that_is_ours() -> None:
    rows = [row("1", kgen=3e-6, **{"kgen-tuned": 2e-6}), row("2", kgen=2e-6, **{"kgen-tuned": 4e-6}), row("3", kgen=1e-6)]
    rows[0]["results"]["kgen"]["chosen"] = ["mm: a | b"]
    assert Results(rows).regret() == {"1": pytest.approx(1.5), "2": 1.0}
    text = report.markdown(Results(rows))
    assert "| 1 matmul 1 | 1.500 | mm: a \\| b |" in text
    assert "| **geomean** | **1.225** |" in text
    assert "Regret" not in report.markdown(Results(rows[2:]))


def test_newer_rows_replace_older_ones() -> None:
    both = merged(ROWS, [row("2", kgen=9e-6)])
    assert [one["number"] for one in both] == ["1", "2", "10"]
    assert list(both[1]["results"]) == ["kgen"]


def test_the_report_draws(stored: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.main([str(stored), "--out", str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.md", "ratios.png", "roofline.png"}
    assert all(p.stat().st_size > 1000 for p in (tmp_path / "out").iterdir())


def test_another_file_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"rows": {}}')
    assert report.main([str(tmp_path / "other.json"), "--out", str(tmp_path)]) == 1
    assert "neither of a bench nor of pytest-benchmark" in capsys.readouterr().err


# ---- matmuls -------------------------------------------------------------------------------------------------------


def test_matmuls_say_what_they_cost() -> None:
    costs = {p.number: (p.flops, p.fewest_bytes, p.rate) for p in MATMULS}
    assert costs["1"] == (2 * 4096 * 4096 * 16384, 2 * (4096 * 4096 + 2 * 4096 * 16384 + 16384), "bfloat16")
    assert costs["7"][0] == 2 * 4096 * 4096 * 32000
    assert costs["8"][1] == 16 * 8192 * 2 + 8192 * 8192 + 8192 * 2 + 16 * 8192 * 2
    assert costs["11"][0] == 2 * 2048 * 4096 * (4096 + 1024 + 1024)
    assert [number for number, (*_, rate) in costs.items() if rate != "bfloat16"] == ["19", "21"]


@pytest.mark.parametrize("matmul", [*MATMULS, *MORE], ids=lambda p: p.number)
def test_every_matmul_has_a_small_one(matmul: Matmul) -> None:
    small = matmul.shrunk(64)
    args = small.make("cpu")
    assert max(max(a.shape, default=0) for a in args) <= 1024
    got, want = small.fn(*args), small.reference(args)
    for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
        assert one.shape == other.shape
        assert ((one.float() - other).norm() / other.norm()).item() < 2e-2
    if matmul.bare is not None:
        matmul.bare(*args)


# ---- cuBLAS through cupy --------------------------------------------------------------------------------------------


class Columns:
    """What cuBLAS does, on a CPU: matrices of float32 stored by columns, given as addresses."""

    def gemmEx(self, handle: int, ta: int, tb: int, m: int, n: int, k: int, *rest: Any) -> None:
        alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, _sums, _algorithm = rest
        assert (at, bt, ct) == (TYPES[torch.float32],) * 3
        left, right = self.matrix(a, lda, k if ta else m, m if ta else k), self.matrix(b, ldb, n if tb else k, k if tb else n)
        out = self.matrix(c, ldc, m, n)
        assert (self.scalar(alpha), self.scalar(beta)) == (1, 0)
        out[...] = (left.T if ta else left) @ (right.T if tb else right)

    def gemmStridedBatchedEx(self, *given: Any) -> None:
        handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, count, sums, algorithm = given
        for i in range(count):
            a_i, b_i, c_i = (at_0 + 4 * stride * i for at_0, stride in ((a, sa), (b, sb), (c, sc)))
            self.gemmEx(handle, ta, tb, m, n, k, alpha, a_i, at, lda, b_i, bt, ldb, beta, c_i, ct, ldc, sums, algorithm)

    def matrix(self, address: int, leading: int, rows: int, columns: int) -> np.ndarray:
        assert leading >= rows
        memory = (ctypes.c_float * ((columns - 1) * leading + rows)).from_address(address)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.float32), (rows, columns), (4, 4 * leading))

    def scalar(self, address: int) -> float:
        return ctypes.c_float.from_address(address).value


def matmuls_by_columns(fn: Any, *args: Tensor) -> Tensor:
    found: Tensor = Cublas(Columns(), lambda: 0).inside(fn, args)(*args)
    return found


CUBLAS = {
    "rows": (lambda a, b: a @ b, (5, 7), (7, 6)),
    "columns": (lambda a, b: a.t() @ b.t(), (7, 5), (6, 7)),
    "bias and activation": (lambda a, b, c: F.gelu(F.linear(a, b, c)), (5, 7), (6, 7), (6,)),
    "parts of wider matrices": (lambda a, b: a[:, 1:4] @ b[2:5, 1:], (5, 7), (7, 6)),
    "batches": (lambda a, b: torch.bmm(a, b.transpose(1, 2)) + 1, (3, 5, 7), (3, 6, 7)),
    "one row": (lambda a, b: F.silu(F.linear(a, b)), (1, 7), (6, 7)),
    "one column": (lambda a, b: a @ b, (5, 7), (7, 1)),
    "strides": (lambda a, b: a[:, ::2] @ b[::2], (5, 7), (7, 6)),
}


@pytest.mark.parametrize("name", CUBLAS)
def test_what_cublas_is_asked_for(name: str) -> None:
    fn, *shapes = CUBLAS[name]
    args = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(matmuls_by_columns(fn, *args), fn(*args))


def test_cupy_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="cupy is not installed: pip install"):
        through_cupy(torch.mm, [torch.randn(2, 2)] * 2)


def test_no_matmul_is_an_error() -> None:
    with pytest.raises(ValueError, match="no matmul that cublasGemmEx takes"):
        matmuls_by_columns(lambda a: a + 1, torch.randn(3))


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    order: list[str] = []
    args = [[torch.ones(2)], [torch.ones(2)]]
    entries = [Entry("a"), Entry("b")]
    for entry in entries:
        prepare(entry, lambda x, name=entry.name: order.append(name) or x, args, args[0][0], nullcontext())
    order.clear()
    take_turns(entries, 0, False)
    assert order[:8] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert [len(entry.samples) for entry in entries] == [7, 7]
    assert entries[0].error == 0


def test_what_a_compiler_prints_is_not_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch._inductor.select_algorithm")

    def chatter(line: str) -> None:
        print(line, file=sys.stderr)
        logger.error(line)

    with gpu_matmuls.CONTENDERS["max-autotune"].context():
        chatter("inside")
    chatter("outside")
    printed = capsys.readouterr().err
    assert "outside" in printed
    assert "inside" not in printed
    with pytest.raises(RuntimeError), gpu_matmuls.quiet():
        raise RuntimeError("an error gets through")


@pytest.mark.slow
@pytest.mark.cpu
def test_matmuls(tmp_path: Path) -> None:
    """Rows appended to a file, one contender that fails, one without a bare matmul, and a variant of ours."""
    path = tmp_path / "new" / "a.json"
    run = (*SMALL, "--json", str(path), "--seconds", "0", "--append", "--contenders", "eager", "cublas", "cupy", "kgen")
    gpu_matmuls.main([*run, "--only", "8"])
    gpu_matmuls.main([*run, "--only", "2", "--variant", "apart", '{"fusion": false}'])
    rows = load([path]).rows
    assert [one["number"] for one in rows] == ["2", "8"]
    assert list(rows[0]["results"]) == ["eager", "cublas", "kgen", "apart"]
    assert list(rows[1]["results"]) == ["eager", "kgen"]
    assert list(rows[0]["failed"]) == ["cupy"]
    assert rows[0]["results"]["kgen"]["error"] < 1e-2
    assert "samples" not in rows[0]
    assert {"copy", "bfloat16"} <= rows[0]["rates"].keys()


def test_the_default_mode_does_not_know_what_another_contender_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, options, **how: options)
    asked = gpu_matmuls.parse(["--contenders", "kgen", "kgen-autotune", "--tuning-file", "here.json"])
    given = {name: one.make(MATMULS[0], []) for name, one in gpu_matmuls.contenders_of(asked).items()}
    assert given["kgen-tuned"]["tuning_file"] == "here.json"
    assert given["kgen-autotune"]["mode"] == "max-autotune-no-cudagraphs"
    files = [given[name]["tuning_file"] for name in ("kgen", "kgen-autotune")]
    assert files[0] != files[1]
    assert not Path(files[0]).exists()


def test_without_a_gpu_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="there is no GPU"):
        gpu_matmuls.main(["--only", "1"])


def in_process(*command: str) -> str:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # not a worker of xdist's
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.cpu
def test_the_suite_under_pytest_benchmark(tmp_path: Path) -> None:
    """One group a matmul, what was measured in turns in its JSON, and a test that fails for who failed."""
    pytest.importorskip("pytest_benchmark")
    out = tmp_path / "b.json"
    text = in_process(
        "-m", "pytest", "-q", "bench/test_gpu_matmuls.py", "--try-on-cpu", "--shrink", "64", "--matmuls", "2",
        "--seconds", "0", "--contenders", "eager", "cupy", "kgen", f"--benchmark-json={out}",
    )  # fmt: skip
    assert "1 failed, 2 passed" in text
    [one] = load([out]).rows
    assert (one["number"], list(one["results"]), list(one["failed"])) == ("2", ["eager", "kgen"], ["cupy"])
    assert one["results"]["kgen"]["rounds"] == one["results"]["eager"]["rounds"] == 7
    benchmarks = json.loads(out.read_text())["benchmarks"]
    assert {b["group"] for b in benchmarks} == {"2 x w + b + r 4096^3"}


@pytest.mark.cpu
@pytest.mark.slow
def test_compile_times(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    run = (*SMALL, "--compilers", "kgen", "--json", str(out), "--append")
    autotune_compile.main([*run, "--only", "2"])
    autotune_compile.main([*run, "--only", "6"])
    both = load([out]).compiles["kgen"]
    assert set(both["cold"]["seconds"]) == set(both["warm"]["seconds"]) == {"2", "6"}
    assert sum(both["warm"]["seconds"].values()) < sum(both["cold"]["seconds"].values())


def test_compile_times_count_what_all_managed() -> None:
    runs = {"a": {"cold": {"seconds": {"1": 1.0, "2": 5.0}}}, "b": {"cold": {"seconds": {"1": 2.0}, "errors": {"2": "no"}}}}
    text = report.markdown(Results([], compiles={**runs, "c": {"cold": {"error": "it crashed"}}}))
    assert "over the 1 matmuls" in text
    assert "| a | cold | 1.00 | 1.00 |  |" in text
    assert "| b | cold | 2.00 | 2.00 | 2 |" in text
    assert "it crashed" in text


@pytest.mark.cpu
def test_ablation(tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    run = ["--device", "cpu", "--quick", "--seconds", "0", "--json", str(out), "--switches", "fusion", "cudagraphs"]
    ablation.main([*run, "--only", "layer_norm"])
    ablation.main([*run, "--only", "gelu_1", "layer_norm", "--append"])
    rows = read(out).rows
    assert [one["name"] for one in rows] == ["layer_norm", "gelu_1"]
    assert all(set(one["seconds"]) == {"all on", "all on, again", "fusion"} and not one["failed"] for one in rows)


@pytest.mark.cpu
def test_layouts_are_a_switch_of_convolutions() -> None:
    (subject,) = [one for one in ablation.subjects("cpu", quick=True) if one.name == "residual"]
    (args,) = subject.sets()
    with torch.no_grad():
        made = ablation.compiled(subject.fn, **ablation.SWITCHES["layouts"])(*args)
        torch.testing.assert_close(made, subject.fn(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.cpu
def test_convolutions_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    run = ["--only", "relu", "--contenders", "eager", "kgen-frozen", "--seconds", "0", "--json", str(out)]
    cpu_convolutions.main(run)
    (row,) = read(out).rows
    assert set(row["seconds"]) == {"eager", "kgen-frozen"}


def test_slowdowns_are_times_without_over_times_with() -> None:
    seconds = {"all on": 1.0, "fusion": 3.0, "called": 4.0, "called, with graphs": 2.0}
    rows = [{"name": "x", "seconds": seconds}, {"name": "y", "seconds": {"all on": 1.0}}]
    assert ablation.slowdowns(rows, "fusion") == {"x": 3.0}
    assert ablation.slowdowns(rows, "cudagraphs") == {"x": 2.0}


def test_every_switch_of_the_ablation_is_an_option() -> None:
    from kgen.config import from_call

    for off in ablation.SWITCHES.values():
        assert all(getattr(from_call(None, off), name) in (False, "off") for name in off)


def test_shrinking_keeps_what_lengths_have_in_common() -> None:
    given = Given((4096, 50257), torch.bfloat16).shrunk(64)
    assert given.shape[0] % 16 == 0
    assert given.shape[1] % 2 == 1
    assert Given((32000,), torch.int64, top=32000).shrunk(64).top == Given((32000,)).shrunk(64).shape[0]
