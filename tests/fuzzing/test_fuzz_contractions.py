"""The oracle for contractions: small problems through Triton's interpreter, operand tiles of layers' sizes on numpy arrays, and
that it notices what it is there for.

KGEN_FUZZ_EXAMPLES says how many problems, KGEN_FUZZ_SEED the first one; `make fuzz-gpu` runs many on a GPU.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz_contractions import crew, operands
from fuzz_contractions.check import CRASHED, HUNG, RIGHT, SAME, How, check
from fuzz_contractions.computation import Computation, Expected, wrong
from fuzz_contractions.crew import Worker
from fuzz_contractions.draw import KNOWN, draw
from fuzz_contractions.kinds import KINDS, LAYERS, SMALL
from fuzz_contractions.problem import LAYOUTS, Problem, as_json, from_json
from fuzz_contractions.report import Report, table
from fuzz_contractions.shrink import shrunk
from fuzz_contractions.tensors import Spec, geometry, make
from slow import slow_but
from torch.utils._pytree import tree_leaves

from kgen.templates.triton.codegen.point import PointEmitter

FIRST = int(os.environ.get("KGEN_FUZZ_SEED", "0"))
# Problems that run each time, and all.
ALWAYS, ALL = 12, max(12, int(os.environ.get("KGEN_FUZZ_EXAMPLES", "300")) // 2)
INTERPRETED = How("cpu", most=1)


def seeds(count: int) -> list[object]:
    return slow_but(lambda seed: seed < FIRST + count, range(FIRST, FIRST + ALL))


def convolution(n: int, c: int, place: int, taps: int = 3, **more: str) -> Problem:
    """One whose tiles cross the rows of an image, and images."""
    sizes = (("n", n), ("c", c), ("o", 16), ("s0", place), ("s1", place))
    options = {"kernel": (taps, taps), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": (1,), "bias": (1,)}
    last = "channels_last"
    return Problem(0, "conv2d", "bfloat16", sizes, tuple(options.items()), (last, last), epilogue="relu", **more)


# ---- the problems -------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.interpret
@pytest.mark.parametrize("seed", seeds(ALWAYS))
def test_every_template_is_right(seed: int) -> None:
    problem = draw(seed, SMALL)
    failed = [r for r in check(problem, INTERPRETED) if r.outcome not in (RIGHT, SAME)]
    assert not failed, f"{problem}: {failed[0].candidate}: {failed[0].text}"


@pytest.mark.interpret
@pytest.mark.parametrize("kind", ["linear", "bmm"])
def test_sizes_that_are_symbols(kind: str) -> None:
    """Called with another number of rows, too."""
    problem = replace(draw(3, SMALL, (kind,)), dynamic=True, epilogue="bias")
    found = list(check(problem, INTERPRETED))
    assert {r.outcome for r in found} <= {RIGHT, SAME}
    assert any(r.templates for r in found)


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", seeds(4))
def test_operand_tiles_read_just_what_they_should(seed: int) -> None:
    assert_reads_what_it_should(operands.simplified(draw(seed, LAYERS)))


@pytest.mark.parametrize("left", ["", "affine relu", "pad", "gather"])
def test_operand_tiles_of_convolutions_cross_rows_and_images(left: str) -> None:
    assert_reads_what_it_should(convolution(3, 16, 21, left=left))


def assert_reads_what_it_should(problem: Problem) -> None:
    found = list(operands.check(problem, most=1))
    assert [one for one in found if one.wrong] == [], str(problem)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [KNOWN[2], KNOWN[3]], ids=str)
def test_operand_tiles_of_layers_that_were_wrong(problem: Problem) -> None:
    assert_reads_what_it_should(problem)


def test_operand_tiles_are_checked_at_all() -> None:
    found = list(operands.check(convolution(2, 16, 9)))
    assert sum(not one.skipped for one in found) >= 4


# ---- what it is there for -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read whatever is there: past the ends of axes, and outside of an image."""
    monkeypatch.setattr(PointEmitter, "_mask_argument", lambda self, level: "")


@pytest.mark.usefixtures("no_masks")
def test_an_operand_without_masks_is_noticed() -> None:
    found = list(operands.check(convolution(2, 16, 9), most=1))
    assert all(one.wrong for one in found if not one.skipped)
    assert any("where it has no element" in one.wrong for one in found)


@pytest.mark.usefixtures("no_masks")
def test_an_operand_that_leaves_a_row_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All accesses are valid: only the sums say what is wrong."""
    monkeypatch.undo()
    original = operands.Simulation._tile

    def without_a_row(self, name, number, batch, starts, lengths):  # type: ignore[no-untyped-def]
        made = original(self, name, number, batch, starts, lengths).copy()
        if name == "A":
            made[5] = 0
        return made

    monkeypatch.setattr(operands.Simulation, "_tile", without_a_row)
    found = [one for one in operands.check(convolution(2, 16, 9), most=1) if not one.skipped]
    assert all("elements of" in one.wrong for one in found)
    assert found


def results_of(problem: Problem) -> tuple[Computation, list[torch.Tensor], list[torch.Tensor]]:
    computation, generator = Computation(problem), torch.Generator().manual_seed(0)
    flat = [make(spec, torch.device("cpu"), generator).tensor for spec in computation.specs]
    return computation, flat, tree_leaves(computation.run(*flat))


def test_one_wrong_row_of_one_image_is_noticed() -> None:
    """Without the tap below it, as where a mask cuts off the last row of an image."""
    computation, flat, results = results_of(convolution(16, 64, 28))
    expected = computation.expected(flat)
    assert wrong(results, results, expected, computation.norm_limit) == ""
    changed = results[0].clone()
    changed[3, :, -1] = (changed[3, :, -1].float() + 0.3 * torch.randn(changed[3, :, -1].shape)).to(changed.dtype)
    assert "within [3, 0..15, 27, 0..27]" in wrong([changed], results, expected, computation.norm_limit)


def test_an_element_that_nobody_wrote_is_noticed() -> None:
    computation, flat, results = results_of(draw(0, SMALL))
    changed = results[0].clone()
    changed.view(-1)[-1] = float("nan")
    assert "in 1 elements" in wrong([changed], results, computation.expected(flat), computation.norm_limit)


def _cut(x: torch.Tensor) -> torch.Tensor:
    """The digits that matrix units take of float32 numbers."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_sums_of_squares_may_shrink_as_tf32_cuts_digits_off() -> None:
    problem = Problem(0, "mm", "float32", (("m", 256), ("k", 8), ("n", 16)), epilogue="statistics", tf32=True)
    computation, flat, results = results_of(problem)
    expected, cut = computation.expected(flat), tree_leaves(computation.run(*map(_cut, flat)))
    assert wrong(cut, results, expected, computation.norm_limit) == ""
    assert wrong([*cut[:2], cut[2] * 0.97], results, expected, computation.norm_limit) != ""


