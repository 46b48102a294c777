"""What a template can do is said in its class, once: fusion asks the registered templates, and nothing else knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.ir.plan import ComboKernel, Kernel, Schedule
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import contraction_of, prepared
from kgen.templates import registry
from kgen.templates.base import KernelTemplate, Request
from kgen.templates.contract import Template
from kgen.templates.problem import Problem, problem_of
from kgen.verdict import Outcome, Reason
from tests.house.test_docs import SNIPPETS
from tests.kernels import plans
from tests.matmuls import only_templates

ROOT = Path(__file__).resolve().parents[3]
X, W, V = torch.randn(70, 40), torch.randn(40, 90), torch.randn(40, 90)


def told(template: Template, **attributes: Any) -> Template:
    """The template with other things said in its class."""
    kind = type(template.author)
    return replace(template, author=type(kind.__name__, (kind,), attributes)())


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch, templates_win: None) -> Callable[..., Schedule]:
    """The plan of a function where every template's class says something else."""
    known = list(registry.every())

    def plan(f: Callable[..., Any], *args: Tensor, gpu: bool = True, **attributes: Any) -> Schedule:
        only_templates(monkeypatch, [told(template, **attributes) for template in known])
        with torch.no_grad():
            return plans(f, *args, options=Options(gpu_everywhere=gpu)).forward

    return plan


def reasons(plan: Schedule) -> set[Reason]:
    return {v.reason for v in plan.verdicts}


def matmuls(plan: Schedule) -> list[Kernel]:
    return [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]


def statements(kernel: Kernel, kind: str) -> int:
    return sum(s.kind == kind for s in kernel.statements)


# ---- each capability decides --------------------------------------------------------------------------------------------


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_family_is_as_large_as_a_template_says(plan_with: Callable[..., Schedule], gpu: bool) -> None:
    assert [statements(k, "contraction") for k in matmuls(plan_with(gated, X, W, V, gpu=gpu))] == [2]
    plan = plan_with(gated, X, W, V, gpu=gpu, family=1)
    assert [statements(k, "contraction") for k in matmuls(plan)] == [1, 1]
    assert Reason.TWO_MATMULS in reasons(plan)


def halves(x: Tensor, w: Tensor) -> Tensor:
    c = x @ w
    return F.silu(c[:, :45]) * c[:, 45:]


def test_a_concat_is_split_into_as_many_as_a_family_has(plan_with: Callable[..., Schedule]) -> None:
    assert Reason.OUTPUT_SPLIT in reasons(plan_with(halves, X, W))
    assert Reason.OUTPUT_SPLIT not in reasons(plan_with(halves, X, W, family=1))


