"""From a problem and a configuration to a C++ function: renders a template's Jinja file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.build.unit import Rendered
from kgen.templates import slots as sl
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.engine import declaration, objects
from kgen.templates.cpp.codegen.epilogue_loops import Parameters
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.codegen.tile import Slots
from kgen.templates.cpp.kernels.loops import source_lines
from kgen.templates.problem import Problem
from kgen.templates.render import clean

# Where the function's head comes, which is known last.
OPENING = "\0opening\0"


def render_template(problems: Sequence[Problem], config: Config, name: str) -> Rendered:
    """The function of a problem, or of several that share an operand."""
    parameters = Parameters()
    fillers = [Slots(problem, config, parameters) for problem in problems]
    function = _Function(name, fillers)
    text = sl.render(fillers, function, _facts, "").replace(OPENING, function.opening())
    linked, kind = _linked(problems[0]), problems[0].template.author.engine
    text = f"{declaration(*linked, kind)}\n{text}" if linked else text
    names = frozenset(parameters.made_names | set(parameters.sizes) | {f"p_{clean(b)}" for b in parameters.pointers})
    return Rendered(
        text, tuple(parameters.pointers), tuple(parameters.sizes), names, objects=objects(*linked, kind) if linked else ()
    )


def _linked(problem: Problem) -> tuple[str, ...]:
    """The two types whose loops the kernel links, if its author says that it does."""
    return tuple(CPP_TYPES[kind].storage for kind in problem.template.author.multiplies(problem) or ())


@dataclass(frozen=True, slots=True)
class _Function:
    """``{{ kernel() }}`` opens the function, ``{{ kernel.end() }}`` closes it."""

    name: str
    fillers: Sequence[Slots]

    def __call__(self) -> str:
        return OPENING

    def opening(self) -> str:
        """The function's head. Which pointers and sizes it has is known when its slots are filled."""
        first = self.fillers[0]
        problem, parameters = first.problem, first.parameters
        lines = [f"// {line}" for filler in self.fillers for line in source_lines(filler.problem.kernel.origins)]
        lines += [f"// {problem.template.name} {first.config}"]
        lines += [f'extern "C" int {self.name}(void** ptrs, const int64_t* ints, int threads) {{']
        for k, buffer in enumerate(parameters.pointers):
            kind = CPP_TYPES[problem.graph.buffers[buffer].dtype].storage
            lines.append(f"  {kind}* const p_{clean(buffer)} = static_cast<{kind}*>(ptrs[{k}]);")
        lines += [f"  const int64_t {size} = ints[{k}];" for k, size in enumerate(parameters.sizes)]
        lines += ["  Flag failed;"] if parameters.checks else []
        return "\n".join(lines)

    def end(self) -> str:
        return f"  return {'failed.raised' if self.fillers[0].parameters.checks else '0'};\n}}"


def _facts(problem: Problem, operand: str) -> dict[str, object]:
    return {"type": CPP_TYPES[problem.inputs[operand].dtype].storage}
