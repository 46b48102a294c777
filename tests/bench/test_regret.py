"""The calibration set and `bench.regret`: every problem runs and is scheduled for a GPU, variants are what their names say, and
the report's arithmetic is right."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import _disable_current_modes

from bench.calibration import CLASSES, FAMILIES, SIZES, problems
from bench.measurements import read
from bench.patterns import outputs_of
from bench.regret import __main__ as command
from bench.regret.replan import on_card, plan_job, replanned
from bench.regret.report import by_class, regret_of, show, variant
from bench.regret.variants import (
    CHOSEN,
    H100,
    H200,
    LIBRARY,
    FixedResults,
    Job,
    MatmulGraph,
    Offer,
    Way,
    compile_job,
    settled,
    steps_of,
    traced,
    ways,
)  # fmt: skip
from kgen.cost.tuning_query import TuningResult

GPU = problems(SIZES["gpu"])
TINY = problems(SIZES["tiny"])


def job_of(name: str, size: str = "gpu", device: str = "cuda") -> Job:
    number = next(k for k, one in enumerate(problems(SIZES[size])) if one.name == name)
    return Job(size, number, torch.bfloat16 if device == "cuda" else torch.float32, device, H100 if device == "cuda" else None)


# ---- the problems ------------------------------------------------------------------------------------------------------


def test_the_set_covers_what_it_is_for() -> None:
    assert len(GPU) >= 200
    assert {one.kind for one in GPU} == {*CLASSES}
    assert len({one.model for one in GPU}) == len(FAMILIES) == 13
    backward = Counter(one.model for one in GPU if one.direction == "backward")
    assert {one.model for one in GPU} == {*backward}


@torch.no_grad()
def test_every_problem_runs() -> None:
    """In bfloat16 on a CPU, tiny; at a GPU's sizes without memory."""
    for one in TINY:
        assert all(made.isfinite().all() for made in outputs_of(one.fn(*one.make("cpu"))) if made.is_floating_point()), one.name
    for one in GPU:
        outputs_of(one.fn(*one.make("meta")))


@pytest.mark.parametrize("name", ["cpu", "tiny"])
def test_small_sizes_have_the_same_layers(name: str) -> None:
    small = problems(SIZES[name])
    assert {one.kind for one in small} == {*CLASSES}
    assert sum(one.nbytes for one in small) < sum(one.nbytes for one in GPU) / 10


def planned(job: Job) -> int:
    """How many ways to compute a problem there are; each of its matmuls has been described."""
    with settled(job):
        graph = MatmulGraph(job, traced(job.problem, job.device))
        found = graph.matmuls()
        json.dumps([matmul.description for matmul in found])
        return len(list(ways(found, job.configs)))


def test_some_problems_are_scheduled_for_a_gpu() -> None:
    """`test_all_problems_are_scheduled_for_a_gpu` has all."""
    for number in range(7, len(GPU), 29):
        assert planned(Job("gpu", number, torch.bfloat16, "cuda", H100)) >= 2


@pytest.mark.slow
def test_all_problems_are_scheduled_for_a_gpu() -> None:
    for number in range(len(GPU)):
        assert planned(Job("gpu", number, torch.bfloat16, "cuda", H100)) >= 2


# ---- variants ----------------------------------------------------------------------------------------------------------


def test_answers_are_for_one_matmul() -> None:
    """Of two matmuls, one is left to the library as well, and the other one as it was."""
    job = job_of("ViT-B: norm + MLP + residual, bf16")
    with settled(job), _disable_current_modes():
        graph = MatmulGraph(job, traced(job.problem, job.device))
        matmuls = graph.matmuls()
        first = next(one for one in matmuls if one.outs == ("addmm",))
        forced = {first.outs: TuningResult(None, (), 1, first.library, first.library)}
        config = next(ways(matmuls, 1)).config
        plain = [way for way in ways(matmuls, 1) if way.name == CHOSEN]
        plans = [graph.plan(way) for way in (*plain, Way("forced", config, None, forced))]
    assert [len(plan.calls) for plan in plans] == [1, 2]
    assert steps_of(plans[0])[-1] == steps_of(plans[1])[-1]


def test_an_oracle_without_answers_changes_nothing() -> None:
    job = job_of("GPT-2: norm + MLP + residual of 8, bf16")
    with settled(job), _disable_current_modes():
        graph = MatmulGraph(job, traced(job.problem, job.device))
        [chosen] = [way for way in ways((), 1) if way.name == CHOSEN]
        listening = replace(chosen, tuning_results={("nobody's",): TuningResult(None, (), 1, 1.0, 1.0)})
        assert steps_of(graph.plan(chosen)) == steps_of(graph.plan(listening))
    assert FixedResults().tuning_results([], graph.graph()) == {}