@pytest.mark.parametrize("family", ["", "gate and up"])
def test_each_factor_may_shrink_a_sum_as_much(family: str) -> None:
    """Two contractions that are multiplied have four rounded factors, and the square of that eight."""
    sizes = (("m", 512), ("k", 4), ("n", 64))
    problem = Problem(0, "mm", "float32", sizes, family=family, epilogue="kept with squares", tf32=True)
    computation, flat, results = results_of(problem)
    expected = computation.expected(flat)
    assert computation.norm_limit(0) == 3e-3
    assert computation.norm_limit(1) == (8 * 2**-11 if family else 3e-3)
    assert wrong(tree_leaves(computation.run(*map(_cut, flat))), results, expected, computation.norm_limit) == ""
    for number, one in enumerate(results):
        changed = [*results[:number], one * (1 - 1.1 * computation.norm_limit(number)), *results[number + 1 :]]
        assert wrong(changed, results, expected, computation.norm_limit) != ""


def test_operands_that_are_cast_are_rounded_whatever_they_are_stored_as() -> None:
    sizes = (("m", 33), ("k", 16), ("n", 40))
    computation, flat, results = results_of(Problem(0, "mm", "bfloat16", sizes, left="cast", right="cast", epilogue="float32"))
    assert wrong(results, results, computation.expected(flat), computation.norm_limit) == ""


def test_what_overflows_may_be_infinite() -> None:
    values = torch.tensor([7e4, -7e4, 1.0], dtype=torch.float64)
    got = torch.tensor([torch.inf, -torch.inf, 1.0], dtype=torch.float16)
    expected = [Expected(values, torch.zeros_like(values))]
    assert wrong([got], [got], expected, lambda _: 1e-3) == ""
    assert wrong([-got], [got], expected, lambda _: 1e-3) != ""


# ---- the generator ------------------------------------------------------------------------------------------------------


def test_a_seed_is_one_problem_and_its_json_another_spelling_of_it() -> None:
    for seed in range(60):
        problem = draw(seed)
        assert draw(seed) == problem
        assert from_json(as_json(problem)) == problem


def test_all_kinds_and_surroundings_are_drawn() -> None:
    drawn = [draw(seed) for seed in range(600)]
    assert {p.kind for p in drawn} == set(KINDS)
    assert {layout for p in drawn for layout in p.layouts} == set(LAYOUTS)
    assert min(Counter(p.epilogue for p in drawn).values()) >= 2
    assert max(KINDS[p.kind].multiplications(p) for p in drawn) > 1e10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_overlap(layout: str) -> None:
    strides, offset = geometry(Spec((2, 3, 4, 5), torch.float32, layout))
    view = torch.zeros(1000).as_strided((2, 3, 4, 5), strides, offset)
    view += 1
    assert float(view.sum()) == 120


def test_a_failure_is_made_smaller() -> None:
    """To what it needs: a padded convolution of at least 8 channels."""
    problem = replace(KNOWN[9], family="joined", right="scale")
    small = shrunk(problem, lambda p: p.size("c") >= 8 and p.option("padding")[0] == 1)
    assert (small.left, small.right, small.epilogue, small.family) == ("", "", "", "")
    assert dict(small.sizes)["c"] in range(8, 16)
    assert dict(small.sizes)["n"] == 1


# ---- the processes ------------------------------------------------------------------------------------------------------


def test_a_candidate_that_ends_or_hangs_loses_nothing_but_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(crew.LIMITS, "running", 3.0)
    worker = Worker(module="stub_fuzz_worker")
    found = worker.check(draw(0, SMALL), How("cpu"))
    worker.stop()
    assert [(r.candidate, r.outcome) for r in found.results] == [("a", RIGHT), ("b", CRASHED), ("c", HUNG), ("d", RIGHT)]
    report = Report()
    report.add(found)
    assert report.failed
    written = json.loads(report.write(tmp_path, "shard").read_text())
    assert [r["candidate"] for r in written["failures"][0]["results"]] == ["b", "c"]
    assert from_json(written["failures"][0]["problem"]) == draw(0, SMALL)
    kind = next(line for line in table([written, written]).splitlines() if line.startswith(draw(0, SMALL).kind))
    assert kind.split()[-7:] == ["2", "4", "0", "2", "2", "0", "0"]


@pytest.mark.slow
@pytest.mark.interpret
def test_the_command_runs(tmp_path: Path) -> None:
    from fuzz_contractions.__main__ import main

    assert main(["--device", "cpu", "--count", "3", "--workers", "2", "--configs", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "shard-1-of-1.json").exists()
