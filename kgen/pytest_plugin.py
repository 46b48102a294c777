"""A pytest plugin: each problem of a template's conformance check becomes a test.

    @pytest.mark.kgen_template("my_matmul", configs=1)        # the class, or its name
    def test_my_matmul(template_problem):
        template_problem()

Every pytest loads it where kgen is installed, so nothing of kgen is imported before a test asks for `template_problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["pytest_configure", "pytest_generate_tests"]

FIXTURE, MARK = "template_problem", "kgen_template"
DOCUMENT = f"{MARK}(template, *, dtypes=('float32',), only=(), device=None, configs=3, seed=0): the template of the tests"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", DOCUMENT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each problem. It passes, fails with TemplateCheckFailed, or is skipped where the template refuses the problem.

    Raises UsageError and UnknownTemplate."""
    if FIXTURE not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mark it with @pytest.mark.{MARK}(template)")
    made = dict(_problems(*marker.args, **marker.kwargs))
    metafunc.parametrize(FIXTURE, list(made.values()), ids=list(made))


def _problems(
    template: Any, *, dtypes: tuple[str, ...] = ("float32",), only: str | tuple[str, ...] = (), **options: Any
) -> Iterator[tuple[str, Callable[[], None]]]:
    from kgen.testing.check import single_problems  # noqa: PLC0415  every run of pytest loads this module

    for text, check in single_problems(template, dtypes, (only,) if isinstance(only, str) else only, options):
        yield text, _skipping(check)


def _skipping(check: Callable[[], str]) -> Callable[[], None]:
    def problem() -> None:
        refused = check()
        if refused:
            pytest.skip(refused)

    return problem