@pytest.mark.cpu
def test_a_problem_from_start_to_end(tmp_path: Path) -> None:
    """On a CPU, where it is timed as well."""
    path = tmp_path / "regret.json"
    name = "ViT-B: fc1 + gelu"
    arguments = ["--device", "cpu", "--size", "tiny", "--names", name, "--dtypes", "f32", "--jobs", "0", "--configs", "1"]
    arguments += ["--seconds", "0.001", "--json", str(path)]
    command.main(arguments)
    [row] = read(path).rows
    assert not row["failed"]
    assert row["name"] == f"{name}, f32"
    assert {"card", "date", "torch", "commit"} <= row.keys()
    assert [v["name"] for v in row["variants"]] == [CHOSEN, LIBRARY, "cpp_matmul 0"]
    assert variant(row, "cpp_matmul 0")["matmuls"][0]["template"] == "cpp_matmul"
    assert all(variant(row, v["name"])["error"] < 1e-5 for v in row["variants"])
    [matmul] = row["matmuls"]
    assert matmul["estimates"].keys() == {"cpp_matmul"}
    command.main([*arguments, "--append"])  # which has nothing to do
    assert len(read(path).rows) == 1


def test_a_problem_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.regret.variants.traced", lambda *_: 1 / 0)
    done = compile_job(job_of("ViT-B: attention, bf16"))
    assert done.failed.startswith("ZeroDivisionError")
    assert command.dry_row(done)["failed"] == {"problem": done.failed}


# ---- what is asked for ---------------------------------------------------------------------------------------------------


def jobs(*arguments: str, known: set[str] | None = None) -> list[str]:
    options = command.parse(["--device", "cuda", "--dry", *arguments])
    return [job.problem.name for job in command.jobs_of(options, known or set())]


def test_shards_are_a_partition() -> None:
    whole = jobs()
    assert sorted(whole) == sorted(name for k in range(3) for name in jobs("--shard", f"{k}/3"))
    assert len({*whole}) == len(whole) == len(GPU)


def test_selection() -> None:
    chosen = jobs("--models", "ViT-B", "--direction", "backward")
    assert chosen
    assert all(name.startswith("ViT-B") for name in chosen)
    assert jobs("--models", "ViT-B", "--direction", "backward", known={*chosen[1:]}) == chosen[:1]
    assert len(jobs("--classes", "depthwise", "--limit", "3")) == 3


def test_a_beginning_of_the_run_has_some_of_everything() -> None:
    assert len({name.partition(":")[0] for name in jobs("--limit", "40")}) >= 10


# ---- the report ------------------------------------------------------------------------------------------------------------


