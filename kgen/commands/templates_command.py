"""`kgen templates`: which templates there are, what one declares, a new one to begin with, and whether one is right."""

from __future__ import annotations

import argparse
import inspect
import keyword
import sys
from pathlib import Path

from kgen import config
from kgen.commands.exit_codes import OK, WRONG, misused
from kgen.commands.explain_text import Table, write
from kgen.commands.script import imported
from kgen.errors import UnknownTemplate
from kgen.option_names import near
from kgen.templates import registry
from kgen.templates.author_files import line_of
from kgen.templates.contract import Template
from kgen.templates.loop_contract import LoopTemplate

__all__ = ["check", "found_template", "list_all", "load_modules", "new", "show"]

MODULE = '''"""A template of your own: C[b, m, n] = sum over k of A[b, m, k] B[b, k, n]."""

import kgen
from kgen import knob, operand, result


@kgen.template(
    implements=kgen.contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="{file}.py.jinja", name="{name}"
)
class {kind}(kgen.KernelTemplate):
    A, B, C = operand("b", "m", "k"), operand("b", "k", "n"), result("b", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = knob(32, 64), knob(32, 64), knob(32)

    def refuse(self, problem: kgen.Problem) -> str | None:
        return None  # or the reason, for people
'''
JINJA = """\
{{ kernel() }}
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    b = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    rm = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
    for start in range(0, K, BLOCK_K):
        rk = start + tl.arange(0, BLOCK_K)
        {{ A.tile("left", "b", "rm", "rk") }}
        {{ B.tile("right", "b", "rk", "rn") }}
        acc = lib.dot(left, right, acc, PRECISION)
    {{ C.store("acc", "b", "rm", "rn") }}
"""

OPERATOR_MODULE = '''"""An operator of your own, and its template in C++: rows over the root of the mean of their squares."""

import torch

import kgen
from kgen import operand, result


@torch.library.custom_op("{name}::norm", mutates_args=())
def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """What runs where no template does."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@norm.register_fake
def _(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@kgen.template(
    implements=kgen.operator("{name}::norm", "m,n -> m,n", examples=[{"eps": 1e-5}]),
    device="cpu", source="{file}.cpp.jinja", name="{name}",
)
class {kind}(kgen.KernelTemplate):
    X, Y = operand("m", "n"), result("m", "n")

    def refuse(self, problem: kgen.Problem) -> str | None:
        return None if problem.main_dtype.is_floating_point else "it is for floats"
'''
ELEMENTS = """\
{{ kernel() }}
  constexpr int L = {{ problem.device.lanes }};
  using Real = {{ Y.type }};
  const int64_t N = {{ n.size }};
  parallel_for(threads, {{ m.size }}, 8, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      auto squares = splat<L>(Real(0));
      vector_loop<L>(0, N, [&](int64_t n, auto w) KGEN_INLINE {
        {{ X.element("x", "m", "n", lanes="n") }}
        squares = step_sum(squares, mul_(x, x), w);
      });
      const Real scale = rsqrt_(fold_sum(squares) / Real(N) + Real({{ problem.arguments.eps }}));
      vector_loop<L>(0, N, [&](int64_t n, auto w) KGEN_INLINE {
        {{ X.element("x", "m", "n", lanes="n") }}
        const auto y = mul_(x, scale);
        {{ Y.store_element("y", "m", "n", lanes="n") }}
      });
    }
  });
{{ kernel.end() }}
"""
# By the device: a module, the ending of its Jinja file, and that.
SKELETONS = {"cuda": (MODULE, "py", JINJA), "cpu": (OPERATOR_MODULE, "cpp", ELEMENTS)}


def list_all(options: argparse.Namespace) -> int:
    """A row a template, with those of the named modules and of installed packages."""
    load_modules(options)
    rows = tuple((one.name, one.device, _pattern(one), _module(one)) for one in registry.all_templates())
    write([Table(("template", "device", "implements", "declared in"), rows)], sys.stdout)
    return OK


def show(options: argparse.Namespace) -> int:
    """What a template declares, and its Jinja file."""
    load_modules(options)
    one = found_template(options.name)
    print(f"{one.name} for {one.device}: {_pattern(one)}")
    print(f"class: {line_of(type(one.author)) or _module(one)}")
    print(f"source: {one.source}")
    for name, knob in one.knobs.items():
        print(f"knob {name}: {', '.join(map(str, knob.values))}")
    document = type(one.author).__doc__  # not what the base class says of all templates
    if document:
        print(f"\n{inspect.cleandoc(document)}")
    print(f"\n{one.source.read_text()}", end="")
    return OK


def new(options: argparse.Namespace) -> int:
    """Writes a module and a Jinja file that pass `check`: a matmul for GPUs, or an operator of its own for CPUs."""
    stem = options.name
    if not stem.isidentifier() or keyword.iskeyword(stem):
        return misused(f"{stem!r} is no name of a module")
    module, language, source = SKELETONS[options.device]
    files = {Path(f"{stem}.py"): module, Path(f"{stem}.{language}.jinja"): source}
    there = [str(path) for path in files if path.exists()]
    if there:
        return misused(f"{there[0]} exists already")
    kind = "".join(part.capitalize() for part in stem.split("_"))
    for path, text in files.items():
        path.write_text(text.replace("{file}", stem).replace("{name}", stem).replace("{kind}", kind))
    print(f"wrote {' and '.join(map(str, files))}; `kgen templates check {stem} --module {stem}` tries it")
    return OK


def check(options: argparse.Namespace) -> int:
    """The conformance kit on a template."""
    from kgen.testing import check_template  # noqa: PLC0415  the other actions do not need it

    load_modules(options)
    found_template(options.name)
    report = check_template(options.name, configs=options.configs, only=options.only, seconds=options.seconds, raises=False)
    print(report)
    if options.only and not report.results and report.stopped is None:
        texts = " or ".join(map(repr, options.only))
        print(
            f"kgen: no problem has {texts} in its text; without --only the report lists those that are tried", file=sys.stderr
        )
    return OK if report.passed and not report.failed else WRONG


def load_modules(options: argparse.Namespace) -> None:
    """Imports the templates of installed packages and of the modules that a command names."""
    if config.current().template_packages:
        registry.load_packages()
    for module in options.module:
        imported(module)


def found_template(name: str) -> Template | LoopTemplate:
    """The template of that name. Raises UnknownTemplate."""
    known = registry.all_templates()
    found = next((one for one in known if one.name == name), None)
    if found is None:
        names = [one.name for one in known]
        raise UnknownTemplate(template=name, near=_from_file(name) or near(name, names), valid=", ".join(names))
    return found


def _from_file(given: str) -> str:
    """What to do with a file that stands where the name of a template is wanted, or that has its name and was not imported."""
    file = Path(given)
    module = file.with_suffix("").with_suffix("").name
    if given.isidentifier() and Path(f"{given}.py").is_file():
        return f"add --module {module} if {given}.py declares it; "
    if file.suffix not in (".py", ".jinja"):
        return ""
    return f"give the name of a template that the file declares, and --module {module} to import it; "


def _pattern(one: Template | LoopTemplate) -> str:
    if isinstance(one, LoopTemplate):
        return f"loops({one.implements.kind!r})"
    pattern = one.implements
    text = ", ".join(",".join(axes) for axes in pattern.operands) + " -> " + "; ".join(",".join(a) for a in pattern.results)
    if pattern.program is not None:
        return f"program of {len(pattern.program.steps)} steps"
    return f"{pattern.operator}: {text}" if pattern.operator else text


def _module(one: Template | LoopTemplate) -> str:
    return type(one.author).__module__
