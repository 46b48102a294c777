"""The shipped measurements are those of the list of matmuls: a change of a template or a form would make them dead weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from kernels import plans
from slow import slow_but

from bench.matmuls import BY_NUMBER, MATMULS
from kgen.config import Config
from kgen.cost.tuning_query import Place, TuningQuery, TuningResult
from kgen.ir import nodes as ir
from kgen.scheduler import Gpu, Options
from kgen.templates import registry
from kgen.tuning import tuner
from kgen.tuning.tuner import CandidateCompiler, Tuner
from kgen.verdict import Verdict

pytestmark = pytest.mark.none
DEVICES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


class Noting:
    """What the shipped file says of each question."""

    is_worth_asking = True

    def __init__(self, folder: Path, device: str = "h200") -> None:
        def compiles(*_: object) -> object:
            raise AssertionError("nothing is measured")

        self.tuner = Tuner(Config(cache_dir=str(folder)), CandidateCompiler(compiles, compiles, lambda _: DEVICES[device]))  # type: ignore[arg-type]
        self.found: list[Mapping[Place, TuningResult] | None] = []

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, TuningResult]]:
        tuning_results = self.tuner.tuning_results(questions, graph)
        self.found += [tuning_results.get(question.step.name) for question in questions]
        return tuning_results

    def verdicts(self) -> list[Verdict]:
        return []


def asked(number: str, folder: Path, device: str = "h200") -> Noting:
    matmul, oracle = BY_NUMBER[number], Noting(folder, device)
    args = [torch.zeros(one.shape, dtype=one.dtype) for one in matmul.inputs]
    plans(matmul.fn, *args, options=Options(gpu_everywhere=True, gpu=Gpu(arch=90), oracle=oracle))
    return oracle


@pytest.mark.parametrize("number", slow_but(lambda n: n in ("3", "5", "12", "18"), [one.number for one in MATMULS]))
@pytest.mark.parametrize("device", DEVICES)
def test_every_matmul_of_the_list_is_found(device: str, number: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if BY_NUMBER[number].tf32:
        request.getfixturevalue("tf32")
    found = asked(number, tmp_path, device).found
    assert found
    assert all(found), f"measure matmul {number} again and merge it into kgen/tuning/shipped/{device}.json"


def test_forms_do_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    """Values that are there already come before new ones, whatever the order of arguments."""
    assert [number for number in ("1", "3", "4", "5") if not all(asked(number, tmp_path).found)] == []


def test_templates_of_other_devices_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library won on a GPU, it did so against templates for GPUs."""
    known = {device: tuner._versions(device) for device in ("cpu", "cuda")}
    templates = {name: t for name, t in registry._templates.items() if name != "cpp_matmul"}
    monkeypatch.setattr(registry, "_templates", templates)
    assert tuner._versions("cuda") == known["cuda"]
    assert tuner._versions("cpu")[""] != known["cpu"][""]
