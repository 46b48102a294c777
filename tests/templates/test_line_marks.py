"""Generated text names the lines of its author's Jinja file: for g++, for Triton's front end, for debuggers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import template_author
import torch
from template_author import JINJA

from kgen.backend import kgen_backend
from kgen.build import triton
from kgen.build.triton_worker import place_in_template
from kgen.commands.explain import watching
from kgen.errors import KernelBuildFailed, TritonBuildFailed
from kgen.ir.index import Sizes
from kgen.ir.plan import Choice, Kernel
from kgen.only import only
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Gpu, Options, choose_tiles
from kgen.templates import registry
from kgen.templates.loop_contract import loop_problem
from kgen.templates.render import BUILT_IN, IndentedSlots, LineMarks, environment, is_marked, tidy, with_line_marks
from kgen.testing import check_template
from tests.kernels import plans

MODULE = '''
import kgen


@kgen.template(
    implements=kgen.loops("pointwise", replaces="{replaces}"), device="{device}", source="{name}.jinja", name="{name}"
)
class Own(kgen.LoopKernel):
    """A loop kernel of somebody else's."""

    {knobs}
'''
CPP = """
{% import "macros.cpp.jinja" as m %}
{# It goes
   in chunks. #}
{{ kernel() }}
  const int64_t chunk = 48;
  for (int64_t begin = 0; begin < {{ tasks.vector.extent }}; begin += chunk) {
    const int64_t end = minimum_(begin + chunk,
                                 int64_t({{ tasks.vector.extent }}));
    {{ m.flat_points(tasks, body) }}
  }
  // the end
{{ kernel.end() }}
"""
TRITON = """
{{ kernel() }}
    {{ indices }}
    own: tl.constexpr = 7
    {{ body }}
{{ kernel.end() }}
"""
_numbers = itertools.count()


@pytest.fixture
def author(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Registers a template of elementwise loops; the path of its Jinja file."""
    names: list[str] = []

    def write(device: str, jinja: str) -> Path:
        name = f"place_{next(_numbers)}"
        replaces, knobs = ("cpp_pointwise", "") if device == "cpu" else ("triton_pointwise", "XBLOCK = kgen.knob(64)")
        (tmp_path / f"{name}.jinja").write_text(jinja)
        (tmp_path / f"{name}.py").write_text(MODULE.format(device=device, name=name, replaces=replaces, knobs=knobs))
        names.append(name)
        template_author.load(tmp_path / f"{name}.py")
        return tmp_path / f"{name}.jinja"

    yield write
    for name in names:
        registry.remove(name)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def compiled(**options: object) -> None:
    torch._dynamo.reset()
    x = torch.randn(4096)
    got = torch.compile(scaled, backend=kgen_backend, options={"cache": False, "strict": True, **options})(x)
    torch.testing.assert_close(got, scaled(x))


def line_of(path: Path, text: str) -> int:
    return 1 + next(k for k, line in enumerate(path.read_text().splitlines()) if text in line)


# ---- the map -----------------------------------------------------------------------------------------------------------


@pytest.mark.none
@pytest.mark.parametrize("language", ["cpp", "python"])
def test_lines_are_those_of_the_file(tmp_path: Path, language: str) -> None:
    """Whatever tags, blank lines and slots of several lines are between."""
    (tmp_path / "one.jinja").write_text(
        "{% macro twice(x) %}\n{{ x }} first;\n{{ x }} second;\n{% endmacro %}\n\n{# a\nb #}\nint a;\n"
        "{% if yes %}\nint b;\n{% endif %}\n  {{ slot }}\nint c(\n   x);\n{{ twice('m') }}\nint d;\n"
    )
    template = environment((tmp_path,), IndentedSlots, LineMarks).get_template("one.jinja")
    text = with_line_marks(tidy(template.render(yes=True, slot="s1;\ns2;\ns3;")), (tmp_path,), language)
    files = set(re.findall(r'^# \d+ "(.*)"(?: slot)?$', text, re.MULTILINE))
    assert files == {str(tmp_path / "one.jinja")}
    assert dict(_numbered(text)) == {
        "int a;": 8, "int b;": 10, "s1;": 12, "s2;": 12, "s3;": 12, "int c(": 13, "x);": 14, "m first;": 2, "m second;": 3,
        "int d;": 16,
    }  # fmt: skip


def _numbered(text: str) -> Iterator[tuple[str, int]]:
    """Each line with the number that a preprocessor gives it."""
    number, repeats = 0, False
    for line in text.splitlines():
        place = re.match(r'# (\d+) ".*"( slot)?$', line)
        if place is None:
            yield line.strip(), number
        number = int(place[1]) if place else number + (not repeats)
        repeats = bool(place[2]) if place else repeats


@pytest.mark.none
def test_templates_of_kgen_name_no_lines(tmp_path: Path) -> None:
    """People read their kernels, and nobody mends them there."""
    assert not any(map(is_marked, BUILT_IN.values()))
    assert is_marked(tmp_path)


# ---- compilers ---------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const int64_t chunk = 48;", "const int64_t chunk = no_such_name;"),
        ("  // the end", "  no_such_name;"),
    ],
)
def test_gcc_names_the_template(author: Callable[[str, str], Path], old: str, new: str) -> None:
    assert old in CPP
    path = author("cpu", CPP.replace(old, new))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled()
    error = caught.value.inner_exception
    assert isinstance(error, KernelBuildFailed), error
    assert f"{path}:{line_of(path, 'no_such_name')}:" in str(error)


@pytest.mark.cpu
def test_a_template_with_line_marks_computes(author: Callable[[str, str], Path]) -> None:
    author("cpu", CPP)
    compiled()


@pytest.mark.slow  # a precompiled header with lines
@pytest.mark.cpu
@pytest.mark.skipif(shutil.which("addr2line") is None or shutil.which("nm") is None, reason="needs binutils")
def test_debuggers_see_the_template(author: Callable[[str, str], Path], tmp_path: Path) -> None:
    path = author("cpu", CPP)
    compiled(cache=True, cache_dir=str(tmp_path / "cache"), debug_info=True)
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    libraries = {one for one in re.findall(r"\S+\.so$", maps, re.MULTILINE) if one.startswith(str(tmp_path / "cache"))}
    table = "".join(
        subprocess.run(["objdump", "--dwarf=decodedline", one], capture_output=True, text=True, check=True).stdout
        for one in libraries
    )
    found = {int(number) for number in re.findall(rf"^{re.escape(path.name)}\s+(\d+)\s", table, re.MULTILINE)}
    assert line_of(path, "for (int64_t begin") in found


def launch(path: Path) -> KernelCall:
    plan = plans(scaled, torch.randn(4096), options=Options(gpu_everywhere=True)).forward
    [kernel] = plan.kernels
    assert isinstance(kernel, Kernel)
    problem = loop_problem(kernel, plan.graph, [choose_tiles(kernel, plan.graph, Sizes({}), Gpu())])
    made = registry.render_loops(problem, "k", Choice(path.stem, (("XBLOCK", 64),)))
    assert isinstance(made, KernelCall)
    return made


@pytest.mark.interpret
@pytest.mark.parametrize("wrong", ["own: tl.constexpr = no_such_name", "own = tl.no_such_function(3)", "own = tl.arange(0, 7)"])
def test_triton_names_the_template(author: Callable[[str, str], Path], wrong: str) -> None:
    path = author("cuda", TRITON.replace("own: tl.constexpr = 7", wrong))
    made = launch(path).launch
    assert made is not None
    with pytest.raises(TritonBuildFailed) as caught:
        triton.compile_kernels([made], 90)
    assert f"in the template: {path}, line {line_of(path, wrong)}" in str(caught.value)


@pytest.mark.interpret
@pytest.mark.parametrize("wrong", ["acc = lib.no_such_function(left)", "acc = nobody + left", "acc = lib.dot(left right)"])
def test_the_interpreter_names_the_template(tmp_path: Path, wrong: str) -> None:
    text = JINJA.replace("acc = lib.dot(left, right, acc, PRECISION)", wrong)
    path = template_author.write(tmp_path, "place_interpreted", text)
    template_author.load(path)
    try:
        report = check_template("place_interpreted", configs=1, only=["alone 'float32' of (float32[35"], raises=False)
    finally:
        registry.remove("place_interpreted")
    jinja = path.with_name("matmul.py.jinja")
    assert f"in the template: {jinja}, line {line_of(jinja, wrong)}" in report.failed[0].reason
    assert "TORCHDYNAMO" not in report.failed[0].reason


@pytest.mark.none
def test_an_error_without_a_place_has_none() -> None:
    assert place_in_template(ValueError("of anything")) == ""


@pytest.mark.interpret
def test_the_skeleton_names_lines(tmp_path: Path) -> None:
    """A contraction, as `kgen templates new` begins one."""
    path = template_author.write(tmp_path, "place_matmul", JINJA)
    template_author.load(path)
    try:
        with only("place_matmul", lambda configs: configs[0]), watching() as seen:
            options = {"gpu_interpreter": True, "cache": False, "strict": True}
            torch.compile(torch.bmm, backend=kgen_backend, options=options)(torch.ones(1, 32, 16), torch.ones(1, 16, 32))
            [kernel] = seen.report().kernels
    finally:
        registry.remove("place_matmul")
    jinja = path.with_name("matmul.py.jinja")
    assert dict(_numbered(kernel.source))["acc = lib.dot(left, right, acc, PRECISION)"] == line_of(jinja, "acc = lib.dot")
