"""From a problem and a configuration to a C++ function: renders a template's Jinja file."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.build.unit import Rendered
from kgen.templates import slots as sl
from kgen.templates.contract import Config
from kgen.templates.cpp.kernel import source_lines
from kgen.templates.cpp.table import CPP_TYPES
from kgen.templates.cpp.tile import Parameters, Slots
from kgen.templates.problem import Problem


def render_template(problem: Problem, config: Config, name: str) -> Rendered:
    """The function of a problem. It is rendered twice: only its slots know which pointers and sizes it needs."""
    parameters = Parameters()
    _text(problem, config, name, Slots(problem, config, parameters))
    text = _text(problem, config, name, Slots(problem, config, parameters))
    names = frozenset(parameters.made_names | set(parameters.sizes) | {f"p_{_clean(b)}" for b in parameters.pointers})
    return Rendered(text, tuple(parameters.pointers), tuple(parameters.sizes), names)


@dataclass(frozen=True, slots=True)
class _Function:
    """``{{ kernel() }}`` opens the function, ``{{ kernel.end() }}`` closes it."""

    problem: Problem
    config: Config
    name: str
    filler: Slots

    def __call__(self) -> str:
        problem, parameters = self.problem, self.filler.parameters
        lines = [f"// {line}" for line in source_lines(problem.kernel.origins)]
        lines += [f"// {problem.template.name} {self.config}"]
        lines += [f'extern "C" int {self.name}(void** ptrs, const int64_t* ints, int threads) {{']
        for k, buffer in enumerate(parameters.pointers):
            kind = CPP_TYPES[problem.graph.buffers[buffer].dtype].storage
            lines.append(f"  {kind}* const p_{_clean(buffer)} = static_cast<{kind}*>(ptrs[{k}]);")
        lines += [f"  const int64_t {size} = ints[{k}];" for k, size in enumerate(parameters.sizes)]
        lines += ["  Flag failed;"] if parameters.checks else []
        return "\n".join(lines)

    def end(self) -> str:
        return f"  return {'failed.raised' if self.filler.parameters.checks else '0'};\n}}"


def _text(problem: Problem, config: Config, name: str, filler: Slots) -> str:
    template = problem.template
    operands = [
        sl.OperandSlot(
            n, filler.tile, {"type": CPP_TYPES[problem.inputs[n].dtype].storage}, len(problem.members) if one.many else 1
        )
        for n, one in template.operands.items()
    ]
    results = {n: sl.ResultSlot(n, filler.store) for n in template.results}
    axes = {a: sl.AxisSlot(a, filler.text(problem.extent(a)), problem.static(a)) for a in template.axes}
    return sl.render(problem, config, _Function(problem, config, name, filler), operands, **results, **axes)


def _clean(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