@pytest.mark.parametrize("most", [4, 2, 1])
def test_one_launch_has_as_many_as_a_template_says(plan_with: Callable[..., Schedule], most: int) -> None:
    def three(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ w, x @ v[:, :30], (x @ v[:, 30:80]).relu()

    plan = plan_with(three, X, W, V, grouped=most)
    batches = [len(step.members) for step in plan.steps if isinstance(step, ComboKernel)]
    assert batches == {4: [3], 2: [2], 1: []}[most]


def test_a_prologue_costs_at_most_what_a_template_says(plan_with: Callable[..., Schedule]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x * x + 1) @ w

    assert len(plan_with(f, X, W).kernels) == 1
    assert len(plan_with(f, X, W, prologue_cost=1).kernels) == 2


def test_a_scale_costs_at_most_what_a_template_says(plan_with: Callable[..., Schedule]) -> None:
    def f(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (x * (s + 1)) @ w

    s = torch.randn(70, 1)
    assert Reason.SCALE_LEAVES in reasons(plan_with(f, X, W, s))
    plan = plan_with(f, X, W, s, scale_cost=0)
    assert (Outcome.UNPROFITABLE, Reason.EXPENSIVE) in {(v.outcome, v.reason) for v in plan.verdicts}


def test_rows_are_reduced_and_read_again_where_a_tile_holds_them(plan_with: Callable[..., Schedule]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1)

    assert len(plan_with(f, X, W).kernels) == 1
    assert len(plan_with(f, X, W, full_row=89).kernels) > 1


def test_tiles_are_reduced_as_a_template_says(plan_with: Callable[..., Schedule]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).amax(0)

    (kernel,) = matmuls(plan_with(f, X, W))
    assert statements(kernel, "partial") == 1
    (kernel,) = matmuls(plan_with(f, X, W, reductions=frozenset({"sum"})))
    assert statements(kernel, "partial") == 0


def test_a_value_that_is_reduced_on_tiles_is_computed_again_at_a_templates_price(plan_with: Callable[..., Schedule]) -> None:
    """A softmax sums exponentials, which would need the full row's maximum if they were not computed again."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1)

    long = torch.randn(40, 3000)
    assert Reason.CHAINED_REDUCTIONS not in reasons(plan_with(f, X, long))
    assert Reason.CHAINED_REDUCTIONS in reasons(plan_with(f, X, long, epilogue_cost=0))


def test_updates_in_order_stay_apart_where_no_template_keeps_one(
    plan_with: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    def f(t: Tensor, i: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return t.index_add(0, i, x @ w)

    args = torch.zeros(5, 90), torch.arange(70) % 5, X, W
    (kernel,) = matmuls(plan_with(f, *args, gpu=False))
    assert statements(kernel, "scatter") == 1
    apart = Request(ordered=True)
    why_not = registry.why_not
    monkeypatch.setattr(registry, "why_not", lambda device, asked: "no" if asked == apart else why_not(device, asked))
    plan = plan_with(f, *args, gpu=False)
    assert [statements(kernel, "scatter") for kernel in matmuls(plan)] == [0]
    assert "no" in {v.detail for v in plan.verdicts if v.reason is Reason.NOT_IN_ORDER}


# ---- what a template answers ----------------------------------------------------------------------------------------------

ASKED = {
    "family": (Request(family=3), Request(family=4), "4 contractions with one epilogue, where it has 3 at most"),
    "grouped": (Request(grouped=8), Request(grouped=9), "9 contractions in one launch"),
    "full_row": (Request(full_row=1024), Request(full_row=1025), "1025 points of a row in one tile"),
    "prologue": (Request(prologue_cost=24), Request(prologue_cost=25), "25 operations for an element of an operand"),
    "scale": (Request(scale_cost=6), Request(scale_cost=7), "7 operations for a scale"),
    "epilogue": (Request(epilogue_cost=100), Request(epilogue_cost=101), "101 operations again"),
    "ordered": (Request(), Request(ordered=True), "it stores its tiles in no order"),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_a_template_answers(what: str) -> None:
    within, beyond, message = ASKED[what]
    template = registry.find("triton_matmul")
    assert template.why_not(within) is None
    assert message in (template.why_not(beyond) or "")
    assert "triton_matmul: " in (registry.why_not("cuda", beyond) or "")


def test_reductions_that_a_template_leaves_to_others() -> None:
    warp_specialized = registry.find("triton_matmul_warp_specialized")
    assert warp_specialized.why_not(Request(reduction="max")) is None
    assert warp_specialized.why_not(Request(reduction="welford")) == "its epilogue does not reduce tiles by welford"
    assert registry.why_not("cuda", Request(reduction="welford")) is None  # another one has it


def test_no_tile_in_cpp_holds_rows_that_are_read_again() -> None:
    assert "cpp_matmul: " in (registry.why_not("cpu", Request(full_row=1)) or "")
    assert registry.why_not("cpu", Request(ordered=True)) is None


def test_a_template_refuses_what_it_says_it_cannot_do(plan_with: Callable[..., Schedule]) -> None:
    """Also where fusion went by what another template says."""
    plan = plan_with(lambda x, w: (x @ w).amax(0), X, W)
    (kernel,) = matmuls(plan)
    device = Options(gpu_everywhere=True).device(plan.graph, contraction_of(kernel))
    template = told(registry.find("triton_matmul"), reductions=frozenset({"sum"}))
    problem = problem_of(template, prepared(kernel, plan.graph), plan.graph, device)
    assert isinstance(problem, Problem)
    assert template.refuse(problem) == "its epilogue does not reduce tiles by max"
    assert registry.find("triton_matmul").refuse(problem) is None


def test_what_follows_from_slots_and_knobs() -> None:
    assert registry.find("triton_matmul_persistent").most.full_row == 256
    assert registry.find("triton_matmul_tiles").most.full_row == 1024
    assert registry.find("triton_matvec").most.family == 3
    assert registry.find("triton_matmul_full_row").most.family == 1  # no operand of it is many


# ---- types ----------------------------------------------------------------------------------------------------------------

CONFIG = """
[mypy]
strict = True
python_version = 3.11
follow_imports = silent
disallow_untyped_decorators = False
disallow_subclassing_any = False
warn_return_any = False

[mypy-torch.*,jinja2.*,sympy.*,triton.*]
follow_imports = skip
ignore_missing_imports = True

[mypy-kgen.backend,kgen.report.*,kgen.host.*,kgen.testing.*,kgen.build.*,kgen.tuning.*,kgen.capture.*]
follow_imports = skip
"""
WRONG = """
from collections.abc import Hashable

import kgen
from kgen import knob, operand, result
from kgen.templates.contract import Config
from kgen.templates.problem import Problem

PATTERN = kgen.contraction("b,m,k", "b,k,n -> b,m,n")


@kgen.template(implements=PATTERN, device="cuda", source="matmul.py.jinja")
class NoTemplate:  # [type-var]
    A, B, C = operand("b", "m", "k"), operand("b", "k", "n"), result("b", "m", "n")


@kgen.template(implements=PATTERN, device="cuda", source="matmul.py.jinja")
class Matmul(kgen.KernelTemplate):
    A, B, C = operand("b", "m", "k"), operand("b", "k", "n"), result("b", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = knob(64, 32), knob("wide"), knob(32)  # [arg-type]
    language = 3  # [assignment]

    def refuse(self, problem: Problem) -> str | None:
        return problem.reason  # [attr-defined]

    def order(self, problem: Problem) -> Hashable:  # [override]
        return None

    def seconds(self, problem: Problem, config: Config) -> str:  # [override]
        return str(config.BLOCK_M + "s")  # [operator]
"""


def test_templates_are_type_checked(tmp_path: Path) -> None:
    """The example's and the documentation's have no error; of others mypy names each."""
    package = tmp_path / "tree" / "kgen"
    package.mkdir(parents=True)
    for path in (*(ROOT / "kgen").iterdir(), *(ROOT / name for name in ("lowering", "scheduler", "templates"))):
        (package / path.name).symlink_to(path)
    files = {
        name: code
        for kind, name, code, _ in SNIPPETS
        if kind == "file" and name.endswith(".py") and not name.startswith("test_")
    }
    files |= {"new_template.py": (ROOT / "examples" / "new_template.py").read_text(), "wrong.py": WRONG}
    assert {"gated.py", "plain.py"} < files.keys()
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "templates"),
    ]
    env = {"MYPYPATH": "tree", "PATH": ""}
    done = subprocess.run([*command, *files], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    found = sorted(
        f"{line.split(':')[0]}:{line.split(':')[1]} {line[line.rindex('[') :]}"
        for line in done.stdout.splitlines()
        if ": error:" in line
    )
    wanted = [f"wrong.py:{k} {line[line.index('# [') + 2 :]}" for k, line in enumerate(WRONG.splitlines(), 1) if "# [" in line]
    assert found == sorted(wanted), done.stdout + done.stderr


def test_type_checkers_see_the_public_names() -> None:
    """Names that load when they are first used are imported for type checkers."""
    tree = ast.parse((ROOT / "kgen" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {"KernelConfig": "kgen.ir.plan:Config"}  # under another name than its own
    for node in block.body:
        if not isinstance(node, ast.ImportFrom):
            assert ast.unparse(node) == "KernelConfig = _plan.Config"
            continue
        for alias in node.names:
            if alias.asname == "_plan":
                continue
            assert alias.asname == alias.name
            seen[alias.name] = f"{node.module}.{alias.name}" if node.module == "kgen" else f"{node.module}:{alias.name}"
    assert seen == kgen._PUBLIC


def test_the_base_class_has_no_untyped_parameter() -> None:
    for name, value in vars(KernelTemplate).items():
        if callable(value):
            hints = dict(value.__annotations__)
            assert "return" in hints, name
            assert "Any" not in " ".join(map(str, hints.values())), name
