"""What the author of a template gets to hear: at registration, at compile time, and from the conformance kit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import template_author
import torch
from template_author import JINJA, METHODS, MODULE

import kgen
from kgen import errors
from kgen.only import only
from kgen.scheduler import Options
from kgen.templates import contract, registry
from kgen.testing import Case, Outcome, Spec, cases, check_template
from kgen.testing.cases import plain
from kgen.testing.compare import compare
from tests.kernels import plans

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def author(tmp_path: Path) -> Iterator[Author]:
    made = Author(tmp_path)
    yield made
    for name in made.names:
        registry.remove(name)


@pytest.mark.parametrize("template", registry.every(), ids=lambda one: one.name)
def test_built_in_files_fit_their_classes(template: contract.Template) -> None:
    """Importing kgen's own templates does not parse them."""
    contract.check_file(template, contract.members_of(type(template.author)), ValueError)


def test_a_built_in_file_that_does_not_fit_is_found(tmp_path: Path) -> None:
    template = registry.find("triton_matmul")
    broken = tmp_path / template.source.name
    broken.write_text(template.source.read_text().replace("C.store", "C.stored"))
    with pytest.raises(ValueError, match="never"):
        contract.check_file(replace(template, source=broken), contract.members_of(type(template.author)), ValueError)


class Author:
    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, []

    def registers(self, name: str = "authors", jinja: str = JINJA, module: str = MODULE, methods: str = "") -> type:
        """The decorated class."""
        self.names.append(name)
        path = template_author.write(self.folder / f"{len(self.names)}", name, jinja, module, methods)
        return template_author.load(path).Matmul


# ---- declarations that do not hold together -------------------------------------------------------------------------

