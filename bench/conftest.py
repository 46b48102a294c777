"""Options of the suites under pytest-benchmark."""

from __future__ import annotations

import pytest

from bench.matmuls import BY_NUMBER, MATMULS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench/test_gpu_matmuls.py")
    group.addoption("--matmuls", "--products", nargs="+", choices=list(BY_NUMBER), default=[p.number for p in MATMULS])
    group.addoption("--contenders", nargs="+", help="default: all")
    group.addoption("--seconds", type=float, default=2.0, help="of measuring, for each matmul")
    group.addoption("--shrink", type=int, default=1, help="divide all lengths by about this")
    group.addoption("--try-on-cpu", action="store_true", help="run the suite where there is no GPU, to see that it works")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each matmul and contender, matmuls outermost: all contenders of one are measured together."""
    if {"number", "contender"} <= set(metafunc.fixturenames):
        from bench.gpu_matmuls import CONTENDERS

        config = metafunc.config
        asked = config.getoption("--contenders") or list(CONTENDERS)
        cases = [(number, name) for number in config.getoption("--matmuls") for name in asked]
        metafunc.parametrize(("number", "contender"), cases)
