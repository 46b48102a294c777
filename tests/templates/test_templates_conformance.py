"""The conformance kit over the built-in templates, and what they may refuse.

A family is the templates for one kind of matmul on one device. What one refuses, another one has to take: all together must
leave nothing to the library, and most of them should take most problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kgen.templates import registry
from kgen.templates.contract import Template
from kgen.testing import Case, Report, cases, check_template
from kgen.testing.cases import DTYPES, cases_of_dtype, large, plain
from kgen.testing.steps import Steps

# Operators have operands that the kit does not draw, such as ends of groups: their templates have tests of their own.
NAMES = [
    t.name for t in registry.every()
    if type(t.author).__module__ in registry.BUILT_IN and not (t.implements.operator and t.implements.program is None)
]  # fmt: skip
# The share of (problem, template) pairs that a family may refuse.
MAY_REFUSE = 0.2
# Problems that are the library's: of types that a GPU's matrix units do not multiply.
LEFT_TO_LIBRARY = {"float64"}
# What has to become one kernel (of some problems two: a reduction's second step) on every device.
FUSED = {
    "gelu", "plus a row", "times a column", "plus a tile", "times a scalar", "all kinds of input", "several outputs",
    "raw result kept", "to float32", "to float16", "added in place", "transposed", "columns in parts", "rows in parts", "cast",
    "times a row", "of all operands", "sum of two", "gathered rows", "padded", "dequantised from int8",
    "dequantised from 4 bits", "int8, scaled behind", "normalised", "and epilogue", "rows put elsewhere", "rows added up",
    *(f"sum of {what} (A)" for what in ("an operand", "an operand, worked on", "a computed operand")),
}  # fmt: skip
# One in so many problems, in the first type and in bfloat16: primes, so that they fall upon all kinds. FEW are for tests that
# run each time.
SOME, FEW = (9, 3), (97, 31)


# The kit writes a program's steps as einsums, and torch makes one loop of rows and columns in the last step of these, which is
# a sum. Their problems are in tests/templates/test_attention_spellings.py.
NOT_DRAWN = ("_attention_backward_scores", "_attention_backward_table")


def few_of_each() -> dict[str, list[Case]]:
    """A part of the problems that the kit has for each template, in a wide and a narrow type."""
    return {name: list(some_problems(registry.find(name), *FEW, (DTYPES[0], torch.bfloat16))) for name in NAMES}


def some_problems(template: Template, every: int, every_half: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    yield from (plain(template, dtype) for dtype in dtypes)
    yield from list(cases(template, DTYPES[0]))[::every]
    yield from list(cases_of_dtype(template, torch.bfloat16))[::every_half]


def assert_right(report: Report) -> None:
    assert not report.failed, str(report)
    apart = [r for r in report.separate if r.case.name in FUSED and not _may_be_stored(registry.find(report.template), r.case)]
    assert not apart, "\n".join(map(str, apart))


def _may_be_stored(template: Template, case: Case) -> bool:
    """An operand of a program is, where TMA loads it, and one with zeros around it where sizes are dynamic."""
    if template.implements.program is None:
        return False
    by_tma = any(one.access == "tma" for one in template.operands.values())
    return (by_tma and case.kind == "prologue") or (case.kind, case.name) == ("dynamic", "padded")


def refused_cases(report: Report) -> list[Case]:
    return [r.case for r in report.refused if r.case.name not in LEFT_TO_LIBRARY and not _has_one_element(r.case)]


def _has_one_element(case: Case) -> bool:
    """Of a program with one element in each operand nothing is left to recognise."""
    return case.name == "all 1" and isinstance(case.function, Steps)


def assert_covered(report: Report, family: list[Template], **how: Any) -> None:
    """What one template refuses, another one of the family takes."""
    left = refused_cases(report)
    for other in family:
        if left and other.name != report.template:
            tried = check_template(other, problems=left, configs=1, raises=False, **how)
            assert not tried.failed, str(tried)
            left = refused_cases(tried)
    assert not left, f"no template takes {[str(case) for case in left]}"


def family_of(kind: str) -> list[Template]:
    return [t for t in map(registry.find, NAMES) if t.device == kind]


def assert_conform(family: str, problems: dict[str, list[Case]] | None, **how: Any) -> None:
    """One test for a family: what each of its templates refuses matters only to all of them."""
    # Triton's interpreter does not run Gluon
    templates = [t for t in family_of(family) if t.language != "gluon" and not t.name.endswith(NOT_DRAWN)]
    reports = [
        check_template(t, problems=None if problems is None else problems[t.name], raises=False, **how) for t in templates
    ]
    for report in reports:
        report.raise_if_failed()  # for one that takes nothing, too
        assert_right(report)
        assert_covered(report, templates, device=how["device"])
    pairs = sum(len(report.problems) for report in reports)
    refused = sum(len(refused_cases(report)) for report in reports)
    assert refused <= MAY_REFUSE * pairs, "\n".join(map(str, reports))


DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.interpret)]


@pytest.mark.parametrize("device", DEVICES)
def test_templates_are_right_and_refuse_little(device):
    assert_conform(device, few_of_each(), device="cpu", configs=1)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_templates_are_right_for_every_problem(device):
    assert_conform(device, None, device="cpu")


# ---- on a GPU, where a compiler takes most of the time: in parts, so that several processes share them ------------------

SHARDS = 6
GPU_NAMES = [t.name for t in family_of("cuda")]


def every_problem(template: Template) -> Iterator[Case]:
    """What `check_template` tries of itself: everything in the first type that the template takes on this GPU."""
    first = True
    for dtype in DTYPES:
        yield plain(template, dtype)
        if check_template(template, problems=[plain(template, dtype)], configs=1, raises=False).refused:
            continue
        yield from cases_of_dtype(template, dtype)
        yield from large(template, dtype)
        if first:
            yield from cases(template, dtype)
        first = False


def assert_conforms_on_a_gpu(name: str, problems: Iterable[Case], part: int, configs: int) -> None:
    report = check_template(name, problems=list(problems)[part::SHARDS], device="cuda", configs=configs, raises=False)
    assert_right(report)
    assert_covered(report, family_of("cuda"), device="cuda")


# Templates that take nothing which the kit draws, and what they ask for; their own tests draw it.
OTHER_LAYOUTS = {
    "triton_conv_warp_specialized": "channels are not side by side",
    "triton_attention_backward_scores": "it is sum",
    "triton_attention_backward_table": "it is sum",
    "triton_attention_backward_warp_specialized": "its last operand is none",
    "triton_attention_backward_together": "rows of Q do not begin at multiples of 16 bytes",
    "triton_attention_backward_values_together": "rows of Q do not begin at multiples of 16 bytes",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_NAMES)
def test_templates_take_plain_matmuls_on_a_gpu(name):
    """A part of the problems may be none that the template takes."""
    report = check_template(name, problems=[plain(registry.find(name), torch.bfloat16)], device="cuda", configs=1, raises=False)
    if name in OTHER_LAYOUTS:
        assert OTHER_LAYOUTS[name] in report.refused[0].reason
    else:
        report.raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(SHARDS))
@pytest.mark.parametrize("name", GPU_NAMES)
def test_templates_are_right_on_a_gpu(name, part):
    assert_conforms_on_a_gpu(name, some_problems(registry.find(name), *SOME), part, configs=2)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(SHARDS))
@pytest.mark.parametrize("name", GPU_NAMES)
def test_templates_are_right_for_every_problem_on_a_gpu(name, part):
    assert_conforms_on_a_gpu(name, every_problem(registry.find(name)), part, configs=3)