BAD_MODULES = {
    "device": ('device="cuda"', 'device="tpu"', "device 'tpu' is none of cuda, cpu"),
    "operand": ('kgen.operand("b", "m", "k")', 'kgen.operand("m", "k")', "operands are over"),
    "packed operand": ('kgen.operand("b", "m", "k")', 'kgen.operand("b", "m", "k", packs=True)', "it takes A packed"),
    "missing operand": ("A, B, C = kgen.operand", "B, _, C = kgen.operand", ""),
    "result": ('kgen.result("b", "m", "n")', 'kgen.result("b", "n", "m")', "results are over"),
    "axis": ("BLOCK_M,", "BLOCK_X,", "BLOCK_X is the tile of an axis 'x', but its axes are b, m, k, n"),
    "no values": ("kgen.knob(16)", "kgen.knob()", "knob BLOCK_K has no values"),
    "file": ("matmul.py.jinja", "missing.py.jinja", "there is no file"),
    "pattern": ('"b,k,n -> b,m,n"', '"b,k,n"', "is no pattern such as"),
    "long name of an axis": ('"b,m,k", "b,k,n', '"b,rows,k", "b,k,n', "axis 'rows' is no lower-case letter"),
    "longest of no axis": ("BLOCK_M,", "longest = dict(x=3)\n    BLOCK_M,", "how long axis 'x' may be"),
    "another base": ("Matmul(kgen.KernelTemplate)", "Matmul", "write class Matmul(kgen.KernelTemplate)"),
    "unknown reduction": ("BLOCK_M,", "reductions = frozenset(['sun'])\n    BLOCK_M,", "it reduces by 'sun', which is none of"),
    "unknown language": ("BLOCK_M,", "language = 'glue'\n    BLOCK_M,", "language 'glue' is none of triton, gluon"),
    "method that is none": ("BLOCK_M,", "configs = [64]\n    BLOCK_M,", "configs is a method of kgen.KernelTemplate"),
    "attribute as a method": ("BLOCK_M,", "family = lambda self: 3\n    BLOCK_M,", "family is no method of"),
    "misspelled method": ("BLOCK_M,", "refuze = lambda self, problem: None\n    BLOCK_M,", "was refuse meant?"),
    "misspelled attribute": ("BLOCK_M,", "familly = 2\n    BLOCK_M,", "was family meant?"),
    "helper without an underscore": ("BLOCK_M,", "rows = staticmethod(len)\n    BLOCK_M,", "begins with an underscore"),
    "capital": ('"b,m,k", "b,k,n', '"b,M,k", "b,k,n', "axis 'M' is no lower-case letter"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_MODULES)
def test_a_declaration_that_does_not_hold_together(author, what):
    old, new, message = BAD_MODULES[what]
    assert old in MODULE
    with pytest.raises(errors.BadTemplate) as error:
        author.registers(module=MODULE.replace(old, new))
    assert message in str(error.value)
    assert "docs/templates/reference.md" in str(error.value)
    assert "authors" not in {t.name for t in registry.every()}


def test_names_that_are_a_templates_own(author):
    """Helpers with an underscore, constants, and what the Jinja file asks for."""
    methods = """
    LOADING = 24

    def _rows(self):
        return self.LOADING

    def warps(self, config):
        return self._rows()
"""
    jinja = JINJA.replace("{{ kernel() }}", "{{ kernel() }}\n    # {{ problem.template.author.warps(config) }}")
    assert author.registers(jinja=jinja, methods=methods)().warps(None) == 24


def test_rows_in_cpp(author):
    jinja = "{{ kernel() }} {{ A.tile() }} {{ B.tile() }} {{ C.store() }} {{ kernel.end() }}"
    module = MODULE.replace('"cuda"', '"cpu"')
    author.registers(jinja=jinja, module=module)
    with pytest.raises(errors.BadTemplate, match="it holds full rows, which no epilogue in C"):
        author.registers(jinja=jinja, module=module, methods="    full_row = 64")


BAD_SOURCES = {
    "result never stored": ('    {{ C.store("acc", "b", "rm", "rn") }}\n', "", "never renders the slot C"),
    "operand never read": ('{{ B.tile("right", "b", "rk", "rn") }}', "right = left.T", "never renders the slot B"),
    "unknown name": ("{{ kernel() }}", "{{ kernel() }}\n    {{ C_out }}", "uses C_out: no slot, no knob and no axis"),
    "syntax": ("{{ kernel() }}", "{{ kernel() }}\n{% if %}", "line 3"),
}


@pytest.mark.parametrize("what", BAD_SOURCES)
def test_a_source_that_does_not_fit_its_declaration(author, what):
    old, new, message = BAD_SOURCES[what]
    assert old in JINJA
    with pytest.raises(errors.BadTemplate, match="authors") as error:
        author.registers(jinja=JINJA.replace(old, new))
    assert message in str(error.value)
    assert "matmul.py.jinja" in str(error.value)


def test_two_templates_of_one_name(author):
    author.registers()
    with pytest.raises(errors.DuplicateTemplate, match="two templates are called authors") as error:
        author.registers()
    assert error.value.details["first"] != error.value.details["second"]


def test_two_classes_of_one_module_with_one_name(author):
    """Their Jinja file is the same, so that the path does not tell them apart."""
    two_classes = MODULE + MODULE.replace("class Matmul", "class Another").replace("import kgen", "")
    with pytest.raises(errors.DuplicateTemplate, match=r"Matmul and .*Another"):
        author.registers(module=two_classes)


def test_a_module_may_be_loaded_again(author):
    path = template_author.write(author.folder, "authors")
    author.names.append("authors")
    module = template_author.load(path)
    module.__spec__.loader.exec_module(module)
    assert type(registry.find("authors").author) is module.Matmul


def test_unknown_templates_are_named_with_those_there_are():
    with pytest.raises(errors.UnknownTemplate, match="triton_matmul"):
        check_template("matmul_of_nobody")
    with pytest.raises(errors.UnknownTemplate, match="triton_matmul"):
        check_template(dict)


def test_a_configuration_with_an_unknown_knob(author):
    author.registers(
        methods="""
    def configs(self, problem):
        yield {"BLOCK_M": 16, "WRAPS": 4}
"""
    )
    with pytest.raises(errors.BadTemplate, match=r"names \['WRAPS'\], which are no knobs"):
        list(registry.find("authors").configs(None))


def test_equal_configurations_are_one(author):
    author.registers(
        methods="""
    def configs(self, problem):
        yield {"BLOCK_M": 16}
        yield {"BLOCK_M": 32}
        yield {"BLOCK_N": 32, "BLOCK_M": 16}
"""
    )
    assert [config.BLOCK_M for config in registry.find("authors").configs(None)] == [16, 32]


# ---- the kit --------------------------------------------------------------------------------------------------------


def some(name: str) -> list[Case]:
    """A few of the kit's problems that between them try each part of a kernel."""
    return [case for case in cases(registry.find(name)) if case.name in ("k=17", "n=17", "b=5", "added in place", "transposed")]


@pytest.mark.interpret
def test_a_right_template_passes(author):
    report = check_template(author.registers(), problems=some("authors"))
    assert report.template == "authors"
    assert report.where == ("cuda" if torch.cuda.is_available() else "interpreter")
    assert len(report.passed) == len(report.results) > 2 * len(report.problems)  # under several configurations
    assert all(r.fused for r in report.results)
    assert "0 failed; refused 0 / " in str(report)


WRONG = {
    "the last block of the sum is missing": ("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)"),
    "the first block of the sum is missing": ("range(0, K, BLOCK_K)", "range(BLOCK_K, K, BLOCK_K)"),
    "stored twice": (
        '    {{ C.store("acc", "b", "rm", "rn") }}',
        '    {{ C.store("acc", "b", "rm", "rn") }}\n    {{ C.store("acc", "b", "rm", "rn") }}',
    ),
    "axes swapped at the store": ('C.store("acc", "b", "rm", "rn")', 'C.store("acc", "b", "rn", "rm")'),
    "axes swapped at a load": ('A.tile("left", "b", "rm", "rk")', 'A.tile("left", "b", "rk", "rm")'),
    "one batch only": ("b = tl.program_id(0) // (tiles_m * tiles_n)", "b = tl.program_id(0) * 0"),
    "summed in short floats": ("acc = lib.dot(left, right, acc, PRECISION)", (
        "acc = lib.dot(left, right, acc, PRECISION).to(tl.float16).to(ACCUMULATOR)"
    )),
    "tiles left out": ("tile = tl.program_id(0) % (tiles_m * tiles_n)", "tile = tl.program_id(0) % (tiles_m * tiles_n) // 2"),
    "a name that the kernel does not have": ("acc = lib.dot(left,", "acc = lib.dot(lefty,"),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_caught(author, what):
    old, new = WRONG[what]
    assert old in JINJA
    matmul = author.registers(jinja=JINJA.replace(old, new))
    report = check_template(matmul, problems=some("authors"), configs=1, raises=False)
    assert report.failed
    with pytest.raises(errors.TemplateCheckFailed, match="template authors fails") as error:
        report.raise_if_failed()
    assert error.value.details["case"] in report.problems
    assert "BLOCK_M=" in error.value.details["config"]


@pytest.mark.interpret
def test_a_grid_that_is_too_small_leaves_poison(author):
    author.registers(methods=METHODS["half of the programs"])
    with pytest.raises(errors.TemplateCheckFailed, match="it is nan and should be"):
        check_template("authors", problems=[c for c in cases(registry.find("authors")) if c.name == "n=61"], configs=1)


@pytest.mark.interpret
def test_refusals_are_counted_with_their_reasons(author):
    author.registers(methods=METHODS["refuse float64"])
    problem = Case("doubles", "size", torch.mm, (Spec((5, 6), torch.float64), Spec((6, 7), torch.float64)))
    report = check_template("authors", problems=[problem, *some("authors")[:1]])
    (refused,) = report.refused
    assert refused.case is problem
    assert refused.reason == "it is for short floats"
    assert "refused 1 / 2" in str(report)
    assert "refused 1: it is for short floats" in str(report)


@pytest.mark.interpret
def test_a_template_that_takes_nothing_does_not_pass(author):
    author.registers(methods=METHODS["needs too much"])
    report = check_template("authors", problems=some("authors")[:2], raises=False)
    assert {r.outcome for r in report.results} == {Outcome.REFUSED}
    with pytest.raises(errors.TemplateCheckFailed, match="no configuration fits the device"):
        report.raise_if_failed()


@pytest.mark.interpret
def test_a_kernel_that_spills_is_left_out(author, monkeypatch):
    """Nobody would run it: neither right nor wrong, and the report says so."""

    def spilling(*_, **__):
        raise errors.KernelSpills(kernel="k", stack=4480, most=2048)

    author.registers()
    monkeypatch.setattr("kgen.testing.check.kgen_backend", spilling)
    report = check_template("authors", problems=some("authors")[:1], raises=False)
    assert [r.outcome for r in report.spilled] == [Outcome.SPILLED] * len(report.results)
    assert "4480 bytes" in str(report)
    with pytest.raises(errors.TemplateCheckFailed, match="none was taken"):
        report.raise_if_failed()


@pytest.mark.interpret
def test_a_write_beside_the_result_is_caught(author):
    """The guards around an operand change."""
    spoil = '    tl.store(p_arg0_1 - 1, 0.0)\n    {{ C.store("acc", "b", "rm", "rn") }}'
    author.registers(jinja=JINJA.replace('    {{ C.store("acc", "b", "rm", "rn") }}', spoil))
    with pytest.raises(errors.TemplateCheckFailed, match="wrote to its inputs, or to memory next to them"):
        check_template("authors", problems=[c for c in cases(registry.find("authors")) if c.name == "k=17"], configs=1)


@pytest.mark.interpret
def test_the_choice_of_others_is_left_alone(author):
    """A check forces its template for its own compilations only."""
    author.registers(methods=METHODS["costs nothing"].replace("0.0", "1.0"))  # a second: never chosen for what it costs
    check_template("authors", problems=some("authors")[:1], configs=1)
    with kgen.config.override(gpu_interpreter=True):
        report = kgen.explain(lambda a, b: a @ b, torch.randn(512, 512), torch.randn(512, 512), print_report=False)
    assert not any("authors" in v.detail for v in report.verdicts if v.outcome.name == "CHOSEN")


OPERATOR = """
import kgen, torch
from examples.new_template import l1_distance

axes = kgen.operator("example::l1_distance", "m,k", "n,k -> m,n", reference=lambda x, y: torch.cdist(x, y, p={power}))


@kgen.template(implements=axes, device="cuda", source="matmul.py.jinja", name="{name}")
class Matmul(kgen.KernelTemplate):
    A, B, C = kgen.operand("m", "k"), kgen.operand("n", "k"), kgen.result("m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(32, 16), kgen.knob(32, 16), kgen.knob(16)
{methods}
"""
DISTANCES = (ROOT / "examples" / "l1_distance.py.jinja").read_text().replace("X.", "A.").replace("Y.", "B.").replace("D.", "C.")


@pytest.mark.interpret
@pytest.mark.parametrize("power", [1, 2])
def test_a_template_for_an_operator(author, power):
    """The reference computes the operator's result, or the check says that it does not."""
    matmul = author.registers(jinja=DISTANCES, module=OPERATOR.replace("{power}", str(power)))
    wanted = ("m=17", "k=0", "gelu", "times a row", "A transposed", "float64")
    problems = [*cases(registry.find("authors")), plain(registry.find("authors"), torch.float64)]
    problems = [case for case in problems if case.name in wanted]
    report = check_template(matmul, problems=problems, raises=False)
    assert len(report.problems) == len(wanted)
    if power == 1:
        assert all(r.fused for r in report.results)
    else:
        with pytest.raises(errors.TemplateCheckFailed, match="the operator itself disagrees with its reference"):
            report.raise_if_failed()


NEAREST = """
import kgen, torch


@torch.library.custom_op("authors::nearest", mutates_args=())
def nearest(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    apart = (x[:, None] - y[None]).abs() * scale
    return apart.sum(-1), apart.amax(-1)


@nearest.register_fake
def _(x, y, scale):
    return tuple(x.new_empty(x.shape[0], y.shape[0]) for _ in range(2))


axes = kgen.operator("authors::nearest", "m,k", "n,k -> m,n; m,n")


@kgen.template(implements=axes, device="cuda", source="matmul.py.jinja", name="{name}")
class Matmul(kgen.KernelTemplate):
    A, B, C, D = kgen.operand("m", "k"), kgen.operand("n", "k"), kgen.result("m", "n"), kgen.result("m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = kgen.knob(32, 16), kgen.knob(32, 16), kgen.knob(16)
{methods}
"""
LARGEST = (
    DISTANCES.replace(
        "distance += tl.sum(",
        """apart = SCALE * tl.abs(x[:, None, :] - y[None, :, :])
        largest = tl.maximum(largest, tl.max(apart, 2))
        distance += tl.sum(""",
    )
    .replace(
        "    for start",
        """    largest = distance
    for start""",
    )
    .replace("tl.abs(x[:, None, :] - y[None, :, :]).to", "apart.to")
    .replace("SCALE", "{{ problem.arguments.scale }}")
)


@pytest.mark.interpret
def test_an_operator_of_several_results(author):
    """They are stored together, and an epilogue may need both; its numbers are there for the Jinja file."""
    author.registers(module=NEAREST, jinja=LARGEST.replace('C.store("distance"', 'C.store("distance largest"'))

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, largest = torch.ops.authors.nearest(x, y, 0.5)
        return torch.relu(total - 5), total / largest

    x, y = torch.randn(35, 20), torch.randn(37, 20)
    with kgen.config.override(gpu_interpreter=True, cache=False):
        report = kgen.explain(f, x, y, print_report=False)
        torch.testing.assert_close(torch.compile(f, backend="kgen")(x, y), f(x, y))
    assert (len(report.kernels), len(report.externs)) == (1, 0)


def test_results_that_are_stored_one_by_one(author):
    """The epilogue runs where either is stored, so that it needs both there."""
    with pytest.raises(errors.BadTemplate, match="renders C and D: one of them stores all results"):
        author.registers(module=NEAREST, jinja=LARGEST + """    {{ D.store("largest", "rm", "rn") }}\n""")


FAMILY = MODULE.replace('"k", "n"),', '"k", "n", many=True),').replace(
    'kgen.result("b", "m", "n")', 'kgen.result("b", "m", "n", many=True)'
)
PARTS_JINJA = """
{{ kernel() }}
    end = 0
{% for part in parts %}
    begin{{ part.suffix }} = end
    tiles_n{{ part.suffix }} = tl.cdiv({{ part.n.size }}, BLOCK_N)
    end += B * tl.cdiv(M, BLOCK_M) * tiles_n{{ part.suffix }}
    if (tl.program_id(0) >= begin{{ part.suffix }}) & (tl.program_id(0) < end):
        own = tl.program_id(0) - begin{{ part.suffix }}
        tiles = tl.cdiv(M, BLOCK_M) * tiles_n{{ part.suffix }}
        b = own // tiles
        rm = own % tiles // tiles_n{{ part.suffix }} * BLOCK_M + tl.arange(0, BLOCK_M)
        rn = own % tiles_n{{ part.suffix }} * BLOCK_N + tl.arange(0, BLOCK_N)
        acc0 = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
        for start in range(0, K, BLOCK_K):
            rk = start + tl.arange(0, BLOCK_K)
            {{ part.A.tile("left", "b", "rm", "rk") }}
{% for one in part.B %}
            {{ one.tile("right", "b", "rk", "rn") }}
{% endfor %}
            acc0 = lib.dot(left, right, acc0, PRECISION)
        {{ part.C.store("acc", "b", "rm", "rn") }}
{% endfor %}
"""


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("refuses", [False, True])
def test_matmuls_that_one_launch_makes(author, refuses):
    """With `parts` and one program a tile: as many programs as tiles, unless the author would rather not."""
    methods = """
    def refuse_grouped(self, problems):
        return "one after the other, please"
"""
    author.registers(module=FAMILY, jinja=PARTS_JINJA, methods="    joins = 'parts'\n" + (methods if refuses else ""))

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ w), x @ v + 1

    args = torch.randn(200, 40), torch.randn(40, 1000), torch.randn(40, 130)
    with kgen.config.override(gpu_interpreter=True, cache=False), only("authors", lambda configs: configs[0]):
        report = kgen.explain(f, *args, print_report=False)
        for got, want in zip(torch.compile(f, backend="kgen")(*args), f(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (len(report.kernels), len(report.externs)) == (2 if refuses else 1, 0)


@pytest.mark.parametrize(
    ("jinja", "joins", "message"),
    [
        (PARTS_JINJA, "", "uses parts, but the class does not say joins = 'parts'"),
        (JINJA, "program", "'program', which its Jinja file never uses"),
        (JINJA, "tiles", "'tiles', which is none of program, parts"),
    ],
)
def test_how_matmuls_are_joined_is_said(author, jinja, joins, message):
    with pytest.raises(errors.BadTemplate) as error:
        author.registers(module=FAMILY, jinja=jinja, methods=f"    joins = {joins!r}\n" if joins else "")
    assert message in str(error.value)


# ---- axes of any name -----------------------------------------------------------------------------------------------


@pytest.mark.interpret
def test_a_matmul_without_a_batch_whose_axes_have_other_names(author):
    """What the library would take is worked out from the pattern, not from names that built-in templates use."""
    module = MODULE.replace('"b,m,k", "b,k,n -> b,m,n"', '"i,j", "j,l -> i,l"')
    module = (
        module.replace('"b", "m", "k"', '"i", "j"').replace('"b", "k", "n"', '"j", "l"').replace('"b", "m", "n"', '"i", "l"')
    )
    module = module.replace("BLOCK_M, BLOCK_N, BLOCK_K", "BLOCK_I, BLOCK_L, BLOCK_J")
    jinja = JINJA.replace('"b", ', "").replace("    b = tl.program_id(0) // (tiles_m * tiles_n)\n", "")
    for name, own in (("M", "I"), ("N", "L"), ("K", "J")):
        jinja = (
            jinja.replace(f"BLOCK_{name}", f"BLOCK_{own}").replace(f"({name},", f"({own},").replace(f"0, {name},", f"0, {own},")
        )
    author.registers(module=module, jinja=jinja)
    a, b = torch.randn(35, 20), torch.randn(20, 37)
    with kgen.config.override(gpu_interpreter=True, cache=False), kgen.require_fused("aten.mm", "aten.relu"):
        kgen.explain(lambda a, b: torch.relu(a @ b), a, b, print_report=False)
    assert check_template("authors", problems=some("authors")[:2]).passed
    long = torch.randn(35, 4096, dtype=torch.float64), torch.randn(4096, 37, dtype=torch.float64)  # no other template takes it
    plan = plans(lambda a, b: a @ b, *long, options=Options(gpu_everywhere=True)).forward
    assert len(plan.kernels) + len(plan.calls) == 1  # its sum whole: parts would be a batch


@pytest.mark.interpret
def test_an_operator_is_no_sum_to_be_cut(author):
    """Few tiles and long sums: a matmul would be cut into parts, which only additions may be."""
    author.registers(jinja=DISTANCES, module=OPERATOR.replace("{power}", "1"))
    with kgen.config.override(gpu_interpreter=True):
        report = kgen.explain(torch.ops.example.l1_distance, torch.randn(35, 1024), torch.randn(37, 1024), print_report=False)
    assert (len(report.kernels), len(report.externs)) == (1, 0)


# ---- another package ------------------------------------------------------------------------------------------------

USER = """
import torch, acme.matmul, kgen
from kgen.templates import contract, registry
from kgen.testing import cases, check_template
from kgen.verdict import Outcome, Reason

def f(a, b, v):
    return torch.nn.functional.gelu(a @ b + v)

args = torch.randn(70, 40), torch.randn(40, 50), torch.randn(50)
with kgen.config.override(gpu_interpreter=True):
    report = kgen.explain(f, *args, print_report=False)
    (kernel,) = report.kernels
    assert "acme_matmul" in kernel.source and not report.externs
    assert [v.detail.split()[0] for v in report.verdicts if v.outcome is Outcome.CHOSEN] == ["acme_matmul"]
    torch.testing.assert_close(torch.compile(f, backend="kgen")(*args), f(*args))

    doubles = [t.double() for t in args]  # the template refuses them, and the others do not matter here
    report = kgen.explain(f, *doubles, print_report=False)
    assert any("acme_matmul: it is for short floats" in v.detail for v in report.verdicts if v.reason is Reason.NO_TEMPLATE)
    assert report.externs
    torch.testing.assert_close(torch.compile(f, backend="kgen")(*doubles), f(*doubles))

problems = [c for c in cases(registry.find("acme_matmul")) if c.name in ("k=17", "gelu", "normalised")]
print(check_template(acme.matmul.Matmul, problems=problems, configs=1))
"""


def run_user(folder: Path, code: str) -> str:
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.interpret
def test_a_template_of_another_package(tmp_path):
    """With nothing changed in kgen: fusion, fallback, explain and conformance."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "__init__.py").touch()
    methods = METHODS["refuse float64"] + METHODS["costs nothing"]
    template_author.write(tmp_path / "acme", "acme_matmul", methods=methods)
    assert "acme_matmul on " in run_user(tmp_path, USER)


CACHED = """
import torch, acme.matmul
def f(a, b):
    return a @ b
options = {"gpu_interpreter": True}
with torch.no_grad():
    print(torch.compile(f, backend="kgen", options=options)(torch.ones(4, 4), torch.ones(4, 4))[0, 0].item())
"""


@pytest.mark.interpret
def test_a_changed_template_is_not_found_in_the_cache(tmp_path):
    """Graphs in the cache of compiled graphs were made with the templates of their time."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "__init__.py").touch()
    template_author.write(tmp_path / "acme", "acme_matmul", methods=METHODS["costs nothing"])
    assert run_user(tmp_path, CACHED).split() == ["4.0"]
    doubled = JINJA.replace("    {{ C.store", "    acc *= 2\n    {{ C.store")
    template_author.write(tmp_path / "acme", "acme_matmul", doubled, methods=METHODS["costs nothing"])
    assert run_user(tmp_path, CACHED).split() == ["8.0"]


def test_the_error_that_eager_makes_is_allowed():
    """Where a sum cancels, or an exponential grows, and nowhere else; not in the check of the operator itself."""
    eager, exact = [torch.tensor([1.0, 2.2])], [torch.tensor([1.0, 2.0], dtype=torch.float64)]
    assert not compare(torch.tensor([1.0, 2.21]), eager, exact, []).problem
    assert compare(torch.tensor([1.0, 2.3]), eager, exact, []).problem
    assert compare(eager[0], eager, exact, [], own_errors=0.0).problem
