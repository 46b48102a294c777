"""kgen against cuBLAS and separate kernels, eager and Inductor, under pytest-benchmark: one group a matmul.

pytest bench/test_gpu_matmuls.py --benchmark-json=out/matmuls_pytest.json
pytest bench/test_gpu_matmuls.py --matmuls 1 12 --contenders eager library kgen --seconds 1

pytest-benchmark runs all rounds of one benchmark before it starts the next, so that a drift of the GPU's clocks would look like
a difference of contenders. Here the first benchmark of a matmul measures all contenders in turns (`bench.gpu_matmuls`), and
each benchmark then plays its own rounds back: its timer is a clock that the played rounds move forward. The statistics
and the JSON are pytest-benchmark's, over seconds a call by the GPU's clock. A contender that fails is a failed test.

Who covers what: `cupy` calls cublasGemmEx through cupy's bindings, in torch's memory and with torch's kernels as epilogues,
for all matmuls but the one of 8-bit floats (21), which that function does not take; `library` is cuBLAS through torch, with
cuBLASLt's own epilogues where it has them; `cublas` is the bare matmul, without the epilogue, where its operands are
arguments as they are (not 8, whose weights are dequantised first).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed; python -m bench.gpu_matmuls needs none")

from bench.gpu_matmuls import CONTENDERS, Settings, measure
from bench.gpu_timing import machine_rates
from bench.matmuls import BY_NUMBER


class Played:
    """A clock that stands still but for the recorded rounds."""

    def __init__(self) -> None:
        self.now = 0.0

    def play(self, rounds: Iterator[float]) -> None:
        self.now += next(rounds)


PLAYED = Played()


def played_seconds() -> float:
    return PLAYED.now


class Suite:
    """Measures each matmul once, when its first benchmark asks."""

    def __init__(self, contenders: list[str], settings: Settings) -> None:
        self.contenders = {name: CONTENDERS[name] for name in contenders}
        self.settings = settings
        self.rows: dict[str, dict[str, Any]] = {}

    def row(self, number: str) -> dict[str, Any]:
        if number not in self.rows:
            with torch.no_grad():
                self.rows[number] = measure(BY_NUMBER[number], self.contenders, self.settings)
        return self.rows[number]


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> Suite:
    on_cpu = pytestconfig.getoption("--try-on-cpu")
    if not torch.cuda.is_available() and not on_cpu:
        pytest.skip("there is no GPU here; --try-on-cpu --shrink 64 shows whether the suite works")
    device = "cpu" if on_cpu else "cuda"
    rates = machine_rates(device, 64 if on_cpu else 8192)
    shrink, seconds = pytestconfig.getoption("--shrink"), pytestconfig.getoption("--seconds")
    return Suite(pytestconfig.getoption("--contenders") or list(CONTENDERS), Settings(device, seconds, shrink, rates))


@pytest.mark.benchmark(timer=played_seconds)
def test_matmul(benchmark: Any, suite: Suite, number: str, contender: str) -> None:
    row = suite.row(number)
    benchmark.group = f"{number} {row['title']}"
    if contender in row["failed"]:
        pytest.fail(f"{contender}: {row['failed'][contender]}", pytrace=False)
    if contender not in row["results"]:
        pytest.skip(f"{contender} has nothing to measure here")
    told = ("number", "title", "flops", "bytes", "rate", "rates")
    found = row["results"][contender]
    benchmark.extra_info |= {
        "matmul": {name: row[name] for name in told}, "contender": contender, "failed": row["failed"],
        "result": {name: found[name] for name in ("compile_s", "error", "peak_bytes", "recorded", "chosen")},
    }  # fmt: skip
    samples = row["samples"][contender]
    benchmark.pedantic(PLAYED.play, args=(iter(samples),), rounds=len(samples), iterations=1)
