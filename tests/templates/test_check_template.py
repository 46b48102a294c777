"""How authors ask the conformance kit: some problems, for so long, again, with other arguments, and from pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import template_author
import torch
from template_author import JINJA

import kgen
from kgen import errors
from kgen.cli import main
from kgen.templates import registry
from kgen.testing import check_template
from kgen.testing.cases import cases
from kgen.testing.compare import in_common

pytestmark = pytest.mark.interpret
# The last rows of every tile are of the wrong sign.
WRONG = JINJA.replace('{{ C.store("acc"', 'acc = tl.where((rm % 32 > 27)[:, None], -acc, acc)\n    {{ C.store("acc"')


@pytest.fixture
def declared(tmp_path: Path) -> Iterator[None]:
    template_author.load(template_author.write(tmp_path, "asked"))
    yield
    registry.remove("asked")


@pytest.fixture
def wrong(tmp_path: Path) -> Iterator[None]:
    template_author.load(template_author.write(tmp_path, "asked_wrong", jinja=WRONG))
    yield
    registry.remove("asked_wrong")


def test_some_problems_alone(declared: None) -> None:
    report = check_template("asked", only=["size 'k=17' of (float32", "epilogue 'gelu' of (float32"], configs=1)
    assert {case.name for case in report.problems} == {"k=17", "gelu"}
    assert len(report.passed) == 2


def test_no_problem_begins_when_the_time_is_up(declared: None) -> None:
    report = check_template("asked", seconds=0.0, raises=False)
    assert report.results == ()
    assert report.stopped is not None
    assert f"the time was up before {report.stopped}" in str(report)


def test_a_failure_says_how_it_is_repeated(wrong: None) -> None:
    with pytest.raises(errors.TemplateCheckFailed) as caught:
        check_template("asked_wrong", only="size 'several tiles' of (float32", configs=2, seed=3)
    [line] = [line for line in str(caught.value).splitlines() if "repeats it" in line]
    call = line.removeprefix("  try: ").split(" repeats it")[0]
    assert call.endswith(", configs=2, seed=3)")
    with pytest.raises(errors.TemplateCheckFailed) as again:
        eval(call, {"kgen": kgen})
    assert again.value.details["config"] == caught.value.details["config"]
    report = check_template("asked_wrong", only="size 'several tiles' of (float32", configs=1, raises=False)
    assert f"  repeat it: {report.repeats(report.problems[0])}" in str(report)


@pytest.mark.none
@pytest.mark.parametrize(
    ("wrong", "value", "text"),
    [
        ([(1, 2)], 1.0, ""),
        ([(1, 2), (3, 2)], 1.0, (
            ", all at each 2th from 1 to 3 of 8 along dimension 0, all at 2 of 6 along dimension 1"
        )),
        ([(r, k) for r in (6, 7) for k in range(6)], 0.0, ", all at 6...7 of 8 along dimension 0, all of them are 0"),
        ([(0, 0), (1, 0), (5, 0)], float("nan"), (
            ", all at 3 of 8 along dimension 0, from 0 to 5, all at 0 of 6 along dimension 1, all of them are nan"
        )),
        ([(k, j) for k in range(8) for j in range(6)], 1.0, ""),
    ],
    ids=["one", "each second", "the last rows", "scattered", "everywhere"],
)  # fmt: skip
def test_what_wrong_elements_have_in_common(wrong: list[tuple[int, int]], value: float, text: str) -> None:
    where = torch.zeros(8, 6, dtype=torch.bool)
    for place in wrong:
        where[place] = True
    assert in_common(where, torch.full((8, 6), value)) == text


def test_the_command_takes_the_same(declared: None, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["templates", "check", "asked", "--configs", "1", "--seconds", "300", "--only", "size 'k=17' of (float32"]
    assert main(asked) == 0
    assert "1 problems, 1 runs: 1 passed" in capsys.readouterr().out


# ---- an operator with other arguments ---------------------------------------------------------------------------------


@torch.library.custom_op("kgen_check::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (x @ y.t())


@scaled.register_fake
def _(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], y.shape[0])


TEXT = """\
{{ kernel() }}
    tiles_n = tl.cdiv(N, BLOCK_N)
    rm = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
    for start in range(0, K, BLOCK_K):
        rk = start + tl.arange(0, BLOCK_K)
        {{ X.tile("x", "rm", "rk") }}
        {{ Y.tile("y", "rn", "rk") }}
        acc += tl.sum((x[:, None, :] * y[None, :, :]).to(ACCUMULATOR), 2)
    acc = acc * {{ problem.arguments.scale }}
    {{ D.store("acc", "rm", "rn") }}
"""


def declare(examples: list[dict[str, float]]) -> None:
    @kgen.template(
        implements=kgen.operator("kgen_check::scaled", "m,k", "n,k -> m,n", examples=examples),
        device="cuda", source=TEXT, name="asked_scaled",
    )  # fmt: skip
    class Scaled(kgen.KernelTemplate):
        X, Y, D = kgen.operand("m", "k"), kgen.operand("n", "k"), kgen.result("m", "n")
        BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(16), kgen.knob(16), kgen.knob(16)


def test_an_operator_needs_examples_of_its_other_arguments() -> None:
    try:
        declare([])
        with pytest.raises(errors.BadTemplate, match=r"give kgen\.operator examples"):
            next(cases(registry.find("asked_scaled")))
        declare([{"scale": 2.0}, {"scale": -3.0}])
        report = check_template("asked_scaled", only=["arguments 'scale=-3.0'", "epilogue 'gelu' of (float32"], configs=1)
        assert [case.kind for case in report.problems] == ["arguments", "epilogue"]
    finally:
        registry.remove("asked_scaled")


# ---- from pytest ------------------------------------------------------------------------------------------------------

TESTS = """
import pytest
import template_author
from pathlib import Path

template_author.load(template_author.write(Path(__file__).parent, "asked_right"))
text = template_author.JINJA.replace("range(0, K", "range(BLOCK_K, K")
template_author.load(template_author.write(Path(__file__).parent / "wrong", "asked_wrong", jinja=text))

@pytest.mark.kgen_template("asked_right", only=("size 'k=17'", "epilogue 'gelu'"), configs=1)
def test_right(template_problem):
    template_problem()

@pytest.mark.kgen_template("asked_wrong", only="size 'k=17'", configs=1)
def test_wrong(template_problem):
    template_problem()

def test_forgotten(template_problem):
    pass
"""


@pytest.mark.slow
def test_problems_are_tests_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_author.py").write_text(TESTS)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "kgen.pytest_plugin"]
    # where kgen is installed its plugin loads by itself, and could not be loaded by name as well
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*run, "test_author.py", "--deselect", "test_forgotten"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert "mark it with @pytest.mark.kgen_template" in done.stdout
    (tmp_path / "test_author.py").write_text(TESTS.split("def test_forgotten")[0])
    done = subprocess.run(
        [*run, "test_author.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert "test_wrong[size 'k=17' of (float32" in done.stdout
    assert "1 failed, 2 passed" in done.stdout, done.stdout