def timed(name: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    found = {"name": name, "same_as": "", "failed": "", "steps": [], "matmuls": [], "error": 1e-3, **more}
    return found if seconds is None else {**found, "seconds": seconds}


def row(name: str, kind: str, *variants: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "class": kind, "failed": {}, "eager": 8e-6, "variants": list(variants), **more}


ONE, TEMPLATE = "triton_matmul 0", [{"template": "triton_matmul"}]
ROWS = [
    row("a", "matmul", timed(CHOSEN, 2e-6, matmuls=TEMPLATE), timed(LIBRARY, 4e-6), timed(ONE, 1e-6, matmuls=TEMPLATE)),
    row("b", "matmul", timed(CHOSEN, 6e-6), timed(LIBRARY, 3e-6), timed(ONE, 9e-6, matmuls=TEMPLATE)),
    row("c", "norm", timed(CHOSEN, 1e-6), timed(LIBRARY, None, same_as=CHOSEN)),
    row("d", "norm", timed(CHOSEN, 1e-6), timed(LIBRARY, 2e-6), timed("wrong 0", 1e-7, error=0.5)),
    row("e", "norm", timed(LIBRARY, 1e-6), failed={CHOSEN: "it does not compile"}),
]  # fmt: skip


def test_regret() -> None:
    a, b, c, d, e = map(regret_of, ROWS)
    assert a is not None
    assert b is not None
    assert c is not None
    assert d is not None
    assert (a.over_best, a.over_library, a.winner, a.over_eager) == (2.0, 0.5, ONE, 0.25)
    assert (b.over_best, b.over_library, b.winner) == (2.0, 2.0, LIBRARY)
    assert (c.over_best, c.over_library, c.winner) == (1.0, 1.0, CHOSEN)
    assert d.winner == CHOSEN  # not what is wrong
    assert e is None


def test_the_report_by_class() -> None:
    assert {name: len(own) for name, own in by_class(ROWS).items()} == {"matmul": 2, "norm": 2}
    text = StringIO()
    show(ROWS, Console(file=text, width=220))
    printed = text.getvalue()
    [matmul] = [line for line in printed.splitlines() if "matmul" in line and "2.000" in line]
    assert [cell.strip() for cell in matmul.split("│")[1:-1]] == [
        "matmul",
        "2",
        "2.000",
        "2.00",
        "1.000",
        "2.00",
        "0.433",
        "1/2",
    ]
    assert "e, chosen: it does not compile" in printed
    assert "d: wrong 0 is off by 5.0e-01" in printed


# ---- what would be chosen today ----------------------------------------------------------------------------------------


def test_a_choice_that_was_measured_has_that_time() -> None:
    timed = [("chosen", "mm: a", 3.0), ("library", "aten.mm", 2.0), ("a 1", "mm: b", 1.0)]
    row = {
        "name": "one", "class": "matmul", "failed": {}, "matmuls": [{}],
        "variants": [{"name": n, "steps": [s], "matmuls": [], "seconds": t, "error": 0.0} for n, s, t in timed],
    }  # fmt: skip
    found = replanned(row, ["mm: b"], [])
    again = regret_of(found.row)
    assert not found.choice
    assert again is not None
    assert (again.chosen, again.library, again.best) == (1.0, 2.0, 1.0)
    assert replanned(row, ["mm: a"], []).row is row
    assert replanned(row, ["mm: c"], []).choice == "mm: c"


def steps_today(name: str) -> str:
    return "; ".join(plan_job(job_of(name))[0])


def test_windows_go_to_templates_where_the_library_has_no_good_kernel() -> None:
    """Patches that do not overlap, few channels, and windows that were measured; one channel a group has its own template."""
    for name in ("ViT-B: patches, bf16", "MobileNetV3: stem 3x3 stride 2 + hard swish, bf16"):
        assert "triton_matmul" in steps_today(name)
    assert "triton_conv_warp_specialized" in steps_today("ResNet-50: 3x3 256 + relu at 14, bf16")
    assert "triton_conv_depthwise" in steps_today("EfficientNet: depthwise 3x3 + silu, 192 to 1152 at 7, bf16")


def test_rows_that_threads_have_no_registers_for_are_no_candidates() -> None:
    """The softmax's backward keeps its probabilities while it adds up: 32 rows of 512 columns for 8 warps spilled 352 bytes."""
    job = job_of("BERT: scores' gradient, bf16")
    with settled(job):
        [matmul] = MatmulGraph(job, traced(job.problem, job.device)).matmuls()
    tiles = [dict(offer.config) for offer in matmul.offers if offer.template == "triton_matmul_full_row"]
    assert tiles
    assert {(knobs["BLOCK_M"], knobs["WARPS"]) for knobs in tiles} == {(16, 4)}


def test_a_choice_is_the_one_for_the_card_of_a_row() -> None:
    job = job_of("MoE: router of 16, bf16")
    assert on_card(job, {"card": "NVIDIA H200"}).facts is H200
    assert on_card(job, {"card": "NVIDIA H100 80GB HBM3"}).facts is H100
    assert on_card(job, {}).facts is H100


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("Llama: q, k, v of 4, bf16", "triton_matmul_tiles"),  # TMA fills 60 of 64 rows with zeros: 24.2 us, the best 15.5
        ("Mamba: norm + in projection of 16, bf16", "BLOCK_K=128"),  # each step waits for the norm's weights: 20.2 us, 13.1
        ("EfficientNet: squeeze and excite, 192 to 1152 at 7, bf16", "sliced_k"),  # 13.4 us, other templates 5.1
        ("Mamba: time step of 16, bf16", "BLOCK_K=512"),  # of sums of 128: 2.8 us, tiles of 128 1.9
    ],
)
def test_slow_kernels_are_not_chosen(name: str, slow: str) -> None:
    """Measured on an H200."""
    steps = plan_job(on_card(job_of(name), {"card": "NVIDIA H200"}))[0]
    assert not [step for step in steps if slow in step]
    assert any("triton" in step for step in steps)


def test_separate_kernels_take_time_for_sigmoids_and_roots() -> None:
    """On an H200 the convolution with a kernel of its own for the norm and SiLU took 20.2 us, the template's kernel 11.8."""
    name = "EfficientNet: expand 1x1 + bn + silu, 112 to 672 at 14, bf16"
    steps = plan_job(on_card(job_of(name), {"card": "NVIDIA H200"}))[0]
    assert any("triton_matmul" in step for step in steps)


def test_kernels_that_would_spill_or_need_too_much_are_no_candidates() -> None:
    """Two matmuls whose columns are neighbours kept 6304 bytes of each thread; a computed operand needed 233,472 bytes."""
    spilling = {"BLOCK_N": 64, "BLOCK_K": 256, "WARPS": 4}
    for offer in offers_of("MoE: experts' SwiGLU, 4 each, bf16", "triton_matmul_sliced_k"):
        assert {name: dict(offer.config)[name] for name in spilling} != spilling
    computed = offers_of("ResNet-50: relu, bn and 1x1 64 to 256 backward at 56, bf16", "triton_matmul_b_resident")
    assert all(dict(offer.config)["BLOCK_M"] < 128 for offer in computed)
    assert computed


def offers_of(name: str, template: str) -> list[Offer]:
    job = job_of(name)
    with settled(job):
        matmuls = MatmulGraph(job, traced(job.problem, job.device)).matmuls()
    return [offer for matmul in matmuls for offer in matmul.offers if offer.template == template]
