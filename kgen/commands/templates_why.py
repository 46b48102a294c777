"""`kgen templates why`: what became of one template at each kernel of a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kgen import config
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.script import run_script
from kgen.commands.templates_command import found_template, load_modules
from kgen.ir.nodes import Origin
from kgen.scheduler.selection.template_decisions import DECISIONS, TemplateDecision, verdict_on
from kgen.templates.contract import Template
from kgen.templates.loop_contract import LoopProblem, LoopTemplate
from kgen.templates.registry import LOOP_KERNELS

__all__ = ["why"]


def why(options: argparse.Namespace) -> int:
    """Runs a script and says of each kernel that a template could be meant for whether it takes it, or why not."""
    if not options.target.is_file():
        return misused(f"there is no script {options.target}")
    load_modules(options)
    mode = {} if options.mode is None else {"mode": options.mode}
    with DECISIONS.listening() as decisions, LOOP_KERNELS.listening() as loops:
        with config.insist(cache=False, **mode):
            well = run_script(Path(options.target), options.arguments)
        template = found_template(options.name)  # which the script may declare
        if isinstance(template, LoopTemplate):
            lines = list(_of_loops(template, loops))
        else:
            lines = list(_of_contractions(template, decisions))
    _write(template, lines)
    return OK if lines and well else WRONG


def _write(template: Template | LoopTemplate, lines: Sequence[str]) -> None:
    if not lines:
        what = "loops of its kind" if isinstance(template, LoopTemplate) else "a contraction or an operator that templates take"
        sys.stderr.write(f"kgen: no graph of the script has {what}: no template was asked\n")
    for line in lines:
        print(line)


# ---- contractions -------------------------------------------------------------------------------------------------------


def _of_contractions(template: Template, decisions: Iterable[TemplateDecision]) -> Iterator[str]:
    """The last decision on each contraction of each graph counts: earlier ones were of kernels that were made anew."""
    last = {(one.graph.name, one.out): one for one in decisions if one.given.only is None}
    for (graph, out), decision in last.items():
        yield f"{out} of {graph}: {_place(decision.kernel.origins)}"
        yield f"  {template.name} {verdict_on(template, decision)}"


# ---- loops --------------------------------------------------------------------------------------------------------------


def _of_loops(template: LoopTemplate, loops: Iterable[tuple[LoopProblem, LoopTemplate]]) -> Iterator[str]:
    for problem, taken in loops:
        if (problem.kind, problem.device) == (template.implements.kind, template.device):
            yield f"{problem.step.name}: {_place(problem.origins)}"
            yield f"  {template.name} {_verdict_on_loops(template, taken, problem)}"


def _verdict_on_loops(template: LoopTemplate, taken: LoopTemplate, problem: LoopProblem) -> str:
    if taken.name == template.name:
        return "takes it"
    reason = template.refuse(problem)
    return f"is not asked: {taken.name} replaces it, and takes it" if reason is None else f"refuses it: {reason}"


def _place(origins: Sequence[Origin]) -> str:
    """The operators, and the first of the user's lines."""
    operators = dict.fromkeys(name for one in origins for name in one.operators)
    line = next((one.line for one in origins if one.line), "")
    return "  ".join(part for part in (", ".join(operators), line) if part)
